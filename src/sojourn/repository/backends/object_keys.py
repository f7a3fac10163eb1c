"""Which keys and prefixes a backend takes.

Guarantee: a key that passed names one object below the repository and nothing outside of it, on a
file system as well as in a bucket; every backend refuses the same ones, before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sojourn.errors import InvalidRequest

LONGEST_KEY = 512
_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)

CLOCK_KEY = ".clock"
"""Written to learn a bucket's clock; belongs to the backends and is not listed."""


def is_key(key: str) -> bool:
    """Whether the key is one: segments of `A-Za-z0-9._-` joined by `/`, none of them `.` or `..`,
    at most 200 characters each and 512 in all."""
    if not 0 < len(key) <= LONGEST_KEY or key == CLOCK_KEY:
        return False
    return all(
        segment not in {".", ".."} and _SEGMENT.fullmatch(segment) for segment in key.split("/")
    )


def check_key(key: str) -> str:
    """The key itself; InvalidRequest when it is none."""
    if not is_key(key):
        raise InvalidRequest(
            f"{key[:LONGEST_KEY]!r} is no key of an object.", key=key[:LONGEST_KEY]
        )
    return key


def check_prefix(prefix: str) -> str:
    """A prefix for listings: empty, or a key and `/`."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        shown = prefix[:LONGEST_KEY]
        raise InvalidRequest(f"{shown!r} is no prefix of keys: it must end with a slash.")
    return prefix


def check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    """Refuse pieces that begin before the object or have a negative length."""
    for offset, length in ranges:
        if offset < 0 or length < 0:
            raise InvalidRequest(f"{(offset, length)} is no range of an object.")
