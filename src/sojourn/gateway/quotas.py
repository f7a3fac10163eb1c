"""How much a session may use of its network at a time.

Guarantee: bounds hold for a session as a whole, whatever it opens; 0 means there is none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]


class Pace:
    """Bytes per second in one direction, with a second's worth in advance."""

    def __init__(self, rate: int, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._debt = 0.0
        self._at = clock()

    def change(self, rate: int) -> None:
        """Another rate from now on."""
        self._rate = rate

    def spend(self, size: int) -> float:
        """Count bytes; how many seconds to wait before they are passed on."""
        if self._rate <= 0 or size <= 0:
            return 0.0
        now = self._clock()
        self._debt = max(0.0, self._debt - (now - self._at) * self._rate) + size
        self._at = now
        return max(0.0, (self._debt - self._rate) / self._rate)


class Rate:
    """Requests in any minute."""

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: deque[float] = deque()

    def change(self, limit: int) -> None:
        """Another limit from now on."""
        self._limit = limit

    def take(self) -> float:
        """Count a request: 0, or, uncounted, how many seconds until one is free."""
        if self._limit <= 0:
            self._times.clear()
            return 0.0
        now = self._clock()
        while self._times and self._times[0] <= now - 60:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return max(0.001, self._times[-self._limit] + 60 - now)
        self._times.append(now)
        return 0.0
