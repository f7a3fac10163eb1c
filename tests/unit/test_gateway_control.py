"""The channel between the server and the gateway process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from sojourn.errors import HostUnfit, SojournError, Unreachable
from sojourn.gateway.control import Control, Request
from sojourn.gateway.messages import MAX_FRAME, Attach, Detach, Granted
from sojourn.model.network import NetworkPolicy, SecretUse

_VALUE = "sk-very-secret"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def pair(
    asked: Callable[[Request], Awaitable[None]],
) -> tuple[Control, Control, list[asyncio.Future[None]]]:
    async def nothing(body: Request) -> None:
        raise AssertionError(body)

    ours, its = socket.socketpair()
    one, other = await Control.open(ours, nothing), await Control.open(its, asked)
    return one, other, [asyncio.ensure_future(one.serve()), asyncio.ensure_future(other.serve())]


def attach() -> Attach:
    secret = Granted("KEY", [SecretUse(domains=["a.com"])], _VALUE)
    return Attach("sbx", "ses", "ten", 1, "/x", NetworkPolicy(), [secret])


def test_each_request_gets_its_own_answer() -> None:
    async def asked(body: Request) -> None:
        assert isinstance(body, Detach)
        await asyncio.sleep((10 - int(body.sandbox)) / 1000)
        if int(body.sandbox) % 2:
            raise HostUnfit(f"number {body.sandbox}", next_step="go on", number=body.sandbox)

    async def work() -> None:
        one, other, serving = await pair(asked)
        found = await asyncio.gather(
            *(one.request(Detach(str(number))) for number in range(10)), return_exceptions=True
        )
        for number, result in enumerate(found):
            if number % 2:
                assert isinstance(result, HostUnfit)
                assert (result.next_step, result.details) == ("go on", {"number": str(number)})
            else:
                assert result is None
        one.close()
        await asyncio.gather(*serving)
        other.close()

    run(work())


def test_who_waits_is_told_of_the_end() -> None:
    async def asked(body: Request) -> None:
        await asyncio.sleep(3600)

    async def work() -> None:
        one, other, serving = await pair(asked)
        waiting = asyncio.ensure_future(one.request(Detach("a")))
        await asyncio.sleep(0.05)
        other.close()
        with pytest.raises(Unreachable):
            await waiting
        await asyncio.gather(*serving)
        with pytest.raises(Unreachable):
            await one.request(Detach("b"))

    run(work())


def test_a_fault_is_told_without_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def asked(body: Request) -> None:
        assert isinstance(body, Attach)
        raise RuntimeError(body.secrets[0].value)

    async def work() -> None:
        one, _, _ = await pair(asked)
        with pytest.raises(SojournError) as failure:
            await one.request(attach())
        assert "RuntimeError" in str(failure.value)
        assert _VALUE not in str(failure.value) + repr(failure.value.details)
        one.close()

    run(work())
    assert _VALUE not in caplog.text
    assert _VALUE not in repr(attach())


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0", b""])
def test_what_is_no_message_ends_the_channel(sent: bytes) -> None:
    async def asked(body: Request) -> None:
        raise AssertionError(body)

    async def work() -> None:
        ours, its = socket.socketpair()
        control = await Control.open(its, asked)
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        await control.serve()
        ours.close()

    run(work())


def test_a_message_over_the_limit_is_not_sent() -> None:
    asked_for: list[Request] = []

    async def asked(body: Request) -> None:
        asked_for.append(body)

    async def work() -> None:
        one, _, _ = await pair(asked)
        with pytest.raises(SojournError, match="over the limit"):
            await one.request(Detach("a" * MAX_FRAME))
        await one.request(Detach("b"))
        assert asked_for == [Detach("b")]
        one.close()

    run(work())
