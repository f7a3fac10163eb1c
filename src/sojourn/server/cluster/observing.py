"""How a cluster stands, as one of its servers sees it, for whoever scrapes that server.

Guarantee: sessions are counted at most once a minute, whoever asks how often.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from sojourn.database.base import Database
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.queueing import Admissions
from sojourn.server.observing import SessionCounts
from sojourn.telemetry import declared, scraping


@contextlib.contextmanager
def observing(database: Database, members: Members, admissions: Admissions) -> Iterator[None]:
    """Be asked at scrapes, as long as this lasts."""
    counts = SessionCounts(database)

    def nodes() -> dict[tuple[str, ...], float]:
        states = Counter("lost" if node.lost else str(node.state) for node in members.all())
        return {(state,): float(count) for state, count in states.items()}

    with contextlib.ExitStack() as stack:
        for stop in (
            scraping.before(counts.look),
            declared.SESSIONS.tell(lambda: counts.values),
            declared.NODES.tell(nodes),
            declared.QUEUE_LENGTH.tell(lambda: {(): float(admissions.waiting)}),
        ):
            stack.callback(stop)
        yield
