"""What errors and help texts tell people to do can be done: the commands and options exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sojourn.cli.main import cli
from sojourn.errors import all_errors

SOURCE = Path(__file__).parents[2] / "src" / "sojourn"


def commands(group: click.Group, above: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield f"{above} {name}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{above} {name}")


COMMANDS = dict(commands(cli, "sojourn"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module that people may see: all but what describes the module itself."""
    tree = ast.parse(path.read_text())
    own = {id(tree.body[0].value)} if tree.body and isinstance(tree.body[0], ast.Expr) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            # What is put in stands for some word.
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "WORD"
                for part in node.values
            ]
            own |= {id(part) for part in node.values}
            yield node.lineno, "".join(parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            yield node.lineno, node.value


def wrong_with(shown: str) -> str | None:
    """What is not there of a command line; None: all of it is."""
    words = shown.split()
    name = words.pop(0)
    while words and f"{name} {words[0]}" in COMMANDS:
        name = f"{name} {words.pop(0)}"
    found = COMMANDS.get(name)
    if found is None or (isinstance(found, click.Group) and words):
        return f"there is no {name} {words[:1]}"
    options = {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in options:
            return f"{name} has no {word}"
    return None


def test_commands_in_texts_exist() -> None:
    wrong, seen = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text in texts(path):
            for shown in re.findall(r"`(sojourn [^`]+)`", text):
                seen += 1
                if (why := wrong_with(shown)) is not None:
                    wrong.append(f"{path.relative_to(SOURCE)}:{line}: `{shown}`: {why}")
    assert wrong == []
    assert seen > 50


@pytest.mark.parametrize("code", sorted(all_errors()))
def test_every_error_has_a_next_step(code: str) -> None:
    step = all_errors()[code].default_next_step
    assert step.endswith((".", ")")) and len(step) > 10


@pytest.mark.parametrize(
    "shown",
    ["sojourn sesion ls", "sojourn session lsx", "sojourn session update --disk", "sojourn ls"],
)
def test_what_does_not_exist_is_noticed(shown: str) -> None:
    assert wrong_with(shown) is not None
