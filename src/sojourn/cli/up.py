"""`sojourn up`: the server in the foreground.

Guarantee: standard output says `ready URL` once, when requests are answered, and nothing else;
SIGTERM and Ctrl-C stop it cleanly with exit code 0.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("up", help="Run the server until it is stopped (SIGTERM, Ctrl-C).")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory. [SOJOURN_DATA]",
)
@click.option(
    "--listen",
    envvar="SOJOURN_LISTEN",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT; port 0 takes a free one.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged on standard error.",
)
def command(data: Path | None, listen: str, log_level: str) -> None:
    import logging
    import sys

    from sojourn.model.paths import data_directory
    from sojourn.server.app import run
    from sojourn.server.service_factory import open_service

    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    place = (data or data_directory()).absolute()
    run(lambda: open_service(place), data=place, address=listen)
