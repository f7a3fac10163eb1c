"""The asynchronous client behind the blocking one's surface, so that one test drives both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from sojourn.client import AsyncSojourn


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="twin-loop")
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(_awaited(work), self.loop).result(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


async def _awaited(work: Any) -> Any:
    return await work


class Blocking:
    """Something asynchronous of the client, to be called plainly."""

    def __init__(self, inner: Any, loop: Loop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._inner, name))

    def __enter__(self) -> Any:
        return self._wrap(self._loop.run(self._inner.__aenter__()))

    def __exit__(self, *exc: object) -> Any:
        return self._loop.run(self._inner.__aexit__(*exc))

    def _wrap(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            return self._wrap(self._loop.run(value))
        if hasattr(value, "__anext__"):
            return self._items(value)
        if isinstance(value, list):
            return [self._wrap(one) for one in value]
        if inspect.ismethod(value):
            return lambda *given, **named: self._wrap(value(*given, **named))
        if type(value).__module__.startswith("sojourn.client.async_") or hasattr(
            value, "__aenter__"
        ):
            return Blocking(value, self._loop)
        return value

    def _items(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._wrap(self._loop.run(items.__anext__()))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run(items.aclose())


def blocking_twin(url: str, token: str, loop: Loop) -> Any:
    """The asynchronous client, to be used like the blocking one."""

    async def make() -> AsyncSojourn:
        return AsyncSojourn(url, token)

    return Blocking(loop.run(make()), loop)
