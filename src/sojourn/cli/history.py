"""`sojourn session` snapshot, history, diff, rollback, fork, promote, events, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sojourn.cli.connection import session
from sojourn.cli.network import left_text, say_left
from sojourn.cli.output import (
    durable_option,
    emit,
    emit_json,
    json_option,
    moment,
    safe,
    say,
    size,
    table,
    working,
)

if TYPE_CHECKING:
    from sojourn.wire.api import DiffInfo, EventInfo, SnapshotInfo, VerifyReport

_SIGNS = {"added": "A", "changed": "M", "removed": "D"}


@click.command("snapshot", help="Take a snapshot; the session runs on. Prints its id.")
@click.argument("ref", metavar="SESSION")
@click.option("--label", "-l", help="Label to find it by.")
@click.option("--files-only", is_flag=True, help="Leave memory out.")
@durable_option
@json_option
def snapshot(
    ref: str, label: str | None, files_only: bool, wait: str | None, as_json: bool
) -> None:
    found = session(ref)
    with working("Taking a snapshot", quiet=as_json):
        taken = found.snapshot(label, memory=not files_only, wait=wait)
    emit(taken, as_json, lambda: say(taken.id))


@click.command("history", help="List the snapshots of a session.")
@click.argument("ref", metavar="SESSION")
@json_option
def history(ref: str, as_json: bool) -> None:
    found = session(ref).history()
    emit(found, as_json, lambda: _show_history(found))


def _show_history(found: list[SnapshotInfo]) -> None:
    table(
        ["", "SNAPSHOT", "LABEL", "KIND", "MEMORY", "FILES", "DURABLE", "TAKEN"],
        [
            (
                "*" if one.current else "",
                lines + one.id,
                one.label or "",
                one.kind,
                size(one.memory_bytes) if one.memory else "thinned" if one.thinned else "no",
                size(one.layer_bytes),
                "no" if one.durable_at is None else "yes",
                moment(one.created_at),
            )
            for lines, one in as_tree(found)
        ],
    )


def as_tree(found: list[SnapshotInfo]) -> list[tuple[str, SnapshotInfo]]:
    """The snapshots with the lines to draw before each.

    The line that leads to the current snapshot (in a branch without it: to the newest follower)
    keeps its column; what leaves it stands indented between the parent and what goes on from it.
    """
    known = {one.id for one in found}
    children: dict[str | None, list[SnapshotInfo]] = {}
    for one in sorted(found, key=lambda one: (one.created_at, one.id)):
        children.setdefault(one.parent if one.parent in known else None, []).append(one)
    parents = {one.id: one.parent for one in found}
    on_line: set[str] = set()  # the current snapshot and all it comes from
    step = next((one.id for one in found if one.current), None)
    while step in known and step is not None:
        on_line.add(step)
        step = parents[step]
    drawn: list[tuple[str, SnapshotInfo]] = []
    # A stack, not recursion: a history is thousands of snapshots deep.
    waiting = [("", "", one) for one in reversed(children.get(None, []))]
    while waiting:
        lines, column, one = waiting.pop()
        drawn.append((lines, one))
        followers = sorted(children.get(one.id, []), key=lambda child: child.id in on_line)
        if followers:
            waiting.append((column, column, followers[-1]))
            waiting += [(column + "|- ", column + "|  ", side) for side in followers[-2::-1]]
    return drawn


@click.command("diff", help="Show what changed between two snapshots, A (or B's parent) and B.")
@click.argument("ref", metavar="SESSION")
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--text", "-t", is_flag=True, help="Also show the changes inside text files.")
@json_option
def diff(ref: str, a: str | None, b: str | None, text: bool, as_json: bool) -> None:
    found = session(ref)
    with working("Comparing", quiet=as_json):
        differences = found.diff(a, b, text=text)
    emit(differences, as_json, lambda: _show_diff(differences))


def _show_diff(found: DiffInfo) -> None:
    for change in found.changes:
        details = "" if change.kind != "changed" else f"  ({', '.join(change.what)})"
        say(f"{_SIGNS.get(change.kind, '?')} {safe(change.path)}{details}")
    for path, text in sorted(found.text.items()):
        if text is not None:
            say(f"\n{safe(path)}")
            for line in text.splitlines():
                say(safe(line.replace("\t", "    ")))
    if found.truncated:
        say("... and more")
    if text := left_text(found.effects):
        say(safe(text))


force_option = click.option(
    "--force",
    is_flag=True,
    help="Also where the network policy refuses to leave requests behind.",
)


@click.command("rollback", help="Go back to a snapshot, by id or label.")
@click.argument("ref", metavar="SESSION")
@click.argument("snapshot_name", metavar="SNAPSHOT")
@force_option
@json_option
def rollback(ref: str, snapshot_name: str, force: bool, as_json: bool) -> None:
    found = session(ref)
    with working("Rolling back", quiet=as_json):
        found.rollback(snapshot_name, force=force)
    say_left(found.left_behind)
    emit(found.info, as_json, lambda: say(f"{found.id} is at {found.head}"))


@click.command("fork", help="Make sessions that go on from a snapshot, or from now.")
@click.argument("ref", metavar="SESSION")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=1, help="How many.")
@click.option("--snapshot", "snapshot_name", help="Where from, by id or label.")
@click.option("--name", "names", multiple=True, help="Name; once for each fork.")
@force_option
@json_option
def fork(
    ref: str,
    count: int,
    snapshot_name: str | None,
    names: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    found = session(ref)
    wanted = max(count, len(names))
    with working(f"Forking {wanted} times", quiet=as_json):
        forks = found.fork(wanted, snapshot_name, names=list(names) or None, force=force)
    say_left(found.left_behind)
    emit([one.info for one in forks], as_json, lambda: say("\n".join(one.id for one in forks)))


@click.command("promote", help="Make a fork's head the head of the session it came from.")
@click.argument("ref", metavar="SESSION")
@json_option
def promote(ref: str, as_json: bool) -> None:
    found = session(ref)
    with working("Promoting", quiet=as_json):
        parent = found.promote()
    say_left(found.left_behind)
    emit(parent.info, as_json, lambda: say(f"{parent.id} is at {parent.head}"))


@click.command("events", help="Show who did what to a session.")
@click.argument("ref", metavar="SESSION")
@click.option("--follow", "-f", is_flag=True, help="Go on as they happen, until Ctrl-C.")
@click.option("--after", type=int, default=0, help="Only those with a greater number.")
@json_option
def events(ref: str, follow: bool, after: int, as_json: bool) -> None:
    found = session(ref)
    if follow:
        for event in found.events(after=after, follow=True):
            emit(event, as_json, lambda event=event: say(_event_line(event)))  # type: ignore[misc]
        return
    listed = found.events(after=after)
    emit(listed, as_json, lambda: _show_events(listed))


def _event_details(event: EventInfo) -> str:
    return " ".join(f"{key}={value}" for key, value in event.details.items())[:200]


def _event_line(event: EventInfo) -> str:
    parts = (event.seq, moment(event.at), event.actor, event.kind, event.result)
    return safe("  ".join(str(part) for part in (*parts, _event_details(event))))


def _show_events(found: list[EventInfo]) -> None:
    table(
        ["SEQ", "AT", "ACTOR", "KIND", "RESULT", "DETAILS"],
        [
            (
                event.seq,
                moment(event.at),
                event.actor,
                event.kind,
                event.result,
                _event_details(event),
            )
            for event in found
        ],
    )


@click.command("verify", help="Read every byte of a session's snapshots and compare.")
@click.argument("ref", metavar="SESSION")
@click.option("--snapshot", "snapshot_name", help="Only this one, by id or label.")
@json_option
def verify(ref: str, snapshot_name: str | None, as_json: bool) -> int:
    found = session(ref)
    with working("Reading every byte", quiet=as_json):
        report = found.verify(snapshot_name)
    if as_json:
        emit_json(report)
    else:
        _show_report(report)
    if report.ok:
        return 0
    from sojourn.errors import IntegrityError

    return IntegrityError.exit_code


def _show_report(report: VerifyReport) -> None:
    say(f"{report.snapshots} snapshots, {report.objects} objects, {size(report.bytes)} read")
    for fault in report.faults:
        where = f" {safe(fault.path)}" if fault.path else ""
        say(f"BAD {safe(fault.snapshot)} {safe(fault.object)}{where}: {safe(fault.cause)}")
    say("all is as it was put away" if report.ok else f"{len(report.faults)} faults")


COMMANDS = [snapshot, history, diff, rollback, fork, promote, events, verify]
