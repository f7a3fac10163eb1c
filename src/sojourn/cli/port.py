"""`sojourn port`: what of a session is reached from outside."""

from __future__ import annotations

from typing import Literal

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import emit, json_option, say, table
from sojourn.wire.networks import PortInfo


@click.group("port", help="Exposed ports: sessions' servers, reached from outside.")
def port() -> None:
    """The group itself does nothing."""


def opening_url(info: PortInfo) -> str:
    """The address that a browser opens, with the token where one is needed."""
    if info.address is not None:
        return info.address
    url = info.url or ""
    return url if info.token is None else f"{url}?sojourn_token={info.token}"


@port.command(
    "expose",
    help=(
        "Have PORT of SESSION reached from outside, and print its address. It stays the same as"
        " long as it is exposed; a request wakes a session that is put away. Without --public the"
        " address holds a token: whoever has it gets in."
    ),
)
@click.argument("session")
@click.argument("number", metavar="PORT", type=click.IntRange(1, 65535))
@click.option("--public", is_flag=True, help="Needs no token.")
@click.option(
    "--tcp", is_flag=True, help="Any protocol, at a port of the server's own; with --public."
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    help="With --tcp: a network that may connect (203.0.113.0/24). Can be repeated. [all]",
)
@json_option
def expose(
    session: str,
    number: int,
    public: bool,
    tcp: bool,
    sources: tuple[str, ...],
    as_json: bool,
) -> None:
    kind: Literal["http", "tcp"] = "tcp" if tcp else "http"
    found = connect().sessions.get(session)
    info = found.expose(number, public=public, kind=kind, sources=sources)
    emit(info, as_json, lambda: say(opening_url(info)))


@port.command(
    "ls",
    help=(
        "List the exposed ports of SESSION: the address for browsers, and the one by path for"
        " programs that cannot look up its host name, which give the token as `Authorization:"
        " Bearer`."
    ),
)
@click.argument("session")
@json_option
def list_ports(session: str, as_json: bool) -> None:
    found = connect().sessions.get(session).ports()

    def show() -> None:
        table(
            ["PORT", "KIND", "ACCESS", "ADDRESS", "BY PATH"],
            [
                (
                    one.port,
                    one.kind,
                    "public" if one.public else "token",
                    opening_url(one),
                    one.path_url or "",
                )
                for one in found
            ],
        )

    emit(found, as_json, show)


@port.command("rm", help="Expose PORT of SESSION no longer.")
@click.argument("session")
@click.argument("number", metavar="PORT", type=int)
def unexpose(session: str, number: int) -> None:
    connect().sessions.get(session).unexpose(number)
