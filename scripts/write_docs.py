"""Write the parts of the documentation that are made from the code.

Guarantee: what docs/reference/cli.md and the table of verbs in docs/design.md say is what the code
does, because a test compares them with what this program would write.

    python scripts/write_docs.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from sojourn.cli.main import cli
from sojourn.errors import SessionNotFound, SojournError
from sojourn.lifecycle import Command, Verb, decide
from sojourn.model import Limits, Policy, Session, SessionState

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ROOT / "docs" / "design.md"
REFERENCE = ROOT / "docs" / "reference" / "cli.md"
BEGIN, END = "<!-- verbs: written by scripts/write_docs.py -->", "<!-- /verbs -->"


# -- the table of verbs -----------------------------------------------------------------------


def _session(state: SessionState) -> Session:
    return Session(
        id="ses_0",
        tenant="ten_0",
        name=None,
        labels={},
        template="debian",
        env={},
        limits=Limits(),
        policy=Policy(),
        driver="gvisor",
        state=state,
        epoch=1,
        head="snp_0",
        parent_session=None,
        forked_from=None,
        sandbox=None,
        node=None,
        idle_deadline=None,
        lifetime_deadline=None,
        cause=None,
        created_at=0.0,
        updated_at=0.0,
    )


def _cell(verb: Verb, state: SessionState) -> str:
    try:
        transition = decide(_session(state), Command(verb))
    except SessionNotFound:
        return "not found"
    except SojournError:
        return "refused"
    steps = ", ".join(str(effect) for effect in transition.effects) or "nothing"
    return steps if transition.state is state else f"{steps} → **{transition.state}**"


def verbs_table() -> str:
    """What each verb does in each state, as a table."""
    states = list(SessionState)
    lines = [
        f"| verb | {' | '.join(states)} |",
        f"|---{'|---' * len(states)}|",
        *(f"| {verb} | {' | '.join(_cell(verb, state) for state in states)} |" for verb in Verb),
    ]
    return "\n".join(lines)


def design_with_table(text: str) -> str:
    """The design document with its table of verbs made anew."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{DESIGN} has no place for the table of verbs")
    return f"{before}{BEGIN}\n{verbs_table()}\n{END}{after}"


# -- the command line -------------------------------------------------------------------------


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _commands(found, (*path, name))
        return
    usage = " ".join([" ".join(path), *command.collect_usage_pieces(context)])
    yield f"## {' '.join(path)}\n\n    {usage}\n\n{_help(command)}\n{_options(command, context)}"


def _help(command: click.Command) -> str:
    return "\n".join(line.strip() for line in (command.help or "").strip().splitlines()) + "\n"


def _options(command: click.Command, context: click.Context) -> str:
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts or parameter.param_type_name == "argument":
            continue
        names, text = (part.replace("|", "\\|") for part in record)
        rows.append(f"| `{names}` | {text} |")
    return "\n".join(["| option | |", "|---|---|", *rows, ""]) if rows else ""


def cli_reference() -> str:
    """Every command with its options."""
    head = (
        "# The command line\n\n"
        "Written from the commands themselves by `scripts/write_docs.py`.\n\n"
        "`exec`, `run` and `attach` end with the exit code of the command they ran (128 and the"
        " signal's\nnumber when a signal ended it). Sojourn's own failures end with 100 to 120, as"
        " the tree in\n`src/sojourn/errors.py` lists them; with `--json` they are one JSON object"
        " on standard error.\n\n"
    )
    return head + "\n".join(_commands(cli, ("sojourn",)))


def main() -> int:
    """Write what is out of date; the exit code says whether anything was."""
    changed = False
    REFERENCE.parent.mkdir(exist_ok=True)
    for path, text in (
        (DESIGN, design_with_table(DESIGN.read_text())),
        (REFERENCE, cli_reference()),
    ):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
            changed = True
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
