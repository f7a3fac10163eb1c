"""Between rows and records.

Guarantee: a record written and read again is equal to itself. Column names are field names and
columns come in field order, so a query can name them all by the record's list and a row needs no
lookup by name; lists and mappings are JSON text.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from sojourn.database.records import (
    Event,
    Operation,
    Removal,
    SecretRecord,
    SnapshotRecord,
    Tenant,
    Token,
)
from sojourn.model.nodes import Node
from sojourn.model.ports import ExposedPort
from sojourn.model.sessions import Session

R = TypeVar("R", bound=msgspec.Struct)


def encode_json(value: Any) -> str:
    """The JSON text of a value, with keys in order, so that equal values give equal text."""
    return msgspec.json.encode(value, order="deterministic").decode()


decode_names = msgspec.json.Decoder(list[str]).decode
"""The list that a column of names holds."""
decode_labels = msgspec.json.Decoder(dict[str, str]).decode
"""The mapping that a column of labels holds."""


def _inner(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return (arms[0] if len(arms) == 1 else hint), len(arms) < len(typing.get_args(hint))
    return hint, False


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """How a column's value becomes a field's; None when it is the value already."""
    inner, optional = _inner(hint)
    if inner in (str, int, bytes):
        return None
    if inner is float:
        return _optional(float) if optional else float
    if inner is bool:
        return bool
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return _optional(inner) if optional else inner
    decode = msgspec.json.Decoder(inner).decode
    return _optional(decode)


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _writer(hint: Any) -> Callable[[Any], Any] | None:
    inner, _ = _inner(hint)
    if inner in (str, int, float, bool, bytes):
        return None
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return _optional(str)
    return _optional(encode_json)


class Rows(Generic[R]):
    """The mapping of one record type."""

    def __init__(self, kind: type[R]) -> None:
        self.kind = kind
        self.fields: tuple[str, ...] = kind.__struct_fields__
        hints = typing.get_type_hints(kind)
        self._readers = [_reader(hints[field]) for field in self.fields]
        self._writers = {field: _writer(hints[field]) for field in self.fields}

    @property
    def columns(self) -> str:
        """All columns, for SELECT, INSERT and RETURNING."""
        return ", ".join(f'"{field}"' for field in self.fields)

    @property
    def parameters(self) -> str:
        """All columns as named parameters, for VALUES."""
        return ", ".join(f":{field}" for field in self.fields)

    def read(self, row: Sequence[Any]) -> R:
        """The record of a row whose columns are in field order."""
        return self.kind(
            *[
                value if read is None else read(value)
                for read, value in zip(self._readers, row, strict=True)
            ]
        )

    def write(self, record: R) -> dict[str, Any]:
        """Column values of a record."""
        return self.changes({field: getattr(record, field) for field in self.fields})

    def changes(self, values: dict[str, Any]) -> dict[str, Any]:
        """Column values of some fields."""
        written = {}
        for field, value in values.items():
            write = self._writers[field]
            written[field] = value if write is None else write(value)
        return written

    def assignments(self, fields: Collection[str]) -> str:
        """SET list for these fields; field names come from the record type, never from outside."""
        return ", ".join(f'"{field}" = :{field}' for field in self.fields if field in fields)


SESSIONS = Rows(Session)
SNAPSHOTS = Rows(SnapshotRecord)
OPERATIONS = Rows(Operation)
EVENTS = Rows(Event)
TENANTS = Rows(Tenant)
TOKENS = Rows(Token)
REMOVALS = Rows(Removal)
SECRETS = Rows(SecretRecord)
PORTS = Rows(ExposedPort)
NODES = Rows(Node)

PLACEHOLDERS = {
    name: rows
    for name, rows in (
        ("session", SESSIONS),
        ("snapshot", SNAPSHOTS),
        ("operation", OPERATIONS),
        ("event", EVENTS),
        ("tenant", TENANTS),
        ("token", TOKENS),
        ("secret", SECRETS),
        ("port", PORTS),
        ("node", NODES),
    )
}


def parents_first(snapshots: list[SnapshotRecord]) -> list[SnapshotRecord]:
    """Oldest first, but a child never before its parent, whatever the clock did."""
    waiting = {snapshot.id: snapshot for snapshot in snapshots}
    ordered: list[SnapshotRecord] = []
    for snapshot in snapshots:
        line: list[SnapshotRecord] = []
        current: SnapshotRecord | None = snapshot
        while current is not None and current.id in waiting:
            line.append(waiting.pop(current.id))
            current = waiting.get(current.parent) if current.parent else None
        ordered.extend(reversed(line))
    return ordered
