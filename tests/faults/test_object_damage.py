"""Damage in the object store, met by a whole server: each kind of object, flipped, cut off or gone.

Who needs the object is told its name and the way back; whoever does not is unaffected.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from sojourn.client import Session
from sojourn.errors import IntegrityError
from sojourn.repository.domains import Domain
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.repository import Repository
from support.damages import DAMAGES, INTEGRITY
from support.durable import lose, settled, sojourn
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

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


def make_good(world: World, session: Session, name: str) -> None:
    world.ids[name] = session.id
    done = session.exec(f"echo {name} > /srv/good; head -c 100000 /dev/urandom > /srv/first")
    assert done.exit_code == 0
    world.goods[name] = session.snapshot("good", memory=False).id


def make_newest(world: World, session: Session, name: str) -> None:
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
            sessions = dict(zip(some, seed.fork(len(some), names=some), strict=True))
            for name, session in sessions.items():
                make_good(world, session, name)
            # Sent by now, what is good shares no pack with what comes.
            for name in (one for one in some if one.startswith("pack")):
                sessions[name].durability(wait=60)
            for name, session in sessions.items():
                make_newest(world, session, name)
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
