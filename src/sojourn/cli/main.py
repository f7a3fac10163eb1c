"""The `sojourn` command: one group, whose subcommands are loaded only when they are used.

Guarantee: every failure ends with one line that names the cause, the next step, and an exit code
of its own (100 to 122, as `sojourn.errors` gives them), never with an exit code that a command
run inside a session could have given by itself. With `--json` the failure is the JSON error body
on standard error. Start-up imports little more than click, so that `sojourn exec` stays quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sojourn.errors import SojournError

COMMANDS: dict[str, str] = {
    "setup": "sojourn.cli.setup:command",
    "doctor": "sojourn.cli.doctor:command",
    "demo": "sojourn.cli.demo:demo",
    "up": "sojourn.cli.up:command",
    "server": "sojourn.cli.server:command",
    "node": "sojourn.cli.node:node",
    "run": "sojourn.cli.run:command",
    "session": "sojourn.cli.session:command",
    "verify": "sojourn.cli.history:verify",
    "status": "sojourn.cli.service:status",
    "template": "sojourn.cli.template:template",
    "token": "sojourn.cli.service:token",
    "secret": "sojourn.cli.secret:secret",
    "port": "sojourn.cli.port:port",
    "store": "sojourn.cli.store:store",
    "recover": "sojourn.cli.recover:command",
    "export": "sojourn.cli.archives:export",
    "import": "sojourn.cli.archives:import_",
    "mcp": "sojourn.cli.mcp:command",
}
"""Every subcommand: its name, and `module:attribute` of its click command."""

EXIT_INTERNAL = 100
EXIT_USAGE = 101
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, click.Command):
            raise TypeError(f"{target} is not a click command")
        return found


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"sojourn {version('sojourn')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Durable sessions for AI agents over short-lived sandboxes.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """The group itself does nothing; its subcommands do."""


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the tool's own arguments (those after `--` are a command's)."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def report(error: SojournError, as_json: bool) -> None:
    """Tell a failure on standard error."""
    if as_json:
        import msgspec

        from sojourn.errors import to_body

        click.echo(msgspec.json.encode(to_body(error)).decode(), err=True)
    else:
        click.echo(f"error: {error.message} [{error.code}]", err=True)
        if error.next_step:
            click.echo(error.next_step, err=True)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    try:
        # Not `cli.main`, which would turn a reader that left into an exit with 1.
        with cli.make_context("sojourn", list(arguments)) as context:
            result = cli.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        from sojourn.errors import InvalidRequest

        if wants_json(arguments):
            report(InvalidRequest(error.format_message(), next_step="See --help."), True)
        else:
            error.show()
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader left (`sojourn session ls | head`): say nothing, also at exit, and end as
        # other programs do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the last place that can tell of it
        from sojourn.errors import SojournError

        if isinstance(error, SojournError):
            report(error, wants_json(arguments))
            return error.exit_code
        import traceback

        traceback.print_exc()
        report(SojournError(f"{type(error).__name__}: {error}"), wants_json(arguments))
        return EXIT_INTERNAL
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    if "_SOJOURN_COMPLETE" in os.environ:  # the shell asks for completions, or for their script
        cli.main(prog_name="sojourn")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
