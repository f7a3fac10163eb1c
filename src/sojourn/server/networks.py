"""The networks of sessions: a policy becomes what a sandbox can reach.

Guarantee: a sandbox reaches nothing before the gateway knows its policy, and never more than the
policy that was committed last. Where the gateway cannot be asked the session runs all the same,
without a network, until it can. A policy belongs to its session, not to a snapshot or a sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sojourn.database.base import Database
from sojourn.database.writes import AppendEvent
from sojourn.errors import InvalidRequest, SandboxLost, SojournError, Unsupported
from sojourn.gateway.messages import Attach, Granted
from sojourn.model import Session, SessionState
from sojourn.model.network import NetworkMode, NetworkPolicy
from sojourn.node import authorities
from sojourn.node.agent import NodeAgent
from sojourn.node.isolation.base import Capability
from sojourn.node.records import SandboxRecord
from sojourn.node.sandboxes import Sandbox
from sojourn.server.effects import Effects
from sojourn.server.gateways import EgressSettings, Gateway
from sojourn.server.network_checks import check_network
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.secrets import Secrets, secret_environment
from sojourn.wire.guest import Reach
from sojourn.wire.tunnels import SOCKET

log = logging.getLogger(__name__)

_BUNDLE = authorities.BUNDLE.decode()
_TRUST = dict.fromkeys(
    (
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
    ),
    _BUNDLE,
)
_PROXY = "http://127.0.0.1:3128"
_LOCAL = "localhost,127.0.0.1,::1"
_PROXIES = {
    **{f"{kind}_PROXY": _PROXY for kind in ("HTTP", "HTTPS", "ALL")},
    **{f"{kind}_proxy": _PROXY for kind in ("http", "https", "all")},
    "NO_PROXY": _LOCAL,
    "no_proxy": _LOCAL,
}


def network_environment(policy: NetworkPolicy, *, transparent: bool) -> dict[str, str]:
    """The variables that commands of a session of this policy get, where the session has none of
    its own by that name. `transparent`: programs need not know of a proxy."""
    if policy.mode is NetworkMode.NONE:
        return {}
    return _TRUST | ({} if transparent else _PROXIES) | secret_environment(policy)


def inherited(policy: NetworkPolicy) -> NetworkPolicy:
    """The policy of a fork: its parent's, with the secrets only where that was said."""
    return policy if policy.secrets_in_forks else msgspec.structs.replace(policy, secrets=[])


