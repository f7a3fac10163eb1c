"""The unmodified E2B SDK, blocking and asynchronous, against a real server: one sandbox each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from e2b import AsyncSandbox, Sandbox

from support.servers import ServerProcess

pytest.register_assert_rewrite("support.e2b_cases")

from support.e2b_cases import CASES, Box, Case  # noqa: E402

pytestmark = pytest.mark.privileged

FLAVOURS = {
    "blocking": SimpleNamespace(Sandbox=Sandbox, blocking=True, watching={}),
    "async": SimpleNamespace(
        Sandbox=AsyncSandbox, blocking=False, watching={"on_event": lambda event: None}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def variables(shared_server: ServerProcess) -> Iterator[None]:
    """What a program that is written for E2B is pointed here with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_URL", shared_server.url)
        patch.setenv("E2B_SANDBOX_URL", shared_server.url)
        patch.setenv("E2B_API_KEY", shared_server.token)
        yield


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=FLAVOURS)
def box(request: pytest.FixtureRequest, loop: asyncio.Runner, variables: None) -> Iterator[Box]:
    classes = FLAVOURS[request.param]

    async def create() -> Box:
        made = Box(None, classes)
        made.sandbox = await made(
            classes.Sandbox.create(envs={"CREATED": "1"}, metadata={"flavour": request.param})
        )
        return made

    found = loop.run(create())
    yield found

    async def kill() -> None:
        assert await found(found.sandbox.kill()) is True
        assert await found(found.sandbox.is_running()) is False
        assert await found(found.sandbox.kill()) is False

    loop.run(kill())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_e2b(box: Box, loop: asyncio.Runner, case: Case) -> None:
    loop.run(case(box))
