"""Sandboxes over sessions: made, found, kept alive, put away, woken, ended.

Guarantee: a sandbox that E2B's program believes to be asleep is never removed by a deadline: what
its timeout does is changed to "put away" before it is put away, and back only once it runs again.
So whatever crashes in between, the worst is a sandbox that sleeps where it should have been killed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sojourn.errors import (
    Conflict,
    HostUnfit,
    InvalidRequest,
    NotFound,
    SessionNotFound,
    SojournError,
    Unsupported,
)
from sojourn.model import AutoSnapshot, Policy
from sojourn.server.base import Principal, SessionService
from sojourn.server.e2b import ids, networks
from sojourn.server.e2b.known import Known
from sojourn.server.e2b.schemas import (
    CLIENT_ID,
    ENVD_VERSION,
    ConnectSandbox,
    NewSandbox,
    stamp,
)
from sojourn.server.e2b.settings import PREFIX, TEMPLATE, Settings
from sojourn.server.routes.verbs import operation_error
from sojourn.wire.api import (
    CreateSession,
    ForkRequest,
    OperationInfo,
    SessionInfo,
    SuspendRequest,
    UpdateSession,
)

log = logging.getLogger(__name__)

# Further reserved labels.
ON_TIMEOUT = PREFIX + "on-timeout"  # kill or pause
TIMEOUT = PREFIX + "timeout"  # seconds, for a wake by traffic
ENVIRONMENT = PREFIX + "env"  # of sandboxes made from snapshots: a fork has its source's
SNAPSHOT = PREFIX + "snapshot"  # the name of a snapshot, or its own id
SOURCE = PREFIX + "source"  # the sandbox a snapshot was taken of
INTERNET = PREFIX + "internet"  # what the caller said, for the caller to see

DEFAULT_TEMPLATES = frozenset({"", "base", "code-interpreter-v1", "code-interpreter-beta"})
MAX_TIMEOUT = 366 * 86400
_WAIT = 60.0
_PAGE = 100


def metadata(info: SessionInfo) -> dict[str, str]:
    """A session's labels without the reserved ones."""
    return {key: value for key, value in info.labels.items() if not key.startswith(PREFIX)}


def on_timeout(info: SessionInfo) -> str:
    """What its timeout does: sessions that were not made by an E2B client are never killed."""
    return info.labels.get(ON_TIMEOUT, "pause")


def environment(info: SessionInfo) -> dict[str, str]:
    """Variables that the session's own environment lacks."""
    found: dict[str, str] = msgspec.json.decode(
        info.labels.get(ENVIRONMENT, "{}"), type=dict[str, str]
    )
    return found


def check_metadata(given: dict[str, str]) -> dict[str, str]:
    """Raises InvalidRequest for what would be taken for a reserved label."""
    for key in given:
        if key.startswith(PREFIX):
            raise InvalidRequest(f"metadata keys may not begin with {PREFIX!r}", field="metadata")
    return given


def check_seconds(seconds: int) -> int:
    """Raises InvalidRequest for a timeout that is none."""
    if not 1 <= seconds <= MAX_TIMEOUT:
        raise InvalidRequest(
            f"timeout must be 1 to {MAX_TIMEOUT} seconds, not {seconds}", field="timeout"
        )
    return seconds


def _there(made: SessionInfo | None) -> SessionInfo:
    """What a request made. Raises NotFound where a key stands for what was removed since."""
    if made is None:
        raise NotFound("the sandbox this idempotency key made is gone", next_step="Use a new key.")
    return made


