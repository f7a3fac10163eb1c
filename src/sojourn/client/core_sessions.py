"""Plans about sessions, their history, events and the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.client.core import (
    ANSWER_SECONDS,
    JSON_TYPE,
    Plan,
    Request,
    act,
    convert,
    decode,
    get,
    json_body,
    query_text,
    segment,
    session_path,
    verb,
    verb_result,
)
from sojourn.client.core_networks import NetworkLike, moved, network_of
from sojourn.model import Limits, Policy
from sojourn.wire.api import (
    CodeRequest,
    CreateSession,
    CreateToken,
    DiffInfo,
    DurabilityInfo,
    EffectsLeft,
    EventInfo,
    ForkRequest,
    HealthInfo,
    KeepAlive,
    OperationInfo,
    ResumeRequest,
    RollbackRequest,
    SessionInfo,
    SessionPage,
    SnapshotInfo,
    SnapshotRequest,
    StatusInfo,
    SuspendRequest,
    TokenInfo,
    TurnInfo,
    TurnRequest,
    UpdateSession,
    VerifyReport,
)
from sojourn.wire.code import CodeResult
from sojourn.wire.nodes import MigrateRequest

PAGE = 500

LimitsLike = Limits | Mapping[str, Any]
PolicyLike = Policy | Mapping[str, Any]
Labels = Mapping[str, str]


def limits_of(value: LimitsLike | None) -> Limits | None:
    """Limits from what a caller gives. Raises InvalidRequest."""
    return None if value is None else convert(value, Limits, "limits")


def policy_of(value: PolicyLike | None) -> Policy | None:
    """A policy from what a caller gives. Raises InvalidRequest."""
    return None if value is None else convert(value, Policy, "policy")


# -- sessions -----------------------------------------------------------------------------------


def create(
    *,
    template: str,
    name: str | None,
    labels: Labels | None,
    env: Mapping[str, str] | None,
    limits: LimitsLike | None,
    policy: PolicyLike | None,
    network: NetworkLike | None,
    driver: str | None,
    user: str | None,
    cwd: str | None,
    key: str | None,
) -> Plan[SessionInfo]:
    """Create a session."""
    body = CreateSession(
        template=template,
        name=name,
        labels=dict(labels or {}),
        env=dict(env or {}),
        limits=limits_of(limits),
        policy=policy_of(policy),
        network=network_of(network),
        driver=driver,
        user=user,
        cwd=cwd,
    )
    info: SessionInfo = yield from verb_result(SessionInfo, b"POST", "/v1/sessions", body, key=key)
    return info


def get_session(ref: str) -> Plan[SessionInfo]:
    """A session by id or name."""
    info: SessionInfo = yield from get(session_path(ref), SessionInfo)
    return info


def list_sessions(
    *, state: str | None, labels: Labels | None, limit: int | None
) -> Plan[list[SessionInfo]]:
    """Sessions, all pages, at most `limit`."""
    wanted = [f"{key}={value}" for key, value in (labels or {}).items()]
    found: list[SessionInfo] = []
    cursor: str | None = None
    while limit is None or len(found) < limit:
        size = PAGE if limit is None else min(PAGE, limit - len(found))
        page: SessionPage = yield from get(
            "/v1/sessions", SessionPage, state=state, label=wanted, limit=size, cursor=cursor
        )
        found += page.items
        cursor = page.next
        if cursor is None:
            break
    return found


def update(
    ref: str,
    *,
    name: str | msgspec.UnsetType | None,
    labels: Labels | None,
    limits: LimitsLike | None,
    policy: PolicyLike | None,
    network: NetworkLike | None,
) -> Plan[SessionInfo]:
    """Change what is given."""
    body = UpdateSession(
        name=name,
        labels=msgspec.UNSET if labels is None else dict(labels),
        limits=limits_of(limits) or msgspec.UNSET,
        policy=policy_of(policy) or msgspec.UNSET,
        network=network_of(network) or msgspec.UNSET,
    )
    response = yield Request(
        b"PATCH", session_path(ref), (JSON_TYPE,), json_body(body), repeatable=True
    )
    info: SessionInfo = decode(response, SessionInfo)
    return info


def keep_alive(ref: str, seconds: float) -> Plan[SessionInfo]:
    """Push the idle deadline away."""
    target = f"{session_path(ref)}/keepalive"
    content = json_body(KeepAlive(seconds=seconds))
    response = yield Request(b"POST", target, (JSON_TYPE,), content, repeatable=True)
    info: SessionInfo = decode(response, SessionInfo)
    return info


def simple_verb(ref: str, name: str, wait: str | None = None) -> Plan[SessionInfo]:
    """Pause."""
    path = f"{session_path(ref)}/{name}"
    info: SessionInfo = yield from verb_result(SessionInfo, b"POST", path, wait=wait)
    return info


def suspend(ref: str, memory: bool, wait: str | None) -> Plan[SessionInfo]:
    """Put the session away."""
    path, body = f"{session_path(ref)}/suspend", SuspendRequest(memory=memory)
    info: SessionInfo = yield from verb_result(SessionInfo, b"POST", path, body, wait=wait)
    return info


def resume(ref: str, memory: bool) -> Plan[SessionInfo]:
    """Let the session go on."""
    path, body = f"{session_path(ref)}/resume", ResumeRequest(memory=memory)
    info: SessionInfo = yield from verb_result(SessionInfo, b"POST", path, body)
    return info


def migrate(ref: str, node: str | None) -> Plan[SessionInfo]:
    """Move the session to another node."""
    yield from verb(b"POST", f"{session_path(ref)}/migrate", MigrateRequest(node=node))
    return (yield from get_session(ref))


def durability(ref: str, *, wait: float, snapshot: str | None) -> Plan[DurabilityInfo]:
    """How far the session is in the object store."""
    query = query_text({"wait": wait, "snapshot": snapshot})
    response = yield Request(
        b"GET",
        f"{session_path(ref)}/durability{query}",
        timeout=ANSWER_SECONDS + wait,
        repeatable=True,
    )
    info: DurabilityInfo = decode(response, DurabilityInfo)
    return info


Moved = tuple[SessionInfo, EffectsLeft | None]


def rollback(ref: str, snapshot: str, force: bool) -> Plan[Moved]:
    """Go back to a snapshot."""
    path, body = f"{session_path(ref)}/rollback", RollbackRequest(snapshot=snapshot, force=force)
    return (yield from moved(SessionInfo, path, body))


def promote(ref: str) -> Plan[Moved]:
    """Make a fork's head its parent's."""
    return (yield from moved(SessionInfo, f"{session_path(ref)}/promote"))


def fork(
    ref: str,
    *,
    n: int,
    snapshot: str | None,
    names: list[str] | None,
    labels: Labels | None,
    start: bool,
    force: bool,
    key: str | None,
) -> Plan[tuple[list[SessionInfo], EffectsLeft | None]]:
    """Make new sessions from a snapshot or from now."""
    body = ForkRequest(
        n=n, snapshot=snapshot, names=names, labels=dict(labels or {}), start=start, force=force
    )
    path = f"{session_path(ref)}/fork"
    return (yield from moved(list[SessionInfo], path, body, key=key))


def delete(ref: str) -> Plan[None]:
    """Delete the session."""
    yield from verb(b"DELETE", session_path(ref))


def operation(name: str) -> Plan[OperationInfo]:
    """An operation as it stands."""
    info: OperationInfo = yield from get(f"/v1/operations/{segment(name)}", OperationInfo)
    return info


# -- history ------------------------------------------------------------------------------------


def snapshot_name(snapshot: str | SnapshotInfo) -> str:
    """The id or label of what a caller gives for a snapshot."""
    return snapshot.id if isinstance(snapshot, SnapshotInfo) else snapshot


def snapshot(ref: str, *, label: str | None, memory: bool, wait: str | None) -> Plan[SnapshotInfo]:
    """Take a snapshot."""
    path = f"{session_path(ref)}/snapshots"
    body = SnapshotRequest(label=label, memory=memory)
    info: SnapshotInfo = yield from verb_result(SnapshotInfo, b"POST", path, body, wait=wait)
    return info


def history(ref: str) -> Plan[list[SnapshotInfo]]:
    """The snapshots of a session."""
    found: list[SnapshotInfo] = yield from get(f"{session_path(ref)}/snapshots", list[SnapshotInfo])
    return found


def delete_snapshot(ref: str, name: str) -> Plan[None]:
    """Delete a snapshot."""
    yield from act(b"DELETE", f"{session_path(ref)}/snapshots/{segment(name)}")


def diff(ref: str, a: str | None, b: str | None, *, text: bool, limit: int) -> Plan[DiffInfo]:
    """Compare two snapshots."""
    found: DiffInfo = yield from get(
        f"{session_path(ref)}/diff", DiffInfo, timeout=None, a=a, b=b, text=text, limit=limit
    )
    return found


def verify(ref: str, name: str | None) -> Plan[VerifyReport]:
    """Read every byte."""
    target = f"{session_path(ref)}/verify{query_text({'snapshot': name})}"
    response = yield Request(b"POST", target, timeout=None, repeatable=True)
    report: VerifyReport = decode(response, VerifyReport)
    return report


def events(ref: str, after: int) -> Plan[list[EventInfo]]:
    """All events after a number."""
    found: list[EventInfo] = []
    while True:
        page: list[EventInfo] = yield from get(
            f"{session_path(ref)}/events", list[EventInfo], after=after, limit=1000
        )
        found += page
        if len(page) < 1000:
            return found
        after = page[-1].seq


def begin_turn(ref: str, label: str | None) -> Plan[str]:
    """Begin a turn; gives what ends it."""
    content = json_body(TurnRequest(label=label))
    response = yield Request(b"POST", f"{session_path(ref)}/turns", (JSON_TYPE,), content)
    info: TurnInfo = decode(response, TurnInfo)
    return info.turn


def end_turn(ref: str, turn: str) -> Plan[SnapshotInfo | None]:
    """End a turn; gives its snapshot."""
    target = f"{session_path(ref)}/turns/{segment(turn)}/end"
    response = yield Request(b"POST", target, timeout=2 * ANSWER_SECONDS)
    info: SnapshotInfo | None = decode(response, SnapshotInfo | None)
    return info


def run_code(ref: str, code: str, *, context: str, timeout: float | None) -> Plan[CodeResult]:
    """Run code in the persistent interpreter."""
    content = json_body(CodeRequest(code=code, context=context, timeout=timeout))
    response = yield Request(
        b"POST", f"{session_path(ref)}/code", (JSON_TYPE,), content, timeout=None
    )
    result: CodeResult = decode(response, CodeResult)
    return result


# -- service ------------------------------------------------------------------------------------


def health() -> Plan[HealthInfo]:
    """Whether the server serves."""
    info: HealthInfo = yield from get("/v1/health", HealthInfo)
    return info


def status() -> Plan[StatusInfo]:
    """The server at a glance."""
    info: StatusInfo = yield from get("/v1/status", StatusInfo)
    return info


def create_token(tenant: str) -> Plan[TokenInfo]:
    """Make a token."""
    content = json_body(CreateToken(tenant=tenant))
    response = yield Request(b"POST", "/v1/tokens", (JSON_TYPE,), content)
    info: TokenInfo = decode(response, TokenInfo)
    return info


def tokens() -> Plan[list[TokenInfo]]:
    """All tokens."""
    found: list[TokenInfo] = yield from get("/v1/tokens", list[TokenInfo])
    return found


def revoke_token(name: str) -> Plan[None]:
    """Revoke a token."""
    yield from act(b"DELETE", f"/v1/tokens/{segment(name)}")
