"""`sojourn session`: making, listing and moving sessions."""

from __future__ import annotations

from collections.abc import Callable
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

if TYPE_CHECKING:
    from sojourn.model import Policy
    from sojourn.wire.api import DurabilityInfo, SessionInfo


@click.group("session", help="Sessions: make, use, move and delete them.")
def command() -> None:
    """The group itself does nothing."""


def session_options(chosen: Callable[..., Any]) -> Callable[..., Any]:
    """The options of what starts a session."""
    for option in reversed(
        [
            click.option("--template", default="debian", show_default=True, help="Template."),
            click.option("--label", "labels", multiple=True, help="KEY=VALUE; may be repeated."),
            click.option("--env", "-e", "env", multiple=True, help="KEY=VALUE in every command."),
            click.option("--driver", help="Isolation driver; without it the node's default."),
            click.option("--user", "-u", help="User of its commands."),
            click.option("--cwd", "-w", help="Directory of its commands."),
            click.option("--cpus", type=float, help="Cores."),
            click.option("--memory-mib", type=int, help="Memory in MiB."),
            click.option("--disk-mib", type=int, help="Files on top of the template, in MiB."),
            click.option("--pids", type=int, help="Most processes."),
            click.option(
                "--network",
                help="What it reaches: none, open or allow=DOMAIN[:PORT][,...]. [none]",
            ),
        ]
    ):
        chosen = option(chosen)
    return chosen


def start_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Those options as arguments of `sessions.create`."""
    mib = 1024 * 1024
    limits = {
        "cpus": options["cpus"],
        "memory_bytes": options["memory_mib"] and options["memory_mib"] * mib,
        "disk_bytes": options["disk_mib"] and options["disk_mib"] * mib,
        "pids": options["pids"],
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return {
        "template": options["template"],
        "labels": pairs(options["labels"], "--label"),
        "env": pairs(options["env"], "--env"),
        "driver": options["driver"],
        "user": options["user"],
        "cwd": options["cwd"],
        "network": options["network"],
        "limits": given or None,
    }


_KEEP = {
    "for": "keep_all_for",
    "last": "keep_last",
    "hourly": "hourly",
    "daily": "daily",
    "weekly": "weekly",
}


def retention_rules(text: str) -> dict[str, float] | None:
    """The retention policy that `--keep` asks for: rules that are not named keep nothing. None for
    `all`. Raises click.BadParameter."""
    if text == "all":
        return None
    rules: dict[str, float] = dict.fromkeys(_KEEP.values(), 0)
    for part in text.split(","):
        name, _, value = part.partition("=")
        field = _KEEP.get(name.strip())
        if field is None or not value.strip().isascii() or not value.strip().isdigit():
            raise click.BadParameter(
                f"{part!r} is not RULE=NUMBER with a rule of {', '.join(_KEEP)}",
                param_hint="--keep",
            )
        rules[field] = int(value)
    return rules


@command.command("create", help="Make a session and start its sandbox. Prints its id.")
@click.option("--name", "-n", help="Name, unique among your live sessions.")
@session_options
@click.option("--idle-timeout", type=float, help="Suspend after so many idle seconds; 0: never.")
@click.option("--max-lifetime", type=float, help="Seconds after which --on-expiry happens.")
@click.option("--on-expiry", type=click.Choice(["suspend", "delete"]), help="What then happens.")
@click.option(
    "--keep",
    metavar="RULES",
    help="Which automatic snapshots are kept: all, or rules such as hourly=24,daily=30,last=10.",
)
@click.option("--no-auto-snapshot", is_flag=True, help="Take no snapshots by itself.")
@click.option("--key", help="Idempotency key: the same key gives the same session.")
@json_option
def create(as_json: bool, name: str | None, key: str | None, **options: Any) -> None:
    policy: dict[str, Any] = {}
    if options["idle_timeout"] is not None:
        policy["idle_timeout"] = options["idle_timeout"] or None
    for field in ("max_lifetime", "on_expiry"):
        if options[field] is not None:
            policy[field] = options[field]
    if options["keep"] is not None:
        policy["retention"] = retention_rules(options["keep"])
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
        parts.append(f"idle after {policy.idle_timeout:g} s")
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
    rules = {word: getattr(policy.retention, field) for word, field in _KEEP.items()}
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


@command.command("update", help="Change a session's name or labels.")
@click.argument("ref", metavar="SESSION")
@click.option("--name", "-n", help="New name; empty takes it away.")
@click.option("--label", "labels", multiple=True, help="KEY=VALUE; these replace all labels.")
@json_option
def update(ref: str, name: str | None, labels: tuple[str, ...], as_json: bool) -> None:
    changes: dict[str, Any] = {}
    if name is not None:
        changes["name"] = name or None
    if labels:
        changes["labels"] = pairs(labels, "--label")
    changed = session(ref).update(**changes)
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
