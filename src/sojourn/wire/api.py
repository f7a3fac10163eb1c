"""Schemas of the HTTP API, shared by server, client and command line.

Every request type refuses unknown fields. Times are seconds since 1970 (UTC) as numbers. Binary
values are base64 strings in JSON. A path that is not UTF-8 shows U+FFFD in `path` and its exact
bytes in `path_bytes`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sojourn.model import Limits, Policy
from sojourn.model.network import Effect, NetworkPolicy


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all request bodies."""


# -- sessions -----------------------------------------------------------------------------------


class CreateSession(Request, frozen=True):
    """`driver` None takes the node's default; `env` is present in every command of the session."""

    template: str = "debian"
    name: str | None = None
    labels: dict[str, str] = {}
    env: dict[str, str] = {}
    limits: Limits | None = None
    policy: Policy | None = None
    network: NetworkPolicy | None = None
    driver: str | None = None
    user: str | None = None
    cwd: str | None = None


class UpdateSession(Request, frozen=True):
    """Only the given fields change. `limits`, `policy` and `network` replace the whole value."""

    name: str | msgspec.UnsetType | None = msgspec.UNSET
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    limits: Limits | msgspec.UnsetType = msgspec.UNSET
    policy: Policy | msgspec.UnsetType = msgspec.UNSET
    network: NetworkPolicy | msgspec.UnsetType = msgspec.UNSET


class KeepAlive(Request, frozen=True):
    """Push the idle deadline to at least `seconds` from now; it never moves nearer."""

    seconds: float


class SnapshotRequest(Request, frozen=True):
    """`memory` False takes files only."""

    label: str | None = None
    memory: bool = True


class SuspendRequest(Request, frozen=True):
    """`memory` False keeps files only: processes end."""

    memory: bool = True


class ResumeRequest(Request, frozen=True):
    """`memory` False starts a suspended session from the files of its snapshot alone: no process
    goes on. The snapshot keeps its memory."""

    memory: bool = True


class RollbackRequest(Request, frozen=True):
    """`snapshot` is an id or a label of the session's tree. `force` goes through although the
    session's network policy refuses to leave requests behind that cannot be taken back."""

    snapshot: str
    force: bool = False


class ForkRequest(Request, frozen=True):
    """`snapshot` None forks from now; the children are named `names` when given. `force` as in a
    rollback."""

    n: int = 1
    snapshot: str | None = None
    names: list[str] | None = None
    labels: dict[str, str] = {}
    start: bool = True
    force: bool = False


class PromoteRequest(Request, frozen=True):
    """Make this fork's head the head of the session it was forked from."""


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as the API shows it. `node` is the id of the node that has it, in a cluster; None
    on one machine, and while no node has it."""

    id: str
    name: str | None
    labels: dict[str, str]
    template: str
    env: dict[str, str]
    limits: Limits
    policy: Policy
    driver: str
    state: str
    epoch: int
    head: str | None
    parent_session: str | None
    forked_from: str | None
    idle_deadline: float | None
    lifetime_deadline: float | None
    cause: str | None
    operation: str | None
    created_at: float
    updated_at: float
    network: NetworkPolicy = NetworkPolicy()
    node: str | None = None


class SessionPage(msgspec.Struct, frozen=True):
    """One page; `next` is the cursor of the following one."""

    items: list[SessionInfo]
    next: str | None


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot as the API shows it. `current` marks the session's head; `memory` is False for a
    files-only one, `thinned` when its memory image was dropped by policy."""

    id: str
    session: str
    parent: str | None
    kind: str
    label: str | None
    created_at: float
    fingerprint: str
    memory: bool
    thinned: bool
    memory_bytes: int
    layer_bytes: int
    current: bool
    durable_at: float | None = None


class DurabilityInfo(msgspec.Struct, frozen=True):
    """How far a session is in the object store.

    `waiting` snapshots are not there yet, the oldest of them for `lag` seconds.
    `durable_head_at` is when the newest on the head's line that is there was taken: what the loss
    of this node would take the session back to. `durable_at` is when the snapshot that was waited
    for came to be there.
    """

    session: str
    head: str | None
    head_durable: bool
    waiting: int
    lag: float
    durable_head_at: float | None
    durable_at: float | None = None


class ChangeInfo(msgspec.Struct, frozen=True):
    """One difference. `kind` is added, changed or removed."""

    path: str
    kind: str
    what: list[str]
    type: str
    size_before: int | None
    size_after: int | None
    path_bytes: bytes | None = None


