"""Secrets of tenants: kept sealed, used by the gateway, shown to nobody.

Guarantee: a value goes in and never comes out by the API, not to the operator either; the server
opens it for the gateway alone, and keeps it no longer than it takes to send it. A change or a
removal is in force in every sandbox when it is answered.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from sojourn.database.base import Database
from sojourn.database.records import SecretRecord
from sojourn.errors import InvalidRequest, SecretNotFound, TooLarge
from sojourn.gateway.messages import Granted
from sojourn.gateway.names import HostRefused, read_host
from sojourn.model.network import NetworkPolicy, SecretPlace, SecretUse, placeholder
from sojourn.server.base import Principal
from sojourn.server.network_checks import is_shared
from sojourn.server.secret_store import SecretStore, open_secret_store
from sojourn.wire.networks import SecretInfo, SetSecret

MAX_VALUE = 8 << 10
MIN_VALUE = 8
"""Bytes. The gateway takes a value out of every answer of its domains: a shorter one would be found
in what has nothing to do with it, and answers would be changed in silence."""
MAX_USES = 8
MAX_DOMAINS = 32  # of all its uses
_KIND = "secret"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
# What frames a request, or says where it goes, is the gateway's own.
_FRAMING = {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"}
_OWN_ENVIRONMENT = re.compile(r"(?:PATH|HOME|SHELL|USER|LD_.*|SOJOURN_.*)")

Changed = Callable[[str, str], Awaitable[None]]


def check_secret_name(name: str) -> str:
    """A secret's name, which is a variable's inside. Raises InvalidRequest."""
    if not _NAME.fullmatch(name) or _OWN_ENVIRONMENT.fullmatch(name):
        raise InvalidRequest(
            "the name of a secret is a variable's: letters, digits and _ (at most 64), not one that"
            " the system uses itself",
            field="name",
        )
    return name


def check_uses(uses: list[SecretUse]) -> list[SecretUse]:
    """What a secret is used for, in the form it is kept in. Raises InvalidRequest."""
    if not 1 <= len(uses) <= MAX_USES:
        raise InvalidRequest(f"a secret has 1 to {MAX_USES} uses", field="uses")
    if sum(len(use.domains) for use in uses) > MAX_DOMAINS:
        raise InvalidRequest(f"a secret has at most {MAX_DOMAINS} domains", field="uses")
    checked = []
    for number, use in enumerate(uses):
        where = f"uses[{number}]"
        if not use.domains:
            raise InvalidRequest("a use names at least one domain", field=where)
        _check_place(use, where)
        domains = [_domain(domain, f"{where}.domains") for domain in use.domains]
        checked.append(msgspec.structs.replace(use, domains=domains))
    return checked


def _domain(domain: str, field: str) -> str:
    below = domain.startswith("*.")
    try:
        name = read_host(domain[2:] if below else domain).name
    except HostRefused:
        name = None
    # Never all names below one that anybody has names below: who gets it must be somebody.
    if name is None or "." not in name or (below and is_shared(name)):
        raise InvalidRequest(
            f"{domain!r} is no domain of somebody (api.example.com, *.example.com)", field=field
        )
    return f"*.{name}" if below else name


def _check_place(use: SecretUse, where: str) -> None:
    header = use.place in (SecretPlace.HEADER, SecretPlace.TEMPLATE)
    if header and (not _HEADER.fullmatch(use.name) or use.name.lower() in _FRAMING):
        raise InvalidRequest(f"{use.name!r} is no header to put in", field=f"{where}.name")
    if not header and (not 1 <= len(use.name) <= 100 or not use.name.isprintable()):
        raise InvalidRequest("a query parameter or user has a name", field=f"{where}.name")
    if use.place is SecretPlace.BASIC and ":" in use.name:
        raise InvalidRequest("a user has no colon", field=f"{where}.name")
    if header and (
        use.template.count("{secret}") != 1
        or len(use.template) > 1000
        or not use.template.isascii()
        or not use.template.isprintable()
    ):
        raise InvalidRequest(
            "a template is printable ASCII with {secret} in it once", field=f"{where}.template"
        )


def check_value(value: str) -> bytes:
    """A secret's value. Raises InvalidRequest, TooLarge; neither says what it is."""
    encoded = value.encode()
    if len(encoded) < MIN_VALUE:
        raise InvalidRequest(
            f"a secret has at least {MIN_VALUE} bytes: a shorter one would be taken out of answers"
            " where it stands by chance",
            field="value",
        )
    if len(encoded) > MAX_VALUE:
        raise TooLarge(f"a secret is at most {MAX_VALUE} bytes", limit=MAX_VALUE)
    if not value.strip() or any(byte < 0x20 or byte == 0x7F for byte in encoded):
        raise InvalidRequest(
            "a secret is one line of text without control characters", field="value"
        )
    return encoded


