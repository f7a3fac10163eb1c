"""`sojourn secret`: values that are put into sessions' requests, and never into sessions.

Guarantee: a value is read from standard input or typed unseen, never taken from the command line,
which other programs can read; it is printed nowhere.
"""

from __future__ import annotations

import sys

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import emit, json_option, moment, say, table
from sojourn.model.network import SecretUse


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
        " domains alone, as `Authorization: Bearer VALUE` or as an option says. Inside a session"
        " whose network policy names it, the variable NAME holds what stands for it."
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


def _shown(use: SecretUse) -> str:
    return f"{use.place} {use.name}: {', '.join(use.domains)}"


@secret.command("ls", help="List secrets, without their values.")
@json_option
def list_secrets(as_json: bool) -> None:
    found = connect().secrets.list()

    def show() -> None:
        table(
            ["NAME", "CHANGED", "USED AS"],
            [
                (one.name, moment(one.updated_at), "; ".join(_shown(use) for use in one.uses))
                for one in found
            ],
        )

    emit(found, as_json, show)


@secret.command("rm", help="Remove secrets; no session has them from then on.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(names: tuple[str, ...]) -> None:
    client = connect()
    for name in names:
        client.secrets.delete(name)
