"""Dials of the gateway at sessions that sleep, answered by the server."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sojourn.errors import (
    Conflict,
    Interrupted,
    SessionNotFound,
    SojournError,
    WrongState,
    from_body,
)
from sojourn.gateway import ports_channel as channel
from sojourn.model import Policy, SessionState
from sojourn.model.ports import ExposedPort, PortKind
from sojourn.server import wakes
from sojourn.server.wakes import Wakes

SESSION = "ses_0123456789abcdefghjkmnpq"
PORT = ExposedPort(SESSION, 8000, "ten_a", PortKind.HTTP, False, "x", [], None, 0.0)


class World:
    """A session that sleeps, and what a server does with it: as far as `Wakes` sees it."""

    def __init__(self) -> None:
        self.state = SessionState.SUSPENDED
        self.resumes = self.dialled = 0
        self.refuse = 0  # how many dials find nobody listening
        self.error: BaseException | None = None
        self.answers: dict[bytes, asyncio.Future[SojournError | None]] = {}
        self.touched: list[float] = []
        self.noted = 0
        self.age = 0.0
        policy = Policy(idle_timeout=60.0)
        self.active: Any = types.SimpleNamespace(
            id=SESSION,
            calls=0,
            state=SessionState.RUNNING,
            session=types.SimpleNamespace(policy=policy, idle_deadline=1.0),
        )
        self.known: dict[str, ExposedPort] = {PORT.id: PORT}

    # -- ports, registry, database
    def find(self, id: str) -> ExposedPort | None:
        return self.known.get(id)

    def answer(self, message: Any) -> None:
        error = None if message.error is None else from_body(message.error)
        self.answers[message.token].set_result(error)

    def held(self, session: str) -> Any:
        return self.active

    def touch_idle(self, session: str, deadline: float) -> None:
        self.touched.append(deadline)

    # -- turns
    async def running(self, who: Any, ref: str, *, beside: bool) -> tuple[Any, Any]:
        assert who.tenant == "ten_a" and beside
        if self.error is not None:
            raise self.error
        if self.state is not SessionState.RUNNING:
            await asyncio.sleep(0.05)
            self.resumes += 1
            self.state = SessionState.RUNNING
        import time

        record = types.SimpleNamespace(sandbox="sbx-1", created_at=time.time() - self.age)
        return self.active, types.SimpleNamespace(dial=self.dial, record=record)

    def note(self, active: Any, *, later: bool) -> None:
        self.noted += 1

    # -- guest
    async def dial(self, token: bytes, port: int) -> None:
        assert self.active.calls > 0  # it is not idle meanwhile
        self.dialled += 1
        if self.state is not SessionState.RUNNING:
            raise Interrupted("it was put away")
        if self.refuse:
            self.refuse -= 1
            raise Conflict("nobody listens")


def run(work: Callable[[World, Wakes], Awaitable[None]]) -> None:
    async def main() -> None:
        world: Any = World()
        made = Wakes(world, world, world, world)
        try:
            async with asyncio.timeout(30):
                await work(world, made)
        finally:
            await made.stop()

    asyncio.run(main())


async def ask(world: World, made: Wakes, number: int = 1, id: str = PORT.id) -> SojournError | None:
    token = number.to_bytes(16, "big")
    world.answers[token] = asyncio.get_running_loop().create_future()
    made.received(channel.Dial(id, token))
    return await world.answers[token]


def test_many_dials_make_one_resume() -> None:
    async def work(world: World, made: Wakes) -> None:
        answers = await asyncio.gather(*(ask(world, made, number) for number in range(50)))
        assert answers == [None] * 50
        assert world.resumes == 1 and world.dialled == 50 and world.active.calls == 0

    run(work)


def test_a_program_that_needs_a_moment_is_waited_for() -> None:
    async def work(world: World, made: Wakes) -> None:
        world.refuse = 10
        answers = await asyncio.gather(*(ask(world, made, number) for number in range(20)))
        assert answers == [None] * 20
        # One knocks for all: not each of them ten times.
        assert world.dialled <= 20 + 20 + 10

    run(work)


def test_a_silent_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakes, "_GRACE_SECONDS", 0.2)

    async def work(world: World, made: Wakes) -> None:
        world.refuse, world.age = 10**9, 3600.0
        error = await ask(world, made)
        assert error is not None and error.code == "port_silent" and "8000" in error.message

    run(work)


def test_a_session_that_does_not_come_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakes, "HOLD_SECONDS", 0.3)

    async def work(world: World, made: Wakes) -> None:
        async def never(*_: object, **__: object) -> Any:
            await asyncio.sleep(60)

        world.running = never  # type: ignore[method-assign]
        error = await ask(world, made)
        assert error is not None and error.code == "port_silent" and error.status == 504

    run(work)


def test_put_away_meanwhile_it_is_woken_again() -> None:
    async def work(world: World, made: Wakes) -> None:
        dial = world.dial

        async def once(token: bytes, port: int) -> None:
            world.dial = dial  # type: ignore[method-assign]
            world.state = SessionState.SUSPENDED
            raise Interrupted("it was put away")

        world.dial = once  # type: ignore[method-assign]
        assert await ask(world, made) is None
        assert world.resumes == 2

    run(work)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WrongState("it sleeps on", next_step="Resume it."), "wrong_state"),
        (SessionNotFound("gone"), "port_not_found"),
        (RuntimeError("a fault"), "internal"),
    ],
)
def test_what_forbids_it_is_told(error: BaseException, code: str) -> None:
    async def work(world: World, made: Wakes) -> None:
        world.error = error
        answer = await ask(world, made)
        assert answer is not None and answer.code == code

    run(work)


def test_nothing_is_woken_for_a_port_that_is_not_exposed_or_by_a_server_that_stops() -> None:
    async def work(world: World, made: Wakes) -> None:
        answer = await ask(world, made, id=f"{SESSION}:1")
        assert answer is not None and answer.code == "port_not_found"
        await made.stop()
        answer = await ask(world, made, 2)
        assert answer is not None and answer.code == "interrupted"
        assert world.resumes == 0

    run(work)


def test_a_dial_that_is_given_up_ends() -> None:
    async def work(world: World, made: Wakes) -> None:
        world.refuse = 10**9
        made.received(channel.Dial(PORT.id, b"t" * 16))
        await asyncio.sleep(0.2)
        made.received(channel.GiveUp(b"t" * 16))
        await asyncio.sleep(0.1)
        dialled = world.dialled
        await asyncio.sleep(0.2)
        assert world.dialled == dialled and world.active.calls == 0

    run(work)


def test_what_moves_keeps_awake_and_is_looked_at_when_it_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(world: World, made: Wakes) -> None:
        made.received(channel.Moved([PORT.id], []))
        assert len(world.touched) == 1 and world.noted == 0
        made.received(channel.Moved([], [PORT.id]))
        assert world.noted == 1
        monkeypatch.setattr(wakes, "_LOOK_SECONDS", 0.0)
        made.received(channel.Moved([PORT.id], []))
        assert world.noted == 2  # also while it does not pause
        world.active.state = SessionState.SUSPENDED
        made.received(channel.Moved([PORT.id], [PORT.id, "unknown:1"]))
        assert len(world.touched) == 2 and world.noted == 2

    run(work)
