"""Tenants, tokens and the id of the installation: the rows that belong to no session.

Guarantee: a token's secret is stored only as a hash; a revoked one is refused from the next call
on, since every verification reads the database.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from sojourn.database.engine import Duplicate, Reader, Statements, Writer
from sojourn.database.records import Role, Tenant, Token
from sojourn.database.rows import TENANTS, TOKENS
from sojourn.errors import Conflict, InvalidRequest, NameTaken, NotFound, Unauthenticated
from sojourn.model.ids import new_id


class Accounts:
    """A part of `SqlDatabase`."""

    _reader: Reader
    _writer: Writer

    # -- tenants and tokens -----------------------------------------------------------------
    async def create_tenant(self, name: str, *, id: str | None = None) -> Tenant:
        tenant = Tenant(id or new_id("ten"), name, time.time())

        def work(statements: Statements) -> None:
            try:
                statements.run("insert_tenant", TENANTS.write(tenant))
            except Duplicate as error:
                if error.column == "tenants.id":
                    raise Conflict(f"tenant {id} exists already", tenant=id) from error
                raise NameTaken(f"another tenant is named {name!r}", name=name) from error

        await self._writer.submit(work, durable=True)
        return tenant

    async def get_tenant(self, id_or_name: str) -> Tenant:
        rows = await self._reader.lookup("find_tenant", {"key": id_or_name})
        if not rows:
            raise NotFound(f"tenant {id_or_name!r} does not exist")
        return TENANTS.read(rows[0])

    async def list_tenants(self) -> list[Tenant]:
        return [TENANTS.read(row) for row in await self._reader.select("list_tenants", {})]

    async def create_token(
        self, tenant: str, role: Role, *, label: str | None = None, secret: str | None = None
    ) -> tuple[Token, str]:
        if secret is None:
            secret = f"sjn_{secrets.token_urlsafe(32)}"
        if len(secret) < 32:
            raise InvalidRequest("a token has at least 32 characters")
        token = Token(new_id("tok"), tenant, role, label, time.time())
        parameters = {**TOKENS.write(token), "hash": _hash(secret)}

        def work(statements: Statements) -> None:
            if not statements.run("find_tenant", {"key": tenant}):
                raise NotFound(f"tenant {tenant!r} does not exist")
            statements.run("insert_token", parameters)

        await self._writer.submit(work, durable=True)
        return token, secret

    async def verify_token(self, secret: str) -> Token:
        digest = _hash(secret)
        rows = await self._reader.lookup("token_by_hash", {"hash": digest})
        if rows:
            token = TOKENS.read(rows[0])
            # The index compares hashes of what was sent, which tells nothing of the secret; this
            # second comparison keeps it so whatever the index does.
            stored = await self._reader.lookup("stored_hash", {"id": token.id})
            if stored and hmac.compare_digest(stored[0][0], digest) and token.revoked_at is None:
                return token
        raise Unauthenticated("the token is unknown or revoked")

    async def revoke_token(self, id: str) -> bool:
        def work(statements: Statements) -> bool:
            return bool(statements.run("revoke_token", {"id": id, "now": time.time()}))

        return bool(await self._writer.submit(work, durable=True))

    async def list_tokens(self, tenant: str | None = None) -> list[Token]:
        rows = await self._reader.select("list_tokens", {"tenant": tenant})
        return [TOKENS.read(row) for row in rows]

    # -- identity ---------------------------------------------------------------------------
    async def server_id(self) -> str:
        found = await self._reader.lookup("get_setting", {"key": "server_id"})
        if found:
            return str(found[0][0])

        def work(statements: Statements) -> str:
            statements.run("set_setting_once", {"key": "server_id", "value": new_id("srv")})
            return str(statements.run("get_setting", {"key": "server_id"})[0][0])

        return str(await self._writer.submit(work, durable=True))


def _hash(secret: str) -> str:
    # A plain hash serves: secrets are random and long, there is nothing to guess.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
