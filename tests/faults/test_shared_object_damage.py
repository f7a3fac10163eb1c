"""Damage of what all in an object store depend on, met by a whole server: it is told by its name,
keeps nobody from state that lies on the node, and can be mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session
from sojourn.errors import IntegrityError, SojournError
from support.damages import DAMAGES, INTEGRITY, flip
from support.durable import lose, objects, recovered, settled, sojourn
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


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
