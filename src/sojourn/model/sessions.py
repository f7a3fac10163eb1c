"""The session: the durable thing a user owns, and what bounds it."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from sojourn.model.network import NetworkPolicy


class SessionState(enum.StrEnum):
    """Where a session stands. Everything in between is an operation, never a state."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    FAILED = "failed"
    DELETED = "deleted"


class SessionKind(enum.StrEnum):
    """What a session is kept for. The snapshots of a `template` one are a template's versions: it
    never runs, and everything that holds for stored sessions holds for it."""

    SESSION = "session"
    TEMPLATE = "template"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session's sandbox may use.

    `cpus` in cores, the others in bytes or counts. `disk_bytes` bounds what the session has
    changed on top of its template.
    """

    cpus: float = 2.0
    memory_bytes: int = 2 * 1024**3
    pids: int = 512
    disk_bytes: int = 10 * 1024**3


class AutoSnapshot(enum.StrEnum):
    """When a snapshot is taken without being asked for."""

    TURN = "turn"  # after every turn that changed something; the next turn waits for it
    IDLE = "idle"  # in the first pause of a quarter second after turns that changed something
    OFF = "off"


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of a session's automatic snapshots are kept; a snapshot that any rule keeps is kept.

    All of the last `keep_all_for` seconds; the newest `keep_last`; and of the newest `hourly`,
    `daily` and `weekly` hours, days and weeks (UTC) that have any, the newest one each. Kept in any
    case: the head, what forks were made from, the first one of a session; those with a label while
    `labelled`; those that were asked for (of explicit snapshots, suspensions and forks) while
    `explicit`. With these off, such snapshots are subject to the rules as automatic ones are.
    """

    keep_all_for: float = 3600.0
    keep_last: int = 10
    hourly: int = 24
    daily: int = 30
    weekly: int = 0
    labelled: bool = True
    explicit: bool = True


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a session is kept.

    After `idle_timeout` seconds without a call `on_idle` happens (`suspend` or `delete`; None:
    never), `max_lifetime` seconds after creation `on_expiry` (likewise); both deadlines survive
    restarts. `auto_resume` lets exec and file access wake it. `on_stop` says what a clean stop of
    the server does with a running session: `adopt` leaves the sandbox running, to be taken over by
    the next server, `suspend` puts it away. `auto_memory_bytes` is what memory images of
    automatic snapshots may take; the oldest lose their image first (their files stay).
    `retention` says which automatic snapshots are kept (None: all).
    """

    auto_snapshot: AutoSnapshot = AutoSnapshot.TURN
    idle_timeout: float | None = 900.0
    on_idle: str = "suspend"
    max_lifetime: float | None = None
    on_expiry: str = "suspend"
    auto_resume: bool = True
    on_stop: str = "adopt"
    auto_memory_bytes: int = 2 * 1024**3
    retention: Retention | None = Retention()


class Session(msgspec.Struct, frozen=True):
    """A session as the database holds it. Times are seconds since 1970 (UTC).

    `head` is the newest snapshot on the session's current line; `epoch` grows with each placement.
    `network` belongs to the session, not to a snapshot: a rollback leaves it as it is.
    `idle_deadline` and `lifetime_deadline` are absolute. `cause` says what broke, in state `failed`
    and after a sandbox was lost. `holder` is the node that alone may change it and has its newest
    local state, also while it is suspended; None: any node may take it, or there are no nodes.
    """

    id: str
    tenant: str
    name: str | None
    labels: dict[str, str]
    template: str
    env: dict[str, str]
    limits: Limits
    policy: Policy
    driver: str
    state: SessionState
    epoch: int
    head: str | None
    parent_session: str | None
    forked_from: str | None
    sandbox: str | None
    node: str | None
    idle_deadline: float | None
    lifetime_deadline: float | None
    cause: str | None
    created_at: float
    updated_at: float
    network: NetworkPolicy = NetworkPolicy()
    kind: SessionKind = SessionKind.SESSION
    holder: str | None = None

    @property
    def live(self) -> bool:
        """Whether it has a sandbox, running or frozen."""
        return self.state in (SessionState.RUNNING, SessionState.PAUSED)


def without_sandbox(
    id: str,
    tenant: str,
    *,
    template: str,
    driver: str,
    state: SessionState,
    created_at: float,
    **fields: Any,
) -> Session:
    """A session's record where there is no sandbox. What `fields` does not say is as in one that
    was never placed: no name, no snapshot, no deadline, usual limits and policy."""
    values: dict[str, Any] = {
        "name": None,
        "labels": {},
        "env": {},
        "limits": Limits(),
        "policy": Policy(),
        "epoch": 0,
        "head": None,
        "parent_session": None,
        "forked_from": None,
        "idle_deadline": None,
        "lifetime_deadline": None,
        "cause": None,
        "updated_at": created_at,
    }
    return Session(
        id=id,
        tenant=tenant,
        template=template,
        driver=driver,
        state=state,
        sandbox=None,
        node=None,
        created_at=created_at,
        **(values | fields),
    )
