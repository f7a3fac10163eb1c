"""Access to a session's files: a turn when it changes something, a call when it only reads.

Guarantee: that of `sojourn.server.base.FileAccess`; what a path leads to is decided inside the
sandbox, never on the host.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from sojourn.node.guest import Guest
from sojourn.node.sandboxes import Sandbox
from sojourn.server.base import Principal
from sojourn.server.turns import Turn, Turns


class FileTurn:
    """Access to a session's files as one turn."""

    def __init__(self, turns: Turns, who: Principal, ref: str, what: str, mutates: bool) -> None:
        kind, _, path = what.partition(" ")
        frees = kind in ("files.remove", "files.move")
        self._around: AbstractAsyncContextManager[Turn | Sandbox]
        if mutates:
            self._around = turns.turn(who, ref, kind, frees=frees, path=path)
        else:
            self._around = turns.call(who, ref)

    async def __aenter__(self) -> Guest:
        entered = await self._around.__aenter__()
        return (entered.sandbox if isinstance(entered, Turn) else entered).guest

    async def __aexit__(self, *exc: Any) -> None:
        await self._around.__aexit__(*exc)
