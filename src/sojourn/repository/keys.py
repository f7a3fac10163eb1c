"""Keys: what is derived from the root key, for whom, and how the root key itself is kept.

Guarantee: every domain has keys of its own, so nothing can be named, recognised or opened across
domains; and no object that holds key material shows it: not when printed, logged, pickled or
encoded, so that secrets cannot leak through an error text. Every use has a derivation context of
its own, so that a key for one purpose says nothing about another.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from typing import NoReturn

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError, InvalidRequest, StoreKeyInvalid
from sojourn.repository import cipher

KEY_BYTES = 32
SALT_BYTES = 16
SECRET_MINIMUM = 16
_CONTEXT = "sojourn 2026 repository {} v1"
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": KEY_BYTES}
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = {"config", "keys"}  # the names beside the domains in a repository


class _Hidden:
    """Base of what holds key material: shows nothing of it and cannot be pickled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds keys and is not to be written anywhere")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__reduce__()


class DomainKeys(_Hidden):
    """The keys of one domain. `sealing` is None where the repository is not encrypted."""

    __slots__ = ("cutting", "domain", "naming", "sealing")

    def __init__(self, domain: str, naming: bytes, sealing: bytes | None, cutting: int) -> None:
        self.domain = domain
        self.naming = naming
        self.sealing = sealing
        self.cutting = cutting

    def __repr__(self) -> str:
        return f"<DomainKeys of {self.domain!r}>"

    @property
    def encrypted(self) -> bool:
        """Whether what is written with these keys is encrypted."""
        return self.sealing is not None

    def chunk_name(self, kind: int, content: bytes) -> bytes:
        """The name of a chunk (32 bytes) from its kind and content id."""
        return blake3(bytes((kind,)) + content, key=self.naming).digest()

    def object_name(self, kind: str, id: str) -> str:
        """The name in its key of a root object whose id is not to be shown, in hex.

        The input begins with a letter where those of chunk names begin with 0 to 2 and those of
        seals with `SJRS`: names and seals made with one key never meet.
        """
        return blake3(f"object {kind} {id}".encode(), key=self.naming).hexdigest()

    def object_key(self, salt: bytes) -> bytes:
        """The encryption key of the one sealed object that has this salt."""
        return self._own_key(b"object", salt)

    def pack_key(self, salt: bytes) -> bytes:
        """The encryption key of the blocks of the one pack that has this salt."""
        return self._own_key(b"pack", salt)

    def _own_key(self, use: bytes, salt: bytes) -> bytes:
        if self.sealing is None:
            raise ValueError("the repository is not encrypted")
        return blake3(use + salt, key=self.sealing).digest()


# Of `config` and the wrapped keys, which are read before any key is known: their seal tells damage,
# not forgery. What they say is proven by the wrapped key's own authentication.
PLAIN = DomainKeys("", bytes(KEY_BYTES), None, 0)


class Keyring(_Hidden):
    """The root key of an open repository, and the keys of its domains."""

    __slots__ = ("_domains", "_lock", "_root", "encrypted")

    def __init__(self, root: bytes, encrypted: bool) -> None:
        if len(root) != KEY_BYTES:
            raise ValueError("a root key has 32 bytes")
        self._root = root
        self.encrypted = encrypted
        self._domains: dict[str, DomainKeys] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Keyring, {'encrypted' if self.encrypted else 'not encrypted'}>"

    @property
    def root_key(self) -> bytes:
        """The root key itself, for another process of ours that works on the same repository."""
        return self._root

    def domain(self, name: str) -> DomainKeys:
        """The keys of a domain. Raises InvalidRequest where the name cannot be one."""
        found = self._domains.get(name)
        if found is None:
            check_domain(name)
            found = DomainKeys(
                name,
                self._derive("naming", name, KEY_BYTES),
                self._derive("sealing", name, KEY_BYTES) if self.encrypted else None,
                int.from_bytes(self._derive("cutting", name, 8), "little"),
            )
            with self._lock:
                found = self._domains.setdefault(name, found)
        return found

    def _derive(self, use: str, domain: str, length: int) -> bytes:
        hasher = blake3(derive_key_context=_CONTEXT.format(use))
        hasher.update(self._root)
        hasher.update(domain.encode())
        return hasher.digest(length)


def check_domain(name: str) -> None:
    """Refuse a name that would leave its place in the repository or meet another object's."""
    if _DOMAIN.fullmatch(name) is None or name in _RESERVED or ".." in name:
        raise InvalidRequest(f"{name!r} cannot be the name of a domain of the store.", field="name")


def clean_secret(secret: bytes) -> bytes:
    """The operator's secret as it came from a file or the environment: one newline at its end is
    not part of it. Raises InvalidRequest when it is too short to protect anything."""
    if secret.endswith(b"\r\n"):
        secret = secret[:-2]
    elif secret.endswith(b"\n"):
        secret = secret[:-1]
    if len(secret) < SECRET_MINIMUM:
        raise InvalidRequest(
            f"The secret key has {len(secret)} bytes; it needs at least {SECRET_MINIMUM}.",
            next_step="Make one with `openssl rand -hex 32` and keep it safe.",
            field="secret",
        )
    return secret


class WrappedKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The root key under a key made from the operator's secret. Nothing in it is secret."""

    repository: str
    salt: bytes
    wrapped: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WrappedKey)


def wrap_root(root: bytes, secret: bytes, repository: str) -> bytes:
    """The payload of a `keys/...` object."""
    salt = os.urandom(SALT_BYTES)  # of its own, so that the key made with it is used this once
    wrapped = cipher.encrypt(_secret_key(secret, salt), root, repository.encode())
    return _encoder.encode(WrappedKey(repository, salt, wrapped))


def read_wrapped(payload: bytes, *, name: str) -> WrappedKey:
    """The parts of a wrapped key. Raises IntegrityError naming it."""
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{name} is malformed: {error}", object=name) from None
    if len(found.salt) != SALT_BYTES or len(found.wrapped) != KEY_BYTES + 16:
        raise IntegrityError(f"{name} is malformed: it holds no key of 32 bytes.", object=name)
    return found


def unwrap_root(found: WrappedKey, secret: bytes, *, name: str) -> bytes:
    """The root key. Raises StoreKeyInvalid where the secret is not the one it was wrapped with."""
    key = _secret_key(secret, found.salt)
    try:
        return cipher.decrypt(key, found.wrapped, found.repository.encode())
    except cipher.Refused:
        raise StoreKeyInvalid(f"The given key does not open {name}.", object=name) from None


def _secret_key(secret: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(clean_secret(secret), salt=salt, **_SCRYPT)
