"""An in-memory session service for tests of the HTTP layer, the client and the command line.

Two tenants, tokens `token-a` (operator of tenant a) and `token-b` (tenant b). Verbs finish at once
unless `slow` seconds are set; `fail_next` makes the next call of a method raise.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from sojourn.errors import (
    ArchiveInvalid,
    Conflict,
    Forbidden,
    IdempotencyMismatch,
    ImageInvalid,
    InvalidRequest,
    NameTaken,
    NotFound,
    OperationNotFound,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
    StoreKeyInvalid,
    TemplateNotFound,
    Unauthenticated,
    UnknownTemplate,
    to_body,
)
from sojourn.model import Limits, Policy, new_id
from sojourn.model.network import NetworkPolicy
from sojourn.server.base import Principal, Usage
from sojourn.server.network_changes import changed
from sojourn.wire.api import (
    ArchiveInfo,
    CodeRequest,
    CreateSession,
    DiffInfo,
    DurabilityInfo,
    EffectPage,
    EventInfo,
    ExecRequest,
    ExecResult,
    ForkRequest,
    OperationInfo,
    SessionInfo,
    SessionPage,
    SnapshotInfo,
    SnapshotRequest,
    SpawnRequest,
    StatusInfo,
    SuspendRequest,
    TemplateInfo,
    TemplateRequest,
    TokenInfo,
    UpdateSession,
    VerifyReport,
)
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessSpec, ProcessState
from sojourn.wire.networks import NetworkChange
from support.fake_guest import FakeGuest
from support.fake_ports import FakePorts, FakeSecrets


class Kept(msgspec.Struct):
    """A session of the fake."""

    info: SessionInfo
    tenant: str
    guest: Any
    snapshots: list[SnapshotInfo] = []
    events: list[EventInfo] = []


class FakeAccess:
    """Access to a guest's files."""

    def __init__(self, service: FakeService, kept: Kept, what: str) -> None:
        self._service, self._kept, self._what = service, kept, what

    async def __aenter__(self) -> FakeGuest:
        self._service.check("files")
        guest: FakeGuest = self._kept.guest
        return guest

    async def __aexit__(self, *exc: object) -> None:
        self._service.event(self._kept, self._what)


class FakeArchive:
    """An archive of a fake session."""

    def __init__(self, session: str, content: bytes) -> None:
        digest = blake3(content).digest()
        self._data = content + digest
        self.info = ArchiveInfo(
            digest=digest.hex(),
            bytes=len(self._data),
            session=session,
            snapshot="snp_1",
            fingerprint="f",
            snapshots=1,
            encrypted=False,
        )
        self.closed = False
        self.cut = False

    async def pieces(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._data), 1 << 20):
            if self.cut and at:
                raise SojournError("broken")
            yield self._data[at : at + (1 << 20)]

    def close(self) -> None:
        self.closed = True


