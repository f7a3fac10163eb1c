"""`sojourn session`: making, listing and moving sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sojourn.cli import copying, history, network, processes, terminal
from sojourn.cli.connection import connect, session
from sojourn.cli.output import (
    counted,
    durable_option,
    emit,
    facts,
    json_option,
    labels_text,
    moment,
    pairs,
    say,
    size,
    table,
    working,
)
from sojourn.cli.settings import (
    RULES,
    limit_options,
    limits_given,
    policy_given,
    policy_options,
    session_options,
    start_arguments,
)

if TYPE_CHECKING:
    from sojourn.model import Policy
    from sojourn.wire.api import DurabilityInfo, SessionInfo


@click.group("session", help="Sessions: make, use, move and delete them.")
def command() -> None:
    """The group itself does nothing."""


@command.command("create", help="Make a session and start its sandbox. Prints its id.")
@click.option("--name", "-n", help="Name, unique among your live sessions.")
@session_options
@policy_options
@click.option("--no-auto-snapshot", is_flag=True, help="Take no snapshots by itself.")
@click.option("--key", help="Idempotency key: the same key gives the same session.")
@json_option
def create(as_json: bool, name: str | None, key: str | None, **options: Any) -> None:
    policy = policy_given(options)
    if options["no_auto_snapshot"]:
        policy["auto_snapshot"] = "off"
    arguments = start_arguments(options)
    with working("Starting a session", quiet=as_json):
        made = connect().sessions.create(
            name=name, policy=policy or None, idempotency_key=key, **arguments
        )
    emit(made.info, as_json, lambda: say(made.id))


@command.command("ls", help="List sessions, newest first.")
@click.option("--state", help="Only those in this state.")
@click.option("--label", "labels", multiple=True, help="Only those with KEY=VALUE.")
@json_option
def ls(as_json: bool, state: str | None, labels: tuple[str, ...]) -> None:
    found = connect().sessions.list(state=state, labels=pairs(labels, "--label"))
    rows = [one.info for one in found]

    def show() -> None:
        table(
            ["ID", "NAME", "STATE", "TEMPLATE", "CREATED", "LABELS"],
            [
                (
                    info.id,
                    info.name or "",
                    info.state,
                    info.template,
                    moment(info.created_at),
                    labels_text(info.labels),
                )
                for info in rows
            ],
        )

    emit(rows, as_json, show)


def policy_text(policy: Policy) -> str:
    """A policy for people."""
    parts = [f"snapshots {policy.auto_snapshot}"]
    if policy.idle_timeout is None:
        parts.append("never idle")
    else:
        parts.append(f"{policy.on_idle} after {policy.idle_timeout:g} idle s")
    if policy.max_lifetime is not None:
        parts.append(f"{policy.on_expiry} after {policy.max_lifetime:g} s")
    if not policy.auto_resume:
        parts.append("no call wakes it")
    parts.append(f"{policy.on_stop} on stop")
    parts.append(f"{size(policy.auto_memory_bytes)} of automatic memory images")
    return ", ".join(parts)


def retention_text(policy: Policy) -> str:
    """Which automatic snapshots are kept, in the words of `--keep`."""
    if policy.retention is None:
        return "all"
    rules = {word: getattr(policy.retention, field) for word, field in RULES}
    kept = [f"{word}={value:g}" for word, value in rules.items() if value]
    for word, spared in (
        ("labelled", policy.retention.labelled),
        ("asked for", policy.retention.explicit),
    ):
        if not spared:
            kept.append(f"also those {word} go")
    return ",".join(kept) or "none"


def durability_text(found: DurabilityInfo) -> str:
    """How far a session is in the object store."""
    if found.head is None:
        return "nothing yet: there is no snapshot"
    if found.head_durable:
        text = "yes, up to its head"
    elif found.durable_head_at is not None:
        text = f"up to {moment(found.durable_head_at)}, not its head"
    else:
        text = "no"
    if not found.waiting:
        return text
    verb = "waits" if found.waiting == 1 else "wait"
    return f"{text}; {counted(found.waiting, 'snapshot')} {verb}, for up to {found.lag:.0f} s"


def show_session(info: SessionInfo, durability: DurabilityInfo | None = None) -> None:
    """A session for people."""
    limits = info.limits
    facts(
        [
            ("id", info.id),
            ("name", info.name),
            ("state", info.state),
            ("cause", info.cause),
            ("operation", info.operation),
            ("template", info.template),
            ("driver", info.driver),
            ("head", info.head),
            ("forked from", info.forked_from),
            ("labels", labels_text(info.labels) or None),
            ("env", labels_text(info.env) or None),
            (
                "limits",
                f"{limits.cpus:g} cores, {size(limits.memory_bytes)} memory,"
                f" {size(limits.disk_bytes)} disk, {limits.pids} processes",
            ),
            ("policy", policy_text(info.policy)),
            ("keeps", retention_text(info.policy)),
            ("network", network.network_text(info.network)),
            ("secrets", ", ".join(info.network.secrets) or None),
            ("durable", durability and durability_text(durability)),
            ("created", moment(info.created_at)),
            ("suspends when idle", moment(info.idle_deadline) or None),
            ("expires", moment(info.lifetime_deadline) or None),
        ]
    )


@click.command("get", help="Show a session.")
@click.argument("ref", metavar="SESSION")
@json_option
def get(ref: str, as_json: bool) -> None:
    found = session(ref)
    emit(found.info, as_json, lambda: show_session(found.info, found.durability()))


command.add_command(get)
command.add_command(get, "info")


@command.command(
    "update",
    help="Change a session's name, labels, limits and policy; what is not named stays as it is."
    " `sojourn session network` changes what it reaches.",
)
@click.argument("ref", metavar="SESSION")
@click.option("--name", "-n", help="New name; empty takes it away.")
@click.option("--label", "labels", multiple=True, help="KEY=VALUE to set; may be repeated.")
@click.option("--unlabel", "unlabelled", multiple=True, help="KEY to take away; may be repeated.")
@limit_options
@policy_options
@json_option
def update(
    ref: str,
    name: str | None,
    labels: tuple[str, ...],
    unlabelled: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    import msgspec

    found = session(ref)
    changes: dict[str, Any] = {}
    if name is not None:
        changes["name"] = name or None
    if labels or unlabelled:
        kept = {key: value for key, value in found.labels.items() if key not in unlabelled}
        changes["labels"] = kept | pairs(labels, "--label")
    for field, given in (("limits", limits_given(options)), ("policy", policy_given(options))):
        if given:
            present = msgspec.to_builtins(getattr(found.info, field))
            changes[field] = present | given
    if not changes:
        raise click.UsageError("name what is to change")
    changed = found.update(**changes)
    emit(changed.info, as_json, lambda: show_session(changed.info))


@command.command("keepalive", help="Keep a session from being suspended as idle.")
@click.argument("ref", metavar="SESSION")
@click.argument("seconds", type=float)
@json_option
def keepalive(ref: str, seconds: float, as_json: bool) -> None:
    kept = session(ref).keep_alive(seconds)
    emit(kept.info, as_json, lambda: say(f"until {moment(kept.info.idle_deadline)}"))


@command.command("pause", help="Freeze a session in memory.")
@click.argument("ref", metavar="SESSION")
@durable_option
@json_option
def pause(ref: str, wait: str | None, as_json: bool) -> None:
    found = session(ref)
    with working("Pausing", quiet=as_json):
        found.pause(wait=wait)
    emit(found.info, as_json, lambda: say(f"{found.id} {found.state}"))


@command.command("suspend", help="Put a session away: no memory is used until it is needed.")
@click.argument("ref", metavar="SESSION")
@click.option("--files-only", is_flag=True, help="Keep files only; its processes end.")
@durable_option
@json_option
def suspend(ref: str, files_only: bool, wait: str | None, as_json: bool) -> None:
    found = session(ref)
    with working("Suspending", quiet=as_json):
        found.suspend(memory=not files_only, wait=wait)
    emit(found.info, as_json, lambda: say(f"{found.id} {found.state}"))


@command.command("resume", help="Let a session run again.")
@click.argument("ref", metavar="SESSION")
@click.option("--files-only", is_flag=True, help="Start from its files; no process goes on.")
@json_option
def resume(ref: str, files_only: bool, as_json: bool) -> None:
    found = session(ref)
    with working("Resuming", quiet=as_json):
        found.resume(memory=not files_only)
    emit(found.info, as_json, lambda: say(f"{found.id} {found.state}"))


@command.command(
    "migrate",
    help="Move a session to another node of the cluster. What runs goes on, under the same id and"
    " addresses.",
)
@click.argument("ref", metavar="SESSION")
@click.option("--node", help="Its id or name. [one is chosen]")
@json_option
def migrate(ref: str, node: str | None, as_json: bool) -> None:
    found = session(ref)
    with working("Moving", quiet=as_json):
        found.migrate(node)
    emit(found.info, as_json, lambda: say(f"{found.id} {found.state}"))


@command.command("rm", help="Delete sessions with their history, from any state.")
@click.argument("refs", metavar="SESSION...", nargs=-1, required=True)
@json_option
def rm(refs: tuple[str, ...], as_json: bool) -> None:
    from sojourn.cli.main import report
    from sojourn.errors import SojournError

    client = connect()
    deleted: list[str] = []
    failed: list[SojournError] = []
    for ref in refs:
        try:
            found = client.sessions.get(ref)
            with working(f"Deleting {ref}", quiet=as_json):
                found.delete()
        except SojournError as error:
            failed.append(error)  # the others are deleted all the same
        else:
            deleted.append(found.id)
            if not as_json:
                say(found.id)
    if as_json:
        emit(deleted, as_json, lambda: None)
    for earlier in failed[:-1]:
        report(earlier, as_json)
    if failed:
        raise failed[-1]


for module in (processes, terminal, copying, history, network):
    for added in module.COMMANDS:
        command.add_command(added)
