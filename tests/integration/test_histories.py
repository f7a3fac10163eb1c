"""Whatever is done to a session in whatever order, it holds what the model says: files, memory,
processes, state, head and history; also when the server or the sandbox is killed in between."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.histories import Histories, World
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged

SOAK = bool(os.environ.get("SOJOURN_SOAK"))
SETTINGS = settings(
    deadline=None,
    # Shrinking runs the server through hundreds of histories; the printed one is short enough.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    database=None,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    server = ServerProcess(tmp_path_factory.mktemp("histories") / "data")
    server.start()
    world = World(server)
    yield world
    world.client.close()
    server.remove()


def run(world: World, examples: int, steps: int) -> None:
    class Here(Histories):
        pass

    Here.world = world
    Here.__name__ = Here.__qualname__ = "Histories"
    run_state_machine_as_test(
        Here, settings=settings(SETTINGS, max_examples=examples, stateful_step_count=steps)
    )
    print(f"counts: {world.counts}")
    world.machine.check_empty()


# In parts, which two workers can share.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_short_histories(world: World, part: int) -> None:
    run(world, int(os.environ.get("SOJOURN_HISTORIES", "200")) // 4, 4)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not SOAK, reason="a soak: set SOJOURN_SOAK=1")
def test_long_histories(world: World) -> None:
    run(world, int(os.environ.get("SOJOURN_HISTORIES", "3000")), 12)
