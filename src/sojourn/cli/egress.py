"""How connections of sessions leave, in options of commands that run sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def egress_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--egress-namespace`, `--egress-nameservers`, `--egress-private`, `--egress-roots`; the
    command gets what `sojourn.server.gateways.egress_settings` takes."""
    for option in (
        click.option(
            "--egress-roots",
            envvar="SOJOURN_EGRESS_ROOTS",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File of certificates (PEM) that are trusted outside beside the system's."
            " [SOJOURN_EGRESS_ROOTS]",
        ),
        click.option(
            "--egress-private",
            envvar="SOJOURN_EGRESS_PRIVATE",
            help="Private networks that policies may name: NETWORK[,...]."
            " [SOJOURN_EGRESS_PRIVATE; else none]",
        ),
        click.option(
            "--egress-nameservers",
            envvar="SOJOURN_EGRESS_NAMESERVERS",
            help="Name servers that are asked for sessions: ADDRESS[,...]."
            " [SOJOURN_EGRESS_NAMESERVERS; else the host's]",
        ),
        click.option(
            "--egress-namespace",
            envvar="SOJOURN_EGRESS_NAMESPACE",
            help="Path of a network namespace in which connections of sessions are made."
            " [SOJOURN_EGRESS_NAMESPACE; else the server's own]",
        ),
    ):
        command = option(command)
    return command
