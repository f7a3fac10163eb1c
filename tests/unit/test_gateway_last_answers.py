"""The end of a connection after its last answer."""

from __future__ import annotations

import asyncio

from sojourn.gateway.http import Exchanges, Way
from sojourn.gateway.messages import Began, Ended, Withheld
from sojourn.gateway.names import Host
from sojourn.gateway.records import Recorder
from sojourn.gateway.resolving import Outside
from sojourn.gateway.scopes import Ground, Scope
from sojourn.model.network import NetworkPolicy

_ASKED = b"GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"


class _Program:
    """A program that has asked, and then says nothing until it `leaves`."""

    def __init__(self) -> None:
        self._asked = False
        self._left = asyncio.Event()
        self.ended = asyncio.Event()
        self.answer = b""
        self.was_reset = False

    async def read(self) -> bytes:
        if not self._asked:
            self._asked = True
            return _ASKED
        await self._left.wait()
        return b""

    def unread(self, data: bytes) -> None:
        raise AssertionError(data)

    async def write(self, data: bytes) -> None:
        self.answer += data

    async def end(self) -> None:
        self.ended.set()

    def reset(self) -> None:
        self.was_reset = True

    def leaves(self) -> None:
        self._left.set()


class _Server:
    async def request(self, body: Began | Ended | Withheld) -> None:
        raise AssertionError(body)


def test_a_program_that_reads_slowly_is_not_cut_off() -> None:
    async def run() -> None:
        program = _Program()
        outside = Outside()
        scope = Scope(NetworkPolicy(), [], Recorder(_Server(), "ses", "sbx", 1), outside)
        way = Way(Host(name="example.com"), 80)
        serving = asyncio.ensure_future(Exchanges(program, scope, way, Ground(program)).serve())
        await program.ended.wait()
        assert program.answer.startswith(b"HTTP/1.1 403")
        loop = asyncio.get_running_loop()
        time = loop.time
        loop.time = lambda: time() + 300  # type: ignore[method-assign]
        for _ in range(5):
            await asyncio.sleep(0)
        loop.time = time  # type: ignore[method-assign]
        assert not serving.done()
        program.leaves()
        await serving
        assert not program.was_reset
        outside.close()

    asyncio.run(run())
