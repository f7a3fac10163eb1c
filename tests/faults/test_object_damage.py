"""Damage in the object store, met by a whole server: each kind of object, flipped, cut off or gone.

Who needs the object is told its name, whoever does not is unaffected, and so is everyone whose
state still lies on the node.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from sojourn.client import Session
from sojourn.errors import IntegrityError, SojournError
from sojourn.repository.domains import Domain
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.repository import Repository
from support.durable import lose, objects, recovered, settled, sojourn
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

INTEGRITY = 112


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": shorten, "remove": remove}
KINDS = ("pack", "layer", "image", "snapshot", "record")
VICTIMS = [f"{kind}-{way}" for kind in KINDS for way in DAMAGES]


class World:
    """Sessions in a store, one for each damage, and what the damaged objects are called."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ids: dict[str, str] = {}
        self.goods: dict[str, str] = {}
        self.owns: dict[str, bytes] = {}
        self.keys: dict[str, str] = {}
        self.server: ServerProcess
        self.told = ""

    def session(self, name: str) -> Session:
        return self.server.client().sessions.get(self.ids[name])


def make(world: World, session: Session, name: str) -> None:
    world.ids[name] = session.id
    done = session.exec(f"echo {name} > /srv/good; head -c 100000 /dev/urandom > /srv/first")
    assert done.exit_code == 0
    world.goods[name] = session.snapshot("good", memory=False).id
    world.owns[name] = os.urandom(100_000)
    session.files.write("/srv/own", world.owns[name])
    session.suspend(memory=name.startswith("image"))


def key_of(world: World, domain: Domain, repository: Repository, name: str) -> str:
    """The object to damage: the one that only this session's newest snapshot needs."""
    kind = name.partition("-")[0]
    session = world.session(name)
    assert session.head is not None
    snapshot = repository.read_snapshot(domain.name, session.head)
    if kind == "pack":
        place = domain.index.find(
            domain.keys.chunk_name(CHUNK_DATA, blake3(world.owns[name]).digest())
        )
        assert place is not None
        return domain.pack_key(place.pack.id)
    if kind == "layer":
        return domain.layer_key(snapshot.layers[-1].id)
    if kind == "image":
        assert snapshot.memory is not None
        return domain.image_key(snapshot.memory.id)
    return (
        domain.snapshot_key(snapshot.id) if kind == "snapshot" else domain.session_key(session.id)
    )


