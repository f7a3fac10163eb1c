"""Which object store a command means, and the secret that opens it.

Guarantee: the server, and the commands that work on its object store, find the same one from the
same flags and variables; the secret is read from a file or the environment, never from a flag.
"""

from __future__ import annotations

import os
from pathlib import Path

from sojourn.errors import InvalidRequest

_NONE = "none"


def store_location(given: str | None, data: Path) -> str | None:
    """The URL of the object store: as given, else a directory in the data directory; None for
    `none`."""
    text = given or os.environ.get("SOJOURN_STORE") or ""
    if text == _NONE:
        return None
    return text or f"file://{data / 'objects'}"


def store_secret(file: Path | None) -> bytes | None:
    """The secret from the file, SOJOURN_STORE_KEY_FILE or SOJOURN_STORE_KEY; None without any.
    Raises InvalidRequest."""
    named = file or (Path(path) if (path := os.environ.get("SOJOURN_STORE_KEY_FILE")) else None)
    if named is None:
        text = os.environ.get("SOJOURN_STORE_KEY")
        return os.fsencode(text) if text else None
    try:
        return named.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"the key file {named} cannot be read: {error.strerror}", field="store_key_file"
        ) from error
