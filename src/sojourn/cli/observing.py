"""How a server tells of itself, in options of the command line.

Guarantee: the same options mean the same at every command that serves; traces are sent where
OpenTelemetry's own variables name a collector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from sojourn.telemetry import logs


def observing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--log-level, --log-format, --health-listen."""
    for option in reversed(
        [
            click.option(
                "--log-level",
                type=click.Choice(["debug", "info", "warning", "error"]),
                default="info",
                show_default=True,
                help="What is logged on standard error.",
            ),
            click.option(
                "--log-format",
                type=click.Choice(logs.FORMATS),
                envvar="SOJOURN_LOG_FORMAT",
                default=logs.TEXT,
                show_default=True,
                help="Lines for people, or a JSON object each. [SOJOURN_LOG_FORMAT]",
            ),
            click.option(
                "--health-listen",
                envvar="SOJOURN_HEALTH_LISTEN",
                help="HOST:PORT at which /health, /ready and /metrics are answered without a token."
                " [SOJOURN_HEALTH_LISTEN; else nowhere]",
            ),
        ]
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def observing(service: str, level: str, form: str) -> Iterator[None]:
    """Around a process that serves: its log, and its traces under the name of the service. Raises
    HostUnfit."""
    from sojourn.telemetry import tracing

    logs.set_up(level, form)
    tracing.start(service)
    try:
        yield
    finally:
        tracing.stop()
