"""`sojourn session` exec, ps, logs, attach, kill and code.

Guarantee: the exit code is the command's own; output is passed on byte for byte as it comes;
Ctrl-C reaches the command first and kills it the second time.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from sojourn.cli.connection import session
from sojourn.cli.output import emit, emit_json, json_option, moment, pairs, safe, say, table

if TYPE_CHECKING:
    from sojourn.client.core_commands import ExecResult
    from sojourn.client.sync_process import Process
    from sojourn.client.sync_session import Session
    from sojourn.wire.api import ProcessInfo
    from sojourn.wire.code import CodeResult

AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the first argument is the command's, options and all."""


def command_of(words: tuple[str, ...], text: str | None) -> Any:
    """The command as the client takes it. Raises click.UsageError."""
    if words[0:1] and words[0].startswith("-") and words[0] != "--":
        raise click.UsageError(f"{words[0]} stands after SESSION; options come before it.")
    given = list(words[1:] if words[:1] == ("--",) else words)
    if (text is None) == (not given):
        raise click.UsageError("Give a command, or --shell TEXT.")
    if text is not None:
        return text
    return [word.encode("utf-8", "surrogateescape") for word in given] if _odd(given) else given


def _odd(words: list[str]) -> bool:
    return any("\udc80" <= character <= "\udcff" for word in words for character in word)


def write_out(data: bytes) -> None:
    """Output of a command, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_error(data: bytes) -> None:
    """Error output of a command, at once."""
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def run_command(
    target: Session, command: Any, *, interactive: bool, as_json: bool, **options: Any
) -> ExecResult:
    """Run a command, passing its output on and Ctrl-C in."""
    on_stdout, on_stderr = (None, None) if as_json else (write_out, write_error)
    interrupts = _Interrupts(target)
    with interrupts:
        return target.exec(
            command,
            stdin=sys.stdin.buffer if interactive else None,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_start=interrupts.started,
            **options,
        )


class _Interrupts:
    """Hands Ctrl-C to the command: the first time as SIGINT, then as SIGKILL."""

    def __init__(self, target: Session) -> None:
        self._target = target
        self._process: int | None = None
        self._signals = iter(("INT", "KILL"))

    def started(self, process: int) -> None:
        """The command runs."""
        self._process = process

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, _number: int, _frame: object) -> None:
        which = next(self._signals, None)
        if self._process is None or which is None:
            raise KeyboardInterrupt
        # Not from here: the interrupted code may hold the connection pool's lock.
        threading.Thread(target=self._send, args=(self._process, which), daemon=True).start()

    def _send(self, process: int, which: str) -> None:
        from sojourn.errors import SojournError

        with contextlib.suppress(SojournError):  # it may just have ended
            self._target.process(process).signal(which)


@click.command(
    "exec",
    context_settings=AS_GIVEN,
    help="Run a command in a session and end with its exit code. Options come before SESSION.",
)
@click.option("--interactive", "-i", is_flag=True, help="Pass standard input on.")
@click.option("--timeout", type=float, help="Kill it after so many seconds.")
@click.option("--env", "-e", "env", multiple=True, help="KEY=VALUE; may be repeated.")
@click.option("--cwd", "-w", help="Directory to run it in.")
@click.option("--user", "-u", help="User to run it as.")
@click.option("--shell", "-c", "text", help="Text for the session's shell, instead of COMMAND.")
@json_option
@click.argument("ref", metavar="SESSION")
@click.argument("words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def execute(
    ref: str,
    words: tuple[str, ...],
    text: str | None,
    interactive: bool,
    env: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    command = command_of(words, text)
    variables = pairs(env, "--env")
    result = run_command(
        session(ref), command, interactive=interactive, as_json=as_json, env=variables, **options
    )
    return finish(result, as_json)


def finish(result: ExecResult, as_json: bool) -> int:
    """Tell how a command ended; its exit code."""
    if as_json:
        emit_json(result)
    elif result.timed_out:
        click.echo("the command was killed at its timeout", err=True)
    elif result.reason:
        click.echo(f"the command was killed: {safe(result.reason)}", err=True)
    return result.exit_code


@click.command("ps", help="List a session's processes, running and ended.")
@click.argument("ref", metavar="SESSION")
@json_option
def ps(ref: str, as_json: bool) -> None:
    found = [process.info for process in session(ref).processes()]
    emit(found, as_json, lambda: _show_processes(found))


def _show_processes(found: list[ProcessInfo]) -> None:
    table(
        ["ID", "PID", "STATE", "STARTED", "COMMAND"],
        [
            (
                one.id,
                one.pid,
                "running" if one.running else f"ended {one.exit_code}",
                moment(one.started_at),
                " ".join(_first_line(word) for word in one.argv)[:100],
            )
            for one in found
        ],
    )


def _first_line(word: str) -> str:
    """An argument that is a whole program, told by its beginning."""
    first, newline, _rest = word.partition("\n")
    return f"{first[:40]}..." if newline else first


def pass_on(process: Process, *, follow: bool) -> None:
    """Pass a process's output on."""
    for piece in process.output(_oldest(process), follow=follow):
        (write_out if piece.stream == 1 else write_error)(piece.data)


