"""Output as a model can take it: bounded, exact, and with a mark that says how to get the rest.

Guarantee: what is shown is a whole part of what was written, never changed; bytes that are not
UTF-8 are told as base64 and said to be. Nothing is left out without saying how much and where. What
is kept in memory is bounded, whatever a command writes.
"""

from __future__ import annotations

import base64
from typing import Final, Literal

import msgspec

LIMIT = 30_000
"""Characters of one text in a result."""

KEPT = 8 * 1024 * 1024
"""Bytes of each stream that are kept for later, from its beginning."""

BASE64_BYTES = LIMIT // 4 * 3
_TAIL = LIMIT // 2

Encoding = Literal["utf-8", "base64"]
UTF8: Final = "utf-8"  # one object, by which a default is told from what has to be said


class Shown(msgspec.Struct, frozen=True):
    """A text to show; `size` is how many bytes of the original it stands for."""

    text: str
    encoding: Encoding
    size: int


def incomplete_tail(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that is cut off."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0


def part(data: bytes, *, more: bool) -> Shown:
    """The first part of `data` that fits; `more` says that the original goes on after it."""
    cut = data[:LIMIT]
    if more or len(data) > LIMIT:
        cut = cut[: len(cut) - incomplete_tail(cut)]
    if cut or not data or more:
        try:
            return Shown(cut.decode(), UTF8, len(cut))
        except UnicodeDecodeError:
            pass  # it is told as base64 below
    cut = data[:BASE64_BYTES]
    return Shown(base64.b64encode(cut).decode(), "base64", len(cut))


def clipped(text: str, limit: int = LIMIT) -> str:
    """A text that nobody needs whole, with a mark where it was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} characters left out]"


class Stream:
    """What was written to one stream: its beginning, its end, and how much it was."""

    def __init__(self) -> None:
        self.size = 0
        self.kept = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """More of it."""
        self.size += len(data)
        room = KEPT - len(self.kept)
        if room > 0:
            self.kept += data[:room]
        if len(data) > room:
            self._tail += data[max(room, 0) :]
            del self._tail[:-_TAIL]

    def whole(self) -> bool:
        """Whether all of it can be shown."""
        if self.size > LIMIT:
            return False
        return self.size <= BASE64_BYTES or _is_text(bytes(self.kept))

    def show(self, rest: str) -> Shown:
        """All of it, or its beginning and end around a mark; `rest` is the call that gives what is
        left out, with {offset} for where it begins. Of what is not text, the beginning alone."""
        if self.whole():
            return part(bytes(self.kept), more=False)
        head = bytes(self.kept[: LIMIT - _TAIL])
        head = head[: len(head) - incomplete_tail(head)]
        tail = bytes((self.kept[-_TAIL:] + self._tail)[-_TAIL:])
        while tail and tail[0] & 0xC0 == 0x80:
            tail = tail[1:]
        if not (_is_text(head) and _is_text(tail)):
            return Shown(base64.b64encode(self.kept[:BASE64_BYTES]).decode(), "base64", self.size)
        left = self.size - len(head) - len(tail)
        lost = f", of the first {KEPT} bytes" if self.size > KEPT else ""
        mark = f"\n[{left} bytes left out here; {rest.format(offset=len(head))} gives them{lost}]\n"
        return Shown(head.decode() + mark + tail.decode(), UTF8, self.size)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Outputs:
    """What long results left out, to be asked for: the newest ones, up to a bound in all."""

    def __init__(self, bound: int = 8 * KEPT) -> None:
        self._bound = bound
        self._held: dict[str, dict[str, Stream]] = {}

    def keep(self, name: str, streams: dict[str, Stream]) -> None:
        """Keep the streams of one result, in place of the oldest ones if there is no room."""
        self._held[name] = streams
        while len(self._held) > 1 and self._size() > self._bound:
            del self._held[next(iter(self._held))]

    def _size(self) -> int:
        return sum(len(one.kept) for streams in self._held.values() for one in streams.values())

    def get(self, name: str) -> dict[str, Stream] | None:
        """The streams of a result, if they are still kept."""
        return self._held.get(name)
