"""Sandboxes of the OpenAI Agents SDK in durable sessions.

Guarantee: what a `SandboxAgent` does happens in one session, which is suspended with its processes
when a run ends, and goes on from exactly there when the run's state is resumed: in this process or
another, also after the Sojourn server was started again. The framework's snapshots are snapshots of
the session, by reference: where the session has gone on since, resuming takes it back to them.

    config = RunConfig(sandbox=SandboxRunConfig(client=SojournSandboxClient()))
    result = await Runner.run(agent, "...", run_config=config)

The framework calls `delete` at the end of every run that made its sandbox, so `delete` leaves a
session there unless the options say `on_exit="delete"`; `destroy` deletes it whatever they say.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from pydantic import Field

from sojourn.adapters import commands
from sojourn.adapters.openai_agents_session import (
    Connection,
    SojournSandboxSession,
    SojournSandboxSessionState,
)
from sojourn.errors import SessionNotFound

__all__ = [
    "SojournSandboxClient",
    "SojournSandboxClientOptions",
    "SojournSandboxSession",
    "SojournSandboxSessionState",
]


class SojournSandboxClientOptions(BaseSandboxClientOptions):
    """How sessions are made: as `sessions.create` takes it, and what the end of a run does."""

    type: Literal["sojourn"] = "sojourn"
    template: str = "debian"
    name: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, Any] | None = None
    policy: dict[str, Any] | None = None
    network: Any = None
    on_exit: Literal["suspend", "delete"] = "suspend"
    exposed_ports: tuple[int, ...] = ()


_CREATE = ("template", "name", "env", "limits", "policy", "network")


class SojournSandboxClient(BaseSandboxClient[SojournSandboxClientOptions | None]):
    """Makes and resumes sandboxes. The server is found as every client finds it, unless named; its
    address and token are never part of a session's state."""

    backend_id = "sojourn"
    supports_default_options = True

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        self._connection = Connection(url, token)
        self._instrumentation = (
            instrumentation if instrumentation is not None else Instrumentation()
        )
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SojournSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """A new session. Raises what `sessions.create` raises."""
        chosen = options if options is not None else SojournSandboxClientOptions()
        wanted = self._validate_manifest_for_create(
            manifest if manifest is not None else Manifest()
        )
        create = {name: getattr(chosen, name) for name in _CREATE}
        number = uuid.uuid4()
        async with self._connection.open() as client:
            session = await client.sessions.create(
                labels=commands.labels("openai-agents", chosen.labels), **create
            )
        state = SojournSandboxSessionState(
            session_id=number,
            manifest=wanted,
            snapshot=resolve_snapshot(snapshot, str(number)),
            exposed_ports=chosen.exposed_ports,
            session=session.id,
            on_exit=chosen.on_exit,
        )
        return self._wrapped(state, preserved=False)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The session that a state is about, wherever it is now. Raises SessionNotFound when it was
        deleted: the framework's snapshots of it went with it, so there is nothing to go on from."""
        if not isinstance(state, SojournSandboxSessionState):
            raise TypeError(f"a state of this client is needed, not {type(state).__name__}")
        state.assert_path_grants_rebound()
        async with self._connection.open() as client:
            await client.sessions.get(state.session)
        return self._wrapped(state, preserved=True)

    def _wrapped(self, state: SojournSandboxSessionState, *, preserved: bool) -> SandboxSession:
        inner = SojournSandboxSession(state, self._connection)
        inner._set_start_state_preserved(preserved)
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Delete the session if its options said `on_exit="delete"`."""
        if _state_of(session).on_exit == "delete":
            await self.destroy(session)
        return session

    async def destroy(self, session: SandboxSession | SandboxSessionState) -> None:
        """Delete the session with all that is in it, if it is there."""
        state = session if isinstance(session, SandboxSessionState) else _state_of(session)
        if not isinstance(state, SojournSandboxSessionState):
            raise TypeError(f"a state of this client is needed, not {type(state).__name__}")
        async with self._connection.open() as client:
            try:
                await (await client.sessions.get(state.session)).delete()
            except SessionNotFound:
                return  # that is what was asked for

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """A state from what `serialize_session_state` gave."""
        return self._deserialize_session_state_payload(payload, SojournSandboxSessionState)


def _state_of(session: SandboxSession) -> SojournSandboxSessionState:
    state = session._inner.state
    if not isinstance(state, SojournSandboxSessionState):
        raise TypeError(f"a session of this client is needed, not {type(session._inner).__name__}")
    return state
