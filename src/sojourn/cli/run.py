"""`sojourn run`: one command in a sandbox of its own, of which nothing is left.

Guarantee: the session is deleted whatever happens: the command ends, fails or is interrupted,
also while the session is still being made. Should this program itself be killed, the session
deletes itself when nobody has asked for it for ten minutes, and at the latest after --max-lifetime.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import json_option, pairs, working
from sojourn.cli.processes import AS_GIVEN, command_of, finish, run_command
from sojourn.cli.settings import session_options, start_arguments

if TYPE_CHECKING:
    from sojourn.client.sync_client import Sojourn
    from sojourn.client.sync_session import Session


@click.command(
    "run",
    context_settings=AS_GIVEN,
    help="Run a command in a sandbox of its own and end with its exit code. Nothing is left.",
)
@session_options
@click.option("--interactive", "-i", is_flag=True, help="Pass standard input on.")
@click.option("--timeout", type=float, help="Kill it after so many seconds.")
@click.option("--shell", "-c", "text", help="Text for the shell, instead of COMMAND.")
@click.option(
    "--max-lifetime",
    type=float,
    default=86400.0,
    show_default=True,
    help="Seconds after which the sandbox deletes itself.",
)
@json_option
@click.argument("words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def command(
    words: tuple[str, ...],
    text: str | None,
    interactive: bool,
    timeout: float | None,
    max_lifetime: float,
    as_json: bool,
    **options: Any,
) -> int:
    wanted = command_of(words, text)
    arguments = start_arguments(options)
    arguments["policy"] = {
        "auto_snapshot": "off",
        "idle_timeout": 600.0,
        "on_idle": "delete",
        "max_lifetime": max_lifetime,
        "on_expiry": "delete",
        "on_stop": "suspend",
    }
    variables = pairs(options["env"], "--env")
    with _ended_by_signals(), _session(connect(), arguments, as_json) as session:
        result = run_command(
            session,
            wanted,
            interactive=interactive,
            as_json=as_json,
            timeout=timeout,
            env=variables,
        )
    return finish(result, as_json)


@contextlib.contextmanager
def _session(client: Sojourn, arguments: dict[str, Any], quiet: bool) -> Iterator[Session]:
    from sojourn.client.core import new_key

    key = new_key()
    made: Session | None = None
    try:
        with working("Starting a sandbox", quiet=quiet):
            made = client.sessions.create(idempotency_key=key, **arguments)
        yield made
    except KeyboardInterrupt:
        with _undisturbed():
            if made is None:
                # The request may have arrived: the same key finds what it made.
                made = client.sessions.create(idempotency_key=key, **arguments)
        raise
    finally:
        if made is not None:
            with _undisturbed():
                made.delete()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Clean-up that a second Ctrl-C does not stop half-way."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
