"""How often and how long something is tried again.

Guarantee: between two tries lies a pause that grows and is partly random, so that many clients do
not come back at once; no third try begins after the patience is over, so a call ends within the
patience and the time limit of one request (of two, where patience is shorter than that limit).
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """`total` seconds in which tries may begin; pauses grow from `first` to `longest` seconds."""

    total: float = 120.0
    first: float = 0.1
    longest: float = 5.0

    def begin(self, ended: threading.Event) -> Tries:
        """Start counting for one call; `ended` ends all waiting."""
        return Tries(self, ended)


class Tries:
    """The tries of one call."""

    def __init__(self, patience: Patience, ended: threading.Event) -> None:
        self._patience = patience
        self._ended = ended
        self._deadline = time.monotonic() + patience.total
        self._pause = patience.first
        self.made = 1

    def pause(self) -> bool:
        """Wait before the next try; False when there must be none."""
        wait = self._pause * random.uniform(0.5, 1.0)
        if self.made > 1 and time.monotonic() + wait >= self._deadline:
            return False
        if self._ended.wait(wait):
            return False
        self._pause = min(self._pause * 2, self._patience.longest)
        self.made += 1
        return True
