"""The tools for sessions and their history.

Guarantee: each is one verb of the client library, with its errors; lists are bounded and say what
they leave out.
"""

from __future__ import annotations

import msgspec

from sojourn.mcp import arguments, results
from sojourn.mcp.calls import Call
from sojourn.mcp.networks import left_behind
from sojourn.mcp.own_sessions import LABELS
from sojourn.mcp.texts import LIMIT, clipped

MAX_CHANGES = 1_000
_TEXT_OF_FILE = 10_000


async def create(call: Call, given: arguments.Create) -> results.SessionResult:
    """session_create."""
    sessions = call.server.sessions()
    made = await sessions.create(
        template=given.template, name=given.name, labels=LABELS, network=call.settings.network
    )
    return results.session_result(made.info)


async def listed(call: Call, given: arguments.ListSessions) -> results.SessionsResult:
    """session_list."""
    found = await call.server.sessions().list(state=given.state, limit=given.limit + 1)
    told = [
        results.session_result(one.info, own=call.is_own(one.id)) for one in found[: given.limit]
    ]
    return results.SessionsResult(sessions=told, more=len(found) > given.limit)


async def get(call: Call, given: arguments.Own) -> results.SessionResult:
    """session_get."""
    found = await call.session(given.session)
    return results.session_result(found.info, own=call.is_own(found.id))


async def pause(call: Call, given: arguments.Own) -> results.SessionResult:
    """session_pause."""
    found = await (await call.session(given.session)).pause()
    return results.session_result(found.info, own=call.is_own(found.id))


async def suspend(call: Call, given: arguments.Own) -> results.SessionResult:
    """session_suspend."""
    found = await (await call.session(given.session)).suspend()
    return results.session_result(found.info, own=call.is_own(found.id))


async def resume(call: Call, given: arguments.Resume) -> results.SessionResult:
    """session_resume."""
    found = await (await call.session(given.session)).resume(memory=not given.files_only)
    return results.session_result(found.info, own=call.is_own(found.id))


async def delete(call: Call, given: arguments.Named) -> results.Done:
    """session_delete."""
    found = await call.session(given.session)
    await found.delete()
    return results.Done(session=found.id, done="deleted, with its history")


# -- history ------------------------------------------------------------------------------------


async def snapshot(call: Call, given: arguments.Snapshot) -> results.SnapshotResult:
    """snapshot."""
    session = await call.session(given.session, make=True)
    taken = await session.snapshot(given.label)
    return results.snapshot_result(taken)


async def history(call: Call, given: arguments.History) -> results.HistoryResult:
    """history."""
    session = await call.session(given.session)
    found = sorted(await session.history(), key=lambda one: (one.created_at, one.id), reverse=True)
    told = [results.snapshot_result(one) for one in found[: given.limit]]
    current = next((one for one in found[given.limit :] if one.current), None)
    if current is not None:  # after a rollback it may be far back, and is what matters most
        told.append(results.snapshot_result(current))
    return results.HistoryResult(
        session=session.id, snapshots=told, left_out=len(found) - len(told)
    )


async def rollback(call: Call, given: arguments.Rollback) -> results.RollbackResult:
    """rollback."""
    session = await call.session(given.session)
    found = await session.rollback(given.snapshot)
    told = results.session_result(found.info, own=call.is_own(found.id))
    return results.RollbackResult(
        **msgspec.structs.asdict(told), not_taken_back=left_behind(found.left_behind)
    )


async def fork(call: Call, given: arguments.Fork) -> results.ForkResult:
    """fork."""
    session = await call.session(given.session)
    made = await session.fork(given.count, given.snapshot, labels=LABELS)
    return results.ForkResult(
        sessions=[results.session_result(one.info) for one in made],
        not_taken_back=left_behind(session.left_behind),
    )


async def diff(call: Call, given: arguments.Diff) -> results.DiffResult:
    """diff."""
    session = await call.session(given.session)
    found = await session.diff(given.before, given.after, text=given.text, limit=MAX_CHANGES)
    changes: list[results.ChangeResult] = []
    room = LIMIT
    for one in found.changes:
        told = results.ChangeResult(path=one.path, kind=one.kind, what=list(one.what))
        room -= len(msgspec.json.encode(told))
        if room < 0:
            break
        changes.append(told)
    texts: dict[str, str] = {}
    room = LIMIT
    for path, text in sorted(found.text.items()):
        if text is None:
            continue
        cut = clipped(text, min(_TEXT_OF_FILE, max(room, 0)))
        room -= len(cut)
        if room < 0:
            break
        texts[path] = cut
    return results.DiffResult(
        before=found.a,
        after=found.b,
        changes=changes,
        text=texts,
        left_out=len(found.changes) - len(changes),
        more=found.truncated,
    )
