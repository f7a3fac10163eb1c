"""What the command line draws and refuses by itself, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

from sojourn.cli.history import as_tree
from sojourn.cli.processes import command_of


def snapshot(name: str, parent: str | None, at: float, *, current: bool = False) -> Any:
    return SimpleNamespace(id=name, parent=parent, created_at=at, current=current)


def drawn(*found: Any) -> list[str]:
    return [lines + one.id for lines, one in as_tree(list(found))]


def test_a_line_is_not_indented() -> None:
    assert drawn(snapshot("b", "a", 2, current=True), snapshot("a", None, 1)) == ["a", "b"]


def test_what_was_left_stands_beside_the_line_to_the_current_snapshot() -> None:
    assert drawn(
        snapshot("a", None, 1),
        snapshot("old", "a", 2),
        snapshot("older", "old", 3),
        snapshot("other", "old", 4),
        snapshot("now", "a", 5, current=True),
        snapshot("undone", "now", 6),
    ) == ["a", "|- old", "|  |- older", "|  other", "now", "undone"]


def test_the_line_to_the_current_snapshot_keeps_its_column_when_others_are_newer() -> None:
    assert drawn(
        snapshot("a", None, 1),
        snapshot("now", "a", 2, current=True),
        snapshot("newer", "a", 3),
        snapshot("newest", "a", 4),
    ) == ["a", "|- newer", "|- newest", "now"]


def test_a_snapshot_whose_parent_is_gone_is_shown() -> None:
    assert drawn(snapshot("c", "gone", 2), snapshot("a", None, 1)) == ["a", "c"]


def test_a_deep_history_is_drawn() -> None:
    found = [snapshot(str(n), str(n - 1) if n else None, n) for n in range(5000)]
    assert drawn(*reversed(found)) == [str(n) for n in range(5000)]


def test_an_option_after_the_session_is_refused_with_the_reason() -> None:
    with pytest.raises(click.UsageError, match="options come before it"):
        command_of(("-c", "echo hi"), None)
    assert command_of(("--", "-odd"), None) == ["-odd"]
    assert command_of(("ls", "-l"), None) == ["ls", "-l"]