class EffectInfo(Effect, frozen=True):
    """A request or connection that left a session. `snapshot` was the session's head when it began;
    `lasting` ones are not taken back by a rollback (all but reading ones)."""

    snapshot: str | None = None
    lasting: bool = True


class EffectPage(msgspec.Struct, frozen=True):
    """One page, oldest first; `next` is the cursor of the following one."""

    items: list[EffectInfo]
    next: str | None


class EffectsLeft(msgspec.Struct, frozen=True):
    """The lasting effects between two states: how many, and the oldest of them (at most 200)."""

    count: int
    effects: list[EffectInfo]


class DiffInfo(msgspec.Struct, frozen=True):
    """Differences from snapshot `a` to `b`; `text` holds unified diffs by path where asked for.
    `effects` are the lasting ones that happened on the way from the one to the other."""

    a: str
    b: str
    changes: list[ChangeInfo]
    text: dict[str, str | None] = {}
    truncated: bool = False
    effects: EffectsLeft | None = None


class FaultInfo(msgspec.Struct, frozen=True):
    """One object found bad by verify."""

    object: str
    path: str | None
    cause: str
    snapshot: str


class VerifyReport(msgspec.Struct, frozen=True):
    """What verify read and found. `ok` is True when every byte is as it was put away."""

    session: str
    ok: bool
    snapshots: int
    objects: int
    bytes: int
    faults: list[FaultInfo]


# -- operations and events ----------------------------------------------------------------------


class OperationInfo(msgspec.Struct, frozen=True):
    """A verb under way or done. `state` is pending, running, succeeded or failed. `result` of one
    that succeeded is a SnapshotInfo for snapshot, a list of SessionInfo for fork, a TemplateInfo
    for template, null for delete and a SessionInfo for every other verb. `error` of one that failed
    is an ErrorBody. `effects` of a rollback, promotion or fork are those that it leaves behind and
    that cannot be taken back."""

    id: str
    session: str
    verb: str
    state: str
    step: str | None
    created_at: float
    finished_at: float | None
    result: Any = None
    error: dict[str, Any] | None = None
    effects: EffectsLeft | None = None


class EventInfo(msgspec.Struct, frozen=True):
    """Who did what to a session, when, with what result and between which snapshots."""

    seq: int
    session: str
    at: float
    actor: str
    kind: str
    result: str
    details: dict[str, Any]
    snapshot_before: str | None
    snapshot_after: str | None
    operation: str | None


class TurnRequest(Request, frozen=True):
    """Begin a group of calls that counts as one turn; `label` names its snapshot."""

    label: str | None = None


class TurnInfo(msgspec.Struct, frozen=True):
    """A turn that was begun; `turn` ends it."""

    turn: str


# -- commands -----------------------------------------------------------------------------------


class ExecRequest(Request, frozen=True):
    """A command: `argv`, or `shell` text for the session's shell.

    `argv_bytes` gives arguments that are not UTF-8. `stdin` is inline input (at most 1 MiB;
    larger input is streamed to a spawned process). `max_output` bounds what an answer in JSON
    carries of each stream; more sets `truncated`.
    """

    argv: list[str] | None = None
    argv_bytes: list[bytes] | None = None
    shell: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    timeout: float | None = None
    stdin: bytes | None = None
    max_output: int = 16 * 1024 * 1024


class SpawnRequest(ExecRequest, frozen=True):
    """A process that goes on by itself. `keep` bytes of each stream are kept inside for later."""

    open_stdin: bool = False
    pty: tuple[int, int] | None = None
    keep: int = 8 * 1024 * 1024
    lossless: bool = False


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended: `exit_code`, or 128 + `signal`. `process` lets more be read."""

    exit_code: int
    signal: int | None
    timed_out: bool
    reason: str | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    process: int
    duration: float


class ProcessInfo(msgspec.Struct, frozen=True):
    """A process of the session. Offsets are (first kept, next) of stdout and stderr."""

    id: int
    pid: int
    argv: list[str]
    pty: bool
    running: bool
    started_at: float
    ended_at: float | None
    exit_code: int | None
    signal: int | None
    timed_out: bool
    reason: str | None
    stdout: tuple[int, int]
    stderr: tuple[int, int]


class SignalRequest(Request, frozen=True):
    """`signal` is a number or a name such as TERM."""

    signal: int | str = "KILL"
    group: bool = True


class ResizeRequest(Request, frozen=True):
    """Terminal size."""

    rows: int
    columns: int


class CodeRequest(Request, frozen=True):
    """Code for the session's persistent interpreter."""

    code: str
    context: str = "default"
    timeout: float | None = None


