"""C32, C37, C38: whatever a file system can hold comes back exactly as it was."""

from __future__ import annotations

import pytest

from sojourn.client import Session
from sojourn.errors import UnlinkedOpenFile
from support.tree_manifest import differences, make_tree, manifest


def test_c32_every_kind_of_file_survives_suspend_and_resume(session: Session) -> None:
    make_tree(session, "/srv/tree")
    before = manifest(session, "/srv/tree")
    session.suspend()
    assert differences(before, manifest(session, "/srv/tree")) == {}
    # Once more from the stored state, and with a change below: copied up again.
    session.exec("touch /srv/tree/sub")
    before = manifest(session, "/srv/tree")
    session.suspend()
    assert differences(before, manifest(session, "/srv/tree")) == {}
    assert session.verify().ok


def test_c32_files_survive_without_memory(session: Session) -> None:
    make_tree(session, "/srv/tree", nodes=False)
    before = manifest(session, "/srv/tree")
    session.suspend(memory=False)
    assert differences(before, manifest(session, "/srv/tree")) == {}
    session.exec("touch /srv/tree/sub")
    before = manifest(session, "/srv/tree")
    session.suspend(memory=False)
    assert differences(before, manifest(session, "/srv/tree")) == {}


def test_c32_every_kind_of_file_is_in_a_live_snapshot(session: Session) -> None:
    make_tree(session, "/srv/tree")
    before = manifest(session, "/srv/tree")
    taken = session.snapshot("strange")
    for fork in session.fork(2, snapshot=taken):
        assert differences(before, manifest(fork, "/srv/tree")) == {}
        fork.delete()
    assert session.exec("chmod -R u+rwx /srv/tree && rm -rf /srv/tree").exit_code == 0
    session.rollback(taken)
    assert differences(before, manifest(session, "/srv/tree")) == {}


def test_c32_removed_and_replaced_files_stay_removed(session: Session) -> None:
    """Whiteouts and opaque directories: what is gone does not shine through from below."""
    script = """
set -e
mkdir -p /srv/t/keep /srv/t/gone /srv/t/swap
echo 1 > /srv/t/keep/a; echo 1 > /srv/t/gone/a; echo 1 > /srv/t/swap/a; echo 1 > /srv/t/file
ln -s /srv/t/file /srv/t/link
"""
    assert session.exec(script).exit_code == 0
    session.suspend()
    script = """
set -e
rm -r /srv/t/gone
rm -r /srv/t/swap; mkdir /srv/t/swap; echo 2 > /srv/t/swap/b
rm /srv/t/file; mkdir /srv/t/file; echo 2 > /srv/t/file/inside
rm -r /srv/t/keep; echo now a file > /srv/t/keep
rm /srv/t/link; echo real > /srv/t/link
rm -r /usr/share/doc; mkdir /usr/share/doc
rm /etc/hostname; rm -f /etc/debian_version
"""
    assert session.exec(script).exit_code == 0, "changes"
    before = manifest(session, "/srv/t")
    taken = session.snapshot("after removal")
    session.suspend()
    assert differences(before, manifest(session, "/srv/t")) == {}
    gone = session.exec("ls /srv/t/gone; ls -A /usr/share/doc | wc -l; ls /etc/debian_version")
    assert gone.stdout == b"0\n"
    # A directory that comes again under a name once removed does not bring the old content.
    session.exec("mkdir /srv/t/gone")
    session.suspend(memory=False)
    assert session.exec("ls -A /srv/t/gone").stdout == b""
    [fork] = session.fork(1, snapshot=taken)
    assert differences(before, manifest(fork, "/srv/t")) == {}
    fork.delete()


def test_c32_a_virtual_environment_works_after_resume(session: Session) -> None:
    made = session.exec("python3 -m venv --without-pip /srv/venv")
    assert made.exit_code == 0, made.stderr
    before = manifest(session, "/srv/venv")
    session.suspend(memory=False)
    assert differences(before, manifest(session, "/srv/venv")) == {}
    ran = session.exec("/srv/venv/bin/python -c 'import sys; print(sys.prefix)'")
    assert ran.stdout == b"/srv/venv\n"


def test_c32_ten_thousand_small_files(session: Session) -> None:
    script = """
import os
for d in range(100):
    os.makedirs(f"/srv/many/{d}")
    for f in range(100):
        with open(f"/srv/many/{d}/{f}", "w") as file:
            file.write(f"{d}/{f}")
"""
    assert session.exec(["python3", "-c", script]).exit_code == 0
    before = manifest(session, "/srv/many")
    assert len(before) == 10_101
    session.suspend()
    assert differences(before, manifest(session, "/srv/many")) == {}


