"""Two streams joined: what comes from one goes to the other, in both directions.

Guarantee: the end of one direction is passed on without ending the other; a failure on one side
resets the other, so nothing cut off looks whole.
"""

from __future__ import annotations

import asyncio

from sojourn.gateway.records import Record
from sojourn.gateway.secrets import Scrubber
from sojourn.gateway.streams import Reset, Stream


async def splice(
    guest: Stream, outside: Stream, record: Record, scrubber: Scrubber | None = None
) -> None:
    """Until both directions have ended. A secret's value that comes in ends it: such a stream
    cannot be changed. Raises Reset."""

    async def outward() -> None:
        while data := await guest.read():
            record.request_bytes += len(data)
            await outside.write(data)
        await outside.end()

    async def inward() -> None:
        while data := await outside.read():
            record.response_bytes += len(data)
            if scrubber is not None and scrubber.finds(data):
                raise Reset("a stream holds a secret's value")
            await guest.write(data)
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
