"""Lists of the asynchronous client: awaited whole, or gone through with `async for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Listing(Generic[T]):
    """`await listing` gives a list, `async for item in listing` its items; each asks anew."""

    def __init__(self, fetch: Callable[[], Awaitable[list[T]]]) -> None:
        self._fetch = fetch

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._fetch().__await__()

    async def __aiter__(self) -> AsyncIterator[T]:
        for item in await self._fetch():
            yield item
