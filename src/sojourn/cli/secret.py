"""`sojourn secret`: values that are put into sessions' requests, and never into sessions.

Guarantee: a value is read from standard input or typed unseen, never taken from the command line,
which other programs can read; it is printed nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import emit, json_option, moment, safe, say, table
from sojourn.model.network import NetworkPolicy, SecretUse

if TYPE_CHECKING:
    from sojourn.client.sync_client import Sojourn


@click.group("secret", help="Secrets: put into requests of sessions that may use them.")
def secret() -> None:
    """The group itself does nothing."""


def _value() -> str:
    if sys.stdin.isatty():
        typed: str = click.prompt("Value", hide_input=True, err=True)
        return typed
    read = sys.stdin.buffer.read(1 << 20)
    try:
        return read.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        from sojourn.errors import InvalidRequest

        raise InvalidRequest("a secret is one line of UTF-8 text", field="value") from None


@secret.command(
    "set",
    help=(
        "Set secret NAME to the line on standard input. It is put into requests to the given"
        " domains alone, as `Authorization: Bearer VALUE` or as an option says, of sessions it is"
        " granted to (`sojourn secret grant`). Inside these the variable NAME holds what stands for"
        " it."
    ),
)
@click.argument("name")
@click.option(
    "--domain",
    "domains",
    multiple=True,
    required=True,
    help="A domain it is for: example.com, or *.example.com. Can be repeated.",
)
@click.option("--header", help="Put it into this header, as it is.")
@click.option("--query", help="Put it into this query parameter.")
@click.option("--basic", metavar="USER", help="Use it as the password of this user.")
@click.option("--template", help='What the header holds: "token {secret}".')
@json_option
def set_secret(
    name: str,
    domains: tuple[str, ...],
    header: str | None,
    query: str | None,
    basic: str | None,
    template: str | None,
    as_json: bool,
) -> None:
    client = connect()
    made = client.secrets.set(
        name, _value(), domains, header=header, query=query, basic=basic, template=template
    )
    emit(made, as_json, lambda: say(made.name))


@secret.command(
    "grant",
    help="Let sessions use secret NAME: it is put into their requests to its domains. Their network"
    " has to reach these, see `sojourn session network`.",
)
@click.argument("name")
@click.argument("refs", metavar="SESSION...", nargs=-1, required=True)
def grant(name: str, refs: tuple[str, ...]) -> None:
    client = connect()
    domains = {
        domain
        for one in client.secrets.list()
        if one.name == name
        for use in one.uses
        for domain in use.domains
    }
    for ref in refs:
        found = client.sessions.get(ref).change_network(grant=[name])
        if hint := unreached_text(found.network, domains):
            click.echo(safe(f"{ref}: {hint}"), err=True)
        say(found.id)


def unreached_text(policy: NetworkPolicy, domains: Collection[str]) -> str | None:
    """Why a secret is of no use to a session, as it reaches none of the secret's domains."""
    if str(policy.mode) == "open" or not domains:
        return None
    reached = {domain for rule in policy.rules for domain in rule.domains}
    if str(policy.mode) == "allowlist" and any(_meet(one, domains) for one in reached):
        return None
    some = ",".join(sorted(domains))
    return (
        "its network reaches none of the secret's domains;"
        f" `sojourn session network SESSION allow={some}` lets it"
    )


def _meet(allowed: str, domains: Collection[str]) -> bool:
    """Whether an allowed domain has names in common with some of these."""

    def below(one: str, other: str) -> bool:
        return other.startswith("*.") and one.removeprefix("*.").endswith(other[1:])

    return any(allowed == one or below(allowed, one) or below(one, allowed) for one in domains)


@secret.command("revoke", help="Let sessions use secret NAME no longer; it holds at once.")
@click.argument("name")
@click.argument("refs", metavar="SESSION...", nargs=-1, required=True)
def revoke(name: str, refs: tuple[str, ...]) -> None:
    client = connect()
    for ref in refs:
        say(client.sessions.get(ref).change_network(revoke=[name]).id)


@secret.command(
    "ls", help="List secrets, without their values, and the newest sessions that may use each."
)
@json_option
def list_secrets(as_json: bool) -> None:
    client = connect()
    found = client.secrets.list()

    def show() -> None:
        users, more = _users(client) if found else ({}, False)
        table(
            ["NAME", "CHANGED", "USED AS", "BY SESSIONS"],
            [
                (
                    one.name,
                    moment(one.updated_at),
                    "; ".join(_shown(use) for use in one.uses),
                    ", ".join(users.get(one.name, [])) or "none",
                )
                for one in found
            ],
        )
        if more:
            click.echo(f"of sessions the newest {_LOOKED_AT} were looked at", err=True)

    emit(found, as_json, show)


_LOOKED_AT = 1000


def _shown(use: SecretUse) -> str:
    return f"{use.place} {use.name}: {', '.join(use.domains)}"


def _users(client: Sojourn) -> tuple[dict[str, list[str]], bool]:
    """The sessions that may use each secret, and whether there are more than were looked at."""
    users: dict[str, list[str]] = {}
    sessions = client.sessions.list(limit=_LOOKED_AT + 1)
    for one in sessions[:_LOOKED_AT]:
        for name in one.network.secrets:
            users.setdefault(name, []).append(one.name or one.id)
    return users, len(sessions) > _LOOKED_AT


@secret.command("rm", help="Remove secrets; no session has them from then on.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(names: tuple[str, ...]) -> None:
    client = connect()
    for name in names:
        client.secrets.delete(name)
