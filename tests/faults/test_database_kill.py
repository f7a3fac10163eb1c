"""Killing the process in the middle of commits: nothing acknowledged is lost, nothing is torn."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sojourn.database import Database, OperationState, open_database
from sojourn.errors import StaleEpoch
from sojourn.model import SessionState
from support.databases import flaws, operation_states, update_session

ROUNDS = 8

WRITER = """
import asyncio, json, os, sys, time
from pathlib import Path
from sojourn.database import SnapshotRecord, open_database
from sojourn.database.writes import *
from sojourn.errors import ErrorBody
from sojourn.model import *

def tell(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

async def work(db, name):
    page = [s for s in (await db.list_sessions("t")).items if s.name == name]
    if page:
        session = page[0]
        for left in await db.unfinished_operations():
            if left.session == session.id:
                await db.finish(left.id, error=ErrorBody("interrupted", "killed", ""))
    else:
        now = time.time()
        [session] = await db.commit([InsertSession(Session(
            id=new_id("ses"), tenant="t", name=name, labels={}, template="x", env={},
            limits=Limits(), policy=Policy(), driver="d", state=SessionState.RUNNING, epoch=0,
            head=None, parent_session=None, forked_from=None, sandbox=None, node=None,
            idle_deadline=None, lifetime_deadline=None, cause=None, created_at=now,
            updated_at=now))])
    while True:
        operation, _ = await db.begin(tenant="t", session=session.id, verb="snapshot",
            request={"epoch": session.epoch}, server="s")
        tell(kind="begun", session=session.id, operation=operation.id)
        await db.set_step(operation.id, "publish", {"n": session.epoch})
        snapshot = SnapshotRecord(
            id=new_id("snp"), session=session.id, tenant="t", parent=session.head,
            kind=SnapshotKind.AUTO, label=None, created_at=time.time(), fingerprint="f",
            has_memory=False, memory_bytes=0, layer_bytes=0, layers=["a"] * 50, image=None)
        results = await db.commit([
            InsertSnapshot(snapshot),
            FinishOperation(operation.id, {"snapshot": snapshot.id}),
            AppendEvent(session.id, "snapshot", details={"epoch": session.epoch + 1},
                after=snapshot.id, operation=operation.id),
            UpdateSession(session.id, {SessionState.RUNNING}, session.epoch,
                {"head": snapshot.id, "epoch": session.epoch + 1}),
        ])
        session = results[-1]
        tell(kind="committed", session=session.id, epoch=session.epoch, head=session.head,
            operation=operation.id)
        sequence = await db.append_event(AppendEvent(session.id, "turn"))
        tell(kind="event", session=session.id, sequence=sequence)

async def main():
    db = await open_database(Path(sys.argv[1]))
    tell(kind="open")
    await asyncio.gather(*[work(db, f"s{n}") for n in range(4)])

asyncio.run(main())
"""


def write_and_kill(path: Path, seconds: float) -> list[dict[str, Any]]:
    """Run writers until they had something acknowledged and `seconds` more, kill them, and answer
    all that they had acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[bytes] = []
    try:
        while sum(b'"committed"' in line for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read().decode()
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    # The kill may have cut the last line.
    return [json.loads(line) for line in (*lines, *rest.split(b"\n")[:-1])]


async def check(path: Path, db: Database, told: list[dict[str, Any]]) -> None:
    assert flaws(path) == []
    for session in (await db.list_sessions("t")).items:
        events = await db.list_events(session.id, limit=100_000)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        commits = [event for event in events if event.kind == "snapshot"]
        snapshots = await db.list_snapshots(session.id)
        # All four writes of each commit are there, or none of them.
        assert [event.details["epoch"] for event in commits] == list(range(1, session.epoch + 1))
        assert [snapshot.id for snapshot in snapshots] == [event.after for event in commits]
        assert session.head == (snapshots[-1].id if snapshots else None)
        operations = operation_states(path, session.id)
        succeeded = {id for id, state in operations.items() if state == OperationState.SUCCEEDED}
        assert succeeded == {event.operation for event in commits}
        assert sum(state in ("pending", "running") for state in operations.values()) <= 1
        for line in told:
            if line.get("session") != session.id:
                continue
            if line["kind"] == "begun":
                assert line["operation"] in operations
            elif line["kind"] == "committed":
                assert line["epoch"] <= session.epoch
                assert line["head"] in {snapshot.id for snapshot in snapshots}
                assert line["operation"] in succeeded
            else:
                assert line["sequence"] <= len(events)


def test_what_was_acknowledged_before_a_kill_is_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"
    told: list[dict[str, Any]] = []
    moments = random.Random(4)

    async def reopen() -> None:
        db = await open_database(path)
        try:
            await check(path, db, told)
        finally:
            await db.close()

    for n in range(ROUNDS):
        told += write_and_kill(path, moments.uniform(0.0, 0.1))
        # Every other time the next writer finds the file as the kill left it.
        if n % 2:
            asyncio.run(reopen())
    asyncio.run(reopen())


def test_a_kill_while_the_file_is_made_leaves_one_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"
    for n in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=-1)
        # Importing takes some time; the file is made shortly after.
        deadline = time.monotonic() + 20
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(n * 0.003)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

        async def reopen() -> None:
            db = await open_database(path)
            try:
                assert flaws(path) == []
            finally:
                await db.close()

        asyncio.run(reopen())
        assert {entry.name for entry in tmp_path.iterdir()} <= {path.name, f"{path.name}.reserve"}
        for leftover in tmp_path.iterdir():
            leftover.unlink()


SWAPPER = """
import asyncio, sys
from pathlib import Path
from sojourn.database import open_database
from sojourn.database.writes import *
from sojourn.errors import StaleEpoch
from sojourn.model import SessionState

async def main():
    db = await open_database(Path(sys.argv[1]))
    won = 0
    for _ in range(40):
        session = await db.get_session(None, "box")
        try:
            await db.commit([
                UpdateSession(session.id, {SessionState.RUNNING}, session.epoch,
                    {"epoch": session.epoch + 1}),
                AppendEvent(session.id, "swap", details={"epoch": session.epoch + 1}),
            ])
            won += 1
        except StaleEpoch:
            pass
    await db.close()
    print(won)

asyncio.run(main())
"""


def test_processes_that_share_a_file_do_not_lose_each_others_changes(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"
    # Both may find no file and make it.
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(path), name], stdout=-1)
        for name in ("box", "other")
    ]
    assert [maker.wait(60) for maker in makers] == [0, 0]
    swappers = [
        subprocess.Popen([sys.executable, "-c", SWAPPER, str(path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    won = [int(swapper.communicate(timeout=60)[0]) for swapper in swappers]
    assert [swapper.returncode for swapper in swappers] == [0, 0]
    for maker in makers:
        assert maker.stdout is not None
        maker.stdout.close()

    async def read() -> None:
        db = await open_database(path)
        try:
            session = await db.get_session(None, "box")
            await db.get_session(None, "other")
            events = await db.list_events(session.id)
            assert session.epoch == sum(won) == len(events)
            assert [event.details["epoch"] for event in events] == list(range(1, sum(won) + 1))
            assert won[0] > 0
            assert won[1] > 0
        finally:
            await db.close()

    asyncio.run(read())


MAKER = """
import asyncio, sys, time
from pathlib import Path
from sojourn.database import open_database
from sojourn.database.writes import InsertSession
from sojourn.model import *

async def main():
    db = await open_database(Path(sys.argv[1]))
    await db.commit([InsertSession(Session(
        id=new_id("ses"), tenant="t", name=sys.argv[2], labels={}, template="x", env={},
        limits=Limits(), policy=Policy(), driver="d", state=SessionState.RUNNING, epoch=0,
        head=None, parent_session=None, forked_from=None, sandbox=None, node=None,
        idle_deadline=None, lifetime_deadline=None, cause=None, created_at=time.time(),
        updated_at=time.time()))])
    await db.close()

asyncio.run(main())
"""


def test_a_writer_of_an_older_placement_in_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"
    subprocess.run([sys.executable, "-c", MAKER, str(path), "box"], check=True)

    async def scenario() -> None:
        one = await open_database(path)
        two = await open_database(path)
        try:
            session = await one.get_session(None, "box")
            running = {SessionState.RUNNING}
            await update_session(two, session.id, expect_state=running, expect_epoch=0, epoch=1)
            try:
                await update_session(
                    one, session.id, expect_state=running, expect_epoch=0, state=SessionState.FAILED
                )
            except StaleEpoch:
                assert (await one.get_session(None, "box")).state is SessionState.RUNNING
            else:
                raise AssertionError("the stale writer was not refused")
        finally:
            await one.close()
            await two.close()

    asyncio.run(scenario())
    assert path.stat().st_mode & 0o777 == 0o600
