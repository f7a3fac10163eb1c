"""Which database a server, or a command that works on it by itself, means.

Guarantee: both find the same one from the same flag and variable; a password is read from the
environment or a password file, never from a flag, where every user of the machine could see it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sojourn.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])

_VARIABLE = "SOJOURN_DATABASE"
_FILE = "sojourn.db"


def database_option(command: F) -> F:
    """`--database`; the command gets `database`, for `database_location`."""
    option = click.option(
        "--database",
        help="Database of sessions and their history: postgresql://USER@HOST:PORT/NAME, or a file."
        f" [{_VARIABLE}; else `{_FILE}` in the data directory]",
    )
    return option(command)


def database_location(given: str | None, data: Path) -> str:
    """The database's URL or path. Raises InvalidRequest for a password on the command line."""
    if given is None:
        return os.environ.get(_VARIABLE) or str(data / _FILE)
    if given.startswith(("postgresql://", "postgres://")):
        from sojourn.database.postgres.place import has_password

        if has_password(given):
            raise InvalidRequest(
                "a password on the command line is seen by every user of the machine",
                next_step=f"Give the URL in {_VARIABLE}, or the password in ~/.pgpass.",
            )
    return given
