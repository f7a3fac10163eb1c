"""Proving that a repository is whole: its structure from listings and records, its bytes on demand.

Guarantee: what is not reported was there, in the right size, named consistently, and (with
`read_data`) read and compared down to the content of every chunk. A problem names the object, the
cause, and the snapshots and sessions that need it; one problem never hides the others.

Structure costs one listing, the indexes, the roots, the segments and recipes, and the end of each
pack. Packs that no index names are no problem: an upload that is under way has them, and one that
was cut off; neither are those that a tombstone names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError, InvalidRequest, ObjectMissing
from sojourn.model.snapshots import Snapshot
from sojourn.repository.backends.base import Backend
from sojourn.repository.damages import read_damage
from sojourn.repository.domains import Domain
from sojourn.repository.inventory import Inventory, survey
from sojourn.repository.marking import SHARED, each, read_snapshots
from sojourn.repository.needs import add_image, add_layer
from sojourn.repository.packs import contents, parse_records, read_footer
from sojourn.repository.records import MAX_PACK, PackInfo
from sojourn.repository.sealed import SESSION, TENANT
from sojourn.repository.session_records import decode_session, decode_tenant
from sojourn.repository.tombstones import Tombstones, names
from sojourn.store.images import object_name as image_object
from sojourn.store.layers import object_name as layer_object
from sojourn.store.snapshots import object_name as snapshot_object

ERROR, WARNING = "error", "warning"
READERS = 4  # packs of at most 128 MiB (usually 16) read at once
FOOTERS = 16

Progress = Callable[[int, int], None]


class Problem(msgspec.Struct, frozen=True):
    """Something found bad. `severity` is `error` where a snapshot cannot be restored whole or
    stored bytes are damaged, `warning` where no content is lost. `object` is a key or a name as in
    errors; `snapshots` and `sessions` are those affected, as far as known."""

    severity: str
    domain: str
    object: str
    cause: str
    snapshots: list[str] = []
    sessions: list[str] = []


def check(
    backend: Backend,
    domain: Callable[[str], Domain],
    *,
    read_data: bool = False,
    subset: tuple[int, int] | None = None,
    only: Iterable[str] | None = None,
    progress: Progress | None = None,
    shared: str = SHARED,
) -> Iterator[Problem]:
    """Check all domains of a repository (or those of `only`), which `domain` opens by name.

    With `read_data` every pack is read; with `subset` (n, t) instead the n-th of t parts of the
    packs, counted from 1: a pack belongs to the same part each time, and all parts are all packs.
    `progress` is told how many packs are done, and how many there are.

    Raises StoreUnreachable, StoreRefused, InvalidRequest.
    """
    if subset is not None and not 1 <= subset[0] <= subset[1]:
        raise InvalidRequest("A part is given as n/t, with n from 1 to t.", field="subset")
    lying = survey(backend)
    wanted = set(lying) if only is None else set(only)
    checks = {
        name: _DomainCheck(domain(name), lying.get(name, Inventory()))
        for name in sorted({*lying, shared})
        if name in wanted or name == shared
    }
    for place in checks.values():
        yield from place.read_indexes()
    for name, place in checks.items():
        yield from place.read_snapshots(checks[shared])
        yield from place.read_sessions()
        if name == shared:
            place.complete = wanted >= set(lying)
    for place in checks.values():
        yield from place.walk()
    work: list[tuple[_DomainCheck, bytes]] = []
    for place in checks.values():
        yield from place.compare_listing()
        work += ((place, id) for id in sorted(place.lying.packs.keys() - place.dead))
    yield from _look_into(work, read_data, subset, progress)


def in_part(id: bytes, subset: tuple[int, int]) -> bool:
    """Whether a pack belongs to the n-th of t parts. Ids are hashes, so parts are about equal."""
    number, count = subset
    return int.from_bytes(id[:8], "big") % count == number - 1


class _DomainCheck:
    """The check of one domain."""

    def __init__(self, domain: Domain, lying: Inventory) -> None:
        # Its own index, because it goes on where one cannot be read.
        self.domain = domain.with_index(domain.new_index())
        self.lying = lying
        self.complete = True
        self.dead: set[bytes] = set()  # packs that tombstones name
        self.chunks: set[bytes] = set()
        self._layers: dict[str, list[Snapshot]] = {}
        self._images: dict[str, list[Snapshot]] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._unreadable: set[str] = set()
        self._chunks_of: dict[str, set[bytes]] = {}

    def problem(
        self,
        object: str,
        cause: str,
        holders: Iterable[Snapshot] = (),
        severity: str = ERROR,
    ) -> Problem:
        """A problem of this domain that affects these snapshots."""
        found = {snapshot.id: snapshot.session for snapshot in holders}
        sessions = sorted(set(found.values()))
        return Problem(severity, self.domain.name, object, cause, sorted(found), sessions)

    # -- structure --------------------------------------------------------------------------
    def read_indexes(self) -> Iterator[Problem]:
        faults: list[IntegrityError] = []
        try:
            self.domain.index.refresh(faults)
        except IntegrityError as error:
            faults.append(error)
        for fault in faults:
            yield self.problem(_object(fault), f"{fault.message} Its packs can be indexed anew.")
        try:
            self.dead = names(Tombstones(self.domain).look())[1]
        except IntegrityError as error:
            yield self.problem(_object(error), error.message)
        for info in self.lying.strangers:
            yield self.problem(info.key, "It is no pack and lies among them.", severity=WARNING)

    def read_snapshots(self, shared: _DomainCheck) -> Iterator[Problem]:
        faults: dict[str, IntegrityError] = {}
        for snapshot in read_snapshots(self.domain, faults):
            self._snapshots[snapshot.id] = snapshot
            for number, layer in enumerate(snapshot.layers):
                place = self if number else shared
                place._layers.setdefault(layer.id, []).append(snapshot)
            if snapshot.memory is not None:
                self._images.setdefault(snapshot.memory.id, []).append(snapshot)
            if snapshot.id in self.lying.damaged:
                yield from self._marked(snapshot)
        for id, error in faults.items():
            found = self.problem(snapshot_object(id), error.message)
            yield msgspec.structs.replace(found, snapshots=[id])

    def read_sessions(self) -> Iterator[Problem]:
        """The records a recovery begins with: sessions', and their tenant's."""
        found: list[Problem] = []
        named: set[str] = set()

        def one(key: str) -> None:
            id = key.rpartition("/")[2]
            try:
                with contextlib.suppress(ObjectMissing):  # deleted since the listing
                    record = decode_session(self.domain.get_object(SESSION, key), id)
                    if record.session.head is not None:
                        named.add(record.session.head)
                    for note in record.snapshots:
                        named.add(note.id)
                        if isinstance(note.parent, str):
                            named.add(note.parent)
            except IntegrityError as error:
                problem = self.problem(key, error.message)
                found.append(msgspec.structs.replace(problem, sessions=[id]))

        keys = [info.key for info in self.domain.ids("sessions")]
        each(keys, one)
        yield from sorted(found, key=lambda problem: problem.object)
        yield from self._without_record({key.rpartition("/")[2] for key in keys}, named)
        if not keys:
            return
        key = f"tenants/{self.domain.name}"
        try:
            decode_tenant(self.domain.get_object(TENANT, key), self.domain.name)
        except (IntegrityError, ObjectMissing) as error:
            yield self.problem(key, error.message)

    def _without_record(self, known: set[str], named: set[str]) -> Iterator[Problem]:
        """Sessions that only their snapshots tell of. What a session that has a record was forked
        from, or goes back to, is kept for that one, and no sign of a loss."""
        needed: set[str] = set()
        begins = {one.parent for one in self._snapshots.values() if one.session in known}
        for begin in begins | named:
            above = begin
            while above is not None and above not in needed:
                needed.add(above)
                there = self._snapshots.get(above)
                above = there.parent if there is not None else None
        lone: dict[str, list[Snapshot]] = {}
        for id, snapshot in self._snapshots.items():
            if snapshot.session not in known and id not in needed:
                lone.setdefault(snapshot.session, []).append(snapshot)
        for session, held in sorted(lone.items()):
            if not any(self._there(self.domain.snapshot_key(one.id)) for one in held):
                continue  # deleted since they were read
            yield self.problem(
                f"{self.domain.name}/sessions/{session}",
                f"These are snapshots of session {session}, which has no record: it was deleted, "
                "or its record is lost or not sent yet; `sojourn recover` brings it back without "
                "its name.",
                held,
                WARNING,
            )

    def _marked(self, snapshot: Snapshot) -> Iterator[Problem]:
        name = snapshot_object(snapshot.id)
        try:
            damage = read_damage(self.domain, snapshot.id)
        except IntegrityError as error:
            yield self.problem(_object(error), error.message, [snapshot])
            return
        if damage is not None:
            lost = "; ".join(damage.objects)
            yield self.problem(name, f"A repair could not make it whole: {lost}", [snapshot])

    def walk(self) -> Iterator[Problem]:
        """Everything the snapshots need, and whether it lies in a pack that is there."""
        found: list[Problem] = []

        def one(task: tuple[bool, str]) -> None:
            image, id = task
            holders = self._images[id] if image else self._layers[id]
            try:
                (add_image if image else add_layer)(self.domain, id, self.chunks)
            except (IntegrityError, ObjectMissing) as error:
                name = image_object(id) if image else layer_object(id)
                self._unreadable.add(id)
                found.append(self.problem(name, error.message, holders))

        tasks = [(False, id) for id in self._layers] + [(True, id) for id in self._images]
        each(tasks, one)
        yield from found
        gone = set(self.chunks)
        for pack in self.domain.index.packs():
            if pack.id in self.lying.packs:
                gone.difference_update(pack.names())
        if gone:
            gone = {chunk for chunk in gone if not self._stands(chunk)}
        if gone:
            for name, count, holders in self._needing(gone):
                cause = f"{count} chunks are in no pack that is there."
                yield self.problem(name, cause, holders)

    def _stands(self, chunk: bytes) -> bool:
        """Whether a chunk lies in a pack that was put after the listing."""
        places = self.domain.index.places(chunk)
        return any(self._there(self.domain.pack_key(place.pack.id)) for place in places)

    def _needing(self, chunks: set[bytes]) -> Iterator[tuple[str, int, list[Snapshot]]]:
        """The layers and images that need any of these chunks, and how many of them. Only asked
        where something is wrong: everything is read once more, one by one."""
        for image, held in ((False, self._layers), (True, self._images)):
            for id, holders in held.items():
                if id in self._unreadable:
                    continue
                own = self._chunks_of.get(id)
                if own is None:
                    own = set()
                    try:
                        (add_image if image else add_layer)(self.domain, id, own)
                    except (IntegrityError, ObjectMissing):
                        continue  # told of already, or gone since
                    self._chunks_of[id] = own
                count = len(own & chunks)
                if count:
                    yield image_object(id) if image else layer_object(id), count, holders

    def compare_listing(self) -> Iterator[Problem]:
        """The packs that indexes name are listed, in the size they were put."""
        for pack in self.domain.index.packs():
            if pack.id in self.dead:
                continue
            key = self.domain.pack_key(pack.id)
            listed = self.lying.packs.get(pack.id)
            if listed is None:
                if not self._there(key):
                    yield self.bad_pack(pack, key, "It is missing.")
            elif listed.size != pack.size:
                cause = f"It has {listed.size} bytes where {pack.size} were put."
                yield self.bad_pack(pack, key, cause)

    def _there(self, key: str) -> bool:
        # It may have been put after the listing.
        try:
            self.domain.backend.head(key)
        except ObjectMissing:
            return False
        return True

    def bad_pack(self, pack: PackInfo | None, key: str, cause: str) -> Problem:
        """A pack that is not as it should be. Where nothing needs it, that is no more than a
        warning; a chunk of it that another pack has as well is needed all the same."""
        needed = self.chunks.intersection(pack.names()) if pack is not None else set()
        holders = [each for _, _, held in self._needing(needed) for each in held] if needed else []
        unknown = not self.complete or bool(self._unreadable)
        severity = ERROR if needed or unknown else WARNING
        return self.problem(key, cause, holders, severity)

    # -- bytes ------------------------------------------------------------------------------
    def compare_footer(self, id: bytes) -> Problem | None:
        """What the index says of a pack is what its own footer says."""
        key = self.domain.pack_key(id)
        indexed = self.domain.index.pack(id)
        if indexed is None:
            return None  # of an upload that is under way or was cut off
        try:
            found = read_footer(self.domain.backend, key, self.domain.keys)
        except ObjectMissing:
            return None if self._removed(id) else self.bad_pack(indexed, key, "It is missing.")
        except IntegrityError as error:
            return self.bad_pack(indexed, key, error.message)
        if found != indexed:
            return self.bad_pack(indexed, key, "Its footer and the index do not agree.")
        return None

    def read_pack(self, id: bytes) -> Problem | None:
        """Every byte of a pack is what was put, and every chunk what its name says."""
        key = self.domain.pack_key(id)
        indexed = self.domain.index.pack(id)
        try:
            data, _ = self.domain.backend.get(key, limit=MAX_PACK)
        except ObjectMissing:
            return None if self._removed(id) else self.bad_pack(indexed, key, "It is missing.")
        except IntegrityError as error:
            return self.bad_pack(indexed, key, error.message)
        if blake3(data, max_threads=2).digest() != id:
            return self.bad_pack(indexed, key, "Its bytes differ from what was put.")
        try:
            found = parse_records(data, self.domain.keys, id, key)
            if indexed is not None and found != indexed:
                return self.bad_pack(indexed, key, "Its footer and the index do not agree.")
            for _ in contents(data, found, self.domain.keys):
                pass
        except IntegrityError as error:
            return self.bad_pack(indexed, key, error.message)
        return None

    def _removed(self, id: bytes) -> bool:
        """Whether a collection has taken a pack since the listing."""
        return id in names(Tombstones(self.domain).look())[1]


def _look_into(
    work: Sequence[tuple[_DomainCheck, bytes]],
    read_data: bool,
    subset: tuple[int, int] | None,
    progress: Progress | None,
) -> Iterator[Problem]:
    def look(task: tuple[_DomainCheck, bytes]) -> Problem | None:
        place, id = task
        whole = in_part(id, subset) if subset is not None else read_data
        return place.read_pack(id) if whole else place.compare_footer(id)

    threads = READERS if read_data or subset is not None else FOOTERS
    with ThreadPoolExecutor(threads, "read packs") as pool:
        running: deque[Future[Problem | None]] = deque()
        waiting = iter(work)
        done = 0
        try:
            while True:
                for task in itertools.islice(waiting, 2 * threads - len(running)):
                    running.append(pool.submit(look, task))
                if not running:
                    return
                problem = running.popleft().result()
                done += 1
                if progress is not None:
                    progress(done, len(work))
                if problem is not None:
                    yield problem
        finally:
            pool.shutdown(cancel_futures=True)


def _object(error: IntegrityError) -> str:
    return str(error.details.get("object") or "")
