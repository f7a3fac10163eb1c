"""Tokens: remembered by their hash, and never beyond their revocation."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sojourn.errors import Unauthenticated
from sojourn.server.accounts import Accounts
from sojourn.server.base import Principal

OPERATOR = Principal(tenant="", actor="operator", role="operator")
TOKEN = "secret"


class Tokens:
    """One valid token, until it is revoked."""

    def __init__(self) -> None:
        self.valid = True
        self.lookups = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def verify_token(self, token: str) -> Any:
        self.lookups += 1
        valid = self.valid and token == TOKEN
        await self.answer.wait()
        if not valid:
            raise Unauthenticated("unknown")
        return SimpleNamespace(id="tok_1", tenant="ten_1", label="one", role="tenant")

    async def revoke_token(self, token: str) -> bool:
        found, self.valid = self.valid, False
        return found


def make() -> tuple[Accounts, Tokens]:
    tokens = Tokens()
    context: Any = SimpleNamespace(database=tokens)
    return Accounts(context), tokens


def test_a_token_is_looked_up_once_and_not_after_its_revocation() -> None:
    async def run() -> None:
        accounts, tokens = make()
        for _ in range(3):
            assert (await accounts.authenticate(TOKEN)).tenant == "ten_1"
        assert tokens.lookups == 1
        await accounts.revoke(OPERATOR, "tok_1")
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(TOKEN)

    asyncio.run(run())


def test_a_lookup_that_a_revocation_overtook_is_not_remembered() -> None:
    async def run() -> None:
        accounts, tokens = make()
        tokens.answer.clear()
        late = asyncio.create_task(accounts.authenticate(TOKEN))
        await asyncio.sleep(0)
        await accounts.revoke(OPERATOR, "tok_1")
        tokens.answer.set()
        await late
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(TOKEN)

    asyncio.run(run())
