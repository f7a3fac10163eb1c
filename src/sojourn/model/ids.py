"""Identifiers: a kind prefix and 24 lower-case letters and digits, sortable by creation time.

All ids of one kind have one length, because runsc matches ids by prefix.
"""

from __future__ import annotations

import hashlib
import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case


def _encode(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        digits.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(digits))


def new_id(prefix: str) -> str:
    """A new id such as `ses_...`: 9 characters of milliseconds, 15 of randomness (75 bits)."""
    return f"{prefix}_{_encode(time.time_ns() // 1_000_000, 9)}{_encode(secrets.randbits(75), 15)}"


def derived_id(prefix: str, source: str, number: int) -> str:
    """The id of the `number`-th thing that `source` (another id) makes: the same each time it is
    asked for, so that work begun again after a crash finds what it had made. Keeps the time part.
    """
    digest = hashlib.blake2b(f"{prefix}/{source}/{number}".encode(), digest_size=16).digest()
    random = int.from_bytes(digest, "big") & ((1 << 75) - 1)
    return f"{prefix}_{source.partition('_')[2][:9]}{_encode(random, 15)}"
