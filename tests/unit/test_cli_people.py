"""What the command line draws and refuses by itself, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

from sojourn.cli.history import as_tree
from sojourn.cli.processes import command_of
from sojourn.cli.service import object_store_facts
from sojourn.cli.settings import retention_rules
from sojourn.database import database_place
from sojourn.wire.api import ObjectStoreInfo


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


def test_how_far_the_object_store_is_behind() -> None:
    assert object_store_facts(None) == [("object store", "none")]
    behind = ObjectStoreInfo("s3://bucket", 3, 12.4, 0, "it cannot be reached", [])
    assert object_store_facts(behind) == [
        ("object store", "s3://bucket"),
        ("note", None),
        ("behind", "3 snapshots wait, for up to 12 s"),
        ("held up by", "it cannot be reached"),
    ]
    (behind,) = [
        value
        for name, value in object_store_facts(ObjectStoreInfo("", 1, 2.0, 0, None, []))
        if name == "behind"
    ]
    assert behind == "1 snapshot waits, for up to 2 s"
    level = ObjectStoreInfo("", 0, 0.0, 9, None, [], in_data=True)
    assert object_store_facts(level) == [
        ("object store", "yes"),
        ("note", "in the data directory: does not survive its loss"),
        ("behind", "nothing waits"),
        ("held up by", None),
    ]


def test_rules_of_retention_are_read() -> None:
    assert retention_rules("all") is None
    nothing = {"keep_all_for": 0, "keep_last": 0, "hourly": 0, "daily": 0, "weekly": 0}
    assert retention_rules("last=3, daily=7") == nothing | {"keep_last": 3, "daily": 7}
    assert retention_rules("for=60,weekly=4") == nothing | {"keep_all_for": 60, "weekly": 4}


@pytest.mark.parametrize("text", ["", "last", "last=", "last=-1", "last=x", "yearly=1", "last=²"])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        retention_rules(text)


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/srv/data/sojourn.db", "/srv/data/sojourn.db"),
        ("sqlite:///srv/data/sojourn.db", "/srv/data/sojourn.db"),
        (
            "postgresql://me:hunter2@db.example:5433/sojourn",
            "postgresql://me@db.example:5433/sojourn",
        ),
        ("postgres://me@db.example/sojourn?password=hunter2", "postgresql://me@db.example/sojourn"),
    ],
)
def test_where_the_database_is_without_its_password(location: str, shown: str) -> None:
    assert database_place(location) == shown
