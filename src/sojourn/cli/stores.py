"""Which object store a command means, and the secret that opens it.

Guarantee: the server, and the commands that work on its object store, find the same one from the
same flags and variables; the secret is read from a file or the environment, never from a flag.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sojourn.errors import InvalidRequest
from sojourn.model.paths import data_directory

if TYPE_CHECKING:
    from sojourn.repository.opened import OpenedRepository
    from sojourn.repository.repository import Repository

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NONE = "none"
MAX_SECRET = 64 << 10
"""Bytes of a key file."""


def store_options(command: F) -> F:
    """`--store`, `--key-file` and `--data` of a command that works on an object store by itself;
    it gets `url`, `key_file` and `data`."""
    for option in (
        click.option(
            "--data",
            type=click.Path(path_type=Path, file_okay=False),
            callback=lambda _context, _option, given: (given or data_directory()).absolute(),
            help="Data directory of the server. [SOJOURN_DATA]",
        ),
        click.option(
            "--key-file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File with the secret that opens an encrypted object store."
            " [SOJOURN_STORE_KEY_FILE, or the secret itself in SOJOURN_STORE_KEY]",
        ),
        click.option(
            "--store",
            "url",
            help="Object store: a directory, file:///DIR or s3://BUCKET/PREFIX."
            " [SOJOURN_STORE; else `objects` in the data directory]",
        ),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def opened_store(url: str | None, key_file: Path | None, data: Path) -> Iterator[OpenedRepository]:
    """The repository that `store_options` name, for looking after it. Raises InvalidRequest,
    ObjectMissing, StoreKeyInvalid, StoreUnreachable, StoreRefused, IntegrityError."""
    from sojourn.repository.opened import OpenedRepository

    with contextlib.closing(OpenedRepository.open(*_named(url, key_file, data))) as opened:
        yield opened


@contextlib.contextmanager
def opened_store_beside(
    url: str | None, key_file: Path | None, data: Path, work: Callable[[], T]
) -> Iterator[tuple[OpenedRepository, T]]:
    """As `opened_store`, while `work` is done, whose result comes along."""
    from sojourn.repository.opened import OpenedRepository

    location, secret = _named(url, key_file, data)
    opened, done = OpenedRepository.open_beside(location, secret, work)
    with contextlib.closing(opened):
        yield opened, done


@contextlib.contextmanager
def opened_repository(url: str | None, key_file: Path | None, data: Path) -> Iterator[Repository]:
    """As `opened_store`, for reading snapshots."""
    from sojourn.repository.repository import Repository

    with contextlib.closing(Repository.open(*_named(url, key_file, data))) as opened:
        yield opened


def _named(url: str | None, key_file: Path | None, data: Path) -> tuple[str, bytes | None]:
    location = store_location(url, data)
    if location is None:
        raise InvalidRequest("the server keeps no object store (SOJOURN_STORE is `none`)")
    return location, store_secret(key_file)


def store_location(given: str | None, data: Path) -> str | None:
    """The URL of the object store: as given, else a directory in the data directory; None for
    `none`."""
    text = given or os.environ.get("SOJOURN_STORE") or ""
    if text == _NONE:
        return None
    return text or (data / "objects").as_uri()


def store_secret(file: Path | None) -> bytes | None:
    """The secret from the file, SOJOURN_STORE_KEY_FILE or SOJOURN_STORE_KEY; None without any.
    Raises InvalidRequest."""
    return read_secret(file, "SOJOURN_STORE_KEY_FILE", "SOJOURN_STORE_KEY", field="store_key_file")


def read_secret(
    file: Path | None, file_variable: str, variable: str, *, field: str
) -> bytes | None:
    """A secret from a file or pipe, from the one that a variable names, or from a variable; None
    without any. Raises InvalidRequest, also for a file too large to be a key."""
    named = file or (Path(path) if (path := os.environ.get(file_variable)) else None)
    if named is None:
        text = os.environ.get(variable)
        return os.fsencode(text) if text else None
    try:
        secret = _read_key_file(named)
    except OSError as error:
        raise InvalidRequest(
            f"the key file {named} cannot be read: {error.strerror}", field=field
        ) from error
    if secret is None:
        raise InvalidRequest(f"the key file {named} is neither a file nor a pipe", field=field)
    if len(secret) > MAX_SECRET:
        raise InvalidRequest(
            f"the key file {named} is too large for a key, which has {MAX_SECRET} bytes at most",
            field=field,
        )
    return secret


def _read_key_file(path: Path) -> bytes | None:
    """What is in a file or pipe, but one byte more than a key may have at most; None where it is
    something else: a device may never end, and even opening one may do something."""
    if not _is_readable_kind(path.stat().st_mode):
        return None
    with path.open("rb", buffering=0) as file:
        if not _is_readable_kind(os.fstat(file.fileno()).st_mode):
            return None
        read = b""
        while len(read) <= MAX_SECRET and (piece := file.read(MAX_SECRET + 1 - len(read))):
            read += piece
        return read


def _is_readable_kind(mode: int) -> bool:
    # A pipe is what the shell's <(command) gives.
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
