"""The asynchronous client.

Guarantee: safe to share between the tasks of one event loop; every failure is a SojournError with
a stable `code`.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sojourn.client import core, core_ports, core_sessions
from sojourn.client.async_nodes import AsyncNodes
from sojourn.client.async_session import AsyncSession
from sojourn.client.async_templates import AsyncTemplates
from sojourn.client.async_transport import AsyncTransport, content_of
from sojourn.client.core_networks import NetworkLike
from sojourn.client.core_ports import UseLike
from sojourn.client.core_sessions import Labels, LimitsLike, PolicyLike
from sojourn.client.listings import Listing
from sojourn.wire.api import HealthInfo, OperationInfo, StatusInfo, TokenInfo
from sojourn.wire.networks import SecretInfo


class AsyncSojourn:
    """A connection to a Sojourn server.

    Without `url` and `token` they are taken from SOJOURN_URL and SOJOURN_TOKEN, else from the
    files of the local server (SOJOURN_DATA). Use it as an asynchronous context manager, or
    `close` it.

        async with AsyncSojourn() as client:
            session = await client.sessions.create(template="debian")
            print((await session.exec("echo hello")).text)

    Raises Unreachable when no server is named and none runs here.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        address = core.find_server(url, token, dict(os.environ))
        self._transport = AsyncTransport(address)
        self.sessions = AsyncSessions(self._transport)
        self.tokens = AsyncTokens(self._transport)
        self.secrets = AsyncSecrets(self._transport)
        self.templates = AsyncTemplates(self._transport)
        self.nodes = AsyncNodes(self._transport)

    async def __aenter__(self) -> AsyncSojourn:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._transport.url

    async def close(self) -> None:
        """Close the connections. Sessions go on."""
        await self._transport.close()

    async def health(self) -> HealthInfo:
        """Whether the server serves. Needs no token."""
        return await self._transport.run(core_sessions.health())

    async def status(self) -> StatusInfo:
        """The server at a glance."""
        return await self._transport.run(core_sessions.status())

    async def operation(self, operation: str) -> OperationInfo:
        """An operation as it stands. Raises OperationNotFound."""
        return await self._transport.run(core_sessions.operation(operation))


class AsyncSessions:
    """The sessions of the token's tenant."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        template: str = "debian",
        name: str | None = None,
        labels: Labels | None = None,
        env: Mapping[str, str] | None = None,
        limits: LimitsLike | None = None,
        policy: PolicyLike | None = None,
        idempotency_key: str | None = None,
        *,
        driver: str | None = None,
        user: str | None = None,
        cwd: str | None = None,
        network: NetworkLike | None = None,
    ) -> AsyncSession:
        """Create a session and start its sandbox.

        `name` is unique among the tenant's live sessions. `env` is present in every command.
        `limits` and `policy` are structs or mappings of their fields. `network` is what it reaches:
        nothing unless it is given, see `allow`; also "open", or the words of the command line. The
        same `idempotency_key`
        and arguments give the same session. Raises UnknownTemplate, NameTaken, QuotaExceeded,
        IdempotencyMismatch, InvalidRequest.
        """
        info = await self._transport.run(
            core_sessions.create(
                template=template,
                name=name,
                labels=labels,
                env=env,
                limits=limits,
                policy=policy,
                network=network,
                driver=driver,
                user=user,
                cwd=cwd,
                key=idempotency_key,
            )
        )
        return AsyncSession(self._transport, info)

    async def get(self, id_or_name: str) -> AsyncSession:
        """A session by id or name. Raises SessionNotFound."""
        info = await self._transport.run(core_sessions.get_session(id_or_name))
        return AsyncSession(self._transport, info)

    async def import_(
        self,
        source: Any,
        name: str | None = None,
        expect: str | None = None,
        key: bytes | str | None = None,
        *,
        on_progress: Callable[[int, int | None], object] | None = None,
    ) -> AsyncSession:
        """Make a session of an archive (a path, an open binary file, bytes or an iterable of
        them); it is suspended at the archive's head, and its ids are new. `name` stands in for
        the archive's own. `expect` is the digest that the export told: nothing else is taken.

        Raises ArchiveInvalid, NameTaken, StoreKeyInvalid (the key), StorageFull."""
        from sojourn.client import core_archives  # only where it is needed

        with core_archives.Sending(source, on_progress) as sending:
            content = content_of(sending.source)
            if not isinstance(content, bytes):
                content = sending.atold(content)
            plan = core_archives.import_archive(content, name, expect, key)
            return AsyncSession(self._transport, await self._transport.run(plan))

    def list(
        self,
        state: str | None = None,
        labels: Labels | None = None,
        limit: int | None = None,
    ) -> Listing[AsyncSession]:
        """Sessions, newest first: in `state`, with all `labels`, at most `limit` (None: all).
        To be awaited, or gone through with `async for`."""

        async def fetch() -> builtins.list[AsyncSession]:
            plan = core_sessions.list_sessions(state=state, labels=labels, limit=limit)
            return [AsyncSession(self._transport, info) for info in await self._transport.run(plan)]

        return Listing(fetch)


class AsyncTokens:
    """The tokens of tenants; for the operator."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, tenant: str) -> TokenInfo:
        """Make a token; its `token` is told this once. Raises Forbidden."""
        return await self._transport.run(core_sessions.create_token(tenant))

    async def revoke(self, token_id: str) -> None:
        """Make a token worthless. Raises NotFound, Forbidden."""
        await self._transport.run(core_sessions.revoke_token(token_id))

    async def list(self) -> list[TokenInfo]:
        """All tokens, without what they are. Raises Forbidden."""
        return await self._transport.run(core_sessions.tokens())


class AsyncSecrets:
    """The secrets of the token's tenant: set, named in sessions' network policies, never read."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def set(
        self,
        name: str,
        value: str,
        domains: Iterable[str] = (),
        *,
        header: str | None = None,
        query: str | None = None,
        basic: str | None = None,
        template: str | None = None,
        uses: Sequence[UseLike] | None = None,
    ) -> SecretInfo:
        """Make or change a secret. It is put into requests to `domains` alone: as
        `Authorization: Bearer`, or as another `header`, a `query` parameter, the password of the
        user `basic`, or in a header by a `template` with {secret} in it; `uses` says all of it,
        also several. Takes hold at once. Raises InvalidRequest, TooLarge."""
        if uses is None:
            uses = core_ports.secret_uses(
                domains, header=header, query=query, basic=basic, template=template
            )
        return await self._transport.run(core_ports.set_secret(name, value, uses))

    async def delete(self, name: str) -> None:
        """Remove a secret; no session has it from then on. Raises SecretNotFound."""
        await self._transport.run(core_ports.delete_secret(name))

    async def list(self) -> list[SecretInfo]:
        """All secrets, without their values."""
        return await self._transport.run(core_ports.secrets())
