"""What the object store has of this database's snapshots and sessions, and what it lacks.

Guarantee: a snapshot counts as durable only in the form that was sent; whatever is removed here is
remembered until its removal from the object store is acknowledged, since triggers of the schema
write it down in the transaction that removes.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from sojourn.database.engine import Reader, Statements, Touched, Writer
from sojourn.database.records import (
    Durability,
    DurableObjects,
    ObjectStore,
    Removal,
    SnapshotRecord,
)
from sojourn.database.rows import REMOVALS, SNAPSHOTS, decode_names, encode_json, parents_first
from sojourn.errors import SessionNotFound

_STORE = "object_store"


class DurabilityRows:
    """A part of `SqlDatabase`."""

    _reader: Reader
    _writer: Writer

    async def object_store(self) -> ObjectStore | None:
        rows = await self._reader.lookup("get_setting", {"key": _STORE})
        return msgspec.json.decode(rows[0][0], type=ObjectStore) if rows else None

    async def use_object_store(self, store: ObjectStore) -> bool:
        def work(statements: Statements) -> bool:
            rows = statements.run("get_setting", {"key": _STORE})
            before = msgspec.json.decode(rows[0][0], type=ObjectStore) if rows else None
            statements.run("set_setting", {"key": _STORE, "value": encode_json(store)})
            if before is not None and before.repository == store.repository:
                return False
            for query in ("forget_durable", "forget_records", "forget_all_removals"):
                statements.run(query)
            return True

        touches = Touched(keys=frozenset([_STORE]))
        return bool(await self._writer.submit(work, durable=True, touches=touches))

    async def undurable_snapshots(
        self, *, limit: int = 100, node: str | None = None
    ) -> list[SnapshotRecord]:
        def work(statements: Statements) -> list[SnapshotRecord]:
            # One transaction: a head that moves between the two would be in both or in none.
            heads = statements.run("undurable_heads", {"limit": limit, "node": node})
            rest = {"limit": limit - len(heads), "node": node}
            others = statements.run("undurable_others", rest) if rest["limit"] else []
            return [
                record
                for rows in (heads, others)
                for record in parents_first([SNAPSHOTS.read(row) for row in rows])
            ]

        return await self._reader.call(work)

    async def mark_durable(self, id: str, *, fingerprint: str, at: float) -> bool:
        parameters = {"id": id, "fingerprint": fingerprint, "at": at}

        def work(statements: Statements) -> bool:
            return bool(statements.run("mark_durable", parameters))

        # In order with a change of the store, which makes such a mark void.
        touches = Touched(snapshots=frozenset([id]), keys=frozenset([_STORE]))
        return bool(await self._writer.submit(work, durable=False, touches=touches))

    async def store_removals(self, *, limit: int = 1000) -> list[Removal]:
        rows = await self._reader.select("store_removals", {"limit": limit})
        return [REMOVALS.read(row) for row in rows]

    async def forget_removals(self, ids: Collection[int]) -> None:
        parameters = {"ids": encode_json(list(ids))}

        def work(statements: Statements) -> None:
            statements.run("forget_removals", parameters)

        # It shrinks the database, so it may use a full disk's reserve.
        await self._writer.submit(work, durable=False, urgent=True)

    async def durable_objects(self, *, holder: str | None = None) -> DurableObjects:
        query = "durable_objects" if holder is None else "durable_objects_held"
        parameters = None if holder is None else {"holder": holder}

        def work(statements: Statements) -> DurableObjects:
            templates: set[str] = set()
            layers: dict[str, set[str]] = {}  # by tenant: most layers are named by many rows
            images: dict[str, set[str]] = {}
            for text, image, tenant in statements.stream(query, parameters):
                names = decode_names(text)
                templates.update(names[:1])
                layers.setdefault(tenant, set()).update(names[1:])
                if image is not None:
                    images.setdefault(tenant, set()).add(image)
            return DurableObjects(_by_name(layers), _by_name(images), templates)

        return await self._reader.call(work)

    async def record_digest(self, session: str) -> str | None:
        rows = await self._reader.lookup("record_digest", {"session": session})
        return str(rows[0][0]) if rows else None

    async def note_record(self, session: str, digest: str) -> None:
        def work(statements: Statements) -> None:
            if not statements.run("note_record", {"session": session, "digest": digest}):
                raise SessionNotFound(f"session {session} does not exist", session=session)

        touches = Touched(keys=frozenset([_STORE, f"record {session}"]))
        await self._writer.submit(work, durable=False, touches=touches)

    async def durability(
        self,
        tenant: str | None,
        *,
        holder: str | None = None,
        session: str | None = None,
        waiting: bool = False,
    ) -> list[Durability]:
        asked = {"tenant": tenant, "holder": holder, "session": session, "waiting": waiting}
        rows = await self._reader.select("durability", asked)
        return [
            Durability(
                session=session,
                head=head,
                head_durable=bool(head_durable),
                waiting=waiting,
                oldest_waiting=min((at for at in oldest if at is not None), default=None),
                durable_head_at=durable_head_at,
            )
            for session, head, head_durable, waiting, *oldest, durable_head_at in rows
        ]


def _by_name(held: dict[str, set[str]]) -> dict[str, set[str]]:
    """Turn tenants' names round: by name, the tenants that have it."""
    found: dict[str, set[str]] = {}
    for tenant, names in held.items():
        for name in names:
            found.setdefault(name, set()).add(tenant)
    return found
