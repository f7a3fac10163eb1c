"""What lies in a repository, from one listing: packs, roots and indexes of every domain.

Guarantee: what is listed was there at some moment of the listing; a listing that breaks off raises
instead of looking complete.
"""

from __future__ import annotations

from sojourn.errors import IntegrityError, InvalidRequest
from sojourn.repository.backends.base import Backend, ObjectInfo
from sojourn.repository.domains import COPIES, DAMAGED, IMAGES, INDEXES, LAYERS, PACKS, SNAPSHOTS
from sojourn.repository.keys import check_domain
from sojourn.repository.packs import pack_id

NOT_DOMAINS = frozenset({"config", "keys", "tenants"})


class Inventory:
    """The objects of one domain. `strangers` lie where packs do and are none."""

    def __init__(self) -> None:
        self.packs: dict[bytes, ObjectInfo] = {}
        self.roots: dict[str, ObjectInfo] = {}
        self.indexes: dict[str, ObjectInfo] = {}
        self.snapshots: set[str] = set()
        self.damaged: set[str] = set()
        self.strangers: list[ObjectInfo] = []

    @property
    def pack_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(info.size for info in self.packs.values())

    def add(self, info: ObjectInfo) -> None:
        """Take in one listed object."""
        parts = info.key.split("/")
        group = parts[1] if len(parts) > 2 else ""
        if group == PACKS:
            self._add_pack(info, parts)
        elif group in (LAYERS, IMAGES, COPIES):
            self.roots[info.key] = info
        elif group == INDEXES:
            self.indexes[info.key] = info
        elif group == SNAPSHOTS:
            self.snapshots.add(parts[-1])
        elif group == DAMAGED:
            self.damaged.add(parts[-1])

    def _add_pack(self, info: ObjectInfo, parts: list[str]) -> None:
        try:
            id = pack_id(info.key)
        except IntegrityError:
            self.strangers.append(info)
            return
        if parts[2:] == [parts[-1][:2], id.hex()]:
            self.packs[id] = info
        else:
            self.strangers.append(info)


def survey(backend: Backend) -> dict[str, Inventory]:
    """The inventories of all domains there are, by name. What else lies in the same place is no
    business of the repository."""
    found: dict[str, Inventory] = {}
    strange: set[str] = set(NOT_DOMAINS)
    for info in backend.list(""):
        name, slash, _ = info.key.partition("/")
        if not slash or name in strange:
            continue
        if name not in found:
            try:
                check_domain(name)
            except InvalidRequest:
                strange.add(name)
                continue
            found[name] = Inventory()
        found[name].add(info)
    return dict(sorted(found.items()))
