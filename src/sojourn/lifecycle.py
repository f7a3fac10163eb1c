"""What may happen to a session, decided without doing any of it.

Guarantee: every verb in every state is either allowed, without effect, or refused with WrongState
saying what is possible; every session found after a crash, whatever it was in the middle of, is
led to a stable state in a few decisions, and no decision gives up a sandbox that holds work which
no published snapshot holds. These are pure functions over values, so that all cases can be tried.
"""

from __future__ import annotations

import enum

import msgspec

from sojourn.errors import SessionNotFound, WrongState
from sojourn.model.sessions import Policy, Session, SessionState

CREATING = SessionState.CREATING
RUNNING = SessionState.RUNNING
PAUSED = SessionState.PAUSED
SUSPENDED = SessionState.SUSPENDED
FAILED = SessionState.FAILED
DELETED = SessionState.DELETED


# -- verbs ------------------------------------------------------------------------------------


class Verb(enum.StrEnum):
    """What can be asked of a session."""

    CREATE = "create"
    EXEC = "exec"
    FILES = "files"
    RUN_CODE = "run_code"
    UPDATE = "update"
    KEEP_ALIVE = "keep_alive"
    PAUSE = "pause"
    SUSPEND = "suspend"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    ROLLBACK = "rollback"
    FORK = "fork"
    PROMOTE = "promote"
    DELETE = "delete"


class Effect(enum.StrEnum):
    """Work a transition needs, to be done in order."""

    START = "start"  # a fresh sandbox from the template, or from the head of a fork
    RESTORE = "restore"  # a sandbox from a snapshot
    FREEZE = "freeze"
    THAW = "thaw"
    CAPTURE = "capture"  # a snapshot of the sandbox, which goes on
    PUT_AWAY = "put_away"  # a snapshot of the sandbox, which ends
    COPY_HEAD = "copy_head"  # a snapshot of the same content as the head
    CHILDREN = "children"  # new sessions from a snapshot
    MOVE_HEAD = "move_head"  # to another snapshot; by a promote, of the session forked from
    END = "end"  # the sandbox, without keeping anything of it
    PURGE = "purge"  # everything the session owns


class Command(msgspec.Struct, frozen=True):
    """A verb with what its decision depends on. `wake` False: the caller says it must not resume
    the session. `snapshot` says that the verb names one (rollback, fork)."""

    verb: Verb
    wake: bool = True
    snapshot: bool = False


class Transition(msgspec.Struct, frozen=True):
    """The state after the effects. Without effects the verb succeeds at once."""

    state: SessionState
    effects: tuple[Effect, ...] = ()


_CALLS = (Verb.EXEC, Verb.FILES, Verb.RUN_CODE)
_STAY = (Verb.UPDATE, Verb.KEEP_ALIVE)

