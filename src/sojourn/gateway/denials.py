"""What a session's policy did not let out, counted and told to the server.

Guarantee: what was refused is on record with the rule that decided. What a program tries cannot
fill the record: the same host, port and rule are told when they are refused first and then once a
minute with how often, and beyond so many different ones all others are one count. Nothing waits
for it: a refusal is not held up.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from sojourn.gateway.messages import Withheld
from sojourn.gateway.records import Recorder
from sojourn.model.network import Denial

WINDOW_SECONDS = 60.0
MOST_KINDS = 32
_LONGEST_HOST = 255
_LONGEST_REASON = 500


class _Count(msgspec.Struct):
    """What was refused in this window and was not told yet."""

    reason: str
    first_at: float
    last_at: float
    count: int


_Key = tuple[str, int, str]
_OTHERS: _Key = ("", 0, "")


class Denials:
    """Those of one sandbox."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counts: dict[_Key, _Count] = {}
        self._window: asyncio.TimerHandle | None = None

    def note(self, host: object, port: int, rule: str, reason: str) -> None:
        """A connection or request was refused."""
        now = time.time()
        key = (_shown(host), port, rule)
        if key not in self._counts and len(self._counts) >= MOST_KINDS:
            key, reason = _OTHERS, "more different ones than are told one by one"
        known = self._counts.get(key)
        if known is None:
            self._counts[key] = _Count(reason[:_LONGEST_REASON], now, now, 0)
            self._tell(key, self._counts[key], 1)
        elif known.count == 0:
            known.first_at = known.last_at = now
            known.count = 1
        else:
            known.last_at = now
            known.count += 1
        if self._window is None:
            loop = asyncio.get_running_loop()
            self._window = loop.call_later(WINDOW_SECONDS, self._next_window)

    def close(self) -> None:
        """Tell what was counted; no more comes."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self._tell_counts()
        self._counts.clear()

    def _next_window(self) -> None:
        self._window = None
        # What was refused again is still known in the next window: it goes on being counted.
        self._counts = {key: one for key, one in self._counts.items() if self._again(key, one)}
        if self._counts:
            loop = asyncio.get_running_loop()
            self._window = loop.call_later(WINDOW_SECONDS, self._next_window)

    def _again(self, key: _Key, one: _Count) -> bool:
        if not one.count:
            return False
        self._tell(key, one, one.count)
        one.count = 0
        return True

    def _tell_counts(self) -> None:
        for key, one in self._counts.items():
            self._again(key, one)

    def _tell(self, key: _Key, one: _Count, count: int) -> None:
        host, port, rule = key
        self._recorder.tell(
            Withheld(
                Denial(
                    session=self._recorder.session,
                    sandbox=self._recorder.sandbox,
                    epoch=self._recorder.epoch,
                    host=host,
                    port=port,
                    rule=rule,
                    reason=one.reason,
                    count=count,
                    first_at=one.first_at,
                    last_at=one.last_at,
                )
            )
        )


def _shown(host: object) -> str:
    """A host as it was named; what a program says is cut, and holds nothing that is no text."""
    if isinstance(host, bytes):
        host = host.decode("utf-8", "replace")
    text = str(host)[:_LONGEST_HOST]
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
