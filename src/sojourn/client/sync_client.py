"""The blocking client.

Guarantee: safe to share between threads; every failure is a SojournError with a stable `code`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sojourn.client import core, core_ports, core_sessions
from sojourn.client.core_networks import NetworkLike
from sojourn.client.core_ports import UseLike
from sojourn.client.core_sessions import Labels, LimitsLike, PolicyLike
from sojourn.client.sync_nodes import Nodes
from sojourn.client.sync_session import Session
from sojourn.client.sync_templates import Templates
from sojourn.client.transport import Transport, content_of
from sojourn.wire.api import HealthInfo, OperationInfo, StatusInfo, TokenInfo
from sojourn.wire.networks import SecretInfo


class Sojourn:
    """A connection to a Sojourn server.

    Without `url` and `token` they are taken from SOJOURN_URL and SOJOURN_TOKEN, else from the
    files of the local server (SOJOURN_DATA). Use it as a context manager, or `close` it.

        with Sojourn() as client:
            session = client.sessions.create(template="debian")
            print(session.exec("echo hello").text)

    Raises Unreachable when no server is named and none runs here.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        address = core.find_server(url, token, dict(os.environ))
        self._transport = Transport(address)
        self.sessions = Sessions(self._transport)
        self.tokens = Tokens(self._transport)
        self.secrets = Secrets(self._transport)
        self.templates = Templates(self._transport)
        self.nodes = Nodes(self._transport)

    def __enter__(self) -> Sojourn:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._transport.url

    def close(self) -> None:
        """Close the connections. Sessions go on."""
        self._transport.close()

    def health(self) -> HealthInfo:
        """Whether the server serves. Needs no token."""
        return self._transport.run(core_sessions.health())

    def status(self) -> StatusInfo:
        """The server at a glance."""
        return self._transport.run(core_sessions.status())

    def operation(self, operation: str) -> OperationInfo:
        """An operation as it stands. Raises OperationNotFound."""
        return self._transport.run(core_sessions.operation(operation))


class Sessions:
    """The sessions of the token's tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
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
    ) -> Session:
        """Create a session and start its sandbox.

        `name` is unique among the tenant's live sessions. `env` is present in every command.
        `limits` and `policy` are structs or mappings of their fields. `network` is what it reaches:
        nothing unless it is given, see `allow`; also "open", or the words of the command line. The
        same `idempotency_key`
        and arguments give the same session. Raises UnknownTemplate, NameTaken, QuotaExceeded,
        IdempotencyMismatch, InvalidRequest.
        """
        info = self._transport.run(
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
        return Session(self._transport, info)

    def get(self, id_or_name: str) -> Session:
        """A session by id or name. Raises SessionNotFound."""
        info = self._transport.run(core_sessions.get_session(id_or_name))
        return Session(self._transport, info)

    def import_(
        self,
        source: Any,
        name: str | None = None,
        expect: str | None = None,
        key: bytes | str | None = None,
        *,
        on_progress: Callable[[int, int | None], object] | None = None,
    ) -> Session:
        """Make a session of an archive (a path, an open binary file, bytes or an iterable of
        them); it is suspended at the archive's head, and its ids are new. `name` stands in for
        the archive's own. `expect` is the digest that the export told: nothing else is taken.

        Raises ArchiveInvalid, NameTaken, StoreKeyInvalid (the key), StorageFull."""
        from sojourn.client import core_archives  # only where it is needed

        with core_archives.Sending(source, on_progress) as sending:
            content = content_of(sending.source)
            if not isinstance(content, bytes):
                content = sending.told(content)
            plan = core_archives.import_archive(content, name, expect, key)
            return Session(self._transport, self._transport.run(plan))

    def list(
        self,
        state: str | None = None,
        labels: Labels | None = None,
        limit: int | None = None,
    ) -> list[Session]:
        """Sessions, newest first: in `state`, with all `labels`, at most `limit` (None: all)."""
        plan = core_sessions.list_sessions(state=state, labels=labels, limit=limit)
        return [Session(self._transport, info) for info in self._transport.run(plan)]


class Tokens:
    """The tokens of tenants; for the operator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, tenant: str) -> TokenInfo:
        """Make a token; its `token` is told this once. Raises Forbidden."""
        return self._transport.run(core_sessions.create_token(tenant))

    def revoke(self, token_id: str) -> None:
        """Make a token worthless. Raises NotFound, Forbidden."""
        self._transport.run(core_sessions.revoke_token(token_id))

    def list(self) -> list[TokenInfo]:
        """All tokens, without what they are. Raises Forbidden."""
        return self._transport.run(core_sessions.tokens())


class Secrets:
    """The secrets of the token's tenant: set, named in sessions' network policies, never read."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def set(
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
        return self._transport.run(core_ports.set_secret(name, value, uses))

    def delete(self, name: str) -> None:
        """Remove a secret; no session has it from then on. Raises SecretNotFound."""
        self._transport.run(core_ports.delete_secret(name))

    def list(self) -> list[SecretInfo]:
        """All secrets, without their values."""
        return self._transport.run(core_ports.secrets())
