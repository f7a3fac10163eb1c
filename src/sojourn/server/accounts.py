"""Tenants and tokens: who may ask.

Guarantee: a token's secret is shown once, kept only as a hash, and stops working the moment its
revocation is answered. Only the operator manages tokens.
"""

from __future__ import annotations

import hashlib

from sojourn.database.records import Role
from sojourn.errors import Forbidden, NotFound, Unauthenticated
from sojourn.server.base import Principal
from sojourn.server.checks import check_name
from sojourn.server.context import Context
from sojourn.wire.api import TokenInfo

# Every request carries a token; the ones seen lately are not looked up again.
_REMEMBERED = 1024


class Accounts:
    """Checks and manages tokens."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[bytes, Principal] = {}  # by the SHA-256 of the secret
        self._revocations = 0

    async def authenticate(self, token: str | None) -> Principal:
        """Who a token stands for. Raises Unauthenticated."""
        if not token:
            raise Unauthenticated("no token was given")
        digest = hashlib.sha256(token.encode()).digest()
        seen = self._seen.get(digest)
        if seen is not None:
            return seen
        revocations = self._revocations
        known = await self._context.database.verify_token(token)
        who = Principal(tenant=known.tenant, actor=known.label or known.id, role=str(known.role))
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        if revocations == self._revocations:  # else it may have been this one
            self._seen[digest] = who
        return who

    def _operator(self, who: Principal) -> None:
        if who.role != Role.OPERATOR:
            raise Forbidden("only the operator manages tokens")

    async def create(self, who: Principal, tenant: str) -> TokenInfo:
        """A token for a tenant, which is made when it is new."""
        self._operator(who)
        check_name(tenant)
        try:
            owner = await self._context.database.get_tenant(tenant)
        except NotFound:
            owner = await self._context.database.create_tenant(tenant)
        token, secret = await self._context.database.create_token(
            owner.id, Role.TENANT, label=tenant
        )
        return TokenInfo(
            id=token.id,
            tenant=owner.name,
            role=str(token.role),
            created_at=token.created_at,
            token=secret,
        )

    async def list(self, who: Principal) -> list[TokenInfo]:
        """All tokens, without their secrets."""
        self._operator(who)
        names = {tenant.id: tenant.name for tenant in await self._context.database.list_tenants()}
        return [
            TokenInfo(
                id=token.id,
                tenant=names.get(token.tenant, token.tenant),
                role=str(token.role),
                created_at=token.created_at,
            )
            for token in await self._context.database.list_tokens()
            if token.revoked_at is None
        ]

    async def revoke(self, who: Principal, token: str) -> None:
        """End a token's validity at once."""
        self._operator(who)
        revoked = await self._context.database.revoke_token(token)
        self._revocations += 1
        self._seen.clear()
        if not revoked:
            raise NotFound(f"there is no valid token {token!r}")
