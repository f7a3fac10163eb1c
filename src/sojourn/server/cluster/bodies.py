"""A request's body on its way through a server.

Guarantee: it is passed on as it comes, never faster than it is taken; of it a bounded part is kept
(KEPT_BYTES unless more is asked for), so that a request which a node has refused can be sent to
another. When the client leaves before its end, whoever reads it learns that, so that no half body
passes for a whole one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from litestar.types import Receive

from sojourn.errors import TooLarge

KEPT_BYTES = 1 << 20


class ClientLeft(Exception):
    """The client is gone; there is nobody to answer."""


class Body:
    """One body."""

    def __init__(
        self, headers: Mapping[bytes, bytes], receive: Receive, keep: int = KEPT_BYTES
    ) -> None:
        self._receive = receive
        self._keep = keep
        self._kept: list[bytes] = []
        self._size = 0
        self._replayable = True
        length = headers.get(b"content-length")
        # uvicorn tells of every request's end by a message, also of those without a body.
        self.empty = length in (None, b"0") and b"transfer-encoding" not in headers
        self.complete = False

    @property
    def replayable(self) -> bool:
        """Whether all of it that was read is still there."""
        return self._replayable

    async def _more(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientLeft
        self.complete = not message.get("more_body", False)
        piece = bytes(message.get("body", b""))
        self._size += len(piece)
        if self._replayable and self._size <= self._keep:
            self._kept.append(piece)
        else:
            self._replayable = False
            self._kept.clear()
        return piece

    async def begin(self) -> None:
        """Read what is there. Raises ClientLeft."""
        if not self.complete and not self._kept:
            await self._more()

    async def whole(self) -> bytes:
        """All of it, where it is no more than may be kept; raises TooLarge, ClientLeft."""
        while not self.complete and self._replayable:
            await self._more()
        if not self._replayable:
            raise TooLarge(f"the body is over {self._keep} bytes", limit=self._keep)
        return b"".join(self._kept)

    def content(self) -> bytes | AsyncIterator[bytes]:
        """What to send on, from its beginning."""
        assert self._replayable
        if self.complete:
            return b"".join(self._kept)
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in list(self._kept):
            yield piece
        while not self.complete:
            piece = await self._more()
            if piece:
                yield piece
