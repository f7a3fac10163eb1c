"""Signals that end a command as Ctrl-C does, with its clean-up.

Guarantee: what cleans up after the first of them is not cut off by a second one.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C raise KeyboardInterrupt, once; later ones are ignored."""

    def interrupt(_number: int, _frame: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
