"""Ways in which an object of an object store is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

INTEGRITY = 112  # what a command ends with that has found some


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": shorten, "remove": remove}
