"""Values at rest: sealed with a key that lies beside the database, never in it.

Guarantee: what is sealed is opened only with the key it was sealed with, and only as what it was
sealed for (its kind, tenant and name), so that a row copied to another tenant opens nothing. The
key is made once, readable by its owner alone; it is never made anew while something is sealed that
only the lost one opens.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sojourn.errors import HostUnfit, SecretsKeyInvalid
from sojourn.store.copying import write_whole

KEY_FILE = "secrets.key"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_VERSION = 1
_MARK_BYTES = 4  # of the key's fingerprint, to tell another key from damage


def _associated(kind: str, *names: str) -> bytes:
    # Lengths go first, so that no two lists of names give the same bytes.
    parts = [part.encode() for part in ("sojourn", kind, *names)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class SecretStore:
    """Seals and opens with one key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._mark = hashlib.sha256(b"sojourn secrets key" + key).digest()[:_MARK_BYTES]

    def __repr__(self) -> str:
        return "SecretStore()"

    def seal(self, value: bytes, kind: str, *names: str) -> bytes:
        """The sealed form of a value, for what `kind` and `names` say."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, value, _associated(kind, *names))
        return bytes([_VERSION]) + self._mark + nonce + sealed

    def open(self, sealed: bytes, kind: str, *names: str) -> bytes:
        """The value. Raises SecretsKeyInvalid when it is sealed with another key, for something
        else, or damaged."""
        what = f"{kind} {names[-1]}" if names else kind
        head = 1 + _MARK_BYTES
        if len(sealed) < head + _NONCE_BYTES or sealed[0] != _VERSION:
            raise SecretsKeyInvalid(f"{what} is stored in a form this version does not know")
        if sealed[1:head] != self._mark:
            raise SecretsKeyInvalid(f"{what} is sealed with another key than the server has")
        nonce, rest = sealed[head : head + _NONCE_BYTES], sealed[head + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, rest, _associated(kind, *names))
        except InvalidTag:
            raise SecretsKeyInvalid(f"{what} is damaged, or was sealed for something else") from (
                None
            )


def open_secret_store(data: Path, *, anything_sealed: bool) -> SecretStore:
    """The store of a data directory: with the key of SOJOURN_SECRETS_KEY_FILE where that is set,
    else with the directory's own, which is made when nothing is sealed yet.

    Raises HostUnfit (the named file cannot be read or holds no key), SecretsKeyInvalid (the key is
    gone while something is sealed with it).
    """
    named = os.environ.get("SOJOURN_SECRETS_KEY_FILE")
    if named:
        try:
            return SecretStore(parse_key(Path(named).read_bytes(), named))
        except OSError as error:
            raise HostUnfit(
                f"the key of secrets cannot be read: {error}",
                next_step="Correct SOJOURN_SECRETS_KEY_FILE.",
            ) from error
    path = data / KEY_FILE
    try:
        return SecretStore(parse_key(path.read_bytes(), str(path)))
    except FileNotFoundError:
        if anything_sealed:
            raise SecretsKeyInvalid(f"{path} is gone, and secrets are sealed with it") from None
    return SecretStore(_make(path))


def parse_key(content: bytes, where: str) -> bytes:
    """A key is 32 bytes, or these in hexadecimal digits with or without a line's end."""
    if len(content) == _KEY_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise HostUnfit(
            f"{where} does not hold a key of {_KEY_BYTES} bytes",
            next_step="Give 32 random bytes, as they are or as 64 hexadecimal digits.",
        )
    return key


def _make(path: Path) -> bytes:
    """A new key, on disk before anything is sealed with it."""
    key = os.urandom(_KEY_BYTES)
    write_whole(path, f"{key.hex()}\n".encode(), 0o600)
    return key
