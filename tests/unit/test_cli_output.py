"""What people see: control characters never reach the terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.cli.copying import parse_place
from sojourn.cli.output import pairs, safe, size, table


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        ("plain text", "plain text"),
        ("\u00e9\u4e2d", "\u00e9\u4e2d"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\u202ereversed", "\\u202ereversed"),
        ("\u200bhidden", "\\u200bhidden"),
        ("\x9bcsi", "\\x9bcsi"),
        ("\udcff", "\\udcff"),
        (5, "5"),
    ],
)
def test_control_characters_are_escaped(given_text: object, shown: str) -> None:
    assert safe(given_text) == shown


@given(st.text())
def test_whatever_comes_is_one_harmless_line(text: str) -> None:
    shown = safe(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1 and not any(
        ord(one) < 32 or ord(one) == 127 for one in shown
    )


def test_tables_are_plain_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    table(["A", "LONG"], [("x\x1b[2J", 1), ("yyyyyy", "[bold]z")])
    assert capsys.readouterr().out == ("A         LONG\nx\\x1b[2J  1\nyyyyyy    [bold]z\n")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("work:/a/b", ("work", "/a/b")),
        ("work:/a:b", ("work", "/a:b")),
        ("./work:/a", (None, "./work:/a")),
        ("/a:/b", (None, "/a:/b")),
        ("work:relative", (None, "work:relative")),
        ("file", (None, "file")),
    ],
)
def test_places(text: str, place: tuple[str | None, str]) -> None:
    assert parse_place(text) == place


def test_sizes_and_pairs() -> None:
    assert [size(count) for count in (0, 1023, 1024, 5 * 1024**3)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
    ]
    assert pairs(("a=b=c", "d="), "--env") == {"a": "b=c", "d": ""}
