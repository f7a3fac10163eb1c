"""Removing what no snapshot needs, beside running uploads, other collections, and after crashes.

Guarantee: nothing that an acknowledged snapshot needs is removed, in whatever order the steps of
publishers and collectors come and wherever one of them ends; and nothing at all is removed where
something that tells what is needed cannot be read. The safety rests on the order of the steps and
on compare-and-swap alone. The grace, measured by the store's clock, only spares publishers from
sending again: a clock that jumps delays a removal or brings it early, and loses nothing.

The protocol and why it holds are in docs/formats/repository.md (Collection).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from sojourn.errors import Conflict, IntegrityError, ObjectMissing
from sojourn.repository.backends.base import Backend, ObjectInfo
from sojourn.repository.damages import remove_damage
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.inventory import Inventory, survey
from sojourn.repository.marking import SHARED, Marks, mark, root_name
from sojourn.repository.records import PackInfo
from sojourn.repository.rewriting import Rewriter
from sojourn.repository.tombstones import (
    DONE,
    KEPT,
    NAMED,
    REMOVING,
    Found,
    Tombstone,
    Tombstones,
    names,
    swap,
    tombstone,
    write_tombstone,
)

log = logging.getLogger(__name__)

LONGEST = 12 * 3600.0  # seconds a collection may take; tombstones are kept much longer
SMALL_INDEX, MANY_INDEXES = 4 << 20, 16
_ATTEMPTS = 5
_BATCH = 1000
_SLACK = 1.0  # seconds: times of objects are rounded


class Collected(msgspec.Struct):
    """What a collection did. `bytes` were freed, `written_bytes` went into packs written anew;
    `waiting_bytes` in `waiting_packs` packs (and roots) are named for removal, by this collection
    or an earlier one, and wait for their grace. `young_bytes` in `young_packs` packs are needed by
    no snapshot, but younger than the grace: an upload under way may need them, so they are not
    named yet."""

    snapshots: int = 0
    packs: int = 0
    roots: int = 0
    rewritten: int = 0
    indexes: int = 0
    bytes: int = 0
    written_bytes: int = 0
    waiting_bytes: int = 0
    waiting_packs: int = 0
    young_bytes: int = 0
    young_packs: int = 0


class Use(msgspec.Struct):
    """How much of a pack is needed: bytes of chunks, and of those needed."""

    info: PackInfo
    total: int
    used: int
    chunks: list[bytes]


def collect(
    backend: Backend,
    domain: Callable[[str], Domain],
    *,
    grace: float,
    repack_below: float = 0.5,
    shared: str = SHARED,
) -> Collected:
    """Collect in all domains of a repository, which `domain` opens by name.

    What is found dead is named first; it is removed by a collection that begins `grace` seconds
    later or more, and by this one where `grace` is 0. Packs of which less than `repack_below` is
    needed are written anew. Safe to run beside anything, any number of times, and to be cut off.

    Raises IntegrityError naming what cannot be read (nothing is removed then), StoreUnreachable.
    """
    return _Collector(backend, domain, grace, repack_below, shared).run()


class _Collector:
    def __init__(
        self,
        backend: Backend,
        domain: Callable[[str], Domain],
        grace: float,
        repack_below: float,
        shared: str,
    ) -> None:
        self._backend = backend
        self._open = domain
        self._grace = grace
        self._repack_below = repack_below
        self._shared = shared
        self._begun = _uptime()
        self._domains: dict[str, Domain] = {}
        self._lying: dict[str, Inventory] = {}
        self._tombstones: dict[str, Tombstones] = {}
        self.report = Collected()

    def run(self) -> Collected:
        self._look_around()
        for name in self._domains:
            for found in self._look(name):
                if found.tombstone.state == REMOVING:  # somebody ended in the middle
                    self._remove(name, found)
        ripe = {name: self._ripe(name) for name in self._domains}
        if any(ripe.values()):
            # What counts as the second reading begins after the tombstones were seen: which domains
            # there are is part of it.
            self._look_around()
        marks = self._mark()
        self._judge(ripe, marks)
        named = [name for name in self._domains if self._name_dead(name, marks[name])]
        ripe = {name: self._ripe(name) for name in named}
        if any(ripe.values()):
            self._look_around()
            self._judge(ripe, self._mark())
        for name in self._domains:
            self._tidy(name)
        return self.report

    # -- reading ----------------------------------------------------------------------------
    def _look_around(self) -> None:
        self._lying = survey(self._backend)
        for name in [*self._lying, self._shared]:
            if name not in self._domains:
                self._domains[name] = self._open(name)
                self._tombstones[name] = Tombstones(self._domains[name])
            self._lying.setdefault(name, Inventory())
        self._domains = dict(sorted(self._domains.items()))
        for name in self._domains:
            self._lying.setdefault(name, Inventory())

    def _look(self, name: str) -> list[Found]:
        return self._tombstones[name].look()

    def _ripe(self, name: str) -> list[Found]:
        """The tombstones whose grace is over. One from the future was written under a clock that
        was wrong then or is now: it is written again, and waits from now."""
        ripe = []
        now = self._backend.now()
        for found in self._look(name):
            if found.tombstone.state != NAMED:
                continue
            if found.modified > now + _SLACK:
                swap(self._domains[name], found, _again(found.tombstone))
            elif found.modified + self._grace <= now + _SLACK:
                ripe.append(found)
        return ripe

    def _mark(self) -> dict[str, Marks]:
        for domain in self._domains.values():
            domain.index.refresh()
        found = mark(self._domains, self._shared)
        self.report.snapshots = sum(len(each.snapshots) for each in self._lying.values())
        return found

    # -- the verdict ------------------------------------------------------------------------
    def _judge(self, ripe: dict[str, list[Found]], marks: dict[str, Marks]) -> None:
        for name, listed in ripe.items():
            for found in listed:
                self._judge_one(name, found, marks[name])

    def _judge_one(self, name: str, found: Found, marks: Marks) -> None:
        domain = self._domains[name]
        # The last thing read before the swap: two collectors may have named one copy each of what
        # a snapshot needs; then each sees the other's tombstone here, or is seen by it.
        seen = self._look(name)
        if all((each.key, each.version) != (found.key, found.version) for each in seen):
            return  # somebody else has it
        named_roots, named_packs = names(seen)
        own = found.tombstone
        packs = set(own.pack_ids())
        packs -= self._needed_packs(name, marks, packs, named_packs)
        needed = marks.root_names()
        standing = {root_name(key) for key in self._lying[name].roots if key not in named_roots}
        roots = {
            key for key in own.roots if root_name(key) not in needed or root_name(key) in standing
        }
        final = tombstone(REMOVING if packs or roots else DONE, packs, roots)
        ours = swap(domain, found, final)
        if ours is None:
            return
        if final.state == DONE:
            self._backend.delete([found.key])  # all of it is needed again: nothing to remember
        else:
            self._remove(name, ours)

    def _needed_packs(
        self, name: str, marks: Marks, own: set[bytes], named: set[bytes]
    ) -> set[bytes]:
        """Which packs of a tombstone hold needed chunks that no pack outside all tombstones has."""
        index = self._domains[name].index
        left = marks.chunks - marks.lost
        for info in self._there(name):
            if info.id not in named:
                left.difference_update(info.names())
        kept: set[bytes] = set()
        for id in own:
            pack = index.pack(id)
            if left and pack is not None and not left.isdisjoint(pack.names()):
                kept.add(id)
                left.difference_update(pack.names())
        if left:
            self._require(name, left)
        return kept

    def _there(self, name: str) -> Iterable[PackInfo]:
        """The packs that are listed and named by an index, the largest first."""
        lying = self._lying[name].packs
        infos = [info for info in self._domains[name].index.packs() if info.id in lying]
        infos.sort(key=lambda info: (-info.size, info.id))
        return infos

    def _require(self, name: str, left: set[bytes]) -> None:
        """Needed chunks must be in some pack. What is in none may have come, or moved, since the
        index was read; else it is lost, and nothing is removed."""
        domain = self._domains[name]
        gone = [chunk for chunk in left if not self._lies(name, chunk)]
        if gone:
            domain.index.refresh()
            self._look_around()
            gone = [chunk for chunk in gone if not self._lies(name, chunk)]
        if gone:
            raise _missing(min(gone), len(gone))

    def _lies(self, name: str, chunk: bytes) -> bool:
        lying = self._lying[name].packs
        return any(place.pack.id in lying for place in self._domains[name].index.places(chunk))

    # -- removing ---------------------------------------------------------------------------
    def _remove(self, name: str, found: Found) -> None:
        """Remove what a tombstone with a verdict names. Layers and images first, so that none is
        there without its chunks; packs last, so that no index names one that is gone."""
        domain, lying = self._domains[name], self._lying[name]
        dead = set(found.tombstone.pack_ids())
        self._delete(found.tombstone.roots)
        self._unname(domain, dead)
        self._delete([domain.pack_key(id) for id in dead])
        domain.index.remove(dead)
        for key in found.tombstone.roots:
            self._count(lying.roots.pop(key, None), "roots")
        for id in dead:
            self._count(lying.packs.pop(id, None), "packs")
        swap(domain, found, tombstone(DONE, dead, found.tombstone.roots))

    def _count(self, info: ObjectInfo | None, what: str) -> None:
        if info is not None:
            setattr(self.report, what, getattr(self.report, what) + 1)
            self.report.bytes += info.size

    def _delete(self, keys: list[str]) -> None:
        for at in range(0, len(keys), _BATCH):
            self._in_time()
            self._backend.delete(keys[at : at + _BATCH])

    def _unname(self, domain: Domain, dead: set[bytes], merge: Iterable[str] = ()) -> None:
        """Replace the index objects that name dead packs (and those of `merge`) by ones that do
        not. What replaces is written first, so every other pack is named throughout."""
        merged = set(merge)
        for _ in range(_ATTEMPTS):
            domain.index.refresh()
            named = domain.index.named()
            old = {key for key, ids in named.items() if key in merged or not ids.isdisjoint(dead)}
            if not old:
                return
            kept = {id for key in old for id in named[key]} - dead
            infos = [info for id in kept if (info := domain.index.pack(id)) is not None]
            self._in_time()
            new = domain.write_index(infos)
            # Another collector may have removed packs since these were read.
            gone = {
                id
                for found in self._look(domain.name)
                if found.tombstone.state != NAMED
                for id in found.tombstone.pack_ids()
            }
            if not gone.isdisjoint(kept):
                dead = dead | gone
                merged |= old
                continue
            self._delete(sorted(old - set(new)))
            self.report.indexes += len(old)
            domain.index.refresh()
            return
        raise Conflict("The index objects change faster than they can be written anew.")

    # -- naming -----------------------------------------------------------------------------
    def _name_dead(self, name: str, marks: Marks) -> bool:
        """Write a tombstone for what is dead now; whether there is any."""
        domain, lying = self._domains[name], self._lying[name]
        named_roots, named_packs = names(self._look(name))
        uses, idle = self._uses(name, marks, named_packs)
        dead = {id for id in idle if self._old(lying.packs[id])}
        self.report.young_packs += len(idle - dead)
        self.report.young_bytes += sum(lying.packs[id].size for id in idle - dead)
        poor = [
            use
            for use in uses
            if use.used < use.total * self._repack_below and self._old(lying.packs[use.info.id])
        ]
        dead |= self._rewrite(domain, poor)
        needed = marks.root_names()
        roots = []
        for key, info in lying.roots.items():
            if root_name(key) in needed or key in named_roots:
                continue
            if self._old(info):
                roots.append(key)
            else:
                self.report.young_bytes += info.size
        for snapshot in marks.damaged.keys() - lying.snapshots:
            if not _exists(domain, domain.snapshot_key(snapshot)):
                remove_damage(domain, snapshot)
        if not dead and not roots:
            return False
        write_tombstone(domain, tombstone(NAMED, dead, roots))
        return True

    def _old(self, info: ObjectInfo) -> bool:
        """Whether an object's grace is over. One from the future counts as old: it would stay for
        ever otherwise, and naming it loses nothing."""
        age = self._backend.now() - info.modified
        if -_SLACK <= age < 0:
            age = 0.0
        return not 0 <= age < self._grace

    def _uses(self, name: str, marks: Marks, named: set[bytes]) -> tuple[list[Use], set[bytes]]:
        """Which packs outside tombstones are needed, and which are not. A chunk that several have
        counts for the first of them, so the others become dead."""
        left = marks.chunks - marks.lost
        uses = []
        idle = {id for id in self._lying[name].packs if id not in named}
        for info in self._there(name):
            if info.id in named:
                continue
            total = used = 0
            chunks = []
            for chunk, _, _, length in info.records():
                total += length
                if chunk in left:
                    left.remove(chunk)
                    used += length
                    chunks.append(chunk)
            if used:
                idle.discard(info.id)
                poor = used < total * self._repack_below
                uses.append(Use(info, total, used, chunks if poor else []))
        if left:
            self._require(name, left)
        return uses, idle

    def _rewrite(self, domain: Domain, poor: list[Use]) -> set[bytes]:
        """Write the needed chunks of packs anew; the packs that are dead by that."""
        for kind in sorted({use.info.kind for use in poor}):
            rewriter = Rewriter(domain, kind)
            chunks = [chunk for use in poor if use.info.kind == kind for chunk in use.chunks]
            self._in_time()
            for chunk, data in Reader(domain).chunks(chunks, needed_by="a collection"):
                rewriter.add(chunk, data)
            rewriter.finish()
            self.report.written_bytes += rewriter.stored_bytes
        self.report.rewritten += len(poor)
        return {use.info.id for use in poor}

    # -- in the end -------------------------------------------------------------------------
    def _tidy(self, name: str) -> None:
        """Join small indexes, and forget tombstones that are over."""
        domain = self._domains[name]
        small = [info.key for info in domain.ids("indexes") if info.size <= SMALL_INDEX]
        if len(small) > MANY_INDEXES:
            self._unname(domain, set(), small)
        now = self._backend.now()
        seen = self._look(name)
        lying = self._lying[name]
        # Two collections at once may have named the same.
        roots, packs = names(found for found in seen if found.tombstone.state != DONE)
        waiting = [lying.packs[id].size for id in packs if id in lying.packs]
        self.report.waiting_packs += len(waiting)
        self.report.waiting_bytes += sum(waiting)
        self.report.waiting_bytes += sum(
            lying.roots[key].size for key in roots & lying.roots.keys()
        )
        over = [
            found
            for found in seen
            if found.tombstone.state == DONE and found.modified + KEPT + self._grace <= now
        ]
        if not over:
            return
        # An index that was written late may name what is gone; while the tombstone stands nobody
        # relies on it.
        self._unname(domain, names(over)[1])
        self._delete([found.key for found in over])

    def _in_time(self) -> None:
        if _uptime() - self._begun > LONGEST:
            raise Conflict(
                "The collection has taken too long to rely on what it read; nothing was lost.",
                next_step="Run it again.",
            )


def _missing(chunk: bytes, count: int) -> IntegrityError:
    name = f"chunk {chunk.hex()}"
    return IntegrityError(
        f"{count} chunks that snapshots need are in no pack, one of them {name}; nothing was "
        "removed.",
        object=name,
        next_step="Run `sojourn store check` and `sojourn store repair`.",
    )


def _again(old: Tombstone) -> Tombstone:
    return tombstone(old.state, old.pack_ids(), old.roots)


def _exists(domain: Domain, key: str) -> bool:
    try:
        domain.backend.head(key)
    except ObjectMissing:
        return False
    return True


def _uptime() -> float:
    """Seconds that no setting of a clock moves, and that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