class Secrets:
    """The secrets of all tenants."""

    def __init__(self, database: Database, data: Path) -> None:
        self._database = database
        self._data = data
        self._store: SecretStore | None = None
        self._opening = asyncio.Lock()
        self._changed: list[Changed] = []

    def on_change(self, told: Changed) -> None:
        """Have a tenant's id and a secret's name told when it was set or removed; the change is
        answered when that returns."""
        self._changed.append(told)

    async def store(self) -> SecretStore:
        """What seals and opens. Raises HostUnfit, SecretsKeyInvalid."""
        async with self._opening:
            if self._store is None:
                sealed = await self._database.anything_sealed()
                self._store = await asyncio.to_thread(
                    open_secret_store, self._data, anything_sealed=sealed
                )
            return self._store

    async def set(self, who: Principal, name: str, request: SetSecret) -> SecretInfo:
        """Make a secret, or change it. Raises InvalidRequest, TooLarge."""
        check_secret_name(name)
        uses = check_uses(request.uses)
        value = check_value(request.value)
        store = await self.store()
        now = time.time()
        stored = await self._database.put_secret(
            SecretRecord(
                tenant=who.tenant,
                name=name,
                value=store.seal(value, _KIND, who.tenant, name),
                uses=uses,
                created_at=now,
                updated_at=now,
            )
        )
        await self._tell(who.tenant, name)
        return _info(stored)

    async def list(self, who: Principal) -> builtins.list[SecretInfo]:
        """The tenant's secrets, without what they are."""
        return [_info(one) for one in await self._database.list_secrets(who.tenant)]

    async def delete(self, who: Principal, name: str) -> None:
        """Remove one. Raises SecretNotFound."""
        if not await self._database.delete_secret(who.tenant, name):
            raise SecretNotFound(f"there is no secret {name!r}")
        await self._tell(who.tenant, name)

    async def _tell(self, tenant: str, name: str) -> None:
        for told in self._changed:
            await told(tenant, name)

    # -- for sessions -----------------------------------------------------------------------

    async def missing(self, tenant: str, names: builtins.list[str]) -> builtins.list[str]:
        """Which of these secrets the tenant does not have."""
        known = {one.name for one in await self._database.list_secrets(tenant)}
        return [name for name in names if name not in known]

    async def granted(self, tenant: str, policy: NetworkPolicy) -> builtins.list[Granted]:
        """What the gateway is told for a session of this policy, values included: for its process
        and nobody else. Names that stand for nothing (any more) are left out.

        Raises SecretsKeyInvalid, HostUnfit."""
        if not policy.secrets:
            return []
        wanted = set(policy.secrets)
        records = await self._database.list_secrets(tenant)
        store = await self.store()
        return [
            Granted(one.name, one.uses, store.open(one.value, _KIND, tenant, one.name).decode())
            for one in records
            if one.name in wanted
        ]


def secret_environment(policy: NetworkPolicy) -> dict[str, str]:
    """The variables inside a session of this policy: for each secret what stands for it."""
    return {name: placeholder(name) for name in policy.secrets}


def _info(record: SecretRecord) -> SecretInfo:
    return SecretInfo(
        name=record.name,
        uses=record.uses,
        created_at=record.created_at,
        updated_at=record.updated_at,
    )
