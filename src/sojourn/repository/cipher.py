"""The repository's cipher, AES-256-GCM, always under a key that is used for one object or pack.

Guarantee: what opens is what was encrypted with this key and number and together with the same
associated bytes; everything else raises `Refused`. A number is used once under a key: that makes it
safe as a nonce.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


class Refused(Exception):
    """What was to be opened was not made so."""


@cache
def load() -> tuple[type[AESGCM], type[Exception]]:
    """Load the library, which takes some tens of milliseconds: whoever opens a repository does so
    while its key is being made. The cipher and what it raises."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM, InvalidTag


def encrypt(key: bytes, body: Any, associated: bytes, number: int = 0) -> bytes:
    """The encrypted body with its tag of 16 bytes."""
    return load()[0](key).encrypt(_nonce(number), body, associated)


def decrypt(key: bytes, body: Any, associated: bytes, number: int = 0) -> bytes:
    """The body. Raises Refused."""
    cipher, refused = load()
    try:
        return cipher(key).decrypt(_nonce(number), body, associated)
    except refused:
        raise Refused from None


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
