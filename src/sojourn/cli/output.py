"""How commands speak: tables for people, JSON for programs, never a terminal's control characters.

Guarantee: with `--json` standard output holds one JSON document, the API's own (of what goes on,
such as `events --follow`, one a line); without it, text
that came from elsewhere (names, labels, paths, messages) is shown with its control characters
escaped, so that it can neither move the cursor nor disguise itself. A command's own output is not
text for people: it is passed on byte for byte.
"""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click
import msgspec

F = TypeVar("F", bound=Callable[..., Any])

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def safe(text: object) -> str:
    """Text whose control, format and line-breaking characters are escaped."""
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(
        repr(character)[1:-1] if unicodedata.category(character) in _HIDDEN else character
        for character in shown
    )


def json_option(command: F) -> F:
    """`--json` of a command."""
    return click.option("--json", "as_json", is_flag=True, help="JSON for programs.")(command)


def durable_option(command: F) -> F:
    """`--durable` of a command; it gets `wait`, as the client's methods take it."""
    return click.option(
        "--durable",
        "wait",
        is_flag=True,
        flag_value="durable",
        default=None,
        help="Return only when the object store has it, too.",
    )(command)


def counted(count: int, noun: str) -> str:
    """A number with its noun in the right number."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def emit_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(msgspec.json.encode(value))


def emit(value: Any, as_json: bool, show: Callable[[], None]) -> None:
    """A value, for programs or by `show` for people."""
    if as_json:
        emit_json(value)
    else:
        show()


def say(text: str) -> None:
    """A line for people, on standard output."""
    click.echo(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; plain columns when the output is not a terminal."""
    shown = [[safe(cell) for cell in row] for row in rows]
    widths = [
        max(len(column), *(len(row[index]) for row in shown)) if shown else len(column)
        for index, column in enumerate(columns)
    ]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        made = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            made.add_column(column, overflow="fold")
        for row in shown:
            made.add_row(*(Text(cell) for cell in row))
        Console().print(made)
        return
    for row in [list(columns), *shown]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def facts(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values, one a line; what is None is left out."""
    known = [(name, safe(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        click.echo(f"{name.ljust(width)}  {value}")


@contextlib.contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows that something is under way, on a terminal's standard error; gives what renews the
    text."""
    if quiet or not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(text)) as status:
        yield lambda text: status.update(escape(text))


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def moment(seconds: float | None) -> str:
    """A time for people, local."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def labels_text(labels: dict[str, str]) -> str:
    """Labels as key=value."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def pairs(values: Sequence[str], what: str) -> dict[str, str]:
    """KEY=VALUE options as a mapping. Raises click.BadParameter."""
    found = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=what)
        found[key] = rest
    return found
