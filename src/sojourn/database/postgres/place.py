"""Where a database is, and how it may be told.

Guarantee: what is shown of a URL is host, port, database and user, never its password nor any other
setting; a URL that cannot be read is refused without repeating a part of it.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from sojourn.errors import InvalidRequest

SCHEMES = ("postgresql://", "postgres://")

PATIENCE = "SOJOURN_DATABASE_PATIENCE"
PATIENCE_SECONDS = 30.0

_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 5,
    "application_name": "sojourn",
    # A peer that vanished without a word is noticed within half a minute.
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # Of several hosts the one that takes writes.
    "target_session_attrs": "read-write",
}


class Place(msgspec.Struct, frozen=True):
    """`shown` is for people, `settings` are what libpq takes, `patience` are the seconds in which a
    server that is away is waited for."""

    shown: str
    settings: dict[str, Any]
    patience: float = PATIENCE_SECONDS


def read_place(url: str) -> Place:
    """Raises InvalidRequest."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error:
        # Its message quotes what it does not understand, which may be the password.
        raise InvalidRequest(
            "the URL of the database cannot be read",
            next_step="Give postgresql://USER@HOST:PORT/DATABASE; escape what is special in a URL.",
        ) from None
    hosts = str(given.get("host") or given.get("hostaddr") or "")
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    # A directory of sockets is told as libpq takes it.
    where = f"{user}{hosts}{port}" if not hosts.startswith("/") else f"{user}{port}"
    socket = f"?host={hosts}" if hosts.startswith("/") else ""
    shown = f"postgresql://{where}/{given.get('dbname') or ''}{socket}"
    settings = _DEFAULTS | {name: value for name, value in given.items() if value}
    return Place(shown, settings, _patience())


def impatient(place: Place) -> Place:
    """The same for calls that are of no use when they are late: they fail within some seconds."""
    settings = place.settings | {"connect_timeout": 2, "tcp_user_timeout": 4000}
    return Place(place.shown, settings, min(place.patience, 2.0))


def _patience() -> float:
    given = os.environ.get(PATIENCE, "")
    try:
        seconds = float(given) if given else PATIENCE_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 3600.0:
        raise InvalidRequest(f"{PATIENCE} is {given!r}, not a number of seconds up to 3600")
    return seconds


def has_password(url: str) -> bool:
    """Whether a URL holds a password, which has no place in a list of processes."""
    return bool(read_place(url).settings.get("password"))
