"""How often and how long something is tried again.

Guarantee: between two tries lies a pause that grows and is partly random, so that many clients do
not come back at once; no third try begins after the patience is over, so a call ends within the
patience and the time limit of one request (of two, where patience is shorter than that limit).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """`total` seconds in which tries may begin; pauses grow from `first` to `longest` seconds."""

    total: float = 120.0
    first: float = 0.1
    longest: float = 5.0

    def begin(self) -> Tries:
        """Start counting for one call."""
        return Tries(self)


class Tries:
    """The tries of one call."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._deadline = time.monotonic() + patience.total
        self._pause = patience.first
        self.made = 1

    def pause(self) -> bool:
        """Wait before the next try; False when there must be none."""
        wait = self._pause * random.uniform(0.5, 1.0)
        if self.made > 1 and time.monotonic() + wait >= self._deadline:
            return False
        time.sleep(wait)
        self._pause = min(self._pause * 2, self._patience.longest)
        self.made += 1
        return True