@pytest.fixture(scope="module")
def world(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A node that recovered from a store in which one object of each victim is damaged."""
    root = tmp_path_factory.mktemp("damage")
    world = World(Path(shutil.copytree(stocked, root / "objects")))
    world.server = ServerProcess(root / "first", store=world.place.as_uri())
    client = world.server.start()
    try:
        seed = client.sessions.create(policy={"auto_snapshot": "off"})
        names = ["well", *VICTIMS]
        for some in (names[:8], names[8:]):
            for name, session in zip(some, seed.fork(len(some), names=some), strict=True):
                make(world, session, name)
        seed.delete()
        for name in world.ids:
            world.session(name).durability(wait=60)
        eventually(lambda: settled(client))
        repository = Repository.open(str(world.place))
        [tenant] = repository.tenants()
        domain = repository.domain(tenant.id)
        for name in VICTIMS:
            world.keys[name] = key_of(world, domain, repository, name)
        repository.close()
        lose(world.server)
        for name in VICTIMS:
            DAMAGES[name.partition("-")[2]](world.place / world.keys[name])
        world.server = ServerProcess(root / "second", store=world.place.as_uri())
        done = sojourn("recover", "--store", world.server.store, "--data", str(world.server.data))
        assert done.returncode == INTEGRITY, done.stdout + done.stderr
        world.told = done.stderr
        world.server.start()
    except BaseException:
        world.server.remove()
        raise
    yield world
    world.server.remove()


def test_recovery_names_what_it_could_not_read_and_brings_back_the_rest(world: World) -> None:
    for name in VICTIMS:
        kind, way = name.split("-")
        unreadable = kind == "record" or (kind == "snapshot" and way != "remove")
        id = world.keys[name].rpartition("/")[2]
        assert (id in world.told) is unreadable, (name, world.told)
    there = {session.id for session in world.server.client().sessions.list()}
    for name, id in world.ids.items():
        assert id in there, name  # a lost record costs a session its name, not its state
    # A head that cannot be read: the session comes back where it stood before.
    for way in DAMAGES:
        session = world.session(f"snapshot-{way}")
        assert session.head == world.goods[f"snapshot-{way}"]
        assert session.files.read("/srv/good") == f"snapshot-{way}\n".encode()


@pytest.mark.parametrize("name", [one for one in VICTIMS if one[0] in "pli"])
def test_resuming_without_a_cache_names_the_object_and_the_way_back(
    world: World, name: str
) -> None:
    session = world.session(name)
    for _ in range(2):
        with pytest.raises(IntegrityError) as raised:
            session.resume()
        details = raised.value.details
        kind = name.partition("-")[0]
        if kind == "pack":
            assert details["object"] == world.keys[name]
        else:
            assert kind in str(details["object"]) or details["object"] == world.keys[name]
        assert details["last_good"] == world.goods[name]
    assert session.refresh().state == "failed" and session.info.cause
    assert not session.verify().ok
    session.rollback(world.goods[name])
    assert session.files.read("/srv/good") == f"{name}\n".encode()
    assert session.verify(world.goods[name]).ok


def test_others_are_unaffected(world: World) -> None:
    session = world.session("well")
    assert session.files.read("/srv/good") == b"well\n"
    assert session.files.read("/srv/own") == world.owns["well"]
    session.suspend(wait="durable")
    assert session.verify().ok


def test_check_names_every_object_and_whom_it_concerns(world: World) -> None:
    done = sojourn("store", "check", "--read-data", "--json", "--store", world.server.store)
    assert done.returncode == INTEGRITY, done.stderr
    problems: list[dict[str, Any]] = json.loads(done.stdout)["problems"]
    for name in VICTIMS:
        kind, way = name.split("-")
        if kind == "record" or (way == "remove" and kind == "snapshot"):
            continue  # written anew by the recovery; nothing says that there ever was one
        found = [
            one
            for one in problems
            if one["object"] == world.keys[name] or world.ids[name] in one["sessions"]
        ]
        if kind == "snapshot":
            id = world.keys[name].rpartition("/")[2]
            found = [one for one in problems if id in one["object"]]
        assert found, (name, problems)
        assert all(one["cause"] for one in found)
    affected = {session for one in problems for session in one["sessions"]}
    assert world.ids["well"] not in affected


# -- what concerns all ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a server with one durable session left: its data, its object store; the session."""
    root = tmp_path_factory.mktemp("node")
    shutil.copytree(stocked, root / "objects")
    server = ServerProcess(root / "data", store=(root / "objects").as_uri())
    session = server.start().sessions.create(policy={"auto_snapshot": "off"})
    session.files.write("/srv/a", os.urandom(100_000))
    session.suspend(wait="durable")
    eventually(lambda: settled(server.client()))
    server.stop()
    return root, session.id


@pytest.fixture
def place(made: tuple[Path, str], tmp_path: Path) -> Path:
    """The object store of the test's own `node`."""
    return Path(shutil.copytree(made[0] / "objects", tmp_path / "objects"))


@pytest.fixture
def node(
    made: tuple[Path, str], place: Path, tmp_path: Path
) -> Iterator[tuple[ServerProcess, Session]]:
    """A server with one durable session whose state lies on the node as well."""
    shutil.copytree(made[0] / "data", tmp_path / "data")
    server = ServerProcess(tmp_path / "data", store=place.as_uri())
    session = server.start().sessions.get(made[1])
    yield server, session
    server.remove()


def test_a_session_whose_state_is_on_the_node_needs_nothing_of_the_store(
    node: tuple[ServerProcess, Session], place: Path
) -> None:
    server, session = node
    for kind in ("packs", "layers", "images", "indexes", "snapshots"):
        for path in objects(place, kind, "*"):
            flip(path)
    session.resume()
    assert session.verify().ok
    server.stop()
    server.start()
    session = server.client().sessions.get(session.id)
    session.suspend()
    assert len(session.files.read("/srv/a")) == 100_000
    # New things are told to be not durable, or are; never both.
    session.files.write("/srv/b", b"new")
    try:
        session.suspend(wait="durable")
    except SojournError as error:
        assert error.code in ("integrity_error", "store_unreachable"), error
        assert not session.durability().head_durable
    done = sojourn("store", "check", "--store", server.store)
    assert done.returncode == INTEGRITY


def test_a_bad_configuration_is_told_by_name_and_keeps_no_session_from_its_user(
    node: tuple[ServerProcess, Session], place: Path, tmp_path: Path
) -> None:
    server, session = node
    server.stop()
    whole = (place / "config").read_bytes()
    for name, damage in DAMAGES.items():
        damage(place / "config")
        before = sorted(path for path in place.rglob("*"))
        if name == "remove":
            with pytest.raises(RuntimeError, match="no repository any more"):
                server.start()
        else:
            client = server.start()
            assert "config" in client.status().objects.error
            assert len(client.sessions.get(session.id).files.read("/srv/a")) == 100_000
            server.stop()
        commands = [
            ("store", "check", "--store", server.store),
            ("recover", "--store", server.store, "--data", str(tmp_path / "new")),
        ]
        for words in commands:
            done = sojourn(*words)
            assert done.returncode == (103 if name == "remove" else INTEGRITY), done.stderr
            assert ("config" in done.stderr) or name == "remove"
        assert sorted(path for path in place.rglob("*")) == before
        (place / "config").write_bytes(whole)
    server.start()
    assert len(server.client().sessions.get(session.id).files.read("/srv/a")) == 100_000


@pytest.mark.parametrize("way", list(DAMAGES))
def test_a_tenant_whose_name_is_lost_keeps_its_sessions(
    node: tuple[ServerProcess, Session], place: Path, tmp_path: Path, way: str
) -> None:
    server, session = node
    [record] = (place / "tenants").iterdir()
    DAMAGES[way](record)
    done = sojourn("store", "check", "--store", server.store)
    assert done.returncode == INTEGRITY and f"tenants/{record.name}" in done.stdout
    lose(server)
    done = sojourn("recover", "--store", server.store, "--data", str(server.data))
    assert done.returncode == INTEGRITY and record.name in done.stderr
    token = server.start().tokens.create(record.name).token
    assert token is not None
    found = server.client(token).sessions.get(session.id)
    assert len(found.files.read("/srv/a")) == 100_000
    found.delete()


@pytest.mark.parametrize("way", list(DAMAGES))
def test_a_bad_index_is_passed_over_and_its_packs_indexed_anew(
    node: tuple[ServerProcess, Session], place: Path, tmp_path: Path, way: str
) -> None:
    server, session = node
    for path in objects(place, "indexes"):
        DAMAGES[way](path)
    if way != "remove":
        done = sojourn("store", "check", "--store", server.store)
        assert done.returncode == INTEGRITY
        assert all(path.name in done.stdout for path in objects(place, "indexes"))
    # The next thing that is sent finds the packs by themselves, and sends none again.
    server.restart()
    session = server.client().sessions.get(session.id)
    session.exec("echo new > /srv/new")
    session.suspend(memory=False, wait="durable")
    lose(server)
    other = recovered(server.store, tmp_path / "second")
    try:
        found = other.client().sessions.get(session.id)
        assert found.files.read("/srv/new") == b"new\n"
        assert len(found.files.read("/srv/a")) == 100_000
    finally:
        other.remove()
    done = sojourn("store", "repair", "--store", server.store, "--data", str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sojourn("store", "check", "--read-data", "--store", server.store).returncode == 0


def test_a_bad_tombstone_stops_collections_and_nobody_else(
    node: tuple[ServerProcess, Session], place: Path
) -> None:
    server, session = node
    [tenant] = [path.name for path in place.glob("ten_*")]
    bad = place / tenant / "tombstones" / ("0" * 32)
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(b"no tombstone")
    before = {path for path in place.rglob("*") if "tombstones" not in path.parts}
    done = sojourn("store", "gc", "--grace", "0", "--store", server.store)
    assert done.returncode == INTEGRITY and bad.name in done.stderr
    assert sojourn("store", "check", "--store", server.store).returncode == INTEGRITY
    assert {path for path in place.rglob("*") if "tombstones" not in path.parts} == before
    session.exec("echo on > /srv/b")
    try:
        session.suspend(wait="durable")
    except IntegrityError as error:
        # Nobody can tell what is on its way out: nothing counts as durable.
        assert bad.name in str(error.details["object"])
        assert not session.durability().head_durable
    assert session.exec("cat /srv/b").text == "on\n"
    done = sojourn("store", "repair", "--store", server.store, "--data", str(server.data))
    assert done.returncode == 0, done.stdout + done.stderr
    session.suspend(wait="durable")
    assert sojourn("store", "gc", "--grace", "0", "--store", server.store).returncode == 0
