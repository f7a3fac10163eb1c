"""What is put off because it failed, and for how long.

Guarantee: each failure in a row doubles the wait, up to ten minutes; a clock that is set neither
prolongs nor ends one; what is not put off is never held up by what is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container
from typing import NamedTuple

FIRST, MOST = 1.0, 600.0


class _Pause(NamedTuple):
    until: float
    seconds: float
    cause: str


class Pauses:
    """The pauses of things with an id."""

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}

    def put_off(self, id: str, cause: str) -> None:
        """Try it later; each time in a row twice as late."""
        before = self._pauses.get(id)
        seconds = FIRST if before is None else min(before.seconds * 2, MOST)
        self._pauses[id] = _Pause(time.monotonic() + seconds, seconds, cause)

    def give_up(self, id: str, cause: str) -> None:
        """Try it no more, until it is cleared."""
        self._pauses[id] = _Pause(math.inf, MOST, cause)

    def left(self, id: str) -> float:
        """Seconds until it may be tried; 0 where it is not put off."""
        found = self._pauses.get(id)
        return 0.0 if found is None else max(0.0, found.until - time.monotonic())

    def over(self) -> list[str]:
        """What was put off and may be tried again."""
        now = time.monotonic()
        return [id for id, pause in self._pauses.items() if pause.until <= now]

    def cause(self, id: str) -> str | None:
        """Why it is put off."""
        found = self._pauses.get(id)
        return found.cause if found is not None else None

    def any_cause(self) -> str | None:
        """Why something is put off, if anything is."""
        return next((pause.cause for pause in self._pauses.values()), None)

    def clear(self, id: str) -> None:
        """It succeeded, or is to be tried at once."""
        self._pauses.pop(id, None)

    def keep(self, ids: Container[str]) -> None:
        """Forget what is not among these: it is gone."""
        self._pauses = {id: pause for id, pause in self._pauses.items() if id in ids}
