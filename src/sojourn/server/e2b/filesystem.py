"""The agent's file service: looking, listing, moving, removing, watching.

Guarantee: paths are taken inside the sandbox, so that a planted link leads nowhere else; a list is
bounded and says so instead of leaving something out.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import (
    FileConflict,
    FileMissing,
    NotFound,
    PathInvalid,
    SojournError,
    TooLarge,
)
from sojourn.node.guest import Guest
from sojourn.server.answers import StreamAnswer
from sojourn.server.e2b import connect, users
from sojourn.server.e2b.calls import Call
from sojourn.server.e2b.entries import entry, text
from sojourn.server.e2b.rooms import Rooms
from sojourn.server.e2b.watchers import Translator, Watchers, changes, meant
from sojourn.wire.guest import Stat

MAX_ENTRIES = 100_000
_KEEPALIVE = connect.envelope({"keepalive": {}})


class OnePath(msgspec.Struct):
    """A path."""

    path: str = ""


class ListDir(msgspec.Struct):
    """A directory, and how far below it to look (0 stands for 1)."""

    path: str = ""
    depth: int = 1


class Move(msgspec.Struct):
    """From where to where."""

    source: str = ""
    destination: str = ""


class Watch(msgspec.Struct, rename="camel"):
    """What to watch. There are no network mounts, so allowing them changes nothing."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class Watcher(msgspec.Struct, rename="camel"):
    """A watcher that was made."""

    watcher_id: str = ""


class Filesystem:
    """The methods of filesystem.Filesystem."""

    def __init__(self, rooms: Rooms, watchers: Watchers) -> None:
        self._rooms = rooms
        self._watchers = watchers

    async def stat(self, call: Call) -> Any:
        """Stat: one file, a link as itself."""
        asked = connect.decode(await call.body(), OnePath)
        async with self._rooms.files(call, "stat", asked.path, mutates=False) as (guest, _, path):
            return {"entry": await self._entry(call, guest, path)}

    async def _entry(self, call: Call, guest: Guest, path: bytes) -> dict[str, Any]:
        stat = await guest.stat(path, follow=False)
        return await entry(guest, stat, await self._rooms.accounts(guest, call))

    async def list_dir(self, call: Call) -> Any:
        """ListDir: what is in a directory, to some depth."""
        asked = connect.decode(await call.body(), ListDir)
        async with self._rooms.files(call, "list", asked.path, mutates=False) as (guest, _, path):
            top = await guest.stat(path)
            if top.type != "dir":
                raise FileConflict(f"path is not a directory: {text(path)}", next_step="")
            known = await self._rooms.accounts(guest, call)
            found: list[dict[str, Any]] = []
            async for stat in _below(guest, path, max(1, asked.depth)):
                if len(found) >= MAX_ENTRIES:
                    raise TooLarge(
                        f"there are more than {MAX_ENTRIES} entries", next_step="Look less deep."
                    )
                found.append(await entry(guest, stat, known))
            return {"entries": found}

    async def make_dir(self, call: Call) -> Any:
        """MakeDir: with its parents, all of them the user's."""
        asked = connect.decode(await call.body(), OnePath)
        async with self._rooms.files(call, "mkdir", asked.path, mutates=True) as (guest, who, path):
            try:
                present = await guest.stat(path)
            except FileMissing:
                await make_parents(guest, path, who)
            else:
                if present.type != "dir":
                    raise FileConflict(f"{text(path)} is no directory", next_step="")
                raise FileConflict(
                    f"directory already exists: {text(path)}", next_step="", rpc="already_exists"
                )
            return {"entry": await self._entry(call, guest, path)}

    async def move(self, call: Call) -> Any:
        """Move: also onto a file that is there."""
        asked = connect.decode(await call.body(), Move)
        async with self._rooms.files(call, "move", asked.source, mutates=True) as (
            guest,
            who,
            source,
        ):
            target = users.place(asked.destination, who)
            await guest.stat(source, follow=False)
            await make_parents(guest, posixpath.dirname(target), who)
            await guest.move(source, target)
            return {"entry": await self._entry(call, guest, target)}

    async def remove(self, call: Call) -> Any:
        """Remove: a file or a whole directory; what is not there is no failure."""
        asked = connect.decode(await call.body(), OnePath)
        async with self._rooms.files(call, "remove", asked.path, mutates=True) as (guest, _, path):
            if not path.strip(b"/"):
                raise PathInvalid("the root directory cannot be removed", field="path")
            try:
                await guest.remove(path, recursive=True)
            except FileMissing:
                return {}
            return {}

    # -- watching ---------------------------------------------------------------------------

    async def watch_dir(self, call: Call) -> ASGIApp:
        """WatchDir: changes below a directory, as they come."""
        asked = await connect.one_message(call.chunks(), Watch)
        return StreamAnswer(
            self._changes(call, asked),
            call.shutdown,
            media_type=connect.STREAM.encode(),
            heartbeat=_KEEPALIVE,
            encode_error=call.ended_with,
        )

    async def _changes(self, call: Call, asked: Watch) -> AsyncIterator[bytes]:
        try:
            async with meant(self._rooms, call, asked.path) as (guest, path):
                translator = Translator(guest, path, entries=asked.include_entry)
                async for change in changes(guest, path, recursive=asked.recursive):
                    if change is None:
                        yield connect.envelope({"start": {}})
                        continue
                    for event in await translator.events(change):
                        yield connect.envelope({"filesystem": event})
        except SojournError as error:
            yield call.ended_with(error)
        else:
            yield connect.end()

    async def create_watcher(self, call: Call) -> Any:
        """CreateWatcher: changes below a directory, to be asked for."""
        asked = connect.decode(await call.body(), Watch)
        name = await self._watchers.create(
            call, asked.path, recursive=asked.recursive, entries=asked.include_entry
        )
        return {"watcherId": name}

    async def watcher_events(self, call: Call) -> Any:
        """GetWatcherEvents: what came since the last time."""
        asked = connect.decode(await call.body(), Watcher)
        return {"events": self._watchers.events(call.session, asked.watcher_id)}

    async def remove_watcher(self, call: Call) -> Any:
        """RemoveWatcher."""
        asked = connect.decode(await call.body(), Watcher)
        self._watchers.remove(call.session, asked.watcher_id)
        return {}


async def make_parents(guest: Guest, path: bytes, who: users.Account) -> None:
    """Have a directory and those above it; the ones that are made are the user's."""
    missing: list[bytes] = []
    at = path
    while at.strip(b"/"):
        try:
            present = await guest.stat(at)
        except NotFound:
            missing.append(at)
            at = posixpath.dirname(at)
            continue
        if present.type != "dir":
            raise FileConflict(f"{text(at)} is no directory", next_step="")
        break
    for directory in reversed(missing):
        await guest.mkdir(directory)
        await guest.chown(directory, who.uid, who.gid)


async def _below(guest: Guest, path: bytes, depth: int) -> AsyncIterator[Stat]:
    """Entries in the order of a tree, parents before children; links are not followed. Raises
    PathInvalid where the tree is deeper than a path can be long."""
    open_directories = [iter(await guest.list(path))]
    while open_directories:
        stat = next(open_directories[-1], None)
        if stat is None:
            open_directories.pop()
            continue
        yield stat
        if len(open_directories) < depth and stat.type == "dir":
            with contextlib.suppress(FileMissing, FileConflict):  # removed or replaced meanwhile
                open_directories.append(iter(await guest.list(stat.path)))
