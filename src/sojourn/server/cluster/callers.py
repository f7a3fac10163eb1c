"""Who asks, as a server finds out and tells a node.

Guarantee: a revoked token opens nothing once its revocation is answered, at whichever server: what
a server remembers of a token it remembers for REMEMBERED_SECONDS, and a revocation is answered only
after as long. To nodes the caller is named by the server alone, whatever headers it sent.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time

import msgspec

from sojourn.database.base import Database
from sojourn.errors import Unauthenticated
from sojourn.server.base import Principal

HEADER = b"sojourn-principal"
REMEMBERED_SECONDS = 1.0
_MOST = 4096


class Callers:
    """Looks up tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[bytes, tuple[float, Principal]] = {}

    async def authenticate(self, token: str | None) -> Principal:
        """Who a token stands for. Raises Unauthenticated."""
        if not token:
            raise Unauthenticated("no token was given")
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        seen = self._seen.get(digest)
        now = time.monotonic()
        if seen is not None and now - seen[0] < REMEMBERED_SECONDS:
            return seen[1]
        known = await self._database.verify_token(token)
        who = Principal(tenant=known.tenant, actor=known.label or known.id, role=str(known.role))
        if len(self._seen) >= _MOST:
            self._seen.clear()
        self._seen[digest] = (now, who)  # since before it was looked up
        return who

    async def settle(self) -> None:
        """Wait until no server remembers what was revoked before."""
        self._seen.clear()
        await asyncio.sleep(REMEMBERED_SECONDS)


def encode_principal(who: Principal) -> bytes:
    """The header's value."""
    return base64.b64encode(msgspec.json.encode(who))


def decode_principal(value: bytes) -> Principal:
    """Who a server says that asks. Raises Unauthenticated."""
    try:
        return msgspec.json.decode(base64.b64decode(value, validate=True), type=Principal)
    except (ValueError, msgspec.MsgspecError):
        raise Unauthenticated("the server does not say who asks") from None