def test_c37_owners_are_kept_and_commands_run_as_asked(session: Session) -> None:
    assert session.exec("useradd -m -u 1000 agent || id agent").exit_code == 0
    done = session.exec("umask 027; echo mine > ~/mine; ln -s mine ~/l; id -un", user="agent")
    assert done.text.strip() == "agent", done
    session.suspend()
    listed = session.exec("stat -c '%u:%g %a %n' /home/agent /home/agent/mine /home/agent/l")
    lines = listed.text.splitlines()
    assert lines[1].startswith("1000:1000 640 "), listed
    assert lines[2].startswith("1000:1000 777 "), listed
    assert session.exec("cat ~/mine && touch ~/new", user="agent").text == "mine\n"
    session.suspend(memory=False)
    assert session.exec("stat -c %u /home/agent/new").text == "1000\n"
    [fork] = session.fork(1)
    assert fork.exec("id -un; cat ~/mine", user="agent").text == "agent\nmine\n"
    fork.delete()


@pytest.mark.parametrize(
    "name",
    [b"\xff", b"a\xe9b", b"\xed\xa0\x80", b"with\nline", b"\x01\x1b[31m", b"'; rm -rf *; '"],
)
def test_c38_names_are_exact_bytes_everywhere(session: Session, name: bytes) -> None:
    path = b"/srv/" + name
    session.files.write(path, b"content of " + name)
    assert session.files.read(path) == b"content of " + name
    [listed] = [one for one in session.files.list("/srv")]
    assert (listed.path_bytes or listed.path.encode()) == path
    seen = session.exec(["python3", "-c", "import os; print(os.listdir(b'/srv'))"])
    assert seen.text == f"{[name]!r}\n"
    session.files.move(path, path + b"2")
    session.files.chmod(path + b"2", 0o600)
    changed = session.diff()
    assert changed is not None
    session.suspend()
    assert session.files.read(path + b"2") == b"content of " + name
    session.files.remove(path + b"2")
    assert not session.files.exists(path + b"2")


def test_c38_names_that_are_not_utf8_in_diff_arguments_and_environment(session: Session) -> None:
    before = session.snapshot("before")
    session.exec([b"touch", b"/srv/\xff\xfe"])
    after = session.snapshot("after")
    [change] = [c for c in session.diff(before, after).changes if c.path.startswith("/srv/")]
    assert change.path_bytes == b"/srv/\xff\xfe"
    assert change.kind == "added"
    assert session.exec([b"printf", b"%s", b"\xff\x80"]).stdout == b"\xff\x80"


DEEP = """
import os, sys
os.chdir("/srv")
for level in range(30):
    name = f"{level:03}" + "d" * 197
    if sys.argv[1] == "make":
        os.mkdir(name)
    os.chdir(name)
exec(sys.argv[2])
"""


def deep(session: Session, script: str, *, make: bool = False) -> str:
    """Run a script at the bottom of a directory deeper than any path can say."""
    ran = session.exec(["python3", "-c", DEEP, "make" if make else "go", script])
    assert ran.exit_code == 0, ran
    return ran.text


def test_c32_directories_deeper_than_any_path(session: Session) -> None:
    deep(session, "open('bottom', 'w').write('one'); os.link('bottom', 'second')", make=True)
    holder = session.spawn(
        ["python3", "-u", "-c", DEEP, "go", "f = open('bottom', 'r+'); print('ready'); input()"],
        stdin="pipe",
    )
    for piece in holder.output():
        if b"ready" in piece.data:
            break
    taken = session.snapshot("deep")
    session.suspend()
    session.resume()
    assert deep(session, "print(open('bottom').read())") == "one\n"
    assert holder.refresh().running
    deep(session, "open('bottom', 'w').write('two')")
    session.suspend(memory=False)
    assert deep(session, "print(open('bottom').read())") == "two\n"
    assert session.verify().ok
    [fork] = session.fork(1, snapshot=taken)
    assert deep(fork, "print(open('bottom').read())") == "one\n"
    fork.delete()
    session.rollback(taken)
    assert deep(session, "print(open('second').read())") == "one\n"
    session.exec("chmod -R u+rwx /srv; rm -rf /srv/000*")
    session.suspend(memory=False)  # the restored process holds the file that is gone
    assert session.exec("ls /srv").text == ""


def test_c41_a_lost_name_deeper_than_any_path_is_refused(session: Session) -> None:
    deep(session, "open('linked', 'w').write('x'); os.link('linked', '/srv/other')", make=True)
    for name in ("lost", "linked"):
        hold = f"f = open('{name}', 'a'); os.unlink('{name}'); print('ready'); input()"
        holder = session.spawn(["python3", "-u", "-c", DEEP, "go", hold], stdin="pipe")
        for piece in holder.output():
            if b"ready" in piece.data:
                break
        with pytest.raises(UnlinkedOpenFile):
            session.snapshot()
        holder.kill()
        holder.wait()
    deep(session, "os.mkdir('inner')")
    session.suspend(memory=False)  # from now on it is in two layers
    hold = "os.chdir('inner'); os.utime('.'); os.rmdir('../inner'); print('ready'); input()"
    holder = session.spawn(["python3", "-u", "-c", DEEP, "go", hold], stdin="pipe")
    for piece in holder.output():
        if b"ready" in piece.data:
            break
    with pytest.raises(UnlinkedOpenFile):
        session.snapshot()
    holder.kill()
    holder.wait()
    taken = session.snapshot()
    assert taken.memory
