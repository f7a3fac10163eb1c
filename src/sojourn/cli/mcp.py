"""`sojourn mcp`: sessions as tools for everything that speaks the Model Context Protocol.

Guarantee: without --http standard output carries the protocol and nothing else; with it, it says
`ready URL` once and nothing else. The log goes to standard error.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("mcp", help="Serve sessions as tools of the Model Context Protocol (MCP).")
@click.option(
    "--http",
    "address",
    metavar="HOST:PORT",
    help="Serve streamable HTTP there (port 0 takes a free one) instead of standard input and"
    " output.",
)
@click.option(
    "--session",
    metavar="NAME",
    help="The session that calls work on; made if there is none. [one for each connection]",
)
@click.option(
    "--network",
    help="What sessions that are made here reach: none, open or allow=DOMAIN[:PORT][,...]. [none]",
)
@click.option(
    "--allow-network",
    is_flag=True,
    help="Let the model open the network of sessions, too.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with the token that HTTP clients have to show. [the token of the Sojourn server]",
)
@click.option(
    "--allow-host",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Another name under which HTTP clients reach this; may be repeated.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is logged on standard error.",
)
def command(
    address: str | None,
    session: str | None,
    network: str | None,
    allow_network: bool,
    token_file: Path | None,
    allowed: tuple[str, ...],
    log_level: str,
) -> None:
    import asyncio
    import logging
    import sys

    from sojourn.client.core_networks import network_of
    from sojourn.errors import HostUnfit, InvalidRequest

    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if address is None and (token_file is not None or allowed):
        raise click.UsageError("--token-file and --allow-host are for --http")
    token = None
    if token_file is not None:
        token = token_file.read_text().strip()
        if not token:
            raise InvalidRequest(f"{token_file} is empty", next_step="Put the token in it.")
    try:
        from sojourn.mcp import http, stdio
        from sojourn.mcp.own_sessions import Settings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sojourn"):
            raise
        raise HostUnfit(
            f"the library for MCP is not installed ({error.name} is missing)",
            next_step="Install it: pip install 'sojourn[mcp]'.",
        ) from error
    settings = Settings(session, network_of(network), allow_network)
    if address is None:
        asyncio.run(stdio.serve(settings))
        return
    serving = http.serve(
        address,
        settings,
        token=token,
        allowed=allowed,
        ready=lambda url: click.echo(f"ready {url}"),
    )
    asyncio.run(serving)