class Networks:
    """The networks of one server's sessions. `exposed` tells whether a session has a port that is
    reached from outside: then its sandbox is served whatever its policy."""

    def __init__(
        self,
        *,
        agent: NodeAgent,
        registry: Registry,
        database: Database,
        secrets: Secrets,
        settings: EgressSettings,
        authority: Path,
    ) -> None:
        self._agent = agent
        self._registry = registry
        self._database = database
        self._secrets = secrets
        self.settings = settings
        self.effects = Effects(database, registry)
        self.gateway = Gateway(settings, authority, self.effects.handle, self.effects.interrupt)
        self.exposed: Callable[[str], bool] = lambda session: False
        secrets.on_change(self._secret_changed)
        self._serving: dict[str, str] = {}  # sandboxes, those that only start too, by session
        agent.ended = self._ended

    async def recover(self) -> None:
        """At the start: what was under way when an earlier server ended was interrupted."""
        await self.effects.interrupt()

    async def close(self) -> None:
        """End the gateway; what was under way is recorded as interrupted."""
        await self.gateway.close()

    async def check(
        self, tenant: str, policy: NetworkPolicy, *, had: Sequence[str] = ()
    ) -> NetworkPolicy:
        """The policy in the form it is kept in. Of the secrets it names those it `had` may be gone.
        Raises InvalidRequest."""
        checked = check_network(policy, private=self.settings.private)
        granted = [name for name in checked.secrets if name not in had]
        if granted:
            missing = await self._secrets.missing(tenant, granted)
            if missing:
                raise InvalidRequest(
                    f"network.secrets: there is no secret {missing[0]!r}",
                    next_step=f"Set it first (`sojourn secret set {missing[0]} ...`).",
                    field="network.secrets",
                )
        return checked

    # -- sandboxes --------------------------------------------------------------------------

    async def start(self, session: Session, record: SandboxRecord) -> None:
        """Start a sandbox with its session's network. Raises as `NodeAgent.start`."""
        if not self._served(session):
            await self._agent.start(record)
            return
        certificates = await self._certificates()

        async def serve(_socket: Path) -> None:
            await self._serve(session.id, record)  # it starts all the same

        on = session.network.mode is not NetworkMode.NONE
        await self._agent.start(
            msgspec.structs.replace(record, network=on),
            authority=certificates if on else None,
            gateway=serve,
            environment=self._environment(session, record),
        )
        if on and self._agent.find(record.sandbox, record.epoch).reach is Reach.OFF:
            await self._database.append_event(
                AppendEvent(
                    session=session.id,
                    kind="network.unavailable",
                    result=Unsupported.code,
                    details={"message": "its memory is of a version without a network"},
                    before=session.head,
                )
            )

    async def adopted(self, session: Session) -> None:
        """A living sandbox was taken over. Raises SandboxLost."""
        assert session.sandbox is not None
        await self._apply(session, self._agent.find(session.sandbox, session.epoch))

    async def thawed(self, session: Session) -> None:
        """A paused sandbox runs again: what was changed meanwhile takes hold. Raises
        SandboxLost."""
        assert session.sandbox is not None
        await self._switch(session, self._agent.find(session.sandbox, session.epoch))

    async def apply(self, active: ActiveSession) -> SojournError | None:
        """The session's policy, or what of it is exposed, has changed. The caller holds the gate.

        Returns when it is in force: connections it does not allow are over. Where no gateway
        process serves it, why: then nothing is reached, until there is one."""
        session = active.session
        if not session.live:
            return None
        assert session.sandbox is not None
        try:
            return await self._apply(session, self._agent.find(session.sandbox, session.epoch))
        except SandboxLost as error:
            log.info("session %s: %s", session.id, error)  # its next call notes it
            return None

    async def cut(self, session: Session) -> None:
        """Reset all connections of a session's sandbox: nothing leaves it from then on."""
        if session.sandbox is not None:
            await self.gateway.detach(session.sandbox)

    def _ended(self, sandbox: str) -> None:
        self._serving.pop(sandbox, None)
        self.gateway.forget(sandbox)

    async def _apply(self, session: Session, sandbox: Sandbox) -> SojournError | None:
        """Put a session's policy in force; why it is not served, where it cannot be."""
        sandbox.provide(self._environment(session, sandbox.record))
        failed = None
        if self._served(session):
            failed = await self._serve(session.id, sandbox.record)
        else:
            await self.gateway.detach(sandbox.record.sandbox)
        await self._switch(session, sandbox)
        return failed

    async def _switch(self, session: Session, sandbox: Sandbox) -> None:
        if sandbox.frozen:
            return  # nothing can be asked of it; `thawed` does it
        on = session.network.mode is not NetworkMode.NONE
        if on:
            certificates = await self._certificates()
            if certificates is not None:
                await authorities.write(sandbox.guest, certificates)
        await sandbox.set_network(on)

    def _served(self, session: Session) -> bool:
        return session.network.mode is not NetworkMode.NONE or self.exposed(session.id)

    def _environment(self, session: Session, record: SandboxRecord) -> dict[str, str]:
        driver = self._agent.driver(record.driver)
        return network_environment(
            session.network, transparent=Capability.NETWORK in driver.capabilities
        )

    # -- the gateway ------------------------------------------------------------------------

    async def _serve(self, session: str, record: SandboxRecord) -> SojournError | None:
        """Have the gateway serve a sandbox, as soon as it can; why it does not yet. That is in the
        session's events, too: a program inside only sees that nothing is reached."""

        async def wanted() -> Attach | None:
            active = self._registry.held(session)
            if active is None or active.state is SessionState.DELETED:
                return None
            policy = active.session.network
            return Attach(
                sandbox=record.sandbox,
                session=session,
                tenant=active.session.tenant,
                epoch=record.epoch,
                socket=str(self._agent.directory / record.sandbox / "control" / SOCKET),
                policy=policy,
                secrets=await self._granted(active.session.tenant, policy),
            )

        self._serving[record.sandbox] = session
        try:
            await self.gateway.attach(record.sandbox, wanted)
        except SojournError as error:
            # It is asked again when it runs again; until then nothing leaves.
            log.error("session %s has no network for now: %s", session, error)
            await self._unavailable(session, error)
            return error
        return None

    async def _unavailable(self, session: str, error: SojournError) -> None:
        active = self._registry.held(session)
        event = AppendEvent(
            session=session,
            kind="network.unavailable",
            result=error.code,
            details={"message": error.message},
            before=None if active is None else active.session.head,
        )
        try:
            await self._database.append_event(event)
        except SojournError as failed:  # the session runs all the same
            log.warning("session %s: its event log does not say so: %s", session, failed)

    async def _granted(self, tenant: str, policy: NetworkPolicy) -> list[Granted]:
        try:
            return await self._secrets.granted(tenant, policy)
        except SojournError as error:
            log.error("requests go without secrets: %s", error)
            return []

    async def _certificates(self) -> bytes | None:
        """The deployment's authority, also while no gateway process runs: a sandbox is told of it
        when it starts, and would go on without it when there is a process again."""
        from sojourn.gateway.authority import trusted  # only where it is needed

        try:
            return await asyncio.to_thread(trusted, self.gateway.authority)
        except (OSError, ValueError) as error:
            log.error("the deployment's authority cannot be told to a session: %s", error)
            return None

    async def renew_secrets(self) -> None:
        """Secrets were changed at another node: sandboxes that may use any get what is in force."""
        for sandbox, session in list(self._serving.items()):
            active = self._registry.held(session)
            if active is not None and active.session.network.secrets:
                try:
                    await self.gateway.renew(sandbox)
                except SojournError as error:
                    log.error("session %s has no network for now: %s", session, error)

    async def _secret_changed(self, tenant: str, name: str) -> None:
        """A secret was set or removed: sandboxes that may use it get it, or lose it, also one
        that is only starting and was served as things were."""
        for sandbox, session in list(self._serving.items()):
            active = self._registry.held(session)
            if active is None or active.session.tenant != tenant:
                continue
            if name in active.session.network.secrets:
                try:
                    await self.gateway.renew(sandbox)
                except SojournError as error:
                    # It is ended then, and the next one serves by what is in force.
                    log.error("session %s has no network for now: %s", session, error)
