"""What left sessions, and where in the tree it happened.

Guarantee: an effect is between two snapshots, or after the last, as the writes put it there, also
when snapshots in between are removed: a trigger of the schema passes it on. So what a change from
one state to another leaves behind is read from an index, whatever the length of the event log.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sojourn.database.engine import Reader
from sojourn.database.records import EffectRecord
from sojourn.model.network import Effect

_decode = msgspec.json.Decoder(Effect).decode


class EffectRows:
    """A part of `SqlDatabase`."""

    _reader: Reader

    async def list_effects(
        self,
        session: str,
        *,
        all: bool = False,
        after: tuple[float, str] | None = None,
        limit: int = 1000,
    ) -> list[EffectRecord]:
        after_time, after_id = after or (0.0, "")
        rows = await self._reader.select(
            "list_effects",
            {
                "session": session,
                "all": all,
                "after_time": after_time,
                "after_id": after_id,
                "limit": limit,
            },
        )
        return [_read(row) for row in rows]

    async def open_effects(
        self, *, limit: int = 1000, holder: str | None = None
    ) -> list[EffectRecord]:
        rows = await self._reader.select("open_effects", {"limit": limit, "holder": holder})
        return [_read(row) for row in rows]

    async def effects_between(
        self, base: str, tip: str | None, *, session: str | None = None, limit: int = 1000
    ) -> tuple[list[EffectRecord], int]:
        rows = await self._reader.select(
            "effects_between", {"base": base, "tip": tip, "session": session, "limit": limit}
        )
        return [_read(row) for row in rows], int(rows[0][3]) if rows else 0


def _read(row: Any) -> EffectRecord:
    return EffectRecord(effect=_decode(row[0]), snapshot=row[1], lasting=bool(row[2]))
