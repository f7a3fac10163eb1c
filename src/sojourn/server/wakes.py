"""Requests from outside at sessions that may be put away.

Guarantee: a request resumes its session at most once however many come, waits at most a minute, and
is told why when there is no answer; a session where bytes move is not idle, and what a request may
have changed is looked for as after a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref

from sojourn.database.base import Database
from sojourn.errors import (
    Conflict,
    Interrupted,
    PortNotFound,
    PortSilent,
    SandboxLost,
    SessionNotFound,
    SojournError,
    to_body,
)
from sojourn.gateway import ports_channel as channel
from sojourn.lifecycle import idle_deadline
from sojourn.model import SessionState
from sojourn.model.ports import ExposedPort
from sojourn.node.sandboxes import Sandbox
from sojourn.server.base import Principal
from sojourn.server.ports import Ports
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.turns import Turns

log = logging.getLogger(__name__)

HOLD_SECONDS = 60.0
# A program that was just restored, or started with its session, may need a moment to listen.
_WAKING_SECONDS = 10.0
_GRACE_SECONDS = 1.0
_AGAIN_SECONDS = 0.05
_MOST_ASKS = 256
# What requests changed is looked for when they pause, and while they do not, so often.
_LOOK_SECONDS = 10.0


class Wakes:
    """Answers the gateway's dials."""

    def __init__(self, database: Database, ports: Ports, registry: Registry, turns: Turns) -> None:
        self._database = database
        self._ports = ports
        self._registry = registry
        self._turns = turns
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._asks: set[asyncio.Task[None]] = set()
        self._looked: dict[str, float] = {}
        self._stopped = False
        # By session (0) and by sandbox and port, as long as somebody uses them.
        self._locks: weakref.WeakValueDictionary[tuple[str, int], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def stop(self) -> None:
        """Wake nothing any more: a session that is put away stays so."""
        self._stopped = True
        tasks = [*self._dials.values(), *self._asks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def received(self, message: channel.Message) -> None:
        """What the gateway process tells about exposed ports."""
        match message:
            case channel.Dial():
                task = asyncio.create_task(self._answer(message), name=f"dial {message.id}")
                self._dials[message.token] = task
                task.add_done_callback(lambda _: self._dials.pop(message.token, None))
            case channel.Ask():
                if len(self._asks) >= _MOST_ASKS:
                    self._ports.answer(channel.Asked(message.number))
                    return
                asking = asyncio.create_task(self._ask(message), name=f"ask {message.session}")
                self._asks.add(asking)
                asking.add_done_callback(self._asks.discard)
            case channel.GiveUp():
                dial = self._dials.get(message.token)
                if dial is not None:
                    dial.cancel()
            case channel.Moved():
                self._moved(message)
            case _:
                log.error("the gateway sent a message that is the server's to send")

    async def _ask(self, asked: channel.Ask) -> None:
        try:
            if not self._stopped:
                await self._ports.asked_for(asked.session, asked.port)
        except SojournError as error:
            log.info("port %d of %s is not exposed: %s", asked.port, asked.session, error)
        self._ports.answer(channel.Asked(asked.number))

    async def _answer(self, dial: channel.Dial) -> None:
        port = self._ports.find(dial.id)
        try:
            if self._stopped:
                raise Interrupted("the server stops", next_step="Ask again when it runs again.")
            if port is None:
                raise PortNotFound("the port is no longer exposed")
            await self._dial(port, dial.token)
            answer = channel.Dialed(dial.token)
        except SessionNotFound as error:
            answer = channel.Dialed(dial.token, to_body(PortNotFound(error.message)))
        except SojournError as error:
            answer = channel.Dialed(dial.token, to_body(error))
        except Exception as error:
            # A fault here is this request's alone, and it must not wait for an answer in vain.
            log.exception("a fault while a port was dialed")
            answer = channel.Dialed(dial.token, to_body(SojournError(f"a fault: {error!r}")))
        self._ports.answer(answer)

    async def _dial(self, port: ExposedPort, token: bytes) -> None:
        """Have the session run and a tunnel opened. Raises what forbids it, PortSilent."""
        who = Principal(tenant=port.tenant, actor=f"port {port.port}", role="tenant")
        why = "the session did not come up"
        # The first wakes it; the others find it awake.
        waking = self._locks.setdefault((port.session, 0), asyncio.Lock())
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                while True:
                    async with waking:
                        active, sandbox = await self._turns.running(who, port.session, beside=True)
                    active.calls += 1
                    try:
                        await self._connect(sandbox, token, port.port)
                        return
                    except (Interrupted, SandboxLost) as error:
                        # It was put away, or lost its sandbox, meanwhile: begin again.
                        why = error.message
                    finally:
                        active.calls -= 1
                    await asyncio.sleep(_AGAIN_SECONDS)
        except TimeoutError:
            raise PortSilent(f"no answer within {HOLD_SECONDS:.0f} s: {why}") from None

    async def _connect(self, sandbox: Sandbox, token: bytes, port: int) -> None:
        with contextlib.suppress(Conflict):
            await sandbox.dial(token, port)
            return
        record = sandbox.record
        age = time.time() - record.created_at
        patience = max(_GRACE_SECONDS, min(_WAKING_SECONDS, _WAKING_SECONDS - age))
        until = time.monotonic() + patience
        # One knocks for all that wait.
        lock = self._locks.setdefault((record.sandbox, port), asyncio.Lock())
        async with lock:
            while True:
                try:
                    await sandbox.dial(token, port)
                    return
                except Conflict as error:
                    if time.monotonic() >= until:
                        raise PortSilent(
                            f"nothing listens on port {port} inside the session"
                        ) from error
                await asyncio.sleep(_AGAIN_SECONDS)

    # -- what goes on -----------------------------------------------------------------------

    def _moved(self, message: channel.Moved) -> None:
        now = time.monotonic()
        for id in message.ids:
            active = self._active(id)
            if active is not None:
                self._keep_awake(active)
                last = self._looked.setdefault(active.id, now)
                if now - last >= _LOOK_SECONDS:
                    self._looked[active.id] = now
                    self._turns.note(active, later=True)
        for id in message.quiet:
            self._looked.pop(id.rpartition(":")[0], None)
            active = self._active(id)
            if active is not None:
                self._turns.note(active, later=True)

    def _keep_awake(self, active: ActiveSession) -> None:
        session = active.session
        deadline = idle_deadline(session.policy, session.idle_deadline, time.time())
        if deadline is not None:
            self._database.touch_idle(active.id, deadline)

    def _active(self, id: str) -> ActiveSession | None:
        port = self._ports.find(id)
        if port is None:
            return None
        active = self._registry.held(port.session)
        if active is None or active.state is not SessionState.RUNNING:
            return None
        return active
