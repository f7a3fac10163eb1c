"""What the snapshots of a repository need: layers, images, and every chunk of them.

Guarantee: the answer is complete or there is none. A snapshot, layer, image, segment or recipe that
cannot be read raises IntegrityError naming it, because what it needs is not known then; only what a
repair has written down as lost is passed over. A snapshot that is deleted meanwhile does not count.

Layers and images are read once each, segments and recipes once each, a few at a time; what is kept
are ids and names of 32 bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.model.snapshots import Snapshot
from sojourn.repository.damages import Damage, read_damages
from sojourn.repository.domains import SNAPSHOTS, Domain
from sojourn.repository.losses import losses_of_image, losses_of_layer
from sojourn.repository.needs import add_image, add_layer
from sojourn.repository.sealed import SNAPSHOT
from sojourn.repository.session_records import decode_snapshot
from sojourn.store.images import object_name as image_object
from sojourn.store.layers import object_name as layer_object

SHARED = "shared"
_THREADS = 8
_WALKERS = 4  # layers and images at once

T = TypeVar("T")

Holder = tuple[Domain, str]  # a snapshot and its domain


class Marks:
    """What is needed of one domain. `layers` and `images` are ids with the snapshots that hold
    them; `chunks` are names; `lost` the names of chunks that are known to be gone."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.layers: dict[str, list[Holder]] = {}
        self.images: dict[str, list[Holder]] = {}
        self.chunks: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.damaged: dict[str, Damage] = {}

    def root_names(self) -> set[str]:
        """The names in the keys of the layers and images."""
        domain = self.domain
        keys = [domain.layer_key(id) for id in self.layers]
        keys += [domain.image_key(id) for id in self.images]
        return {root_name(key) for key in keys}


def root_name(key: str) -> str:
    """The name that a layer's or image's key, or the key of one of its copies, holds."""
    parts = key.split("/")
    return parts[2]


def read_snapshots(
    domain: Domain, faults: dict[str, IntegrityError] | None = None
) -> Iterator[Snapshot]:
    """All snapshots of a domain, a few read at once. One that cannot be read raises IntegrityError;
    with `faults` it is put there under its id instead."""

    def take(running: deque[tuple[str, Future[bytes]]]) -> Iterator[Snapshot]:
        key, future = running.popleft()
        try:
            yield decode_snapshot(future.result(), key.rpartition("/")[2])
        except ObjectMissing:
            return  # deleted since it was listed
        except IntegrityError as error:
            if faults is None:
                raise
            faults[key.rpartition("/")[2]] = error

    with ThreadPoolExecutor(_THREADS, "read snapshots") as pool:
        running: deque[tuple[str, Future[bytes]]] = deque()
        try:
            for info in domain.ids(SNAPSHOTS):
                running.append((info.key, pool.submit(domain.get_object, SNAPSHOT, info.key)))
                if len(running) >= 2 * _THREADS:
                    yield from take(running)
            while running:
                yield from take(running)
        finally:
            for _, future in running:
                future.cancel()


def references(domains: Mapping[str, Domain], shared: str = SHARED) -> dict[str, Marks]:
    """Which layers and images the snapshots of all domains hold, by domain."""
    found = {name: Marks(domain) for name, domain in domains.items()}
    for name, domain in domains.items():
        marks = found[name]
        marks.damaged = read_damages(domain)
        faults: dict[str, IntegrityError] = {}
        for snapshot in read_snapshots(domain, faults):
            holder = (domain, snapshot.id)
            damage = marks.damaged.get(snapshot.id)
            for number, layer in enumerate(snapshot.layers):
                place = found[name if number else shared]
                place.layers.setdefault(layer.id, []).append(holder)
                if damage is not None:
                    place.lost.update(damage.chunk_names())
            if snapshot.memory is not None:
                marks.images.setdefault(snapshot.memory.id, []).append(holder)
            if damage is not None:
                marks.lost.update(damage.chunk_names())
        for id, error in faults.items():
            if id not in marks.damaged:
                raise error  # what it needs is not known
    return found


def mark(domains: Mapping[str, Domain], shared: str = SHARED) -> dict[str, Marks]:
    """Everything the snapshots of all domains need, by domain. `domains` are all there are, for the
    shared layers are needed by any of them. Raises IntegrityError naming what cannot be read."""
    found = references(domains, shared)

    def walk(task: tuple[Marks, bool, str]) -> None:
        marks, image, id = task
        holders = marks.images[id] if image else marks.layers[id]
        try:
            (add_image if image else add_layer)(marks.domain, id, marks.chunks)
        except (IntegrityError, ObjectMissing) as error:
            name = image_object(id) if image else layer_object(id)
            _pass_over(error, name, holders, found)
            # Of what is damaged, all that is left stays, so that a repair can still complete it.
            look = losses_of_image if image else losses_of_layer
            losses = look(marks.domain, id, marks.domain.index.locate)
            marks.chunks |= losses.needed
            marks.lost |= losses.lost

    tasks = [(marks, False, id) for marks in found.values() for id in marks.layers]
    tasks += [(marks, True, id) for marks in found.values() for id in marks.images]
    each(tasks, walk)
    return found


def each(tasks: Sequence[T], work: Callable[[T], None]) -> None:
    """Do the work for every task, a few at once. Raises the first error, and leaves the rest."""
    if not tasks:
        return
    with ThreadPoolExecutor(min(_WALKERS, len(tasks)), "walk") as pool:
        try:
            for _ in pool.map(work, tasks):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pass_over(
    error: IntegrityError | ObjectMissing,
    name: str,
    holders: list[Holder],
    found: Mapping[str, Marks],
) -> None:
    """Go on without something only if no snapshot counts on it: all are marked as damaged, or were
    deleted meanwhile (and it was collected with them)."""
    for domain, snapshot in holders:
        if snapshot in found[domain.name].damaged:
            continue
        try:
            domain.backend.head(domain.snapshot_key(snapshot))
        except ObjectMissing:
            continue
        raise IntegrityError(
            f"{name} cannot be read: {error.message}",
            object=name,
            snapshot=snapshot,
            next_step="Nothing was removed. Run `sojourn store check` and `sojourn store repair`.",
        ) from error