class FakeService:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sessions: dict[str, Kept] = {}
        self._operations: dict[str, tuple[str, OperationInfo, asyncio.Task[Any] | None]] = {}
        self._keys: dict[tuple[str, str], tuple[Any, str]] = {}
        self._tokens = {
            "token-a": Principal("a", "operator", "operator"),
            "token-b": Principal("b", "someone", "tenant"),
        }
        self._token_infos: dict[str, TokenInfo] = {}
        self._built: dict[str, builtins.list[TemplateInfo]] = {}
        self._failures: dict[str, BaseException] = {}
        self.secrets = FakeSecrets()
        self.ports = FakePorts(self._find)
        self._changed = asyncio.Event()
        self.calls: dict[str, int] = defaultdict(int)
        self.archives: builtins.list[FakeArchive] = []
        self.slow = 0.0
        self.stopped = False

    # -- for tests

    def fail_next(self, method: str, error: BaseException) -> None:
        """The next call of `method` raises `error`."""
        self._failures[method] = error

    def check(self, method: str) -> None:
        self.calls[method] += 1
        error = self._failures.pop(method, None)
        if error is not None:
            raise error

    async def close(self) -> None:
        for kept in self._sessions.values():
            await kept.guest.close()

    def event(self, kept: Kept, kind: str) -> None:
        kept.events.append(
            EventInfo(
                len(kept.events) + 1,
                kept.info.id,
                time.time(),
                "fake",
                kind,
                "ok",
                {},
                None,
                None,
                None,
            )
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def _find(self, who: Principal, ref: str) -> Kept:
        for kept in self._sessions.values():
            if kept.tenant == who.tenant and ref in (kept.info.id, kept.info.name):
                return kept
        raise SessionNotFound(f"there is no session {ref!r}", session=ref)

    def _guest(self, who: Principal, ref: str) -> FakeGuest:
        guest: FakeGuest = self._find(who, ref).guest
        return guest

    def _set(self, kept: Kept, **changes: Any) -> SessionInfo:
        kept.info = msgspec.structs.replace(kept.info, updated_at=time.time(), **changes)
        return kept.info

    async def authenticate(self, token: str | None) -> Principal:
        if token is None or token not in self._tokens:
            raise Unauthenticated("the token is missing or unknown")
        return self._tokens[token]

    # -- operations

    def _operate(
        self, who: Principal, session: str, verb: str, key: str | None, request: Any, work: Any
    ) -> OperationInfo:
        self.check(verb)
        if key is not None and (who.tenant, key) in self._keys:
            said, name = self._keys[who.tenant, key]
            if said != (session, verb, request):
                raise IdempotencyMismatch("the key was used with another request")
            return self._operations[name][1]
        operation = OperationInfo(new_id("opn"), session, verb, "running", None, time.time(), None)
        if key is not None:
            self._keys[who.tenant, key] = ((session, verb, request), operation.id)

        def finish() -> OperationInfo:
            try:
                result, error = work(), None
            except SojournError as failure:
                result, error = None, msgspec.to_builtins(to_body(failure))
            done = msgspec.structs.replace(
                operation,
                state="failed" if error else "succeeded",
                finished_at=time.time(),
                result=msgspec.to_builtins(result),
                error=error,
            )
            self._operations[operation.id] = (who.tenant, done, None)
            return done

        if not self.slow:
            return finish()

        async def later() -> None:
            await asyncio.sleep(self.slow)
            finish()

        task = asyncio.create_task(later())
        self._operations[operation.id] = (who.tenant, operation, task)
        return operation

    async def operation(self, who: Principal, operation: str) -> OperationInfo:
        tenant, info, _ = self._operations.get(operation, ("", None, None))
        if tenant != who.tenant or info is None:
            raise OperationNotFound(f"there is no operation {operation!r}")
        return info

    async def wait(self, who: Principal, operation: str, timeout: float) -> OperationInfo:
        self.check("wait")
        await self.operation(who, operation)
        task = self._operations[operation][2]
        if task is not None:
            await asyncio.wait([task], timeout=timeout)
        return self._operations[operation][1]

    # -- sessions

    def _make(self, who: Principal, name: str | None, **facts: Any) -> Kept:
        if name is not None and any(
            kept.info.name == name and kept.tenant == who.tenant for kept in self._sessions.values()
        ):
            raise NameTaken(f"the name {name!r} is taken")
        number = new_id("ses")
        root = self._directory / number
        root.mkdir()
        values: dict[str, Any] = {
            "labels": {},
            "template": "debian",
            "env": {},
            "limits": Limits(),
            "policy": Policy(),
            "driver": "fake",
            "state": "running",
            "epoch": 1,
            "head": None,
            "parent_session": None,
            "forked_from": None,
            "idle_deadline": None,
            "lifetime_deadline": None,
            "cause": None,
            "operation": None,
            "created_at": time.time(),
            "updated_at": time.time(),
        }
        info = SessionInfo(id=number, name=name, **(values | facts))
        kept = Kept(info, who.tenant, FakeGuest(root))
        self._sessions[number] = kept
        self.event(kept, "create")
        return kept

    async def create(
        self, who: Principal, request: CreateSession, key: str | None
    ) -> OperationInfo:
        if request.template != "debian":
            raise UnknownTemplate(f"there is no template {request.template!r}")

        def work() -> SessionInfo:
            return self._make(
                who,
                request.name,
                labels=request.labels,
                env=request.env,
                limits=request.limits or Limits(),
                policy=request.policy or Policy(),
                network=request.network or NetworkPolicy(),
            ).info

        return self._operate(who, "", "create", key, request, work)

    async def standing(self, who: Principal, ref: str) -> tuple[str, int]:
        info = self._find(who, ref).info
        return info.state, info.epoch

    async def usage(self, who: Principal, ref: str) -> Usage:
        self._find(who, ref)
        return Usage(0.0, 0)

    async def every(self) -> builtins.list[tuple[str, str]]:
        return [(kept.tenant, kept.info.id) for kept in self._sessions.values()]

    async def get(self, who: Principal, ref: str) -> SessionInfo:
        self.check("get")
        return self._find(who, ref).info

    async def list(
        self,
        who: Principal,
        *,
        state: str | None,
        labels: dict[str, str],
        limit: int,
        cursor: str | None,
    ) -> SessionPage:
        self.check("list")
        items = [
            kept.info
            for kept in self._sessions.values()
            if kept.tenant == who.tenant
            and (state is None or kept.info.state == state)
            and labels.items() <= kept.info.labels.items()
        ]
        start = int(cursor or 0)
        more = start + limit < len(items)
        return SessionPage(items[start : start + limit], str(start + limit) if more else None)

    async def update(self, who: Principal, ref: str, request: UpdateSession) -> SessionInfo:
        changes = {
            name: value
            for name in ("name", "labels", "limits", "policy", "network")
            if (value := getattr(request, name)) is not msgspec.UNSET
        }
        return self._set(self._find(who, ref), **changes)

    async def change_network(self, who: Principal, ref: str, change: NetworkChange) -> SessionInfo:
        kept = self._find(who, ref)
        return self._set(kept, network=changed(kept.info.network, change))

    async def keep_alive(self, who: Principal, ref: str, seconds: float) -> SessionInfo:
        return self._set(self._find(who, ref), idle_deadline=time.time() + seconds)

    # -- verbs

    def _state(
        self, who: Principal, ref: str, verb: str, state: str, key: str | None, request: Any = None
    ) -> OperationInfo:
        kept = self._find(who, ref)

        def work() -> SessionInfo:
            self.event(kept, verb)
            return self._set(kept, state=state)

        return self._operate(who, kept.info.id, verb, key, request, work)

    async def pause(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        return self._state(who, ref, "pause", "paused", key)

    async def suspend(
        self, who: Principal, ref: str, request: SuspendRequest, key: str | None
    ) -> OperationInfo:
        return self._state(who, ref, "suspend", "suspended", key, request)

    async def resume(
        self, who: Principal, ref: str, key: str | None, *, memory: bool = True
    ) -> OperationInfo:
        return self._state(who, ref, "resume", "running", key)

    def _snapshot(self, kept: Kept, kind: str, label: str | None, memory: bool) -> SnapshotInfo:
        found = SnapshotInfo(
            new_id("snp"),
            kept.info.id,
            kept.info.head,
            kind,
            label,
            time.time(),
            "f" * 64,
            memory,
            False,
            0,
            0,
            True,
        )
        kept.snapshots.append(found)
        self._set(kept, head=found.id)
        return found

    def _snapshot_of(self, kept: Kept, name: str) -> SnapshotInfo:
        for found in kept.snapshots:
            if name in (found.id, found.label):
                return found
        raise SnapshotNotFound(f"there is no snapshot {name!r}")

    async def snapshot(
        self, who: Principal, ref: str, request: SnapshotRequest, key: str | None
    ) -> OperationInfo:
        kept = self._find(who, ref)
        return self._operate(
            who,
            kept.info.id,
            "snapshot",
            key,
            request,
            lambda: self._snapshot(kept, "explicit", request.label, request.memory),
        )

    async def rollback(
        self, who: Principal, ref: str, snapshot: str, key: str | None, *, force: bool = False
    ) -> OperationInfo:
        kept = self._find(who, ref)
        found = self._snapshot_of(kept, snapshot)
        return self._operate(
            who, kept.info.id, "rollback", key, snapshot, lambda: self._set(kept, head=found.id)
        )

    async def fork(
        self, who: Principal, ref: str, request: ForkRequest, key: str | None
    ) -> OperationInfo:
        kept = self._find(who, ref)
        source = kept.info.head if request.snapshot is None else request.snapshot
        if request.snapshot is not None:
            self._snapshot_of(kept, request.snapshot)

        def work() -> builtins.list[SessionInfo]:
            names: builtins.list[str | None] = [*(request.names or [None] * request.n)]
            return [
                self._make(
                    who,
                    name,
                    labels=request.labels,
                    parent_session=kept.info.id,
                    forked_from=source,
                ).info
                for name in names
            ]

        return self._operate(who, kept.info.id, "fork", key, request, work)

    async def promote(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        kept = self._find(who, ref)
        parent = kept.info.parent_session
        if parent is None:
            raise Conflict("the session is no fork")
        return self._operate(
            who, kept.info.id, "promote", key, None, lambda: self._find(who, parent).info
        )

    async def migrate(
        self, who: Principal, ref: str, node: str | None, key: str | None
    ) -> OperationInfo:
        kept = self._find(who, ref)
        return self._operate(who, kept.info.id, "migrate", key, None, lambda: kept.info)

    async def delete(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        kept = self._find(who, ref)

        def work() -> None:
            self._sessions.pop(kept.info.id, None)

        return self._operate(who, kept.info.id, "delete", key, None, work)

    # -- history

    async def history(self, who: Principal, ref: str) -> builtins.list[SnapshotInfo]:
        return self._find(who, ref).snapshots

    async def diff(
        self, who: Principal, ref: str, a: str | None, b: str | None, *, text: bool, limit: int
    ) -> DiffInfo:
        kept = self._find(who, ref)
        for name in (a, b):
            if name is not None:
                self._snapshot_of(kept, name)
        return DiffInfo(a or "", b or "", [], {"/x": "diff"} if text else {})

    async def delete_snapshot(self, who: Principal, ref: str, snapshot: str) -> None:
        kept = self._find(who, ref)
        kept.snapshots.remove(self._snapshot_of(kept, snapshot))

    async def verify(self, who: Principal, ref: str, snapshot: str | None) -> VerifyReport:
        kept = self._find(who, ref)
        return VerifyReport(kept.info.id, True, len(kept.snapshots), 0, 0, [])

    async def events(
        self, who: Principal, ref: str, *, after: int, limit: int, kinds: Collection[str] = ()
    ) -> builtins.list[EventInfo]:
        found = [event for event in self._find(who, ref).events if event.seq > after]
        return [event for event in found if not kinds or event.kind in kinds][:limit]

    async def effects(
        self, who: Principal, ref: str, *, all: bool, cursor: str | None, limit: int
    ) -> EffectPage:
        self._find(who, ref)
        return EffectPage([], None)

    async def follow_events(
        self, who: Principal, ref: str, *, after: int
    ) -> AsyncIterator[EventInfo]:
        while True:
            changed = self._changed
            for event in await self.events(who, ref, after=after, limit=1000):
                after = event.seq
                yield event
            await changed.wait()

    # -- commands

    def _spec(self, kept: Kept, request: ExecRequest) -> ProcessSpec:
        if request.shell is not None:
            argv = [b"/bin/sh", b"-c", request.shell.encode()]
        else:
            argv = request.argv_bytes or [word.encode() for word in request.argv or []]
        env = kept.info.env | request.env
        return ProcessSpec(
            argv=argv,
            env={name.encode(): value.encode() for name, value in env.items()},
            cwd=None if request.cwd is None else request.cwd.encode(),
            timeout=request.timeout,
            stdin="null" if request.stdin is None else "inline",
            input=request.stdin or b"",
        )

    async def durable(
        self, who: Principal, ref: str, snapshot: str | None, timeout: float
    ) -> DurabilityInfo:
        kept = self._find(who, ref)
        if snapshot is not None:
            self._snapshot_of(kept, snapshot)
        return DurabilityInfo(kept.info.id, kept.info.head, True, 0, 0.0, None)

    async def export(
        self, who: Principal, ref: str, snapshot: str | None, secret: bytes | None
    ) -> FakeArchive:
        self.check("export")
        kept = self._find(who, ref)
        if snapshot is not None:
            self._snapshot_of(kept, snapshot)
        content = msgspec.json.encode({"name": kept.info.name, "secret": secret})
        archive = FakeArchive(kept.info.id, content + bytes(3 << 20))
        self.archives.append(archive)
        return archive

    async def import_(
        self,
        who: Principal,
        chunks: AsyncIterator[bytes],
        *,
        name: str | None,
        expect: str | None,
        secret: bytes | None,
    ) -> SessionInfo:
        data = b"".join([chunk async for chunk in chunks])
        self.check("import")
        if expect is not None and expect != data[-32:].hex():
            raise ArchiveInvalid("another archive")
        try:
            told = msgspec.json.decode(data[: data.index(b"\0")])
        except (ValueError, msgspec.DecodeError):
            raise ArchiveInvalid("no archive") from None
        if told["secret"] != (None if secret is None else base64.b64encode(secret).decode()):
            raise StoreKeyInvalid("another key")
        return self._make(who, name or told["name"], state="suspended").info

    async def exec(self, who: Principal, ref: str, request: ExecRequest) -> ExecResult:
        self.check("exec")
        kept = self._find(who, ref)
        started = await kept.guest.start(self._spec(kept, request))
        state = await kept.guest.wait(started.id)
        pieces = [piece async for piece in kept.guest.output(started.id)]
        streams = [b"".join(p.data for p in pieces if p.stream == i) for i in (1, 2)]
        bound = request.max_output
        return ExecResult(
            exit_code=state.exit_code if state.exit_code is not None else 128 + state.signal,
            signal=state.signal,
            timed_out=state.timed_out,
            reason=None,
            stdout=streams[0][:bound],
            stderr=streams[1][:bound],
            truncated=any(len(stream) > bound for stream in streams),
            process=state.id,
            duration=0.0,
        )

    async def exec_stream(
        self, who: Principal, ref: str, request: ExecRequest
    ) -> AsyncIterator[ProcessState | Output]:
        self.check("exec")
        kept = self._find(who, ref)
        state = await kept.guest.start(self._spec(kept, request))
        yield state
        async for piece in kept.guest.output(state.id):
            yield piece
        yield await kept.guest.wait(state.id)

    async def spawn(
        self, who: Principal, ref: str, request: SpawnRequest, *, tag: str = "spawn"
    ) -> ProcessState:
        kept = self._find(who, ref)
        spec = self._spec(kept, request)
        if request.open_stdin:
            spec = msgspec.structs.replace(spec, stdin="pipe")
        spec = msgspec.structs.replace(spec, pty=request.pty, tag=tag)
        state: ProcessState = await kept.guest.start(spec)
        return state

    async def processes(self, who: Principal, ref: str) -> builtins.list[ProcessState]:
        return await self._guest(who, ref).processes()

    async def process(self, who: Principal, ref: str, process: int) -> ProcessState:
        return await self._guest(who, ref).process(process)

    async def wait_process(
        self, who: Principal, ref: str, process: int, timeout: float
    ) -> ProcessState:
        guest = self._guest(who, ref)
        try:
            async with asyncio.timeout(timeout):
                return await guest.wait(process)
        except TimeoutError:
            return await guest.process(process)

    async def output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> AsyncIterator[Output]:
        self.check("output")
        async for piece in self._guest(who, ref).output(process, offsets):
            yield piece

    async def discard_output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> None:
        async for _ in self._guest(who, ref).output(process, offsets):
            pass

    async def write_stdin(self, who: Principal, ref: str, process: int, data: bytes) -> None:
        await self._guest(who, ref).write(process, data)

    async def close_stdin(self, who: Principal, ref: str, process: int) -> None:
        await self._guest(who, ref).close_stdin(process)

    async def signal(
        self, who: Principal, ref: str, process: int, signal: int, group: bool
    ) -> None:
        await self._guest(who, ref).signal(process, signal, group=group)

    async def resize(self, who: Principal, ref: str, process: int, rows: int, columns: int) -> None:
        await self._guest(who, ref).resize(process, rows, columns)

    async def run_code(self, who: Principal, ref: str, request: CodeRequest) -> CodeResult:
        self.check("run_code")
        self._find(who, ref)
        return CodeResult(text=repr(request.code), stdout="", stderr="", error=None)

    def files(self, who: Principal, ref: str, what: str, *, mutates: bool) -> FakeAccess:
        return FakeAccess(self, self._find(who, ref), what)

    async def begin_turn(self, who: Principal, ref: str, label: str | None) -> str:
        self._find(who, ref)
        return new_id("trn")

    async def end_turn(self, who: Principal, ref: str, turn: str) -> SnapshotInfo | None:
        return self._snapshot(self._find(who, ref), "auto", None, True)

    # -- service

    async def templates(self, who: Principal) -> builtins.list[TemplateInfo]:
        return [TemplateInfo("debian", "0" * 64, 1, 0.0)]

    async def template(self, who: Principal, ref: str) -> TemplateInfo:
        self.check("template")
        for one in [*await self.templates(who), *self._built.get(who.tenant, [])]:
            if ref in (one.name, f"{one.name}@{one.version}"):
                return one
        raise TemplateNotFound(f"there is no template {ref!r}")

    async def build_template(
        self,
        who: Principal,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        tag: str | None,
        source: str | None,
        start: bool,
    ) -> TemplateInfo:
        self.check("build_template")
        received = b"".join([chunk async for chunk in chunks])
        if not received.startswith(b"oci-layout"):
            raise ImageInvalid("it is no tar file")
        return self._keep_template(who, name, len(received), source or "")

    def _keep_template(self, who: Principal, name: str, size: int, source: str) -> TemplateInfo:
        kept = self._built.setdefault(who.tenant, [])
        version = 1 + sum(one.name == name for one in kept)
        made = TemplateInfo(name, "1" * 64, size, time.time(), version, source=source)
        kept.insert(0, made)
        return made

    async def remove_template(self, who: Principal, ref: str) -> None:
        found = await self.template(who, ref)
        if found.version is None:
            raise InvalidRequest(f"{ref!r} is a template of the node")
        self._built[who.tenant].remove(found)

    async def make_template(
        self, who: Principal, ref: str, request: TemplateRequest, key: str | None
    ) -> OperationInfo:
        kept = self._find(who, ref)

        def work() -> Any:
            self.check("make_template")
            return self._keep_template(who, request.name, 1, f"session {kept.info.id}")

        return self._operate(who, kept.info.id, "template", key, request, work)

    def _operator(self, who: Principal) -> None:
        if who.role != "operator":
            raise Forbidden("only the operator may do this")

    async def create_token(self, who: Principal, tenant: str) -> TokenInfo:
        self._operator(who)
        name, secret = new_id("tok"), new_id("secret")
        self._tokens[secret] = Principal(tenant, name, "tenant")
        self._token_infos[name] = TokenInfo(name, tenant, "tenant", time.time())
        return msgspec.structs.replace(self._token_infos[name], token=secret)

    async def tokens(self, who: Principal) -> builtins.list[TokenInfo]:
        self._operator(who)
        return list(self._token_infos.values())

    async def revoke_token(self, who: Principal, token: str) -> None:
        self._operator(who)
        if self._token_infos.pop(token, None) is None:
            raise NotFound(f"there is no token {token!r}")
        for secret, principal in list(self._tokens.items()):
            if principal.actor == token:
                del self._tokens[secret]

    async def status(self, who: Principal) -> StatusInfo:
        self.check("status")
        running = {"running": len(self._sessions)}
        return StatusInfo("0", "fake", {"fake": []}, running, 0, 0, 0, database="/fake/sojourn.db")
