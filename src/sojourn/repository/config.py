"""The repository itself: its configuration and root key, made once, and the key's rotation.

Guarantee: whatever is cut off, wherever, the repository can be made or opened again: the wrapped
root key is there before the configuration that makes the repository exist, and a new wrapping is
proven to open before an old one goes. Of several creators at once one wins and the others open
what it made; of several rotations at once the last new secret opens. A repository that is not
encrypted is never taken for one that is.
"""

from __future__ import annotations

import os
import re
import time

import msgspec

from sojourn.errors import (
    Conflict,
    IntegrityError,
    ObjectMissing,
    StoreKeyInvalid,
    Unsupported,
)
from sojourn.repository.backends.base import Backend
from sojourn.repository.keys import (
    KEY_BYTES,
    PLAIN,
    Keyring,
    WrappedKey,
    clean_secret,
    read_wrapped,
    unwrap_root,
    wrap_root,
)
from sojourn.repository.sealed import CONFIG, WRAPPED, largest, seal, unseal

KEY = "config"
KEYS = "keys/"
FORMAT = 1
# What readers and writers must agree on. Other values would be another format.
PARAMETERS = {"small_file": 1 << 20}
MAX_KEYS = 16  # tried; each takes 32 MiB and a tenth of a second
MAX_LISTED = 1024  # looked at: those of creations that were cut off are passed over
_ATTEMPTS = 5
_ID = re.compile(r"[0-9a-f]{32}")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a repository is. `created_at` is in seconds since 1970 by the creator's clock."""

    id: str
    format: int
    created_at: float
    encrypted: bool
    parameters: dict[str, int]


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration as it is stored: with the root key where nothing is encrypted."""

    format: int
    id: str
    created_at: float
    encrypted: bool
    parameters: dict[str, int]
    root: bytes | None

    def __repr__(self) -> str:
        return f"<configuration of {self.id}>"

    @property
    def config(self) -> Config:
        return Config(
            id=self.id,
            format=self.format,
            created_at=self.created_at,
            encrypted=self.encrypted,
            parameters=self.parameters,
        )


class _Version(msgspec.Struct):
    format: int


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_version_decoder = msgspec.msgpack.Decoder(_Version)
_decoder = msgspec.msgpack.Decoder(_Stored)


def create(backend: Backend, secret: bytes | None) -> tuple[Config, Keyring]:
    """Make a repository, encrypted when a secret is given, or open the one that is there.
    Raises what `open_existing` does, InvalidRequest for a secret too short, StorageFull."""
    try:
        return open_existing(backend, secret)
    except ObjectMissing:
        pass  # the usual case: there is none yet
    root = os.urandom(KEY_BYTES)
    encrypted = secret is not None
    stored = _Stored(
        format=FORMAT,
        id=os.urandom(16).hex(),
        created_at=time.time(),
        encrypted=encrypted,
        parameters=PARAMETERS,
        root=None if encrypted else root,
    )
    wrapped = None
    if secret is not None:
        # First, because a configuration without its key could never be opened. A key without its
        # configuration names a repository that does not exist, and is passed over by all.
        wrapped = _put_key(backend, root, secret, stored.id)
    data = seal(CONFIG, _encoder.encode(stored), PLAIN, KEY.encode())
    try:
        backend.put(KEY, data, create=True)
    except Conflict:
        # Another creator won, so nothing will ever name this key.
        if wrapped is not None:
            backend.delete([wrapped])
        return open_existing(backend, secret)
    if wrapped is not None:
        _sweep(backend, stored.id)
    return stored.config, Keyring(root, encrypted)


def open_existing(backend: Backend, secret: bytes | None) -> tuple[Config, Keyring]:
    """Open a repository. Raises ObjectMissing when there is none, StoreKeyInvalid when the secret
    does not open it or does not fit, IntegrityError when what stands there is damaged."""
    stored = _read_config(backend)
    if stored.root is not None:
        if secret is not None:
            # Someone who may write to the store could put an open repository in place of the
            # encrypted one, and be given everything in clear.
            raise StoreKeyInvalid(
                "A key was given, but the repository is not encrypted.",
                next_step="Open it without a key, if this is the repository that is meant.",
            )
        return stored.config, Keyring(stored.root, False)
    if secret is None:
        raise StoreKeyInvalid("The repository is encrypted and no key was given.")
    root = _find_root(backend, stored.id, secret)
    return stored.config, Keyring(root, True)


def read(backend: Backend) -> Config:
    """What a repository says of itself, which no key proves. Raises ObjectMissing,
    IntegrityError."""
    return _read_config(backend).config


def rotate(backend: Backend, old: bytes, new: bytes) -> None:
    """Change the operator's secret: wrap the root key anew, prove that it opens, and only then
    remove the other wrappings. Cut off anywhere, the old secret, the new one or both open.
    Raises StoreKeyInvalid, InvalidRequest for a new secret too short or no encryption at all."""
    clean_secret(new)
    stored = _read_config(backend)
    if stored.root is not None:
        raise StoreKeyInvalid(
            "The repository is not encrypted: there is no key to change.",
            next_step="Make an encrypted repository and copy the snapshots there.",
        )
    root = _find_root(backend, stored.id, old)
    # What goes is what was there before: of several rotations at once, the key written last was in
    # nobody's list and stays.
    before = _key_names(backend)
    written = _put_key(backend, root, new, stored.id)
    data, _ = backend.get(written, limit=largest(WRAPPED))
    if unwrap_root(_read_key(data, written), new, name=written) != root:
        raise IntegrityError(f"{written} does not hold what was written.", object=written)
    backend.delete(before)


def _put_key(backend: Backend, root: bytes, secret: bytes, repository: str) -> str:
    key = KEYS + os.urandom(16).hex()
    data = seal(WRAPPED, wrap_root(root, secret, repository), PLAIN, key.encode())
    backend.put(key, data, create=True)
    return key


def _read_config(backend: Backend) -> _Stored:
    data, _ = backend.get(KEY, limit=largest(CONFIG))
    payload = unseal(CONFIG, data, PLAIN, KEY.encode(), name=KEY)
    try:
        format = _version_decoder.decode(payload).format
        if format != FORMAT:
            raise Unsupported(
                f"The repository has format {format}; this version knows format {FORMAT}.",
                next_step="Use a version of Sojourn that knows this format.",
            )
        stored = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{KEY} is malformed: {error}", object=KEY) from None
    if _ID.fullmatch(stored.id) is None:
        raise IntegrityError(f"{KEY} is malformed: its id is none.", object=KEY)
    held = KEY_BYTES if not stored.encrypted else 0
    if len(stored.root or b"") != held or (stored.root is None) != stored.encrypted:
        raise IntegrityError(f"{KEY} is inconsistent about its key.", object=KEY)
    if stored.parameters != PARAMETERS:
        raise Unsupported(
            f"The repository has parameters this version does not know: {stored.parameters}.",
            next_step="Use the version of Sojourn it was made with, or a newer one.",
        )
    return stored


def _find_root(backend: Backend, repository: str, secret: bytes) -> bytes:
    clean_secret(secret)
    for _ in range(_ATTEMPTS):
        root = _try_keys(backend, repository, secret)
        if root is not None:
            return root
    raise IntegrityError("The wrapped keys change faster than they can be read.", object=KEYS)


def _try_keys(backend: Backend, repository: str, secret: bytes) -> bytes | None:
    """The root key, or None where a key went that may have been the one: a rotation is under way,
    and what it wrote is to be listed again."""
    tried = 0
    gone = False
    damaged: IntegrityError | None = None
    for key in _key_names(backend):
        try:
            data, _ = backend.get(key, limit=largest(WRAPPED))
            wrapped = _read_key(data, key)
        except ObjectMissing:
            gone = True
            continue
        except IntegrityError as error:
            damaged = error
            continue
        if wrapped.repository != repository:
            continue
        tried += 1
        if tried > MAX_KEYS:
            raise _too_many(tried)
        try:
            return unwrap_root(wrapped, secret, name=key)
        except StoreKeyInvalid:
            continue
    if gone:
        return None
    if damaged is not None:
        raise damaged  # it may be the very one this secret opens
    if tried:
        raise StoreKeyInvalid("The given key does not open the repository.")
    raise IntegrityError(
        "The repository is encrypted but holds no wrapped key: it cannot be opened.",
        object=KEYS,
        next_step=f"Put back the objects below {KEYS} from a copy.",
    )


def _read_key(data: bytes, key: str) -> WrappedKey:
    return read_wrapped(unseal(WRAPPED, data, PLAIN, key.encode(), name=key), name=key)


def _sweep(backend: Backend, repository: str) -> None:
    """Remove the keys of creations that were cut off. Once there is a configuration no other
    creation can succeed, so nothing will ever name them."""
    for key in _key_names(backend):
        try:
            data, _ = backend.get(key, limit=largest(WRAPPED))
            foreign = _read_key(data, key).repository != repository
        except (ObjectMissing, IntegrityError):
            continue  # gone by itself, or nobody can tell whose it is
        if foreign:
            backend.delete([key])


def _key_names(backend: Backend) -> list[str]:
    names = []
    for info in backend.list(KEYS):
        names.append(info.key)
        if len(names) > MAX_LISTED:
            raise _too_many(len(names))
    return sorted(names)


def _too_many(count: int) -> IntegrityError:
    return IntegrityError(
        f"There are {count} wrapped keys or more, where a few are expected.",
        object=KEYS,
        next_step="Remove those that do not belong there; each takes long to try.",
    )