_TABLE: dict[tuple[Verb, SessionState], Transition] = {
    (Verb.CREATE, CREATING): Transition(RUNNING, (Effect.START,)),
    (Verb.PAUSE, RUNNING): Transition(PAUSED, (Effect.FREEZE,)),
    (Verb.PAUSE, PAUSED): Transition(PAUSED),
    (Verb.SUSPEND, RUNNING): Transition(SUSPENDED, (Effect.PUT_AWAY,)),
    (Verb.SUSPEND, PAUSED): Transition(SUSPENDED, (Effect.PUT_AWAY,)),
    (Verb.SUSPEND, SUSPENDED): Transition(SUSPENDED),
    (Verb.RESUME, RUNNING): Transition(RUNNING),
    (Verb.RESUME, PAUSED): Transition(RUNNING, (Effect.THAW,)),
    (Verb.RESUME, SUSPENDED): Transition(RUNNING, (Effect.RESTORE,)),
    (Verb.RESUME, FAILED): Transition(RUNNING, (Effect.RESTORE,)),
    (Verb.SNAPSHOT, RUNNING): Transition(RUNNING, (Effect.CAPTURE,)),
    (Verb.SNAPSHOT, PAUSED): Transition(PAUSED, (Effect.CAPTURE,)),
    (Verb.SNAPSHOT, SUSPENDED): Transition(SUSPENDED, (Effect.COPY_HEAD,)),
    (Verb.ROLLBACK, RUNNING): Transition(RUNNING, (Effect.END, Effect.RESTORE)),
    (Verb.ROLLBACK, PAUSED): Transition(RUNNING, (Effect.END, Effect.RESTORE)),
    (Verb.ROLLBACK, SUSPENDED): Transition(SUSPENDED, (Effect.MOVE_HEAD,)),
    (Verb.ROLLBACK, FAILED): Transition(SUSPENDED, (Effect.MOVE_HEAD,)),
    (Verb.FORK, RUNNING): Transition(RUNNING, (Effect.CAPTURE, Effect.CHILDREN)),
    (Verb.FORK, PAUSED): Transition(PAUSED, (Effect.CAPTURE, Effect.CHILDREN)),
    (Verb.FORK, SUSPENDED): Transition(SUSPENDED, (Effect.CHILDREN,)),
    (Verb.FORK, FAILED): Transition(FAILED, (Effect.CHILDREN,)),
    (Verb.PROMOTE, RUNNING): Transition(RUNNING, (Effect.CAPTURE, Effect.MOVE_HEAD)),
    (Verb.PROMOTE, PAUSED): Transition(PAUSED, (Effect.CAPTURE, Effect.MOVE_HEAD)),
    (Verb.PROMOTE, SUSPENDED): Transition(SUSPENDED, (Effect.MOVE_HEAD,)),
    (Verb.DELETE, CREATING): Transition(DELETED, (Effect.END, Effect.PURGE)),
    (Verb.DELETE, RUNNING): Transition(DELETED, (Effect.END, Effect.PURGE)),
    (Verb.DELETE, PAUSED): Transition(DELETED, (Effect.END, Effect.PURGE)),
    (Verb.DELETE, SUSPENDED): Transition(DELETED, (Effect.PURGE,)),
    (Verb.DELETE, FAILED): Transition(DELETED, (Effect.END, Effect.PURGE)),
    (Verb.DELETE, DELETED): Transition(DELETED),
    **{(verb, RUNNING): Transition(RUNNING) for verb in _CALLS},
    **{(verb, PAUSED): Transition(RUNNING, (Effect.THAW,)) for verb in _CALLS},
    **{(verb, SUSPENDED): Transition(RUNNING, (Effect.RESTORE,)) for verb in _CALLS},
    **{(verb, state): Transition(state) for verb in _STAY for state in SessionState},
}
del _TABLE[(Verb.UPDATE, DELETED)], _TABLE[(Verb.KEEP_ALIVE, DELETED)]

_NEXT_STEPS = {
    CREATING: "Wait until it is created, or delete it.",
    RUNNING: "Nothing needs to be done.",
    PAUSED: "Resume it first (`sojourn session resume`).",
    SUSPENDED: "Resume it first (`sojourn session resume`).",
    FAILED: "Resume it from its last snapshot (`sojourn session resume`), roll back to another one"
    " (`sojourn session history`, `rollback`), or delete it.",
}


def decide(session: Session, command: Command) -> Transition:
    """What a verb does to a session now. Raises WrongState, SessionNotFound for a deleted one."""
    verb, state = command.verb, session.state
    transition = _TABLE.get((verb, state))
    if transition is None:
        if state is DELETED:
            raise SessionNotFound(f"session {session.id} does not exist", session=session.id)
        because = f" ({session.cause})" if session.cause else ""
        raise _refused(session, f"session {session.id} is {state}{because}: {verb} is not possible")
    wakes = verb in _CALLS and state in (PAUSED, SUSPENDED)
    if wakes and not (session.policy.auto_resume and command.wake):
        raise _refused(session, f"session {session.id} is {state} and does not resume by itself")
    if command.snapshot and verb is Verb.FORK:
        # What is forked is in the store already; the sandbox is left alone.
        return Transition(state, (Effect.CHILDREN,))
    needs_head = verb in (Verb.RESUME, Verb.FORK) and state in (SUSPENDED, FAILED)
    if needs_head and session.head is None:
        raise WrongState(
            f"session {session.id} is {state} and has no snapshot to go on from",
            next_step="Delete it.",
            session=session.id,
            state=str(state),
        )
    return transition


def _refused(session: Session, message: str) -> WrongState:
    return WrongState(
        message,
        next_step=_NEXT_STEPS[session.state],
        session=session.id,
        state=str(session.state),
    )


# -- deadlines --------------------------------------------------------------------------------


def first_deadlines(policy: Policy, now: float) -> tuple[float | None, float | None]:
    """Idle and lifetime deadline of a session created now."""
    lifetime = None if policy.max_lifetime is None else now + policy.max_lifetime
    return idle_deadline(policy, None, now), lifetime


def idle_deadline(policy: Policy, present: float | None, now: float) -> float | None:
    """The idle deadline after a call or a resume: moved out, never in. None: never idle."""
    if policy.idle_timeout is None:
        return None
    wanted = now + policy.idle_timeout
    return wanted if present is None else max(present, wanted)


def kept_alive(session: Session, now: float, seconds: float) -> float | None:
    """The idle deadline after an explicit request to keep the session at least so long."""
    if session.idle_deadline is None:
        return None  # it never becomes idle (or is put away): there is nothing to move
    return max(session.idle_deadline, now + seconds)


