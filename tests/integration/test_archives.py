"""Sessions that leave a server by a file and enter another: processes, files and history go along;
what is damaged, cut off or in the way is refused and leaves nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import ArchiveInvalid, NameTaken, ResumeFailed, StoreKeyInvalid
from sojourn.model import Limits, Policy
from sojourn.wire.api import ArchiveInfo
from support.archives import Forger, with_memory
from support.counting import COUNTER
from support.servers import ServerProcess, eventually

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("small_template"),
]

SECRET = "a secret of sixteen bytes"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ...]]:
    """Two servers that share nothing."""
    root = tmp_path_factory.mktemp("archives")
    both = tuple(ServerProcess(root / name / "data") for name in ("here", "there"))
    for server in both:
        server.data.parent.mkdir()
        server.start()
    yield both
    for server in both:
        server.remove()


@pytest.fixture
def here(servers: tuple[ServerProcess, ...]) -> Iterator[Sojourn]:
    yield from cleared(servers[0])


@pytest.fixture
def there(servers: tuple[ServerProcess, ...]) -> Iterator[Sojourn]:
    yield from cleared(servers[1])


def cleared(server: ServerProcess) -> Iterator[Sojourn]:
    client = server.client() if server.running else server.start()
    yield client
    client = server.client() if server.running else server.start()
    for session in client.sessions.list():
        session.delete()


def counted(session: Session) -> int:
    """How far the counter is; its log has neither gap nor repetition."""
    lines = session.files.read("/root/count").decode().split("\n")[:-1]
    assert lines == [str(n + 1) for n in range(len(lines))]
    return len(lines)


def busy(client: Sojourn, **options: object) -> Session:
    """A session with a process that counts, a variable and files."""
    session = client.sessions.create(**options)  # type: ignore[arg-type]
    session.exec(
        "mkdir /root/d; echo kept > /root/d/file; ln /root/d/file /root/d/link; : > /root/count"
    )
    assert session.run_code("value = 41; value").text == "41"
    session.spawn(COUNTER)
    eventually(lambda: counted(session) > 3)
    return session


@pytest.fixture(scope="module")
def exported(servers: tuple[ServerProcess, ...]) -> tuple[bytes, ArchiveInfo]:
    """An archive of a session with processes, and what was told of it."""
    session = busy(servers[0].client())
    archive = io.BytesIO()
    told = session.export(archive)
    session.delete()
    return archive.getvalue(), told


def test_a_session_goes_on_elsewhere(here: Sojourn, there: Sojourn, tmp_path: Path) -> None:
    session = busy(here, name="mover", labels={"kind": "test"}, env={"A": "b"})
    marked = session.snapshot("marked")
    session.exec("echo later > /root/later")
    told = session.export(tmp_path / "archive")
    assert told.session == session.id and told.bytes == (tmp_path / "archive").stat().st_size
    history = session.refresh().history()
    assert told.snapshots == len(history)
    assert session.head == told.snapshot and session.state == "running"

    moved = there.sessions.import_(tmp_path / "archive", expect=told.digest)
    assert moved.id != session.id and moved.state == "suspended"
    assert (moved.name, moved.labels, moved.info.env) == ("mover", {"kind": "test"}, {"A": "b"})
    arrived = moved.history()
    places = {old.id: number for number, old in enumerate(history)}

    def shape(snapshots: list, number: dict) -> list:  # type: ignore[type-arg]
        return sorted(
            (one.fingerprint, one.label or "", one.kind, one.memory, number.get(one.parent, -1))
            for one in snapshots
        )

    by_fingerprint = {one.fingerprint: one.id for one in history}
    assert len(by_fingerprint) == len(history)
    mapped = {new.id: places[by_fingerprint[new.fingerprint]] for new in arrived}
    assert shape(arrived, mapped) == shape(history, places)
    assert not {one.id for one in arrived} & {one.id for one in history}
    event = next(one for one in moved.events() if one.kind == "imported")
    assert event.details["digest"] == told.digest

    moved.resume()
    before = counted(moved)
    eventually(lambda: counted(moved) > before + 3)
    assert moved.run_code("value + 1").text == "42"
    assert moved.exec("cat d/link later; stat -c %h d/file; echo $A").text == "kept\nlater\n2\nb\n"
    assert moved.verify().ok
    moved.rollback("marked")
    assert not moved.files.exists("/root/later")
    assert counted(moved) > 3
    assert marked.fingerprint in {one.fingerprint for one in arrived}


def test_an_archive_gives_independent_sessions(
    here: Sojourn, there: Sojourn, tmp_path: Path
) -> None:
    session = busy(here, name="twice")
    session.suspend()
    session.export(tmp_path / "archive", key=SECRET)
    first = there.sessions.import_(tmp_path / "archive", key=SECRET)
    with pytest.raises(NameTaken):
        there.sessions.import_(tmp_path / "archive", key=SECRET)
    with pytest.raises(NameTaken):  # told before the archive is sent
        there.sessions.import_(tmp_path / "archive", name="twice", key=SECRET)
    with (tmp_path / "archive").open("rb") as file:
        second = there.sessions.import_(file, name="other", key=SECRET)
    assert first.id != second.id and second.name == "other"
    for one in (first, second):
        one.exec(f"echo {one.id} > /root/d/file")
    for one in (first, second):
        assert one.exec("cat d/file").text == f"{one.id}\n"
        eventually(lambda one=one: counted(one) > 5)  # type: ignore[misc]
    first.delete()
    assert second.verify().ok
    with pytest.raises(StoreKeyInvalid):
        there.sessions.import_(tmp_path / "archive", name="no")
    with pytest.raises(StoreKeyInvalid):
        there.sessions.import_(tmp_path / "archive", name="no", key="another secret of some length")
    assert [one.name for one in there.sessions.list()] == ["other"]


def test_one_snapshot_and_back_to_its_own_server(here: Sojourn) -> None:
    session = busy(here, name="one")
    first = session.snapshot("first")
    session.exec("echo later > /root/later")
    archive = io.BytesIO()
    told = session.export(archive, "first")
    assert told.snapshots == 1 and told.fingerprint == first.fingerprint
    with pytest.raises(NameTaken):
        here.sessions.import_(archive.getvalue())
    made = here.sessions.import_(archive.getvalue(), name="again")
    assert len(made.history()) == 1
    made.resume()
    assert not made.files.exists("/root/later") and counted(made) > 3
    session.delete()
    assert made.verify().ok and counted(made) > 3


def test_what_is_damaged_is_refused_and_leaves_nothing(
    there: Sojourn, servers: tuple[ServerProcess, ...], exported: tuple[bytes, ArchiveInfo]
) -> None:
    data, told = exported

    def objects() -> int:
        store = servers[1].data / "store"
        return sum(
            len(list((store / kind).iterdir())) for kind in ("layers", "images", "snapshots")
        )

    before = objects()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for bad in (
        bytes(flipped),
        data[:-1],
        data[: len(data) // 2],
        data + b"\0",
        b"",
        b"no archive",
    ):
        with pytest.raises(ArchiveInvalid):
            there.sessions.import_(bad)
    with pytest.raises(ArchiveInvalid):
        there.sessions.import_(data, expect="0" * 64)
    assert there.sessions.list() == []
    assert objects() == before
    assert there.sessions.import_(data, expect=told.digest.upper()).verify().ok


def test_memory_of_another_runtime_comes_in_and_is_not_resumed(
    there: Sojourn, exported: tuple[bytes, ArchiveInfo]
) -> None:
    data, _ = exported
    foreign = with_memory(
        data, lambda ref: msgspec.structs.replace(ref, runtime="runsc release-19990101.0")
    )
    made = there.sessions.import_(foreign)
    with pytest.raises(ResumeFailed):
        made.resume()
    assert made.refresh().state == "suspended" and made.verify().ok
    base = made.history()[0]
    assert not base.memory
    made.rollback(base)
    assert made.exec("echo files alone").text == "files alone\n"
    other = with_memory(data, lambda ref: msgspec.structs.replace(ref, cpu=["not_of_this_world"]))
    made = there.sessions.import_(other)
    with pytest.raises(ResumeFailed):
        made.resume()


def test_bounds_of_requests_hold_for_what_an_archive_says(there: Sojourn) -> None:
    for bad in (
        {"name": "no/name"},
        {"labels": {"": "x"}},
        {"env": {"A=B": "x"}},
        {"limits": Limits(pids=1)},
        {"policy": Policy(on_expiry="explode")},
        {"template": "../etc"},
        {"driver": ""},
    ):
        forger = Forger()
        with pytest.raises(ArchiveInvalid):
            there.sessions.import_(forger.finish(forger.snapshot(), **bad))
    forger = Forger()
    with pytest.raises(ArchiveInvalid):
        there.sessions.import_(forger.finish(forger.snapshot(label="x" * 1000)))
    forger = Forger()
    with pytest.raises(ArchiveInvalid):
        there.sessions.import_(forger.finish(forger.snapshot(created_at=float("nan"))))
    assert there.sessions.list() == []


def test_of_many_at_once_with_one_name_one_wins(
    there: Sojourn, servers: tuple[ServerProcess, ...]
) -> None:
    forger = Forger()
    data = forger.finish(forger.snapshot())
    manifests = servers[1].data / "store" / "snapshots"
    eventually(lambda: not list(manifests.iterdir()))

    def attempt(_number: int) -> str:
        try:
            return there.sessions.import_(data, name="one").id
        except NameTaken:
            return ""

    with ThreadPoolExecutor(6) as pool:
        made = [id for id in pool.map(attempt, range(6)) if id]
    assert [one.id for one in there.sessions.list()] == made and len(made) == 1
    assert len(list(manifests.iterdir())) == 1


def test_the_command_line(servers: tuple[ServerProcess, ...], tmp_path: Path) -> None:
    def sojourn(server: ServerProcess, *words: str, **more: object):  # type: ignore[no-untyped-def]
        environment = os.environ | {"SOJOURN_URL": server.url, "SOJOURN_TOKEN": server.token}
        return subprocess.run(
            [sys.executable, "-m", "sojourn.cli.main", *words],
            capture_output=True,
            env=environment | {"SOJOURN_ARCHIVE_KEY": SECRET},
            timeout=120,
            **more,  # type: ignore[call-overload]
        )

    session = servers[0].client().sessions.create(name="lines")
    session.exec("echo by hand > /root/note")
    file = str(tmp_path / "archive")
    done = sojourn(servers[0], "export", "lines", file, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["encrypted"] and Path(file).stat().st_mode & 0o777 == 0o600
    done = sojourn(servers[1], "import", file, "--expect", "0" * 64)
    assert done.returncode == ArchiveInvalid.exit_code and b"[archive_invalid]" in done.stderr
    done = sojourn(servers[1], "import", file, "--expect", told["digest"], "--name", "typed")
    assert done.returncode == 0, done.stderr
    made = servers[1].client().sessions.get("typed")
    assert done.stdout.decode().strip() == made.id
    assert made.exec("cat note").text == "by hand\n"
    piped = sojourn(servers[0], "export", f"lines@{told['snapshot']}", "-")
    assert piped.returncode == 0 and len(piped.stderr.split()[-1]) == 64
    done = sojourn(servers[1], "import", "-", "--json", input=piped.stdout)
    assert done.returncode == 0 and json.loads(done.stdout)["name"] == "lines"
    for server in servers:
        for one in server.client().sessions.list():
            one.delete()


def test_what_only_the_object_store_has_goes_along(there: Sojourn, tmp_path: Path) -> None:
    """A server that was made anew from its object store has nothing on its own disk."""
    store = (tmp_path / "objects").as_uri()
    server = ServerProcess(tmp_path / "data", store=store)
    session = busy(server.start(), name="far")
    session.suspend(wait="durable")
    server.kill()
    shutil.rmtree(server.data)
    words = ("recover", "--data", str(server.data), "--store", store)
    subprocess.run([sys.executable, "-m", "sojourn.cli.main", *words], check=True)
    try:
        found = server.start().sessions.get("far")
        archive = io.BytesIO()
        found.export(archive)
        assert [one.kind for one in found.events()][-1] == "export"
        made = there.sessions.import_(archive.getvalue())
        before = counted(made)
        eventually(lambda: counted(made) > before)
    finally:
        server.remove()
