"""A deployment and runtime of SWE-ReX in a durable session.

Guarantee: an evaluation harness that speaks SWE-ReX runs its commands in one session; its shells
keep their directory, variables and running programs through suspension, and with `state` in
another process too. Exit codes are the shell's own, told out of band of what commands print.

    deployment = SojournDeployment(name="task-17")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="make test"))
    attempts = await deployment.fork(3)
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import msgspec
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse

from sojourn.adapters import commands
from sojourn.adapters.swerex_runtime import ShellState, SojournRuntime
from sojourn.client import AsyncSession, AsyncSojourn
from sojourn.errors import NameTaken, SessionNotFound, SojournError

__all__ = ["SojournDeployment", "SojournRuntime"]


class DeploymentState(msgspec.Struct, frozen=True):
    """What another process needs to go on: nothing secret."""

    session: str
    shells: dict[str, ShellState] = {}


class SojournDeployment(AbstractDeployment):
    """A session as a deployment: `name` finds one that is there or makes it, as `create` says.
    `stop` suspends it, with its shells, or deletes it with `on_stop="delete"`."""

    def __init__(
        self,
        name: str | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        state: bytes | None = None,
        on_stop: Literal["suspend", "delete"] = "suspend",
        logger: logging.Logger | None = None,
        **create: Any,
    ) -> None:
        self.logger = logger or logging.getLogger(__name__)
        self._name = name
        self._address = (url, token)
        self._state = None if state is None else msgspec.json.decode(state, type=DeploymentState)
        self._on_stop = on_stop
        self._create = create
        self._hooks = CombinedDeploymentHook()
        self._client: AsyncSojourn | None = None
        self._runtime: SojournRuntime | None = None

    def __del__(self) -> None:
        """Nothing: the base class would stop it from wherever the last reference goes, in whatever
        event loop is there. A session that is left is suspended by its idle timeout."""

    def add_hook(self, hook: DeploymentHook) -> None:
        """Tell a hook of the steps of `start`."""
        self._hooks.add_hook(hook)

    @property
    def session(self) -> AsyncSession:
        """The session, for what the framework does not know of."""
        return self.runtime.session

    @property
    def runtime(self) -> SojournRuntime:
        """The runtime. Raises DeploymentNotStartedError."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    def state(self) -> bytes:
        """What `state=` of another deployment, in another process, goes on from."""
        told = DeploymentState(self.session.id, self.runtime.shell_states())
        return msgspec.json.encode(told)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the session can run commands. Raises DeploymentNotStartedError."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Find or make the session. Raises DeploymentStartupError."""
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Opening the session")
        client = None
        try:
            client = AsyncSojourn(*self._address)
            session = await self._open(client)
        except SojournError as error:
            if client is not None:
                await client.close()
            raise DeploymentStartupError(str(error)) from error
        self._client = client
        shells = {} if self._state is None else self._state.shells
        self._runtime = SojournRuntime(session, shells, logger=self.logger)

    async def _open(self, client: AsyncSojourn) -> AsyncSession:
        if self._state is not None:
            return await client.sessions.get(self._state.session)
        if self._name is not None:
            try:
                return await client.sessions.get(self._name)
            except SessionNotFound:
                pass  # made below
        given = dict(self._create)
        marks = commands.labels("swe-rex", given.pop("labels", None))
        try:
            return await client.sessions.create(name=self._name, labels=marks, **given)
        except NameTaken:
            return await client.sessions.get(self._name or "")  # by another at the same moment

    async def fork(self, n: int = 1) -> list[SojournDeployment]:
        """`n` started deployments that each go on alone from here, shells included; they are
        deleted when they are stopped."""
        state = DeploymentState("", self.runtime.shell_states())
        children = await self.session.fork(n)
        made = []
        for child in children:
            told = msgspec.json.encode(msgspec.structs.replace(state, session=child.id))
            url, token = self._address
            one = SojournDeployment(url=url, token=token, state=told, on_stop="delete")
            await one.start()
            made.append(one)
        return made

    async def stop(self) -> None:
        """Suspend or delete the session, and close the connection."""
        runtime, self._runtime = self._runtime, None
        client, self._client = self._client, None
        if runtime is None or client is None:
            return
        try:
            if self._on_stop == "delete":
                await runtime.session.delete()
            elif (await runtime.session.refresh()).state in {"running", "paused"}:
                await runtime.session.suspend()
        except SessionNotFound:
            return  # deleted by somebody else
        finally:
            await client.close()
