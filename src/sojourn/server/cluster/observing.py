"""How a cluster stands, as one of its servers sees it, for whoever scrapes that server.

Guarantee: sessions are counted at most once a minute, whoever asks how often.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from sojourn.database.base import Database
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.queueing import Admissions
from sojourn.telemetry import declared, scraping

_COUNT_SECONDS = 60.0


@contextlib.contextmanager
def observing(database: Database, members: Members, admissions: Admissions) -> Iterator[None]:
    """Be asked at scrapes, as long as this lasts."""
    counts: dict[tuple[str, ...], float] = {}
    counted_at = float("-inf")

    async def look() -> None:
        nonlocal counted_at
        now = time.monotonic()
        if now - counted_at > _COUNT_SECONDS:
            counted_at = now
            found = await database.count_sessions(None)
            counts.update({(str(state),): float(count) for state, count in found.items()})

    def nodes() -> dict[tuple[str, ...], float]:
        states = Counter("lost" if node.lost else str(node.state) for node in members.all())
        return {(state,): float(count) for state, count in states.items()}

    with contextlib.ExitStack() as stack:
        for stop in (
            scraping.before(look),
            declared.SESSIONS.tell(lambda: counts),
            declared.NODES.tell(nodes),
            declared.QUEUE_LENGTH.tell(lambda: {(): float(admissions.waiting)}),
        ):
            stack.callback(stop)
        yield
