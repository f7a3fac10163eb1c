"""A node that is killed at each step of a migration: whichever of the two it is, the session
arrives with its memory, and is never at two places."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node_process import MIGRATION_POINTS
from support.node_rig import Rig, node_rig, require_no_gap, start_counting
from support.servers import eventually

pytestmark = pytest.mark.privileged

SOURCE, TARGET = 0, 1
CASES = [
    (SOURCE if point in MIGRATION_POINTS[0] else TARGET, point)
    for points in MIGRATION_POINTS
    for point in points
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[Rig]:
    with node_rig(tmp_path_factory.mktemp("crashes"), stocked, "a", "b") as made:
        yield made


@pytest.fixture(scope="module")
def session(rig: Rig):  # type: ignore[no-untyped-def]
    made = rig.nodes[0].client(rig.tenant).sessions.create()
    process = start_counting(made)
    return made.id, process.id


@pytest.mark.parametrize(("side", "point"), CASES, ids=[point for _, point in CASES])
def test_a_migration_survives_a_crash_at(side: int, point: str, rig: Rig, session) -> None:  # type: ignore[no-untyped-def]
    id, process = session
    nodes = [rig.nodes[0], rig.nodes[1]]
    if rig.session(id).holder != nodes[0].id:
        nodes.reverse()
    source, target = nodes
    crashing = nodes[side]
    crashing.kill()
    crashing.start(SOJOURN_CRASH_AT=point)

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            rig.migrate(source, id, target, wait=30)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: not crashing.running, timeout=60)
    assert crashing.wait() == -9, f"{point} was not reached: {crashing.log()}"
    crashing.start()
    eventually(lambda: not rig.unfinished(), timeout=60)
    asking.join()
    assert rig.session(id).holder == target.id
    moved = target.client(rig.tenant).sessions.get(id)
    assert moved.state == "running"
    require_no_gap(moved, moved.process(process))
    eventually(lambda: not source.sandboxes())
