"""The numbered migrations of an engine.

Guarantee: they are told in order and numbered from 1 without a gap, so that the number of those
that were applied says which come next.
"""

from __future__ import annotations

import re
from importlib import resources

_NUMBERED = re.compile(r"^(\d{4})_(\w+)\.sql$")


def numbered(package: str) -> list[tuple[int, str, str]]:
    """Number, name and text of all in the folder `migrations` of an engine's package."""
    found = []
    for file in resources.files(package).joinpath("migrations").iterdir():
        match = _NUMBERED.match(file.name)
        if match:
            found.append((int(match[1]), match[2], file.read_text(encoding="utf-8")))
    found.sort()
    if [number for number, _, _ in found] != list(range(1, len(found) + 1)):
        raise ValueError("migrations are not numbered 1, 2, 3, ...")
    return found
