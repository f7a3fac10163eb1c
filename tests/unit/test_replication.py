"""The copying to the object store: what cannot be sent hides nothing that can, and nothing counts
as durable that a recovery would not find. The sending process stands in for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sojourn.database import Database, DurableObjects, ObjectStore, open_database
from sojourn.database.writes import DeleteSnapshot, InsertSnapshot
from sojourn.errors import (
    IntegrityError,
    Interrupted,
    ObjectMissing,
    SnapshotNotFound,
    SojournError,
    StaleEpoch,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.model import Session, SnapshotKind
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, TenantRecord
from sojourn.server.guards import StoreGuard
from sojourn.server.opening import StoreOpening
from sojourn.server.replication import Replicator, StoreSettings
from sojourn.server.sources import RepositorySource
from support.databases import insert_session, make_session, make_snapshot

PATIENCE = 20.0


class Sender:
    """Takes what it is given, but for what a test makes it refuse."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refused: dict[tuple[str, str], Callable[[], SojournError]] = {}
        self.on_remove: Callable[[], None] = lambda: None

    def expect(self, repository: Repository) -> None:
        pass

    def _take(self, kind: str, id: str) -> None:
        self.calls.append((kind, id))
        refusal = self.refused.get((kind, id))
        if refusal is not None:
            raise refusal()

    async def push(self, tenant: str, snapshot: Any, parent: Any) -> int:
        self._take("push", snapshot.id)
        return 1

    async def put_tenant(self, record: TenantRecord) -> None:
        self._take("tenant", record.id)

    async def put_session(self, record: SessionRecord) -> None:
        self._take("session", record.session.id)

    async def remove(self, kind: str, tenant: str, id: str) -> None:
        self.on_remove()
        self._take("remove", id)

    async def close(self) -> None:
        pass


