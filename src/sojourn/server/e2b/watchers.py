"""Watchers that are asked for what came, which blocking clients use.

Guarantee: what came is kept until it is asked for, up to a bound, and lost changes are said;
a watcher ends with its sandbox's rest, with its client's patience (an hour without a question),
or when it is removed, and is unknown from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import time
from collections.abc import AsyncIterator
from typing import Any

from sojourn.errors import (
    FileConflict,
    NotFound,
    OutputTruncated,
    QuotaExceeded,
    SojournError,
)
from sojourn.model import new_id
from sojourn.node.guest import Guest
from sojourn.server.e2b import users
from sojourn.server.e2b.calls import Call
from sojourn.server.e2b.entries import entry, text
from sojourn.server.e2b.rooms import Rooms
from sojourn.wire.guest import WatchEvent

MAX_EVENTS = 10_000
MAX_WATCHERS = 100  # of one sandbox
IDLE_SECONDS = 3600.0
_BESIDE = b".sojourn-write-"
"""How the supervisor names a file until it is whole."""
_KINDS = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "removed": "EVENT_TYPE_REMOVE",
    "renamed_from": "EVENT_TYPE_RENAME",
    "renamed_to": "EVENT_TYPE_CREATE",
    "attributes": "EVENT_TYPE_CHMOD",
}


class Translator:
    """Changes as clients see them, from those of one watch in their order.

    A file that is written through the agent is made beside its place and moved there: clients are
    told of the file alone, that it is there and was written.
    """

    def __init__(self, guest: Guest, top: bytes, *, entries: bool) -> None:
        self._guest = guest
        self._top = top
        self._entries = entries
        self._moving = False

    async def events(self, change: WatchEvent) -> list[dict[str, Any]]:
        """What a change is told as. Raises OutputTruncated when changes were lost."""
        if change.kind == "overflow":
            raise OutputTruncated(
                "changes came faster than they were read", next_step="List again."
            )
        kind = _KINDS.get(change.kind)
        if kind is None:
            return []
        if posixpath.basename(change.path).startswith(_BESIDE):
            self._moving = change.kind == "renamed_from"
            return []
        moved, self._moving = self._moving and change.kind == "renamed_to", False
        event: dict[str, Any] = {
            "name": text(posixpath.relpath(change.path, self._top)),
            "type": kind,
        }
        if self._entries and change.kind not in ("removed", "renamed_from"):
            with contextlib.suppress(NotFound):
                stat = await self._guest.stat(change.path, follow=False)
                event["entry"] = await entry(self._guest, stat, await users.accounts(self._guest))
        return [event, event | {"type": "EVENT_TYPE_WRITE"}] if moved else [event]


@contextlib.asynccontextmanager
async def meant(rooms: Rooms, call: Call, asked: str) -> AsyncIterator[tuple[Guest, bytes]]:
    """Around watching a directory, which is there. Raises FileMissing, FileConflict."""
    async with rooms.files(call, "watch", asked, mutates=False) as (guest, _, path):
        stat = await guest.stat(path)
        if stat.type != "dir":
            raise FileConflict(f"path {text(path)} is not a directory", next_step="")
        yield guest, path


async def changes(
    guest: Guest, path: bytes, *, recursive: bool
) -> AsyncIterator[WatchEvent | None]:
    """Changes below a directory; first None, once it is watched."""
    events = guest.watch(path, recursive=recursive)
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.sleep(0)
        # Requests to the supervisor are answered in their order: with this one's answer the watch
        # that was asked for before it is there.
        await guest.stat(path)
        yield None
        change = await first
        while change is not None:
            yield change
            change = await anext(events, None)
    finally:
        if not first.done():
            first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()  # type: ignore[attr-defined]


class _Watcher:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: SojournError | None = None
        self.asked = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Watchers:
    """The watchers of all sandboxes."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._watchers: dict[str, dict[str, _Watcher]] = {}

    async def stop(self) -> None:
        """End them all."""
        tasks = [
            watcher.task
            for known in self._watchers.values()
            for watcher in known.values()
            if watcher.task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watchers.clear()

    async def create(self, call: Call, path: str, *, recursive: bool, entries: bool) -> str:
        """A watcher that watches already."""
        self._forget(call.session)
        known = self._watchers.setdefault(call.session, {})
        if len(known) >= MAX_WATCHERS:
            raise QuotaExceeded(
                f"the sandbox has {MAX_WATCHERS} watchers", next_step="Stop those not needed."
            )
        name = new_id("wat")
        watcher = known[name] = _Watcher()
        watcher.task = asyncio.create_task(self._watch(call, watcher, path, recursive, entries))
        try:
            await asyncio.shield(watcher.ready)
        except BaseException:
            known.pop(name, None)
            watcher.task.cancel()
            raise
        return name

    async def _watch(
        self, call: Call, watcher: _Watcher, asked: str, recursive: bool, entries: bool
    ) -> None:
        try:
            async with meant(self._rooms, call, asked) as (guest, path):
                translator = Translator(guest, path, entries=entries)
                async for change in changes(guest, path, recursive=recursive):
                    if change is None:
                        watcher.ready.set_result(None)
                        continue
                    watcher.events += await translator.events(change)
                    if len(watcher.events) >= MAX_EVENTS:
                        raise OutputTruncated(
                            f"more than {MAX_EVENTS} changes were not asked for",
                            next_step="List the directory again, and watch it anew.",
                        )
        except SojournError as error:
            watcher.error = error
            if not watcher.ready.done():
                watcher.ready.set_exception(error)

    def events(self, session: str, name: str) -> list[dict[str, Any]]:
        """What came since the last time. Raises NotFound, and once what ended it."""
        watcher = self._find(session, name)
        watcher.asked = time.monotonic()
        found, watcher.events = watcher.events, []
        if not found and watcher.error is not None:
            raise watcher.error
        return found

    def remove(self, session: str, name: str) -> None:
        """End one. Raises NotFound."""
        watcher = self._find(session, name)
        del self._watchers[session][name]
        if watcher.task is not None:
            watcher.task.cancel()

    def _find(self, session: str, name: str) -> _Watcher:
        watcher = self._watchers.get(session, {}).get(name)
        if watcher is None:
            raise NotFound(f"watcher with id {name} not found", next_step="Watch anew.")
        return watcher

    def _forget(self, session: str) -> None:
        """End those nobody asks any more, of any sandbox, and forget the ended ones."""
        now = time.monotonic()
        for owner in list(self._watchers):
            known = self._watchers[owner]
            for name in list(known):
                watcher = known[name]
                if now - watcher.asked > IDLE_SECONDS:
                    if watcher.task is not None:
                        watcher.task.cancel()
                    del known[name]
            if not known and owner != session:
                del self._watchers[owner]
