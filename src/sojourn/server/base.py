"""What the HTTP routes ask of the session service.

Guarantee: every method checks tenant and state, raises only errors of the tree, and has changed
nothing when it raises InvalidRequest, NotFound or Conflict. The routes check the bounds of commands
and of numbers in the query first (`sojourn.server.checks`, `queries`). Verbs return an operation;
`wait` awaits it. Paths are raw bytes, absolute inside the session.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Protocol

import msgspec

from sojourn.node.guest import Guest
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
from sojourn.wire.guest import Output, ProcessState
from sojourn.wire.networks import ExposePort, NetworkChange, PortInfo, SecretInfo, SetSecret


class Principal(msgspec.Struct, frozen=True):
    """Who asks: tenant, an actor name for the event log, and role `operator` or `tenant`."""

    tenant: str
    actor: str
    role: str


class Usage(msgspec.Struct, frozen=True):
    """What a running session uses: seconds of processor time so far, bytes of files above the
    template."""

    cpu_seconds: float
    disk_bytes: int


class FileAccess(Protocol):
    """A held right to touch a session's files: use as an async context manager around `guest`.

    Entering resumes the session if needed and keeps lifecycle verbs out (or makes them interrupt,
    for long streams); leaving ends the turn (`mutates` decides whether it may snapshot).
    """

    async def __aenter__(self) -> Guest: ...

    async def __aexit__(self, *exc: object) -> None: ...


class ExportedArchive(Protocol):
    """A finished archive, until it is closed."""

    info: ArchiveInfo

    def pieces(self) -> AsyncIterator[bytes]:
        """Its bytes."""

    def close(self) -> None:
        """Give its room back. Idempotent."""


class SecretService(Protocol):
    """The secrets of tenants; no value is ever answered."""

    async def set(self, who: Principal, name: str, request: SetSecret) -> SecretInfo:
        """Make or change one; in force in every sandbox when answered."""

    async def list(self, who: Principal) -> builtins.list[SecretInfo]: ...
    async def delete(self, who: Principal, name: str) -> None: ...


class PortService(Protocol):
    """The exposed ports of sessions."""

    async def expose(self, who: Principal, ref: str, request: ExposePort) -> PortInfo:
        """Idempotent for the same request. Raises Conflict for another one."""

    async def list(self, who: Principal, ref: str) -> builtins.list[PortInfo]: ...
    async def unexpose(self, who: Principal, ref: str, number: int) -> None: ...
    def on_request(self, decide: Callable[[str, int], Awaitable[Principal | None]]) -> None:
        """Have `decide` asked who exposes a port that a request names; None: nobody."""

    async def serve(self) -> str:
        """HOST:PORT below which ports have their names, served from now on. Raises HostUnfit."""


class SessionService(Protocol):
    """The one machine-independent entry to sessions."""

    @property
    def secrets(self) -> SecretService: ...
    @property
    def ports(self) -> PortService: ...

    async def authenticate(self, token: str | None) -> Principal:
        """Raises Unauthenticated."""

    # -- sessions; `ref` is an id or a name of the caller's tenant
    async def create(
        self, who: Principal, request: CreateSession, key: str | None
    ) -> OperationInfo: ...
    async def get(self, who: Principal, ref: str) -> SessionInfo: ...
    async def list(
        self,
        who: Principal,
        *,
        state: str | None,
        labels: dict[str, str],
        limit: int,
        cursor: str | None,
    ) -> SessionPage: ...
    async def every(self) -> builtins.list[tuple[str, str]]:
        """Tenant and id of every session there is, whoever's they are."""

    async def standing(self, who: Principal, ref: str) -> tuple[str, int]:
        """State and epoch of a session, without a look at the database where that is not needed.
        Raises SessionNotFound."""

    async def usage(self, who: Principal, ref: str) -> Usage:
        """What a running session uses. Raises WrongState for one that does not run."""

    async def update(self, who: Principal, ref: str, request: UpdateSession) -> SessionInfo: ...
    async def change_network(self, who: Principal, ref: str, change: NetworkChange) -> SessionInfo:
        """Change of its network policy what is named, in one step. Raises InvalidRequest."""

    async def keep_alive(self, who: Principal, ref: str, seconds: float) -> SessionInfo: ...

    # -- verbs; all idempotent by key
    async def pause(self, who: Principal, ref: str, key: str | None) -> OperationInfo: ...
    async def suspend(
        self, who: Principal, ref: str, request: SuspendRequest, key: str | None
    ) -> OperationInfo: ...
    async def resume(
        self, who: Principal, ref: str, key: str | None, *, memory: bool = True
    ) -> OperationInfo: ...
    async def snapshot(
        self, who: Principal, ref: str, request: SnapshotRequest, key: str | None
    ) -> OperationInfo: ...
    async def rollback(
        self, who: Principal, ref: str, snapshot: str, key: str | None, *, force: bool = False
    ) -> OperationInfo:
        """`force` goes through although the network policy refuses to leave effects behind."""

    async def fork(
        self, who: Principal, ref: str, request: ForkRequest, key: str | None
    ) -> OperationInfo: ...
    async def promote(self, who: Principal, ref: str, key: str | None) -> OperationInfo: ...
    async def migrate(
        self, who: Principal, ref: str, node: str | None, key: str | None
    ) -> OperationInfo:
        """To a node by its id or name, or to one that is chosen. Raises Unsupported where there is
        but one."""

    async def delete(self, who: Principal, ref: str, key: str | None) -> OperationInfo: ...
    async def operation(self, who: Principal, operation: str) -> OperationInfo: ...
    async def wait(self, who: Principal, operation: str, timeout: float) -> OperationInfo:
        """Returns the operation, finished or not after `timeout` seconds. Does not raise for a
        failed operation: its `error` tells."""

    async def durable(
        self, who: Principal, ref: str, snapshot: str | None, timeout: float
    ) -> DurabilityInfo:
        """Wait until the head (or another snapshot of the tree) is in the object store; with 0
        only look. Raises SnapshotNotFound, Unsupported, and StoreUnreachable when it is not in
        time."""

    # -- history
    async def history(self, who: Principal, ref: str) -> builtins.list[SnapshotInfo]: ...
    async def diff(
        self, who: Principal, ref: str, a: str | None, b: str | None, *, text: bool, limit: int
    ) -> DiffInfo:
        """`a` None is the parent of `b`; `b` None is the head (a pending automatic snapshot is
        waited for). Ids or labels."""

    async def delete_snapshot(self, who: Principal, ref: str, snapshot: str) -> None: ...
    async def verify(self, who: Principal, ref: str, snapshot: str | None) -> VerifyReport: ...
    async def events(
        self, who: Principal, ref: str, *, after: int, limit: int, kinds: Collection[str] = ()
    ) -> builtins.list[EventInfo]: ...
    async def effects(
        self,
        who: Principal,
        ref: str,
        *,
        all: bool,
        cursor: str | None,
        limit: int,
    ) -> EffectPage:
        """What left a session, oldest first: what cannot be taken back, or all. `cursor` is the
        `next` of the page before. Raises InvalidRequest."""

    def follow_events(
        self, who: Principal, ref: str, *, after: int
    ) -> AsyncIterator[EventInfo]: ...

    # -- templates
    async def templates(self, who: Principal) -> builtins.list[TemplateInfo]: ...
    async def template(self, who: Principal, ref: str) -> TemplateInfo:
        """`NAME` (the newest version) or `NAME@VERSION`. Raises TemplateNotFound."""

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
        """A new version, of an image that comes as a tar. Raises ImageInvalid, NameTaken, TooLarge,
        StorageFull; nothing is kept then."""

    async def remove_template(self, who: Principal, ref: str) -> None: ...
    async def make_template(
        self, who: Principal, ref: str, request: TemplateRequest, key: str | None
    ) -> OperationInfo:
        """Result: TemplateInfo. The session runs on."""

    # -- archives
    async def export(
        self, who: Principal, ref: str, snapshot: str | None, secret: bytes | None
    ) -> ExportedArchive:
        """One snapshot, or the whole tree (the present state of a live session is taken first)."""

    async def import_(
        self,
        who: Principal,
        chunks: AsyncIterator[bytes],
        *,
        name: str | None,
        expect: str | None,
        secret: bytes | None,
    ) -> SessionInfo:
        """A new, suspended session. Raises ArchiveInvalid, NameTaken, StoreKeyInvalid,
        StorageFull; nothing is kept then."""

    # -- commands; a paused or suspended session is resumed first
    async def exec(self, who: Principal, ref: str, request: ExecRequest) -> ExecResult: ...
    def exec_stream(
        self, who: Principal, ref: str, request: ExecRequest
    ) -> AsyncIterator[ProcessState | Output]:
        """First the started process, then output as it comes, last the ended process."""

    async def spawn(
        self, who: Principal, ref: str, request: SpawnRequest, *, tag: str = "spawn"
    ) -> ProcessState: ...
    async def processes(self, who: Principal, ref: str) -> builtins.list[ProcessState]: ...
    async def process(self, who: Principal, ref: str, process: int) -> ProcessState: ...
    async def wait_process(
        self, who: Principal, ref: str, process: int, timeout: float
    ) -> ProcessState: ...
    def output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> AsyncIterator[Output]: ...
    async def discard_output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> None:
        """Read its output to the end and drop it, so that it is not held back. Neither wakes a
        session nor keeps it awake: returns at once where it does not run. Raises Interrupted."""

    async def write_stdin(self, who: Principal, ref: str, process: int, data: bytes) -> None: ...
    async def close_stdin(self, who: Principal, ref: str, process: int) -> None: ...
    async def signal(
        self, who: Principal, ref: str, process: int, signal: int, group: bool
    ) -> None: ...
    async def resize(
        self, who: Principal, ref: str, process: int, rows: int, columns: int
    ) -> None: ...
    async def run_code(self, who: Principal, ref: str, request: CodeRequest) -> CodeResult: ...

    # -- files
    def files(self, who: Principal, ref: str, what: str, *, mutates: bool) -> FileAccess:
        """`what` is the event's kind, such as `files.write /path`."""

    # -- a bracketed group of calls that counts as one turn
    async def begin_turn(self, who: Principal, ref: str, label: str | None) -> str: ...
    async def end_turn(self, who: Principal, ref: str, turn: str) -> SnapshotInfo | None: ...

    # -- service
    async def create_token(self, who: Principal, tenant: str) -> TokenInfo: ...
    async def tokens(self, who: Principal) -> builtins.list[TokenInfo]: ...
    async def revoke_token(self, who: Principal, token: str) -> None: ...
    async def status(self, who: Principal) -> StatusInfo: ...
