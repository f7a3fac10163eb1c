"""C32 to C50 through the object store: what one node put away is the same on another, which has
nothing but the store.

Each case prepares sessions on the first node; that node is lost once for all of them, and each
test looks at its own sessions on the second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from contract.store_rig import capture, hostile_tree, look, snapshot_of
from sojourn.client import Process, Session, Sojourn
from sojourn.errors import CaptureRefused, ResumeFailed, SnapshotNotFound, UnlinkedOpenFile
from sojourn.repository.checks import check
from sojourn.repository.collection import collect
from sojourn.repository.copies import StoredCopies
from sojourn.repository.repository import Repository
from sojourn.repository.sealed import SNAPSHOT
from sojourn.server.sources import RepositorySource
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore
from sojourn.store.trees import remove_tree
from support.durable import moved, settled
from support.servers import ServerProcess, eventually
from support.tree_manifest import differences, make_tree, manifest

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

REMOVED = """
set -e
mkdir -p /srv/t/gone /srv/t/swap; echo 1 > /srv/t/gone/a; echo 1 > /srv/t/swap/a
ln -s ../t/swap /srv/t/link
"""
REPLACED = """
set -e
rm -r /srv/t/gone
rm -r /srv/t/swap; mkdir /srv/t/swap; echo 2 > /srv/t/swap/b
rm /srv/t/link; mkdir /srv/t/link; echo 3 > /srv/t/link/inside
rm -r /usr/share/doc; mkdir /usr/share/doc; echo mine > /usr/share/doc/only
rm /etc/debian_version; rm -r /usr/share/man; echo file > /usr/share/man
"""
LOOK_REPLACED = """
find /srv/t -printf '%P %y %s %m\\n' | sort; ls -A /usr/share/doc; cat /usr/share/doc/only
cat /usr/share/man; test ! -e /etc/debian_version && echo gone
"""
LINKS = """
set -e
mkdir -p /srv/l/dir; cd /srv/l
ln -s /etc/passwd outside; ln -s ../../../../../../../../etc/shadow up; ln -s dir to-dir
ln -s /proc/self/root/etc/hostname proc; echo in > dir/file; ln dir/file hard
"""
AGENT = """
set -e
useradd -m -u 1000 agent 2>/dev/null || id agent > /dev/null
su agent -c 'umask 027; echo mine > ~/mine; ln -s mine ~/l; mkdir ~/d'
cp /bin/true /srv/program; chown 1000:1000 /srv/program; chmod 6755 /srv/program
chown -h 4321:1234 /home/agent/l
"""
LOOK_AGENT = "stat -c '%n %u:%g %a' /home/agent /home/agent/* /srv/program"
SPARSE = """
import os
with open("/srv/sparse", "wb") as file:
    file.truncate(256 << 20)
    for at in (0, 100 << 20, (256 << 20) - 5):
        file.seek(at)
        file.write(b"data!")
"""
# A counter in memory, in a file, in a database with a log of its own: one after the other.
COUNTER = r"""
import os, sqlite3
os.makedirs("/srv/w")
log = open("/srv/w/log", "ab", buffering=0)
database = sqlite3.connect("/srv/w/db", isolation_level=None)
database.execute("pragma journal_mode=wal")
database.execute("create table t (n integer primary key)")
memory = open("/tmp/counter", "w+")
count = 0
while True:
    count += 1
    log.write(b"%d\n" % count)
    database.execute("insert into t values (?)", (count,))
    memory.seek(0); memory.write(str(count)); memory.flush()
    if count % 50 == 0:
        print(count, flush=True)
