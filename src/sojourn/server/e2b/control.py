"""The control plane: making, listing, keeping, pausing, connecting, forking and ending sandboxes.

Guarantee: that of `sojourn.server.e2b.sandboxes`; another tenant's sandboxes do not exist (404),
and what E2B has and this server has not is answered with 501 and the reason, which every SDK turns
into its own exception.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from litestar.types import ASGIApp

from sojourn.errors import InvalidRequest, NotFound, SojournError, Unsupported
from sojourn.model.network import NetworkPolicy
from sojourn.server.e2b import failures, ids, metrics, networks
from sojourn.server.e2b.calls import Call, answer, nothing
from sojourn.server.e2b.rooms import Rooms
from sojourn.server.e2b.sandboxes import (
    SNAPSHOT,
    Sandboxes,
    check_seconds,
)
from sojourn.server.e2b.schemas import (
    ConnectSandbox,
    ForkSandbox,
    NewSandbox,
    PauseSandbox,
    Refresh,
    SetTimeout,
    SnapshotSandbox,
)
from sojourn.server.e2b.settings import PREFIX, TEMPLATE
from sojourn.server.e2b.snapshots import Snapshots
from sojourn.wire.api import SessionInfo, UpdateSession

MAX_LIMIT = 1000
MAX_FORKS = 100
_STATES = {"running": "creating,running", "paused": "paused,suspended,failed"}


class Control:
    """The routes of the control plane."""

    def __init__(self, sandboxes: Sandboxes, rooms: Rooms) -> None:
        self._sandboxes = sandboxes
        self._rooms = rooms
        self._snapshots = Snapshots(sandboxes)

    async def _info(self, call: Call) -> SessionInfo:
        call.sandbox = call.groups["sandbox"]
        return await self._sandboxes.find(call.who, call.sandbox)

    async def create(self, call: Call) -> ASGIApp:
        """POST /sandboxes and /v2/sandboxes."""
        asked = await call.json(NewSandbox)
        key = call.header(b"idempotency-key")
        with call.shutdown.cancellable():
            info = await self._sandboxes.create(call.who, asked, key)
            if info.state == "running":  # one that a key made before may sleep
                await self._rooms.prepare(call, info)
        return answer(await self._sandboxes.opened(call.who, info), 201)

    async def get(self, call: Call) -> ASGIApp:
        """GET /sandboxes/{id}."""
        return answer(await self._sandboxes.detailed(call.who, await self._info(call)))

    async def kill(self, call: Call) -> ASGIApp:
        """DELETE /sandboxes/{id}."""
        info = await self._info(call)
        with call.shutdown.cancellable():
            await self._sandboxes.kill(call.who, info)
        return nothing()

    async def set_timeout(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/timeout."""
        asked = await call.json(SetTimeout)
        await self._sandboxes.set_timeout(call.who, await self._info(call), asked.timeout)
        return nothing()

    async def refresh(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/refreshes."""
        asked = await call.json(Refresh)
        info = await self._info(call)
        if asked.duration:
            await self._sandboxes.extend(call.who, info, asked.duration)
        return nothing()

    async def pause(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/pause."""
        asked = await call.json(PauseSandbox)
        info = await self._info(call)
        with call.shutdown.cancellable():
            await self._sandboxes.pause(call.who, info, memory=asked.memory)
        return nothing()

    async def connect(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/connect, /v2/sandboxes/{id}/connect and /sandboxes/{id}/resume."""
        asked = await call.json(ConnectSandbox)
        info = await self._info(call)
        with call.shutdown.cancellable():
            info, woken = await self._sandboxes.connect(call.who, info, asked)
            if woken:
                await self._rooms.prepare(call, info)
        return answer(await self._sandboxes.opened(call.who, info), 201 if woken else 200)

    async def fork(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/fork."""
        asked = await call.json(ForkSandbox)
        check_seconds(asked.timeout)
        if not 1 <= asked.count <= MAX_FORKS:
            raise InvalidRequest(f"count must be 1 to {MAX_FORKS}, not {asked.count}")
        info = await self._info(call)
        with call.shutdown.cancellable():
            children = await self._snapshots.fork(call.who, info, asked)
        found: list[dict[str, Any]] = []
        for child in children:
            if isinstance(child, SojournError):
                status = failures.api_status(child)
                found.append({"error": {"code": status, "message": failures.text(child)}})
            else:
                found.append({"sandbox": await self._sandboxes.opened(call.who, child)})
        return answer(found, 201)

    async def metrics(self, call: Call) -> ASGIApp:
        """GET /sandboxes/{id}/metrics."""
        info = await self._info(call)
        if info.state != "running":
            return answer([])
        return answer([await metrics.now(call.service, call.who, info)])

    async def network(self, call: Call) -> ASGIApp:
        """PUT /sandboxes/{id}/network."""
        asked = await call.json(dict[str, Any])
        info = await self._info(call)
        policy = networks.wanted(
            asked,
            asked.get("allow_internet_access"),
            default=True,
        )
        await call.service.update(
            call.who, info.id, UpdateSession(network=policy or NetworkPolicy())
        )
        return nothing()

    # -- lists ------------------------------------------------------------------------------

    async def list(self, call: Call) -> ASGIApp:
        """GET /sandboxes and /v2/sandboxes."""
        limit = _limit(call)
        wanted = {
            key: value
            for key, value in (
                (unquote(key), unquote(value))
                for key, value in parse_qsl(call.query.get("metadata", ""), keep_blank_values=True)
            )
            if not key.startswith(PREFIX)
        }
        states = ",".join(
            _STATES.get(word, "deleted")
            for word in call.query.get("state", "running,paused").split(",")
            if word
        )
        after = _started_after(call.query.get("startedAfter"))
        template = call.query.get("template")
        found = [
            info
            async for info in self._sandboxes.every(call.who, wanted, states)
            if not info.labels.get(SNAPSHOT)
            and info.created_at > after
            and template in (None, info.labels.get(TEMPLATE, info.template))
        ]
        if call.query.get("order") == "asc":
            found.reverse()
        page, token = _page(found, call.query.get("nextToken"), limit)
        headers = [] if token is None else [(b"x-next-token", token.encode())]
        return answer([self._sandboxes.listed(info) for info in page], 200, headers)

    # -- snapshots --------------------------------------------------------------------------

    async def snapshot(self, call: Call) -> ASGIApp:
        """POST /sandboxes/{id}/snapshots."""
        asked = await call.json(SnapshotSandbox)
        info = await self._info(call)
        with call.shutdown.cancellable():
            made = await self._snapshots.take(call.who, info, asked)
        return answer(self._snapshots.shown(made), 201)

    async def snapshots(self, call: Call) -> ASGIApp:
        """GET /snapshots."""
        found = await self._snapshots.list(
            call.who, call.query.get("sandboxID"), call.query.get("name")
        )
        page, token = _page(found, call.query.get("nextToken"), _limit(call))
        headers = [] if token is None else [(b"x-next-token", token.encode())]
        return answer([self._snapshots.shown(info) for info in page], 200, headers)

    async def template(self, call: Call) -> ASGIApp:
        """GET /templates/aliases/{name}: whether sandboxes can be made from it."""
        name = unquote(call.groups["template"])
        found = await self._sandboxes.template(call.who, name)
        known = ids.sandbox_id(found.id) if isinstance(found, SessionInfo) else name
        return answer({"templateID": known, "public": False})

    async def delete_template(self, call: Call) -> ASGIApp:
        """DELETE /templates/{id}: snapshots are templates to E2B, and the only ones it may end."""
        name = unquote(call.groups["template"])
        info = await self._sandboxes.snapshot(call.who, name)
        if info is None:
            raise NotFound(f"template '{name}' not found")
        with call.shutdown.cancellable():
            await self._sandboxes.kill(call.who, info)
        return nothing()

    async def refuse(self, call: Call) -> ASGIApp:
        """What E2B has and this server has not."""
        raise Unsupported(
            f"{call.groups['what']} of E2B are not served here",
            next_step="docs/e2b.md lists what is.",
        )


def _limit(call: Call) -> int:
    given = call.query.get("limit", "100")
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {MAX_LIMIT}", field="limit")
    return int(given)


def _started_after(given: str | None) -> float:
    if given is None:
        return 0.0
    try:
        # A plus sign that was not escaped arrives as a space.
        found = datetime.fromisoformat(given.replace(" ", "+")).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(f"startedAfter is no time: {given!r}", field="startedAfter") from None
    return min(found, time.time() + 1e9)


def _page(
    found: list[SessionInfo], token: str | None, limit: int
) -> tuple[list[SessionInfo], str | None]:
    """What follows the item a token names. When that is gone, what was made on its other side is
    told by the time in ids, so that nothing comes twice or is left out."""
    start = 0
    if token:
        session = ids.session_id(token)
        if session is None:
            raise InvalidRequest("nextToken is none of ours", field="nextToken")
        known = [info.id for info in found]
        if session in known:
            start = known.index(session) + 1
        else:
            rising = len(known) > 1 and known[0] < known[-1]
            start = sum((id < session) if rising else (id > session) for id in known)
    page = found[start : start + limit]
    more = len(found) > start + limit
    return page, ids.sandbox_id(page[-1].id) if more else None
