"""What leaves sessions, or was refused, on record; and what a step back in their history leaves
behind.

Guarantee: a request that cannot be taken back is on disk, with the snapshot before it, before its
first byte leaves; what was under way when the gateway ended is recorded as interrupted. A rollback
therefore never forgets one: at most it names one whose answer is not known.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sojourn.database.base import Database
from sojourn.database.records import EffectRecord
from sojourn.database.writes import AppendEvent, PutEffect, Write
from sojourn.errors import EffectsInTheWay, InvalidRequest, SessionNotFound, SojournError
from sojourn.gateway.messages import Began, Ended, Withheld
from sojourn.model import Session
from sojourn.model.network import Denial, Effect, OnEffects, lasting
from sojourn.server.registry import Registry
from sojourn.telemetry import declared
from sojourn.wire.api import EffectInfo, EffectPage, EffectsLeft

log = logging.getLogger(__name__)

DENIED = "network.denied"
"""The kind of the event that tells what a policy did not let out."""
_WITH_COMMANDS = frozenset({"network.request", DENIED})
_QUIET_SECONDS = 0.05
_MOST_AT_ONCE = 200
_MOST_WAITING = 1000  # ends that are not written yet
_MOST_LISTED = 200  # with what a verb or a comparison tells
_TOLD = 20  # in errors and events; all of them are asked for by themselves


def effect_info(record: EffectRecord) -> EffectInfo:
    """An effect as the API shows it."""
    fields = {name: getattr(record.effect, name) for name in Effect.__struct_fields__}
    return EffectInfo(**fields, snapshot=record.snapshot, lasting=record.lasting)


def effect_line(effect: Effect) -> str:
    """An effect in one line: `POST api.example.com/orders 201 12:03:11`."""
    at = time.strftime("%H:%M:%S", time.gmtime(effect.began_at))
    port = "" if effect.port in (80, 443) else f":{effect.port}"
    how = str(effect.status) if effect.status is not None else effect.outcome
    return f"{effect.method or effect.kind} {effect.host}{port}{effect.path} {how} {at}"


class Effects:
    """Records what the gateway tells, and finds it again."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._ended: list[Effect | Denial] = []
        self._told = self._written = 0  # how many ended, and of how many that is dealt with
        self._flushing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    # -- record -----------------------------------------------------------------------------

    async def handle(self, message: Began | Ended | Withheld) -> None:
        """Record what the gateway tells. Of what is about to leave, returns when it is on disk; of
        what ended or was refused, at once, but not while too much waits to be written: the gateway
        holds requests up when it is not answered.

        Raises SessionNotFound, StorageFull: it must not leave then."""
        if isinstance(message, Ended | Withheld):
            if isinstance(message, Ended):
                self._ended.append(message.effect)
                declared.GATEWAY_REQUESTS.add(message.effect.kind, message.effect.outcome)
            else:
                self._ended.append(message.denial)
                declared.GATEWAY_DENIALS.add(amount=message.denial.count)
            self._told += 1
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush_soon(), name="effects")
            while len(self._ended) > _MOST_WAITING:
                await self._flush()
            return
        effect = message.effect
        await self._database.commit(
            [PutEffect(effect, lasting(effect)), self._event("network.request", effect, "ok")]
        )

    def _event(self, kind: str, told: Effect | Denial, result: str) -> AppendEvent:
        session: Session | None = None
        active = self._registry.held(told.session)
        if active is not None:
            session = active.session
        details = msgspec.to_builtins(told)
        if kind in _WITH_COMMANDS and active is not None and active.commands:
            details["during"] = active.commands[:5]
        return AppendEvent(
            session=told.session,
            kind=kind,
            actor="session",
            result=result,
            details=details,
            before=session.head if session is not None else None,
        )

    async def _flush_soon(self) -> None:
        await asyncio.sleep(_QUIET_SECONDS)
        await self.flush()

    async def flush(self) -> None:
        """Return when all that ended until now is written; nobody waits for it but who wants to see
        it."""
        told = self._told
        while self._written < told:
            await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            batch, self._ended = self._ended[:_MOST_AT_ONCE], self._ended[_MOST_AT_ONCE:]
            if not batch:
                return
            try:
                await self._write_batch(batch)
            finally:
                self._written += len(batch)

    async def _write_batch(self, batch: list[Effect | Denial]) -> None:
        try:
            await self._write(batch)
        except SessionNotFound:
            for one in batch:
                try:
                    await self._write([one])
                except SessionNotFound:
                    continue  # deleted meanwhile, with all there is of it
        except SojournError as error:
            log.error("the ends of %d requests are not on record: %s", len(batch), error)

    async def _write(self, told: Sequence[Effect | Denial]) -> None:
        writes: list[Write] = []
        for one in told:
            if isinstance(one, Denial):
                writes.append(self._event(DENIED, one, one.rule))
                continue
            kind = "network.response" if lasting(one) else "network.request"
            writes.append(PutEffect(one, lasting(one)))
            writes.append(self._event(kind, one, one.outcome))
        await self._database.commit(writes, durable=False)

    async def interrupt(self) -> None:
        """Mark what was under way as interrupted: no gateway process knows of it any more."""
        await self.flush()
        taker = self._registry.taker
        holder = taker.id if taker is not None else None
        while found := await self._database.open_effects(limit=_MOST_AT_ONCE, holder=holder):
            over = {"outcome": "interrupted", "ended_at": time.time()}
            await self._write([msgspec.structs.replace(one.effect, **over) for one in found])

    # -- find -------------------------------------------------------------------------------

    async def left(self, session: Session, base: str, tip: str | None = None) -> EffectsLeft:
        """What going back from `tip` to `base` leaves behind; without a tip from the present."""
        await self.flush()
        found, count = await self._database.effects_between(
            base,
            tip if tip is not None else session.head,
            session=None if tip is not None else session.id,
            limit=_MOST_LISTED,
        )
        return EffectsLeft(count, [effect_info(one) for one in found])

    async def page(
        self, session: Session, *, all: bool, cursor: str | None, limit: int
    ) -> EffectPage:
        """A page of what left a session, oldest first. Raises InvalidRequest."""
        await self.flush()
        after = None if cursor is None else _read_cursor(cursor)
        found = await self._database.list_effects(session.id, all=all, after=after, limit=limit + 1)
        last = found[limit - 1].effect if len(found) > limit else None
        return EffectPage(
            items=[effect_info(one) for one in found[:limit]],
            next=None if last is None else f"{last.began_at!r}~{last.id}",
        )


def _read_cursor(cursor: str) -> tuple[float, str]:
    text, _, id = cursor.partition("~")
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if not math.isfinite(at):
        raise InvalidRequest(f"{cursor!r} is no cursor of effects", field="cursor")
    return at, id


def require_none(session: Session, verb: str, left: EffectsLeft, *, force: bool) -> None:
    """Raise EffectsInTheWay where the session's policy refuses to leave effects behind."""
    if force or not left.count or session.network.on_effects is not OnEffects.REFUSE:
        return
    some = "1 request" if left.count == 1 else f"{left.count} requests"
    raise EffectsInTheWay(
        f"the {verb} would leave behind {some} that cannot be taken back:"
        f" {effect_line(left.effects[0])}{', ...' if left.count > 1 else ''}",
        session=session.id,
        count=left.count,
        effects=[msgspec.to_builtins(one) for one in left.effects[:_TOLD]],
    )


def told(left: EffectsLeft | None) -> dict[str, Any]:
    """The part of an event's details that tells what was left behind."""
    if left is None or not left.count:
        return {}
    return {
        "effects": left.count,
        "requests": [effect_line(one) for one in left.effects[:_TOLD]],
    }
