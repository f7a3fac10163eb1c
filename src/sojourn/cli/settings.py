"""What a session is set to, in options of the command line: limits, policy, network.

Guarantee: an option that is not given changes nothing; each means the same at `session create`,
`session update` and `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from sojourn.cli.output import pairs

if TYPE_CHECKING:
    from sojourn.model.network import NetworkPolicy

_MIB = 1024 * 1024
_KEEP = {
    "for": "keep_all_for",
    "last": "keep_last",
    "hourly": "hourly",
    "daily": "daily",
    "weekly": "weekly",
}
RULES = tuple(_KEEP.items())
"""The rules of `--keep`: word and field."""


def _added(options: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(chosen: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            chosen = option(chosen)
        return chosen

    return add


limit_options = _added(
    [
        click.option("--cpus", type=float, help="Cores."),
        click.option("--memory-mib", type=int, help="Memory in MiB."),
        click.option("--disk-mib", type=int, help="Files on top of the template, in MiB."),
        click.option("--pids", type=int, help="Most processes."),
    ]
)

session_options = _added(
    [
        click.option("--template", default="debian", show_default=True, help="Template."),
        click.option("--label", "labels", multiple=True, help="KEY=VALUE; may be repeated."),
        click.option("--env", "-e", "env", multiple=True, help="KEY=VALUE in every command."),
        click.option("--driver", help="Isolation driver; without it the node's default."),
        click.option("--user", "-u", help="User of its commands."),
        click.option("--cwd", "-w", help="Directory of its commands."),
        limit_options,
        click.option(
            "--network",
            help="What it reaches: none, open or allow=DOMAIN[:PORT][,...]. [none]",
        ),
        click.option(
            "--secret",
            "secrets",
            multiple=True,
            metavar="NAME",
            help="A secret it may use (`sojourn secret set`); may be repeated.",
        ),
    ]
)
"""The options of what starts a session."""

policy_options = _added(
    [
        click.option(
            "--idle-timeout",
            type=float,
            help="Idle seconds after which --on-idle happens; 0: never.",
        ),
        click.option(
            "--on-idle", type=click.Choice(["suspend", "delete"]), help="What then happens."
        ),
        click.option("--max-lifetime", type=float, help="Seconds after which --on-expiry happens."),
        click.option(
            "--on-expiry", type=click.Choice(["suspend", "delete"]), help="What then happens."
        ),
        click.option(
            "--keep",
            metavar="RULES",
            help="Which automatic snapshots are kept: all, or rules such as"
            " hourly=24,daily=30,last=10.",
        ),
        click.option(
            "--auto-snapshot",
            type=click.Choice(["turn", "idle", "off"]),
            help="When snapshots are taken by themselves.",
        ),
        click.option(
            "--auto-resume/--no-auto-resume",
            default=None,
            help="Whether calls wake it when it is put away.",
        ),
        click.option(
            "--on-stop",
            type=click.Choice(["adopt", "suspend"]),
            help="What a clean stop of the server does: leave it running, or put it away.",
        ),
    ]
)
"""The options of how a session is kept."""


def limits_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that were given."""
    limits = {
        "cpus": options["cpus"],
        "memory_bytes": options["memory_mib"] and options["memory_mib"] * _MIB,
        "disk_bytes": options["disk_mib"] and options["disk_mib"] * _MIB,
        "pids": options["pids"],
    }
    return {name: value for name, value in limits.items() if value is not None}


def policy_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy that were given."""
    policy: dict[str, Any] = {}
    for field in ("idle_timeout", "max_lifetime"):
        if options[field] is not None:
            policy[field] = options[field] or None
    for field in ("on_idle", "on_expiry", "auto_snapshot", "auto_resume", "on_stop"):
        if options[field] is not None:
            policy[field] = options[field]
    if options["keep"] is not None:
        policy["retention"] = retention_rules(options["keep"])
    return policy


def start_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """`session_options` as arguments of `sessions.create`."""
    return {
        "template": options["template"],
        "labels": pairs(options["labels"], "--label"),
        "env": pairs(options["env"], "--env"),
        "driver": options["driver"],
        "user": options["user"],
        "cwd": options["cwd"],
        "network": with_secrets(options["network"], options["secrets"]),
        "limits": limits_given(options) or None,
    }


def with_secrets(network: str | None, secrets: tuple[str, ...]) -> NetworkPolicy | str | None:
    """The network of a new session that may use secrets. Raises click.UsageError,
    InvalidRequest."""
    if not secrets:
        return network
    if network in (None, "none"):
        raise click.UsageError(
            "--secret goes with --network: a secret is put into requests to its domains, which the"
            " session has to reach (--network allow=DOMAIN)"
        )
    import msgspec

    from sojourn.client.core_networks import network_of

    policy = network_of(network)
    assert policy is not None
    return msgspec.structs.replace(policy, secrets=list(dict.fromkeys(secrets)))


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