def policy_deadlines(
    session: Session, policy: Policy, now: float
) -> tuple[float | None, float | None]:
    """Idle and lifetime deadline after the owner set another policy. Only here may they come
    nearer, since the owner asked for it; the idle time starts anew. A lifetime that is not changed
    keeps its deadline, so that one that was spent does not come back."""
    idle = idle_deadline(policy, None, now) if session.live else None
    lifetime = session.lifetime_deadline
    if policy.max_lifetime is None:
        lifetime = None
    elif policy.max_lifetime != session.policy.max_lifetime:
        lifetime = session.created_at + policy.max_lifetime
    return idle, lifetime


def settled_deadline(session: Session, state: SessionState, now: float) -> float | None:
    """The idle deadline to store with a change of state: a woken session starts its idle time, a
    paused one keeps the one it has, one without a sandbox has none."""
    if state is RUNNING:
        return idle_deadline(session.policy, session.idle_deadline, now)
    if state is PAUSED:
        return session.idle_deadline
    return None


def expired(session: Session, now: float, *, busy: bool = False) -> Verb | None:
    """What must happen to a session whose time has come; None when nothing must.

    An idle session is suspended, also a paused one, unless its policy says that it is deleted then.
    `busy` says that calls are under way: it is not idle then. At the end of its lifetime the policy
    decides; `lifetime_after` then marks it as spent.
    """
    lifetime = session.lifetime_deadline
    if lifetime is not None and lifetime <= now and session.state is not DELETED:
        if session.policy.on_expiry == "delete":
            return Verb.DELETE
        if session.live:
            return Verb.SUSPEND
    idle = session.idle_deadline
    if session.live and idle is not None and idle <= now and not busy:
        return Verb.DELETE if session.policy.on_idle == "delete" else Verb.SUSPEND
    return None


def lifetime_after(session: Session, now: float) -> float | None:
    """The lifetime deadline to store with a suspension: one that has come is spent, so that a
    session resumed after its lifetime is not put away again at once."""
    lifetime = session.lifetime_deadline
    return None if lifetime is not None and lifetime <= now else lifetime


# -- after a crash ----------------------------------------------------------------------------


class Host(enum.StrEnum):
    """What the host shows of a session's sandbox."""

    ALIVE = "alive"
    FROZEN = "frozen"
    GONE = "gone"


class Found(msgspec.Struct, frozen=True):
    """What was found on the host. `cause`: why the sandbox ended, where that can be told."""

    host: Host
    cause: str | None = None


class Action(enum.StrEnum):
    """What to do with a session found after a crash, before its operation (if any) goes on."""

    NONE = "none"  # it is as it should be
    ADOPT = "adopt"  # take the sandbox over as it is
    THAW_AND_ADOPT = "thaw_and_adopt"
    FREEZE_AND_ADOPT = "freeze_and_adopt"
    UNSEAL_AND_ADOPT = "unseal_and_adopt"  # it went on after it was sealed: the seal is void
    LEAVE = "leave"  # the operation deals with what is there
    TO_SUSPENDED = "to_suspended"  # at the head; there is no sandbox any more
    TO_FAILED = "to_failed"


class Decision(msgspec.Struct, frozen=True):
    """`cause` goes into the record and the event log."""

    action: Action
    cause: str | None = None


_UNKNOWN_CAUSE = "the sandbox was gone when the server started"


def reconcile(session: Session, verb: str | None, sealed: bool, found: Found) -> Decision:
    """What brings a session to rest, given the verb of its unfinished operation (None: it has
    none), whether that operation has recorded a seal, and the host.

    Operations begin again from what their steps recorded once this is done, so nothing has to be
    undone here; only the sandbox must be in someone's hands or gone. A sealed sandbox that is
    still frozen (or ended) holds nothing its seal does not, so the operation goes forward.
    """
    state, host = session.state, found.host
    if sealed:
        if host is Host.ALIVE:
            return Decision(Action.UNSEAL_AND_ADOPT)
        return Decision(Action.LEAVE)
    if verb == Verb.DELETE:
        return Decision(Action.LEAVE)
    if state is CREATING:
        if verb in (Verb.CREATE, Verb.FORK):
            return Decision(Action.LEAVE)
        return Decision(Action.TO_FAILED, cause="its creation was interrupted")
    if session.live:
        if host is Host.GONE:
            return Decision(Action.TO_SUSPENDED, cause=found.cause or _UNKNOWN_CAUSE)
        if state is RUNNING:
            return Decision(Action.ADOPT if host is Host.ALIVE else Action.THAW_AND_ADOPT)
        return Decision(Action.ADOPT if host is Host.FROZEN else Action.FREEZE_AND_ADOPT)
    return Decision(Action.NONE)
