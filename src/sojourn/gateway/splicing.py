"""Two streams joined: what comes from one goes to the other, in both directions.

Guarantee: the end of one direction is passed on without ending the other; a failure on one side
resets the other, so nothing cut off looks whole.
"""

from __future__ import annotations

import asyncio
import re

from sojourn.gateway.records import Record
from sojourn.gateway.secrets import Scrubber
from sojourn.gateway.streams import Reset, Stream

_LONGEST_LINE = 16 << 10
_HTTP_LINE = re.compile(rb"[^\r\n]*\bHTTP/[0-9]", re.IGNORECASE)
_NO_TEXT = re.compile(rb"[^\t\r\n -~]")
_METHOD = re.compile(rb"[\r\n]*[!#$%&'*+.^_`|~0-9A-Za-z-]*(?:\Z|[ \t\r\n])")


class FirstLine:
    """What a program says first, as far as it tells HTTP from other protocols."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.http: bool | None = None  # None: not known yet

    def feed(self, data: bytes) -> None:
        """The next bytes. A line without an end that looks like a request's counts as one: some
        servers read very long ones."""
        if self.http is not None:
            return
        self._data += data
        if not _METHOD.match(self._data[:256]):
            self.http = False
        elif len(self._data) > _LONGEST_LINE:
            self.http = True
        elif b"\n" in data or _NO_TEXT.search(data):
            line, newline, _ = self._data.lstrip(b"\r\n").partition(b"\n")
            if _NO_TEXT.search(line):
                self.http = False
            elif newline:
                self.http = _HTTP_LINE.match(line) is not None


async def splice(
    guest: Stream,
    outside: Stream,
    record: Record,
    *,
    scrubber: Scrubber | None = None,
    first: FirstLine | None = None,
) -> None:
    """Until both directions have ended. A secret's value that comes in ends it: such a stream
    cannot be changed. So does a `first` line that turns out to be HTTP: that is to be read, and
    not passed through. Raises Reset."""

    async def outward() -> None:
        while data := await guest.read():
            if first is not None:
                first.feed(data)
                if first.http:
                    raise Reset("HTTP came where it was no longer expected")
            record.request_bytes += len(data)
            await outside.write(data)
        await outside.end()

    async def inward() -> None:
        while data := await outside.read():
            record.response_bytes += len(data)
            if scrubber is not None:
                passable = scrubber.passable(data)
                if passable is None:
                    raise Reset("a stream holds a secret's value")
                data = passable
            if data:
                await guest.write(data)
        if scrubber is not None and (rest := scrubber.passable_rest()):
            await guest.write(rest)
        await guest.end()

    tasks = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
    try:
        pending: set[asyncio.Future[None]] = set(tasks)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
    except ConnectionError as error:
        guest.reset()
        outside.reset()
        raise Reset(str(error) or "the connection broke") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
