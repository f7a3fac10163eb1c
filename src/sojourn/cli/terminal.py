"""`sojourn session sh`: an interactive terminal in a session.

Guarantee: the local terminal is given back as it was, however the shell ends. The shell itself
runs in the session: it survives a lost connection, a detach (Ctrl-]), suspend and resume, and
`--process` takes it up again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from sojourn.cli.connection import session
from sojourn.cli.output import safe
from sojourn.cli.processes import AS_GIVEN, command_of

if TYPE_CHECKING:
    from sojourn.client.sync_process import Process

DETACH = b"\x1d"  # Ctrl-]
LOGIN_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"


@click.command(
    "sh",
    context_settings=AS_GIVEN,
    help="Open a terminal in a session, or take one up again. Ctrl-] leaves it running.",
)
@click.option("--process", "number", type=int, help="A terminal that runs already (see ps).")
@click.option("--user", "-u", help="User to run it as.")
@click.option("--cwd", "-w", help="Directory to run it in.")
@click.argument("ref", metavar="SESSION")
@click.argument("words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def shell(
    ref: str, words: tuple[str, ...], number: int | None, user: str | None, cwd: str | None
) -> int:
    target = session(ref)
    if number is not None:
        process = target.process(number)
        if not process.info.pty:
            raise click.UsageError(f"process {number} has no terminal; see `session attach`")
        process.resize(*_size())
    else:
        command: Any = command_of(words, None) if words else LOGIN_SHELL
        term = os.environ.get("TERM", "xterm")
        process = target.spawn(
            command, pty=_size(), stdin="pipe", user=user, cwd=cwd, env={"TERM": term}
        )
    with _raw_terminal():
        detached = _relay(process)
    if detached:
        click.echo(f"\nleft running: sojourn session sh --process {process.id} {safe(ref)}")
        return 0
    return process.wait().exit_code or 0


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.lines, size.columns


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Hand every key to the session; restored at the end."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setraw(handle)
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _relay(process: Process) -> bool:
    """Carry keys in and output out until the end; True when the user left."""
    left = threading.Event()
    resized = threading.Event()
    previous = signal.signal(signal.SIGWINCH, lambda _number, _frame: resized.set())
    output = process.output(process.info.stdout[0])
    threading.Thread(target=_keys, args=(process, left), daemon=True).start()
    threading.Thread(target=_resizes, args=(process, resized), daemon=True).start()
    try:
        # Reading in a thread lets the main one notice that the user has left.
        done = threading.Event()
        failed: list[BaseException] = []
        reader = threading.Thread(target=_show, args=(output, done, failed), daemon=True)
        reader.start()
        while not done.is_set() and not left.is_set():
            done.wait(0.05)
        if failed and not left.is_set():
            raise failed[0]
        return left.is_set() and not done.is_set()
    finally:
        signal.signal(signal.SIGWINCH, previous)


def _show(output: Iterator[Any], done: threading.Event, failed: list[BaseException]) -> None:
    try:
        for piece in output:
            sys.stdout.buffer.write(piece.data)
            sys.stdout.buffer.flush()
    except Exception as error:  # noqa: BLE001 - raised again by the main thread
        failed.append(error)
    finally:
        done.set()


def _keys(process: Process, left: threading.Event) -> None:
    from sojourn.errors import SojournError

    handle = sys.stdin.fileno()
    interactive = sys.stdin.isatty()
    with contextlib.suppress(SojournError):  # the end of the process shows in its output
        while data := os.read(handle, 4096):
            if interactive and DETACH in data:
                try:
                    if before := data.partition(DETACH)[0]:
                        process.write(before)
                finally:
                    left.set()  # leaving must not depend on the server's answer
                return
            process.write(data)
        # The end of input, as a terminal says it. Again and again, as the end of a file is read
        # again and again: a shell that is just starting throws the first away.
        while True:
            process.write(b"\x04")
            time.sleep(0.5)


def _resizes(process: Process, resized: threading.Event) -> None:
    from sojourn.errors import SojournError

    while resized.wait():
        resized.clear()
        with contextlib.suppress(SojournError):  # the next one may succeed; the end shows elsewhere
            process.resize(*_size())


COMMANDS = [shell]