"""
COMPARE = r"""
import sqlite3
numbers = [int(line) for line in open("/srv/w/log").read().split()]
assert numbers == list(range(1, len(numbers) + 1)), "a gap or a repetition"
database = sqlite3.connect("/srv/w/db")
assert database.execute("pragma integrity_check").fetchone() == ("ok",)
rows, top = database.execute("select count(*), max(n) from t").fetchone()
memory = int(open("/tmp/counter").read())
assert rows == top and len(numbers) - 1 <= top <= len(numbers), (rows, top, len(numbers))
assert len(numbers) - 1 <= memory <= len(numbers), (memory, len(numbers))
print(len(numbers))
"""
HOLD = """
import os, sys
file = open(sys.argv[1], "w+b"); file.write(b"still here"); file.flush(); os.unlink(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    file.seek(0); print(file.read().decode(), flush=True)
"""
NAMES = [b"\xff", b"a\xe9b", b"\xed\xa0\x80", b"with\nline", b"\x01\x1b[31m", b"n" * 255]


class World:
    """The sessions of the first node, and what was seen in them."""

    def __init__(self, client: Sojourn, data: Path) -> None:
        self.client = client
        self.data = data
        self.ids: dict[str, str] = {}
        self.seen: dict[str, object] = {}

    def new(self, name: str) -> Session:
        session = self.client.sessions.create(name=name, policy={"auto_snapshot": "off"})
        self.ids[name] = session.id
        return session

    def session(self, name: str) -> Session:
        return self.client.sessions.get(self.ids[name])


def run(session: Session, *words: str) -> str:
    done = session.exec(list(words)) if len(words) > 1 else session.exec(words[0])
    assert done.exit_code == 0, done.stderr.decode()
    return done.text


def seen(session: Session, top: str) -> dict[str, dict[str, object]]:
    """What is below `top`, as stored. A snapshot first: until then the times of files that were
    just written are those of the sandbox's own clock, microseconds beside those of the disk."""
    session.snapshot()
    return manifest(session, top)


def prepare_trees(world: World) -> None:
    strange = world.new("strange")
    make_tree(strange, "/srv/tree")
    world.seen["strange"] = seen(strange, "/srv/tree")
    strange.suspend()
    files = world.new("files")
    make_tree(files, "/srv/tree", nodes=False)
    run(files, "python3 -m venv --without-pip /srv/venv")
    run(files, "python3", "-c", SPARSE)
    for name in NAMES:
        files.files.write(b"/srv/names/" + name, b"content of " + name)
    world.seen["files"] = seen(files, "/srv")
    files.suspend(memory=False)


def prepare_changes(world: World) -> None:
    removed = world.new("removed")
    run(removed, REMOVED)
    world.seen["first"] = removed.snapshot("first").id
    run(removed, REPLACED)
    run(removed, LINKS)
    run(removed, AGENT)
    world.seen["replaced"] = run(removed, LOOK_REPLACED)
    world.seen["links"] = seen(removed, "/srv/l")
    world.seen["agent"] = run(removed, LOOK_AGENT)
    removed.suspend(memory=False)


def prepare_processes(world: World) -> None:
    counter = world.new("counter")
    process = counter.spawn(["python3", "-c", COUNTER])
    assert eventually(lambda: process.refresh().info.stdout[1] > 10)
    counter.snapshot("live", wait="durable")
    counter.suspend()
    held = world.new("held")
    process = held.spawn(["python3", "-c", HOLD, "/tmp/gone"], stdin="pipe")
    assert eventually(lambda: process.refresh().info.stdout[1] > 0)
    world.seen["holder"] = process.id
    held.suspend()


def prepare_foreign(world: World, place: Path) -> None:
    """A session whose newest snapshot was taken by a processor that can do more."""
    foreign = world.new("foreign")
    foreign.files.write("/srv/kept", b"kept")
    world.seen["plain"] = foreign.snapshot("plain", memory=False, wait="durable").id
    foreign.suspend(wait="durable")
    # The record is written after the snapshot: it must not come after the forgery.
    eventually(lambda: settled(world.client))
    head = foreign.refresh().head
    assert head is not None
    repository = Repository.open(str(place))
    tenant = next(repository.tenants()).id
    found = repository.read_snapshot(tenant, head)
    assert found.memory is not None and found.memory.cpu
    memory = msgspec.structs.replace(found.memory, cpu=[*found.memory.cpu, "imaginary"])
    mark = fingerprint(found.layers, memory, found.config)
    other = msgspec.structs.replace(found, memory=memory, fingerprint=mark)
    domain = repository.domain(tenant)
    domain.put_object(SNAPSHOT, domain.snapshot_key(head), msgspec.msgpack.encode(other))
    repository.close()


@pytest.fixture(scope="module")
def world(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The sessions as the second node has them."""
    root = tmp_path_factory.mktemp("objects")
    place = Path(shutil.copytree(stocked, root / "objects"))
    first = ServerProcess(root / "first", store=place.as_uri())
    found = World(first.start(), root / "second" / "data")
    try:
        prepare_trees(found)
        prepare_changes(found)
        prepare_processes(found)
        prepare_foreign(found, place)
        for name in found.ids:
            found.session(name).durability(wait=60)
        eventually(lambda: settled(found.client))
        second = moved(first, found.data)
    except BaseException:
        first.remove()
        raise
    found.client = second.client()
    yield found
    second.remove()


def test_c32_c38_every_kind_of_file_comes_back_on_another_node(world: World) -> None:
    session = world.session("strange")
    assert differences(world.seen["strange"], manifest(session, "/srv/tree")) == {}
    # Once more after a change below: copied up from what was fetched.
    run(session, "touch /srv/tree/sub /srv/tree/plain")
    changed = seen(session, "/srv/tree")
    session.suspend(wait="durable")
    assert differences(changed, manifest(session, "/srv/tree")) == {}
    assert session.verify().ok


def test_c32_c38_files_alone_come_back_with_names_times_holes_and_a_venv(world: World) -> None:
    session = world.session("files")
    assert differences(world.seen["files"], manifest(session, "/srv")) == {}
    assert run(session, "/srv/venv/bin/python -c 'import sys; print(sys.prefix)'") == "/srv/venv\n"
    listed = session.files.list("/srv/names")
    paths = {one.path_bytes or one.path.encode() for one in listed}
    assert paths == {b"/srv/names/" + name for name in NAMES}
    for name in NAMES:
        assert session.files.read(b"/srv/names/" + name) == b"content of " + name
    # Holes are holes on the node's disk: 256 and 64 MiB of size, a few blocks of data.
    for name in ("sparse", "tree/sparse"):
        found = [path.stat() for path in world.data.glob(f"store/layers/*/fs/srv/{name}")]
        assert found and all(one.st_blocks * 512 < 1 << 20 < one.st_size for one in found)


def test_c32_removed_and_replaced_directories_do_not_shine_through(world: World) -> None:
    session = world.session("removed")
    assert run(session, LOOK_REPLACED) == world.seen["replaced"]
    assert "gone\n" in str(world.seen["replaced"])


def test_c33_c35_links_stay_links_and_lead_nowhere_on_the_node(world: World) -> None:
    session = world.session("removed")
    assert differences(world.seen["links"], manifest(session, "/srv/l")) == {}
    assert run(session, "readlink /srv/l/outside /srv/l/up").split() == [
        "/etc/passwd",
        "../../../../../../../../etc/shadow",
    ]
    # Read through the link inside, it is the session's own.
    assert session.files.read("/srv/l/outside") == session.files.read("/etc/passwd")


def test_c37_owners_and_modes_come_back_and_commands_run_as_asked(world: World) -> None:
    session = world.session("removed")
    assert run(session, LOOK_AGENT) == world.seen["agent"]
    assert "/srv/program 1000:1000 6755\n" in str(world.seen["agent"])
    assert "/home/agent/l 4321:1234 777\n" in str(world.seen["agent"])
    done = session.exec("id -un; cat ~/mine; touch ~/new; stat -c %u ~/new", user="agent")
    assert done.text == "agent\nmine\n1000\n", done


def test_older_snapshots_of_the_tree_come_back_as_well(world: World) -> None:
    session = world.session("removed")
    [fork] = session.fork(1, snapshot=str(world.seen["first"]))
    assert run(fork, "cat /srv/t/gone/a /srv/t/swap/a; ls /etc/debian_version") == (
        "1\n1\n/etc/debian_version\n"
    )
    fork.delete()


def test_c39_memory_files_and_database_are_of_one_instant_on_another_node(world: World) -> None:
    session = world.session("counter")
    [process] = [one for one in session.processes() if one.running]

    def look() -> int:
        process.signal("STOP")
        count = int(run(session, "python3", "-c", COMPARE))
        process.signal("CONT")
        return count

    count = look()
    assert count > 0
    assert eventually(lambda: look() > count), "the writer goes on"
    session.rollback("live")
    [process] = [one for one in session.processes() if one.running]
    assert look() > 0
    assert session.verify().ok


def test_c41_a_file_that_was_open_and_unlinked_in_memory_is_there(world: World) -> None:
    session = world.session("held")
    process = session.process(str(world.seen["holder"]))
    assert ask(process) == b"still here\n"


def test_c50_an_image_of_another_processor_is_refused_before_the_start(world: World) -> None:
    session = world.session("foreign")
    with pytest.raises(ResumeFailed) as raised:
        session.resume()
    assert "imaginary" in raised.value.message
    assert session.refresh().state == "suspended"
    # It stays to be resumed where it fits; its files can be had here.
    session.rollback(str(world.seen["plain"]))
    assert session.files.read("/srv/kept") == b"kept"


def ask(process: Process) -> bytes:
    before = process.refresh().info.stdout[1]
    process.write("\n")
    found = b""
    with contextlib.closing(process.output((before, 0))) as output:
        for piece in output:
            found += piece.data
            if found.endswith(b"\n"):
                break
    return found


# -- what a session's own kernel does not let it make ---------------------------------------

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
ACCESS = bytes.fromhex(
    "02000000" "01000600ffffffff" "02000400e8030000" "04000400ffffffff" "10000600ffffffff"
    "20000400ffffffff"
)  # fmt: skip


@pytest.mark.parametrize("secret", [None, b"a secret of the operator"], ids=["open", "encrypted"])
def test_c32_c37_devices_capabilities_and_access_lists_come_back(
    tmp_path: Path, secret: bytes | None
) -> None:
    upper = tmp_path / "upper"
    hostile_tree(upper)
    (upper / "program").write_bytes(b"#!/bin/sh\n")
    os.setxattr(upper / "program", "security.capability", CAPABILITY)
    os.setxattr(upper / "program", "system.posix_acl_access", ACCESS)
    (upper / "inherits").mkdir()
    os.setxattr(upper / "inherits", "system.posix_acl_default", ACCESS)
    os.setxattr(upper / "inherits", "trusted.overlay.opaque", b"y")
    os.mknod(upper / "inherits" / "whiteout", 0o20000, os.makedev(0, 0))
    os.mknod(upper / "zero", 0o20666, os.makedev(1, 5))
    os.mknod(upper / "drive", 0o60660, os.makedev(7, 0))
    with (upper / "holes").open("wb") as file:
        file.truncate(128 << 20)
        file.seek(64 << 20)
        file.write(b"middle")
    before = look(upper)
    template = tmp_path / "template"
    template.mkdir()
    here = LocalStore(tmp_path / "here")
    base, layer = here.adopt_template(template, "base"), capture(here, upper)
    snapshot = snapshot_of([base, layer])
    here.publish_snapshot(snapshot)
    url = (tmp_path / "objects").as_uri()
    repository = Repository.open(url, secret, create=True)
    repository.push("ten_1", snapshot, StoredCopies(here.root))
    remove_tree(tmp_path / "here")
    remove_tree(upper)
    try:
        again = Repository.open(url, secret)
        source = RepositorySource(again)
        there = LocalStore(tmp_path / "there", source=source)
        found = again.read_snapshot("ten_1", snapshot.id)
        assert found == snapshot
        source._layers[layer.id] = "ten_1"
        place = there.layer_path(layer.id)
        assert look(place) == before
        assert os.getxattr(place / "program", "security.capability") == CAPABILITY
        assert os.getxattr(place / "program", "system.posix_acl_access") == ACCESS
        assert os.getxattr(place / "inherits", "trusted.overlay.opaque") == b"y"
        assert (place / "drive").stat().st_rdev == os.makedev(7, 0)
        assert (place / "holes").stat().st_blocks * 512 < 1 << 20
        assert list(there.verify_layer(layer)) == []
    finally:
        remove_tree(tmp_path / "there")


# -- live sessions that wait for the store ---------------------------------------


@pytest.fixture(scope="module")
def waiting(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("waiting")
    place = shutil.copytree(stocked, root / "objects")
    server = ServerProcess(root / "data", store=place.as_uri())
    server.start()
    yield server
    server.remove()


def test_c41_a_refused_capture_leaves_nothing_in_the_store(waiting: ServerProcess) -> None:
    session = waiting.client().sessions.create(policy={"auto_snapshot": "off"})
    process = session.spawn(["python3", "-c", HOLD, "/srv/gone"], stdin="pipe")
    assert eventually(lambda: process.refresh().info.stdout[1] > 0)
    before = [one.id for one in session.history()]
    for take in (session.snapshot, session.suspend, session.pause):
        with pytest.raises(UnlinkedOpenFile) as raised:
            take(wait="durable")
        assert raised.value.details["path"] == "/srv/gone"
    assert [one.id for one in session.history()] == before
    assert ask(process) == b"still here\n"
    taken = session.snapshot("files", memory=False, wait="durable")
    assert session.durability(snapshot=taken).head_durable
    process.kill()
    session.suspend(wait="durable")
    assert session.durability().head_durable


def test_c43_what_cannot_be_dumped_is_named_and_the_store_not_asked(
    waiting: ServerProcess,
) -> None:
    session = waiting.client().sessions.create(policy={"auto_snapshot": "off"})
    ring = "import ctypes, time\nlibc = ctypes.CDLL(None)\n" + (
        "h = libc.syscall(425, 8, ctypes.create_string_buffer(120))\n"
        "print('ready', h, flush=True); time.sleep(1000)"
    )
    process = session.spawn(["python3", "-c", ring])
    assert eventually(lambda: process.refresh().info.stdout[1] > 0)
    try:
        session.suspend(wait="durable")
    except CaptureRefused as error:
        assert error.details["pid"] == process.pid
        assert session.refresh().state == "running"
    else:  # there was no ring: the runtime has none
        assert session.durability().head_durable
    assert process.refresh().running


def test_c49_what_a_deleted_snapshot_held_leaves_the_store_when_no_child_needs_it(
    waiting: ServerProcess,
) -> None:
    client = waiting.client()
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    size = 8_000_000
    run(session, f"head -c {size} /dev/urandom > /srv/a; sha256sum /srv/a > /srv/sum")
    first = session.snapshot("first", wait="durable")
    [fork] = session.fork(1, snapshot=first, start=False)
    run(session, "rm /srv/a")
    session.suspend(memory=False, wait="durable")
    place = Path(waiting.store.removeprefix("file://"))
    repository = Repository.open(waiting.store)

    def collected() -> int:
        eventually(lambda: settled(client))
        collect(repository.backend, repository.domain, grace=0)
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    full = collected()
    session.delete_snapshot(first)
    assert "first" not in {one.label for one in session.history()}
    with pytest.raises(SnapshotNotFound):
        session.rollback(first)
    # Hidden, and all there for the child.
    assert collected() > full - size // 2
    assert run(fork, "sha256sum -c /srv/sum") == "/srv/a: OK\n"
    assert fork.verify().ok
    fork.delete()
    eventually(lambda: collected() < full - size, timeout=40, every=0.5)
    assert session.verify().ok
    assert list(check(repository.backend, repository.domain, read_data=True)) == []
    repository.close()