def _oldest(process: Process) -> tuple[int, int]:
    return process.info.stdout[0], process.info.stderr[0]


@click.command("logs", help="Show what a process has written, as far as it is kept.")
@click.option("--follow", "-f", is_flag=True, help="Go on to its end.")
@click.argument("ref", metavar="SESSION")
@click.argument("number", metavar="PROCESS", type=int)
def logs(ref: str, number: int, follow: bool) -> None:
    pass_on(session(ref).process(number), follow=follow)


@click.command("attach", help="Follow a process to its end and end with its exit code.")
@click.argument("ref", metavar="SESSION")
@click.argument("number", metavar="PROCESS", type=int)
def attach(ref: str, number: int) -> int:
    process = session(ref).process(number)
    pass_on(process, follow=True)
    return process.wait().exit_code or 0


@click.command("kill", help="Send a signal to a process's group.")
@click.option("--signal", "-s", "which", default="KILL", show_default=True, help="Name or number.")
@click.option("--alone", is_flag=True, help="To the process alone.")
@click.argument("ref", metavar="SESSION")
@click.argument("number", metavar="PROCESS", type=int)
def kill(ref: str, number: int, which: str, alone: bool) -> None:
    wanted = int(which) if which.isascii() and which.isdigit() else which
    session(ref).process(number).signal(wanted, group=not alone)


@click.command("code", help="Run Python code (- reads it) in the session's interpreter.")
@click.option("--context", default="default", show_default=True, help="Which interpreter.")
@click.option("--timeout", type=float, help="Interrupt it after so many seconds.")
@click.argument("ref", metavar="SESSION")
@click.argument("code")
@json_option
def run_code(ref: str, code: str, context: str, timeout: float | None, as_json: bool) -> int:
    text = sys.stdin.read() if code == "-" else code
    found = session(ref)
    try:
        result = found.run_code(text, context=context, timeout=timeout)
    except KeyboardInterrupt:
        _interrupt_code(found)
        raise
    emit(result, as_json, lambda: _show_result(result))
    return 1 if result.error is not None else 0


def _interrupt_code(found: Session) -> None:
    """Have the code end, too: the next one would wait for it without a word."""
    from sojourn.wire.code import is_interpreter

    running = [
        process
        for process in found.processes()
        if process.running and is_interpreter(process.info.argv)
    ]
    if len(running) == 1:
        running[0].signal(signal.SIGINT, group=False)
    elif running:
        numbers = ", ".join(str(process.id) for process in running)
        click.echo(
            "the code goes on; end it with `sojourn session kill -s INT --alone`, one of the"
            f" interpreters {numbers}",
            err=True,
        )


def _show_result(result: CodeResult) -> None:
    write_out(result.stdout.encode("utf-8", "replace"))
    write_error(result.stderr.encode("utf-8", "replace"))
    if result.restarted:
        click.echo("the interpreter was started anew", err=True)
    if result.error is not None:
        trace = result.error.traceback or f"{result.error.name}: {result.error.value}"
        for line in trace.rstrip("\n").splitlines():
            click.echo(safe(line), err=True)
    elif result.text is not None:
        for line in result.text.splitlines():
            say(safe(line))


COMMANDS = [execute, ps, logs, attach, kill, run_code]
