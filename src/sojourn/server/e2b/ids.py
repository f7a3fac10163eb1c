"""Sandbox ids and the tokens that open a sandbox; pure.

Guarantee: a sandbox id stands for one session id and back, and can be part of a host name. The
tokens of a sandbox are made from the server's key, its tenant and its session, so they need no
storage, hold for one sandbox alone, and say nothing to whoever lacks the key.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path

from sojourn.server.base import Principal

log = logging.getLogger(__name__)

_SESSION = "ses_"
_SANDBOX = "ses-"
_ID = re.compile(r"ses-([0-9a-z]{24})(?:-[0-9a-z]+)?")
KEY_BYTES = 32
_REMEMBERED = 10_000
ACCESS, TRAFFIC = "access", "traffic"
"""What a token opens: the agent inside (commands, files), or the ports."""


def sandbox_id(session: str) -> str:
    """The sandbox id of a session: its id without the underscore, which no host name may have."""
    return _SANDBOX + session.removeprefix(_SESSION)


def session_id(sandbox: str) -> str | None:
    """The session id of a sandbox id; None for what is none."""
    # Older clients put what E2B calls the client's id behind it.
    found = _ID.fullmatch(sandbox)
    return None if found is None else _SESSION + found[1]


def load_key(data: Path) -> bytes:
    """The key that tokens are made from: a file of the data directory, made when it is new. Where
    it cannot be written the tokens of now end with the server, which serves all the same."""
    place = data / "e2b.key"
    with contextlib.suppress(FileNotFoundError):
        key = place.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    key = secrets.token_bytes(KEY_BYTES)
    fresh = data / f".e2b.key.{os.getpid()}"
    try:
        descriptor = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(place)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        log.error("tokens of sandboxes will not outlive this server: %s: %s", place, error.strerror)
    return key


class Tokens:
    """Makes and checks the tokens of sandboxes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Tokens that were right once, which saves making them for every request.
        self._right: dict[tuple[str, str], tuple[bytes, Principal]] = {}

    def make(self, purpose: str, tenant: str, session: str) -> str:
        """A sandbox's token."""
        said = f"{purpose}\0{tenant}\0{session}".encode()
        seal = hmac.digest(self._key, said, "sha256")
        return f"{tenant}.{base64.urlsafe_b64encode(seal).decode().rstrip('=')}"

    def check(self, token: str, session: str, *purposes: str) -> Principal | None:
        """Who the bearer of a token is to this session; None when it is not one of its tokens."""
        given = token.encode(errors="surrogateescape")
        for purpose in purposes:
            right, who = self._right.get((purpose, session), (b"", None))
            if who is not None and hmac.compare_digest(given, right):
                return who
        tenant = token.rpartition(".")[0]
        for purpose in purposes:
            right = self.make(purpose, tenant, session).encode()
            if hmac.compare_digest(given, right):
                who = principal(tenant)
                if len(self._right) >= _REMEMBERED:
                    self._right.clear()
                self._right[purpose, session] = (right, who)
                return who
        return None

    def signature(
        self, tenant: str, session: str, path: str, operation: str, user: str, expires: str | None
    ) -> str:
        """What the address of a file is signed with, so that it opens this file and no other."""
        token = self.make(ACCESS, tenant, session)
        said = f"{path}:{operation}:{user}:{token}"
        if expires is not None:
            said += f":{expires}"
        seal = hashlib.sha256(said.encode(errors="surrogateescape")).digest()
        return f"v1_{base64.b64encode(seal).decode().rstrip('=')}"


def principal(tenant: str) -> Principal:
    """Who acts with a sandbox's own token."""
    return Principal(tenant=tenant, actor="sandbox token", role="tenant")


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