class Sandboxes:
    """The verbs of E2B's control plane."""

    def __init__(self, service: SessionService, tokens: ids.Tokens, settings: Settings) -> None:
        self.service = service
        self.known = Known(service)
        self.tokens = tokens
        self.settings = settings
        self._domain: str | None = None
        service.ports.on_request(self.exposes)

    # -- ports ------------------------------------------------------------------------------

    async def domain(self) -> str | None:
        """Below what the ports of sandboxes have their names; None where none can be served."""
        if self._domain is None:
            try:
                self._domain = await self.service.ports.serve()
            except HostUnfit as error:
                log.warning("ports of sandboxes are not served: %s", error)
        return self._domain

    async def exposes(self, session: str, port: int) -> Principal | None:
        """Every port of a sandbox is public, as E2B has it; those of other sessions are not."""
        tenant = await self.known.tenant(session)
        if tenant is None:
            return None
        who = ids.principal(tenant)
        info = await self.service.get(who, session)
        return who if TEMPLATE in info.labels else None

    # -- looking ----------------------------------------------------------------------------

    async def find(self, who: Principal, sandbox: str) -> SessionInfo:
        """The session of a sandbox id. Raises SessionNotFound."""
        session = ids.session_id(sandbox)
        try:
            if session is None:
                raise SessionNotFound("")
            return await self.service.get(who, session)
        except SessionNotFound:
            raise SessionNotFound(f'Sandbox "{sandbox}" was not found', next_step="") from None

    async def every(
        self, who: Principal, labels: dict[str, str], states: str | None = None
    ) -> AsyncIterator[SessionInfo]:
        """All sessions of the caller's, newest first."""
        cursor = None
        while True:
            page = await self.service.list(
                who, state=states, labels=labels, limit=_PAGE, cursor=cursor
            )
            for info in page.items:
                yield info
            cursor = page.next
            if cursor is None:
                return

    async def snapshot(self, who: Principal, ref: str) -> SessionInfo | None:
        """The session a snapshot's id or name stands for; the newest one of that name."""
        session = ids.session_id(ref.partition(":")[0])
        if session is not None:
            try:
                info = await self.service.get(who, session)
            except SessionNotFound:
                return None
            return info if info.labels.get(SNAPSHOT) else None
        name = ref.removesuffix(":default")
        async for info in self.every(who, {SNAPSHOT: name}):
            return info
        return None

    # -- making -----------------------------------------------------------------------------

    async def create(self, who: Principal, asked: NewSandbox, key: str | None) -> SessionInfo:
        """A new sandbox, running. Raises InvalidRequest, Unsupported, NotFound and what a failed
        start raises."""
        self._refuse(asked)
        check_seconds(asked.timeout)
        action = "pause" if asked.auto_pause else "kill"
        labels = check_metadata(asked.metadata) | {
            TEMPLATE: asked.template_id,
            ON_TIMEOUT: action,
            TIMEOUT: str(asked.timeout),
        }
        if asked.allow_internet_access is not None:
            labels[INTERNET] = "true" if asked.allow_internet_access else "false"
        if (asked.network or {}).get("allowPublicTraffic") is False:
            raise Unsupported(
                "ports of sandboxes are public here",
                next_step="Use a session of Sojourn, whose ports have tokens.",
            )
        network = networks.wanted(
            asked.network, asked.allow_internet_access, default=self.settings.internet
        )
        wakes = asked.auto_resume is not None and asked.auto_resume.enabled
        policy = Policy(
            auto_snapshot=AutoSnapshot.IDLE,
            idle_timeout=float(asked.timeout) if wakes else None,
            max_lifetime=float(asked.timeout),
            on_expiry="delete" if action == "kill" else "suspend",
            auto_resume=wakes,
        )
        template = await self.template(who, asked.template_id)
        if isinstance(template, SessionInfo):
            return await self._from_snapshot(who, template, asked, labels, policy, key)
        request = CreateSession(
            labels=labels, env=asked.env_vars, policy=policy, network=network, user=None, cwd=None
        )
        if template is not None:
            request = msgspec.structs.replace(request, template=template)
        made: SessionInfo | None = await self.finish(
            who, await self.service.create(who, request, key)
        )
        return _there(made)

    def _refuse(self, asked: NewSandbox) -> None:
        for field, given in (
            ("mcp", asked.mcp),
            ("iam", asked.iam),
            ("volumeMounts", asked.volume_mounts),
        ):
            if given:
                raise Unsupported(
                    f"sandboxes have no {field} here", next_step=f"Leave out {field}."
                )
        if asked.auto_pause and not asked.auto_pause_memory:
            raise Unsupported(
                "a timeout that pauses keeps memory here",
                next_step="Pause with keep_memory=False before the timeout.",
            )

    async def template(self, who: Principal, name: str) -> str | SessionInfo | None:
        """What a template's name stands for: one of the server's, a snapshot, or (None) the
        server's default. Raises NotFound."""
        if name in DEFAULT_TEMPLATES:
            return None
        known = {template.name for template in await self.service.templates(who)}
        if name in known:
            return name
        snapshot = await self.snapshot(who, name)
        if snapshot is None:
            raise NotFound(
                f"template '{name}' not found",
                next_step=f"There are base, code-interpreter-v1, {', '.join(sorted(known))} and"
                " your snapshots.",
            )
        return snapshot

    async def _from_snapshot(
        self,
        who: Principal,
        snapshot: SessionInfo,
        asked: NewSandbox,
        labels: dict[str, str],
        policy: Policy,
        key: str | None,
    ) -> SessionInfo:
        env = msgspec.json.encode(environment(snapshot) | asked.env_vars).decode()
        labels = labels | {ENVIRONMENT: env}
        forked = await self.service.fork(
            who,
            snapshot.id,
            ForkRequest(start=False, labels=labels | {SNAPSHOT: "", SOURCE: ""}),
            key,
        )
        children: list[SessionInfo] = await self.finish(who, forked)
        child = _there(children[0] if children else None)
        if key is not None and child.labels.get(SOURCE) != "":
            return child  # the key was used before: it is made already
        await self.service.update(who, child.id, UpdateSession(labels=labels, policy=policy))
        try:
            return await self._wake(who, child, asked.timeout)
        except SojournError:
            await self.kill(who, child)
            raise

    # -- time -------------------------------------------------------------------------------

    async def set_timeout(self, who: Principal, info: SessionInfo, seconds: int) -> None:
        """Its end is `seconds` from now, nearer or farther than it was."""
        check_seconds(seconds)
        if info.state != "running":
            raise Conflict(
                f"sandbox {ids.sandbox_id(info.id)} is {info.state} and has no timeout",
                next_step="Connect to it first.",
            )
        await self._policy(who, info, self._until(info, seconds))

    async def extend(self, who: Principal, info: SessionInfo, seconds: int) -> None:
        """Its end is at least `seconds` from now. A session without an end keeps none."""
        check_seconds(seconds)
        deadline = info.lifetime_deadline
        if deadline is not None and deadline < time.time() + seconds:
            await self._policy(who, info, self._until(info, seconds))

    def _until(self, info: SessionInfo, seconds: int) -> dict[str, Any]:
        expiry = "delete" if on_timeout(info) == "kill" else "suspend"
        return {
            "max_lifetime": time.time() - info.created_at + seconds,
            "on_expiry": expiry,
            # One that a request at a port wakes is told no time: it sleeps again when it is idle.
            "idle_timeout": float(seconds) if info.policy.auto_resume else None,
        }

    async def _policy(self, who: Principal, info: SessionInfo, changes: dict[str, Any]) -> None:
        policy = msgspec.structs.replace(info.policy, **changes)
        await self.service.update(who, info.id, UpdateSession(policy=policy))

    # -- sleeping and waking ----------------------------------------------------------------

    async def pause(self, who: Principal, info: SessionInfo, *, memory: bool) -> None:
        """Put away. Raises Conflict when it is asleep already, and what a refused capture raises
        (it runs on then)."""
        if info.state == "suspended":
            raise Conflict(f"sandbox {ids.sandbox_id(info.id)} is paused already")
        kills = info.policy.on_expiry == "delete"
        if kills:
            await self._policy(who, info, {"on_expiry": "suspend"})
        try:
            asleep: SessionInfo = await self.finish(
                who, await self.service.suspend(who, info.id, SuspendRequest(memory=memory), None)
            )
        except SojournError:
            current = await self.service.get(who, info.id)
            if kills and current.state == "running":
                await self._policy(who, current, {"on_expiry": "delete"})
            raise
        if TEMPLATE in info.labels:
            # What was left of its time is over: it has none until it is woken.
            await self._policy(who, asleep, {"max_lifetime": None})

    async def connect(
        self, who: Principal, info: SessionInfo, asked: ConnectSandbox
    ) -> tuple[SessionInfo, bool]:
        """Running, and for at least the time asked for; whether it was woken for that."""
        check_seconds(asked.timeout)
        while info.operation is not None:
            # It may be on its way to sleep: what counts is where that leads.
            await self.settled(who, info)
            info = await self.service.get(who, info.id)
        if info.state == "running":
            await self.extend(who, info, asked.timeout)
            return info, False
        if not asked.memory and await self._has_memory(who, info):
            raise Unsupported(
                "a sandbox that was paused with its memory goes on with it",
                next_step="Pause with keep_memory=False to begin anew from the files.",
            )
        return await self._wake(who, info, asked.timeout), True

    async def _has_memory(self, who: Principal, info: SessionInfo) -> bool:
        history = await self.service.history(who, info.id)
        return any(snapshot.current and snapshot.memory for snapshot in history)

    async def _wake(self, who: Principal, info: SessionInfo, seconds: int) -> SessionInfo:
        until = self._until(info, seconds)
        ours = TEMPLATE in info.labels
        if ours:
            await self._policy(who, info, until | {"on_expiry": "suspend"})
        woken: SessionInfo = await self.finish(who, await self.service.resume(who, info.id, None))
        if ours and until["on_expiry"] == "delete":
            await self._policy(who, woken, until)
        return woken

    async def awake(self, who: Principal, info: SessionInfo) -> SessionInfo:
        """Running: woken when its policy lets traffic do that. Raises WrongState through the
        service where it does not."""
        if info.state == "running" or not info.policy.auto_resume:
            return info
        return await self._wake(who, info, int(info.labels.get(TIMEOUT, "300")))

    async def kill(self, who: Principal, info: SessionInfo) -> None:
        """Remove it, from whatever state."""
        await self.finish(who, await self.service.delete(who, info.id, None))

    async def settled(self, who: Principal, info: SessionInfo) -> None:
        """Wait for what is under way on it, however that ends."""
        if info.operation is not None:
            with contextlib.suppress(SojournError):
                await self.finish(who, await self.service.operation(who, info.operation))

    async def finish(self, who: Principal, operation: OperationInfo) -> Any:
        """The result of an operation. Raises what it failed with."""
        while operation.state not in ("succeeded", "failed"):
            operation = await self.service.wait(who, operation.id, _WAIT)
        if operation.error is not None:
            raise operation_error(operation)
        return operation.result

    # -- showing ----------------------------------------------------------------------------

    async def opened(self, who: Principal, info: SessionInfo) -> dict[str, Any]:
        """A sandbox with what opens it."""
        self.known.add(who.tenant, info.id)
        return {
            "templateID": info.labels.get(TEMPLATE, info.template),
            "sandboxID": ids.sandbox_id(info.id),
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.tokens.make(ids.ACCESS, who.tenant, info.id),
            "trafficAccessToken": self.tokens.make(ids.TRAFFIC, who.tenant, info.id),
            "domain": await self.domain(),
        }

    def listed(self, info: SessionInfo) -> dict[str, Any]:
        """A sandbox in a list."""
        template = info.labels.get(TEMPLATE, info.template)
        return {
            "templateID": template,
            "alias": info.name or template,
            "sandboxID": ids.sandbox_id(info.id),
            "clientID": CLIENT_ID,
            "startedAt": stamp(info.created_at),
            "endAt": stamp(info.lifetime_deadline if info.state == "running" else None),
            "envdVersion": ENVD_VERSION,
            "cpuCount": max(1, round(info.limits.cpus)),
            "memoryMB": info.limits.memory_bytes >> 20,
            "diskSizeMB": info.limits.disk_bytes >> 20,
            "state": "running" if info.state in ("running", "creating") else "paused",
            "metadata": metadata(info),
            "volumeMounts": [],
        }

    async def detailed(self, who: Principal, info: SessionInfo) -> dict[str, Any]:
        """A sandbox by itself."""
        self.known.add(who.tenant, info.id)
        return self.listed(info) | {
            "envdAccessToken": self.tokens.make(ids.ACCESS, who.tenant, info.id),
            "domain": await self.domain(),
            "allowInternetAccess": {"true": True, "false": False}.get(
                info.labels.get(INTERNET, "")
            ),
            "network": networks.shown(info.network),
            "lifecycle": {
                "autoResume": info.policy.auto_resume,
                "onTimeout": on_timeout(info),
            },
        }