# -- files --------------------------------------------------------------------------------------


class FileInfo(msgspec.Struct, frozen=True):
    """One file inside a session."""

    path: str
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    target: str | None = None
    path_bytes: bytes | None = None
    target_bytes: bytes | None = None


class FileChange(msgspec.Struct, frozen=True):
    """An event of a watch."""

    kind: str
    path: str
    is_dir: bool
    path_bytes: bytes | None = None


class TreeInfo(msgspec.Struct, frozen=True):
    """What was unpacked: members of the tar, bytes of file content, and members left out."""

    members: int
    bytes: int
    skipped: list[str] = []


# -- service ------------------------------------------------------------------------------------


class TemplateInfo(msgspec.Struct, frozen=True):
    """What sessions can start from: a template of the node (`version` is None), or a version of one
    that was built, with what its image says. With `memory` its processes run from the start."""

    name: str
    layer: str
    bytes: int
    created_at: float
    version: int | None = None
    versions: list[int] = []
    layers: int = 1
    memory: bool = False
    memory_bytes: int = 0
    source: str = ""
    digest: str | None = None
    env: dict[str, str] = {}
    user: str = "root"
    cwd: str = ""
    entrypoint: list[str] = []
    cmd: list[str] = []
    start: bool = False
    labels: dict[str, str] = {}
    left_out: int = 0
    durable_at: float | None = None


IMAGE_TYPE = "application/x-tar"
"""An image on its way to the server: an OCI layout, or what `docker save` writes, as a tar."""


class TemplateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make a template of a session's present state; without `memory` of its files alone. `env`,
    `user`, `cwd` and what follows replace what the session's own template says."""

    name: str
    memory: bool = True
    env: dict[str, str] | None = None
    user: str | None = None
    cwd: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] | None = None
    start: bool | None = None
    step: str | None = None
    source: str | None = None


ARCHIVE_TYPE = "application/vnd.sojourn.archive"
ARCHIVE_HEADER = "Sojourn-Archive"
"""In the answer to an export: an ArchiveInfo as JSON."""
ARCHIVE_KEY_HEADER = "Sojourn-Archive-Key"


class ArchiveInfo(msgspec.Struct, frozen=True):
    """An exported archive: the digest at its end (BLAKE3 of all before it, in hex), its size, the
    session and snapshot it stands at with that snapshot's fingerprint, and how many it holds."""

    digest: str
    bytes: int
    session: str
    snapshot: str
    fingerprint: str
    snapshots: int
    encrypted: bool


class CreateToken(Request, frozen=True):
    """A token for a tenant; made by the operator."""

    tenant: str


class TokenInfo(msgspec.Struct, frozen=True):
    """A token; `token` itself is shown once, on creation."""

    id: str
    tenant: str
    role: str
    created_at: float
    token: str | None = None


class ObjectStoreInfo(msgspec.Struct, frozen=True):
    """Where snapshots become durable and how far behind that is: `waiting` snapshots, the oldest
    for `lag` seconds; `error` is what holds it up. `sessions` lists those that wait. One that lies
    `in_data`, the server's data directory, does not survive its loss."""

    url: str
    waiting: int
    lag: float
    sent_bytes: int
    error: str | None
    sessions: list[DurabilityInfo]
    in_data: bool = False


class GatewayInfo(msgspec.Struct, frozen=True):
    """The process through which sessions reach the outside: `running` since `since`, how often it
    was started again, how many sandboxes it serves, and what ended the last one (`error`)."""

    running: bool
    pid: int | None
    since: float | None
    restarts: int
    sandboxes: int
    error: str | None = None


class StatusInfo(msgspec.Struct, frozen=True):
    """The server at a glance. `database`, the address of the object store and the gateway are told
    to the operator alone."""

    version: str
    node: str
    drivers: dict[str, list[str]]
    sessions: dict[str, int]
    sandboxes: int
    disk_free_bytes: int
    store_bytes: int
    objects: ObjectStoreInfo | None = None
    gateway: GatewayInfo | None = None
    database: str | None = None


class HealthInfo(msgspec.Struct, frozen=True):
    """The answer of a server that serves."""

    status: str
    version: str


class ServerAddress(msgspec.Struct, frozen=True):
    """The content of `server.json`: where the local server answers, and its process."""

    url: str
    pid: int
