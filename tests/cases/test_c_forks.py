"""Group C: a fork has everything its source had, and shares nothing with it from then on."""

from __future__ import annotations

import pytest

from sojourn.client import Session
from sojourn.errors import NameTaken
from support.servers import eventually

PAIRS = b"""
import os, socket, sys, threading, time

listener = socket.create_server(("127.0.0.1", 4000))
client = socket.create_connection(("127.0.0.1", 4000))
accepted, _ = listener.accept()
left, right = socket.socketpair()
reader, writer = os.pipe()
count = 0

def serve():
    # Whoever connects is told how far the three connections have got in this copy.
    while True:
        other, _ = listener.accept()
        other.sendall(str(count).encode())
        other.close()

threading.Thread(target=serve, daemon=True).start()
while True:
    count += 1
    word = f"{count:08}".encode()
    client.sendall(word); assert accepted.recv(8) == word
    left.sendall(word); assert right.recv(8) == word
    os.write(writer, word); assert os.read(reader, 8) == word
    time.sleep(0.01)
"""
ASK = "import socket; print(socket.create_connection(('127.0.0.1', 4000), 5).recv(100).decode())"


def test_c27_children_share_no_bytes(session: Session) -> None:
    """C27: source and children write one file, in place too; each keeps its own bytes."""
    session.exec("mkdir -p /root/d; printf 0123456789 > /root/d/file; ln /root/d/file /root/d/same")
    session.exec("mkdir -p /tmp/m; printf memory > /tmp/m/file")
    forks = session.fork(n=3)
    try:
        everyone = [session, *forks]
        for number, one in enumerate(everyone):
            one.exec(f"printf {number} | dd of=/root/d/file bs=1 seek=5 conv=notrunc status=none")
            one.exec(f"echo {number} >> /root/d/log; printf {number} > /tmp/m/file")
        forks[0].exec("rm -r /root/d/log")
        forks[1].exec("truncate -s 3 /root/d/file")
        for number, one in enumerate(everyone):
            whole = f"01234{number}6789".encode()
            expected = whole[:3] if one is forks[1] else whole
            assert one.files.read("/root/d/file") == expected
            assert one.files.read("/tmp/m/file") == str(number).encode()
            assert one.files.exists("/root/d/log") is (one is not forks[0])
        for number, one in enumerate(everyone):
            one.suspend()
            assert one.exec("tail -c 1 /tmp/m/file").text == str(number)
        for one in everyone:
            assert one.verify().ok
    finally:
        for fork in forks:
            fork.delete()


def test_c27_children_share_no_memory(session: Session) -> None:
    """C27: variables and open files go their own way in each child, also in mapped memory."""
    session.run_code(
        "import mmap, os\n"
        "file = open('/root/mapped', 'w+b'); file.truncate(4096)\n"
        "view = mmap.mmap(file.fileno(), 4096); view[0:4] = b'base'; values = [0]"
    )
    forks = session.fork(n=2)
    try:
        for number, one in enumerate([session, *forks]):
            one.run_code(f"values.append({number}); view[0:4] = b'own{number}'; view.flush()")
        for number, one in enumerate([session, *forks]):
            assert one.run_code("values").text == f"[0, {number}]"
            assert one.run_code("bytes(view[0:4])").text == f"b'own{number}'"
            assert one.files.read("/root/mapped", length=4) == f"own{number}".encode()
    finally:
        for fork in forks:
            fork.delete()


def test_c27_a_fork_outlives_its_source_and_its_siblings(session: Session) -> None:
    """C27: deleting a source, or one child, takes nothing from the others."""
    source = session.fork(n=1)[0]
    source.files.write("/root/work", b"from the source")
    source.run_code("answer = 42")
    first, second = source.fork(n=2)
    source.delete()
    first.suspend()
    second.delete()
    try:
        assert first.files.read("/root/work") == b"from the source"
        assert first.run_code("answer").text == "42"
        assert first.verify().ok
    finally:
        first.delete()


@pytest.mark.parametrize("state", ["running", "paused", "suspended"])
def test_c27_forks_of_every_state(session: Session, state: str) -> None:
    """C27: a session can be forked in every state and stays in it; children have its processes."""
    session.files.write("/root/work", b"kept")
    process = session.spawn(["sleep", "600"])
    session.run_code("answer = 42")
    if state == "paused":
        session.pause()
    if state == "suspended":
        session.suspend()
    started, later = session.fork(n=1)[0], session.fork(n=1, start=False)[0]
    try:
        assert session.refresh().state == state
        assert (started.state, later.state) == ("running", "suspended")
        for child in (started, later):
            assert child.files.read("/root/work") == b"kept"
            assert child.run_code("answer").text == "42"
            assert process.pid in [one.pid for one in child.processes() if one.running]
            assert child.info.parent_session == session.id
        started.process(process.id).kill()
        assert started.process(process.id).wait(10).exit_code == 137
        assert session.process(process.id).running
    finally:
        started.delete()
        later.delete()


def test_c27_a_fork_that_cannot_be_made_whole_is_not_made(session: Session) -> None:
    """C27: when one name is taken there is no child at all, and the source runs on."""
    (taken,) = session.fork(n=1, names=["taken-name"])
    try:
        with pytest.raises(NameTaken):
            session.fork(n=3, names=["free-a", "taken-name", "free-b"])
        (made,) = session.fork(n=1, names=["free-a"])
        made.delete()
        assert session.refresh().state == "running"
        assert session.exec("echo on").text == "on\n"
    finally:
        taken.delete()


def test_c30_what_a_child_inherits_is_only_what_creation_gave(session: Session) -> None:
    """C30: values given for one command, or left by a deleted file, are in no child's files; the
    environment of creation is, and is shown as such by the API."""
    secret = "s3cr3t-of-one-command"
    assert session.exec('echo "${#KEY}"', env={"KEY": secret}).text == f"{len(secret)}\n"
    (child,) = session.fork(n=1)
    try:
        assert child.info.env == session.info.env == {}
        assert child.exec('echo "${KEY-unset}"').text == "unset\n"
        assert child.run_code("import os; os.environ.get('KEY')").text in (None, "None", "")
        everything = child.exec("cat /proc/[0-9]*/environ | tr '\\0' '\\n'").text
        assert secret not in everything
    finally:
        child.delete()


def test_c31_connections_inside_go_on_in_each_fork(session: Session) -> None:
    """C31: loopback connections, socket pairs and pipes live on in source and forks, each by
    itself: what one copy sends never arrives in another."""
    session.files.write("/root/pairs.py", PAIRS)
    process = session.spawn(["python3", "/root/pairs.py"])
    eventually(lambda: session.exec(["python3", "-c", ASK]).exit_code == 0)

    def told(one: Session) -> int:
        answer = one.exec(["python3", "-c", ASK])
        assert answer.exit_code == 0, answer.stderr
        return int(answer.text)

    before = told(session)
    forks = session.fork(n=2)
    try:
        everyone = [session, *forks]
        for one in everyone:
            first = told(one)
            assert first >= before
            eventually(lambda one=one, first=first: told(one) > first)
            assert one.process(process.id).running
        # Ending it in one ends it in no other.
        forks[0].process(process.id).kill()
        assert forks[0].process(process.id).wait(10).exit_code == 137
        assert forks[0].exec(["python3", "-c", ASK]).exit_code != 0
        for one in (session, forks[1]):
            first = told(one)
            eventually(lambda one=one, first=first: told(one) > first)
        forks[1].suspend()
        first = told(forks[1])
        eventually(lambda: told(forks[1]) > first)
    finally:
        for fork in forks:
            fork.delete()