class Node:
    """A node's store as far as the copying reads it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gone: set[str] = set()
        self.fingerprints: dict[str, str] = {}

    def read_snapshot(self, id: str) -> Any:
        if id in self.gone:
            raise SnapshotNotFound(f"There is no snapshot {id}.")
        return SimpleNamespace(id=id, fingerprint=self.fingerprints.get(id, "ff"))


class World:
    def __init__(self, database: Database, root: Path, holder: str | None = None) -> None:
        self.database = database
        self.tenant = ""
        self.sender = Sender()
        self.node = Node(root / "store")
        self.source = RepositorySource(lambda: pytest.fail("nothing is read"))
        settings = StoreSettings(url=(root / "objects").as_uri(), delay=0.0)
        self.replicator = Replicator(database, settings, root / "store", holder)

    async def session(self) -> Session:
        return await insert_session(self.database, make_session(tenant=self.tenant))

    async def snapshot(self, session: Session, **fields: Any) -> str:
        made = make_snapshot(session, kind=SnapshotKind.EXPLICIT, **fields)
        await self.database.commit([InsertSnapshot(made)])
        return made.id

    async def durable(self, id: str) -> bool:
        record = await self.database.get_snapshot(None, id, hidden=True)
        return record.durable_at is not None

    async def written(self, session: Session, times: int) -> bool:
        return self.sender.calls.count(("session", session.id)) >= times

    async def start(self) -> None:
        await self.replicator.open()
        self.replicator.attach(self.node, self.source, StoreGuard(), set)  # type: ignore[arg-type]
        self.replicator._sender = self.sender  # type: ignore[assignment]
        await self.replicator.start()

    async def until(self, done: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await done():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def world(root: Path, holder: str | None = None) -> AsyncIterator[World]:
    database = await open_database(root / "sojourn.db")
    made = World(database, root, holder)
    made.tenant = (await database.create_tenant("one")).id
    try:
        yield made
    finally:
        await made.replicator.stop()
        await made.replicator.close()
        await database.close()


def stale() -> SojournError:
    return StaleEpoch("taken over by another server")


def test_snapshots_of_a_session_that_is_anothers_hide_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            lost, own = await here.session(), await here.session()
            theirs = [await here.snapshot(lost, created_at=float(n)) for n in range(120)]
            mine = await here.snapshot(own)
            here.sender.refused["session", lost.id] = stale
            await here.start()
            await here.until(lambda: here.durable(mine))
            assert not any([await here.durable(id) for id in theirs])

    asyncio.run(scenario())


def test_what_another_node_sends_is_waited_for_by_its_row(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, holder="nod_here") as here:
            await here.start()
            theirs = await here.snapshot(await here.session(), node="nod_there")
            waiting = asyncio.ensure_future(here.replicator.durable(theirs, PATIENCE))
            await asyncio.sleep(0)
            record = await here.database.get_snapshot(None, theirs, hidden=True)
            await here.database.mark_durable(theirs, fingerprint=record.fingerprint, at=7.0)
            assert (await waiting).durable_at == 7.0
            assert ("push", theirs) not in here.sender.calls

    asyncio.run(scenario())


def test_what_is_deleted_before_its_turn_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            going = await here.snapshot(session)
            await here.replicator.open()
            waiting = asyncio.ensure_future(here.replicator.durable(going, 10 * PATIENCE))
            await asyncio.sleep(0.01)
            await here.database.commit([DeleteSnapshot(going)])
            with pytest.raises(SnapshotNotFound):
                async with asyncio.timeout(PATIENCE):
                    await waiting

    asyncio.run(scenario())


def test_what_no_record_names_does_not_count_as_durable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            first = await here.snapshot(session)
            await here.start()
            await here.until(lambda: here.durable(first))
            # The first look after the start finds no record, and it is written once more.
            await here.until(lambda: here.written(session, 3))
            here.sender.refused["session", session.id] = stale
            second = await here.snapshot(session, parent=first)
            with pytest.raises(StaleEpoch):
                await here.replicator.durable(second, PATIENCE)
            assert ("push", second) in here.sender.calls
            assert not await here.durable(second)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "failure",
    [
        lambda: Interrupted("the process ended"),
        lambda: IntegrityError("differs"),
        lambda: StoreRefused("no"),
    ],
)
def test_a_snapshot_that_always_fails_holds_up_no_others(
    tmp_path: Path, failure: Callable[[], SojournError]
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            bad = await here.snapshot(session, created_at=1.0)
            good = await here.snapshot(session, created_at=2.0)
            here.sender.refused["push", bad] = failure
            await here.start()
            await here.until(lambda: here.durable(good))
            assert not await here.durable(bad)
            assert here.replicator.status().error

    asyncio.run(scenario())


def test_a_manifest_that_is_gone_is_told_and_holds_up_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            bad = await here.snapshot(session, created_at=1.0)
            good = await here.snapshot(session, created_at=2.0)
            here.node.gone.add(bad)
            await here.start()
            with pytest.raises(SnapshotNotFound):
                await here.replicator.durable(bad, PATIENCE)
            await here.until(lambda: here.durable(good))

    asyncio.run(scenario())


def test_a_record_that_cannot_be_written_holds_up_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            bad, good = await here.session(), await here.session()
            here.sender.refused["session", bad.id] = lambda: IntegrityError("cannot be read")
            await here.start()

            async def written() -> bool:
                return await here.database.record_digest(good.id) is not None

            await here.until(written)
            assert await here.database.record_digest(bad.id) is None

    asyncio.run(scenario())


def test_a_snapshot_that_is_being_thinned_is_sent_again_and_not_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            thinned = await here.snapshot(session, created_at=1.0)
            other = await here.snapshot(session, created_at=2.0)
            here.node.fingerprints[thinned] = "ee"  # the manifest is changed before its row
            await here.start()
            await here.until(lambda: here.durable(other))
            assert here.sender.calls.count(("push", thinned)) <= 2
            await here.database.update_snapshot(thinned, fingerprint="ee")
            assert (await here.replicator.durable(thinned, PATIENCE)).durable_at is not None

    asyncio.run(scenario())


def test_what_leaves_the_store_is_not_counted_on_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            gone = await here.snapshot(session, layers=["base", "lonely"], image=None)
            await here.start()
            await here.until(lambda: here.durable(gone))
            await here.until(lambda: asyncio.sleep(0, here.source.has("lonely")))
            seen: list[bool] = []
            here.sender.on_remove = lambda: seen.append(here.source.has("lonely"))
            await here.database.update_snapshot(gone, hidden=True)
            await here.database.delete_snapshot(gone)
            here.replicator.removed(session.id)
            await here.until(lambda: asyncio.sleep(0, bool(seen)))
            assert seen == [False]

    asyncio.run(scenario())


def test_what_stays_durable_is_there_while_the_rest_is_forgotten() -> None:
    source = RepositorySource(lambda: pytest.fail("nothing is read"))
    source.learn(DurableObjects({"kept": {"ten_1"}, "gone": {"ten_1"}}, {}, {"base"}))
    asked: list[bool] = []

    class Asking(dict[str, set[str]]):
        def items(self) -> Any:
            asked.append(source.has("kept") and source.has("base"))
            return super().items()

    source.forget(DurableObjects(Asking({"kept": {"ten_1"}}), Asking(), {"base"}))
    assert asked == [True, True]
    assert source.has("kept") and source.has("base") and not source.has("gone")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no record")])
def test_a_record_that_the_store_lost_is_written_again_after_a_start(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            session = await here.session()
            id = await here.snapshot(session)
            repository = Repository.open((tmp_path / "objects").as_uri(), create=True)

            async def put(record: SessionRecord) -> None:
                await asyncio.to_thread(repository.put_session, record)

            here.sender.put_session = put  # type: ignore[method-assign]
            await here.start()
            await here.until(lambda: here.durable(id))

            async def named() -> bool:
                with contextlib.suppress(IntegrityError, ObjectMissing):
                    record = repository.read_session(here.tenant, session.id)
                    return [note.id for note in record.snapshots] == [id]
                return False

            await here.until(named)
            await here.replicator.stop()
            damage(tmp_path / "objects" / here.tenant / "sessions" / session.id)
            assert not await named()
            again = World(here.database, tmp_path)
            again.sender = here.sender
            await again.start()
            await here.until(named)
            await again.replicator.stop()
            await again.replicator.close()
            repository.close()

    asyncio.run(scenario())


# -- opening ------------------------------------------------------------------------------------


async def settled_on(database: Database, place: Path) -> None:
    """A database that speaks of the repository at a place, which is made."""
    opening = StoreOpening(database, place.as_uri(), None, place.parent / "store")
    assert await opening.start() is None
    await opening.close()


def test_another_store_is_not_read_before_the_database_speaks_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await settled_on(here.database, tmp_path / "old")
            before = await here.database.object_store()
            other = StoreOpening(
                here.database, (tmp_path / "new").as_uri(), None, tmp_path / "store"
            )
            other._known = before
            with pytest.raises(StoreUnreachable):
                other.read()
            told: list[DurableObjects] = []
            other.on_change = told.append
            opened = await other.repository()
            assert other.read() is opened
            assert await here.database.object_store() == ObjectStore(opened.url, opened.config.id)
            assert told == [DurableObjects({}, {}, set())]
            await other.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("only_there", ["base", "layer-1", "image-1"])
def test_a_store_that_alone_holds_something_is_not_left(tmp_path: Path, only_there: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await settled_on(here.database, tmp_path / "old")
            before = await here.database.object_store()
            id = await here.snapshot(await here.session())
            await here.database.mark_durable(id, fingerprint="ff", at=1.0)
            for group, name in (("layers", "base"), ("layers", "layer-1"), ("images", "image-1")):
                place = tmp_path / "store" / group / name
                place.mkdir(parents=True)
                if name != only_there:
                    (place / "manifest").touch()
            other = StoreOpening(
                here.database, (tmp_path / "new").as_uri(), None, tmp_path / "store"
            )
            for _ in range(2):
                with pytest.raises(StoreRefused, match="only in the object store"):
                    await other.repository()
            assert other.accepted is None
            assert await here.database.object_store() == before
            assert await here.durable(id)
            await other.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("left", ["nothing", "directory"])
def test_a_known_store_that_vanished_is_refused_and_not_made_anew(
    tmp_path: Path, left: str
) -> None:
    """An unmounted file system looks like an empty directory, or like none."""

    async def scenario() -> None:
        async with world(tmp_path) as here:
            place = tmp_path / "old"
            await settled_on(here.database, place)
            place.rename(tmp_path / "unmounted")
            if left == "directory":
                place.mkdir()
            opening = StoreOpening(here.database, place.as_uri(), None, tmp_path / "store")
            with pytest.raises(StoreRefused, match="was this server's object store"):
                await opening.start()
            if left == "directory":
                assert list(place.iterdir()) == []
                place.rmdir()
            assert not place.exists()
            (tmp_path / "unmounted").rename(place)
            assert await opening.start() is None
            await opening.close()

    asyncio.run(scenario())
