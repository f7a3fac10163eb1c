"""Making a damaged repository whole again, as far as anything still has what is lost.

Guarantee: what a repair writes is proven like everything else, and nothing is removed before what
could be saved of it is acknowledged elsewhere. What cannot be had is never passed over in silence:
each snapshot that lacks something gets a mark that says what (`damages`), which recoveries tell,
checks list, and a later repair takes away when the content is back.

Content is looked for in this order: other packs, the good blocks of the damaged pack itself, and
the copies that nodes have of whole layers and images (`sources`). Packs that are damaged or missing
leave the indexes and are named by a tombstone, so that no upload relies on them.

Every pack is read. May be cut off anywhere and run again; running uploads are not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing, SnapshotNotFound
from sojourn.model.snapshots import MemoryRef, Snapshot
from sojourn.repository.backends.base import Backend
from sojourn.repository.blocks import open_block
from sojourn.repository.copies import StoredCopies
from sojourn.repository.damages import Damage, remove_damage, write_damage
from sojourn.repository.domains import TOMBSTONES, Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.inventory import Inventory, survey
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.losses import Losses, losses_of_image, losses_of_layer
from sojourn.repository.marking import (
    SHARED,
    mark,
    read_snapshots,
    root_name,
)
from sojourn.repository.packs import contents, names_content, parse_records
from sojourn.repository.pushes import Copies
from sojourn.repository.records import DATA, MAX_PACK, META, PackInfo
from sojourn.repository.rewriting import Rewriter
from sojourn.repository.sealed import SNAPSHOT, TOMBSTONE
from sojourn.repository.session_records import decode_snapshot
from sojourn.repository.tombstones import (
    NAMED,
    REMOVING,
    encode_tombstone,
    read_tombstone,
    tombstone,
    write_tombstone,
)
from sojourn.repository.uploads import Upload
from sojourn.store.envelopes import read_checked
from sojourn.store.snapshots import KIND as STORED_SNAPSHOT
from sojourn.store.snapshots import object_name as snapshot_object

READERS = 4  # packs of at most 128 MiB (usually 16) held at once

Progress = Callable[[int, int], None]


class Source(Copies, Protocol):
    """Somebody who may have whole layers, images and snapshots: a node's store. What it lacks
    raises IntegrityError."""

    def snapshot(self, snapshot: str) -> Snapshot:
        """A snapshot's manifest."""


class NodeStore(StoredCopies):
    """The source that a node's store is, by its directory."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._snapshots = root / "snapshots"

    def snapshot(self, snapshot: str) -> Snapshot:
        """A snapshot's manifest, proven by its fingerprint. Raises IntegrityError."""
        name = snapshot_object(snapshot)
        try:
            payload = read_checked(STORED_SNAPSHOT, self._snapshots / snapshot, name)
        except OSError as error:
            raise IntegrityError(f"{name} is not on this node.", object=name) from error
        return decode_snapshot(payload, snapshot)


class Repaired(msgspec.Struct):
    """What a repair did. `packs` were damaged or missing; `saved` counts chunks that were written
    anew from good blocks; `layers`, `images` and `snapshots` were sent again from sources;
    `healed` snapshots were marked as damaged and are whole now; `damaged` are marked still."""

    packs: list[str] = []
    indexes: int = 0
    saved: int = 0
    layers: int = 0
    images: int = 0
    snapshots: int = 0
    healed: list[str] = []
    damaged: list[Damage] = []


class _Bad(msgspec.Struct):
    """A pack that is not as it was put: what is known to be in it, and its bytes if it has any."""

    info: PackInfo | None
    data: bytes | None


def repair(
    backend: Backend,
    domain: Callable[[str], Domain],
    sources: Sequence[Source] = (),
    *,
    progress: Progress | None = None,
    shared: str = SHARED,
) -> Repaired:
    """Repair all domains of a repository, which `domain` opens by name. `sources` are asked in
    their order. Raises StoreUnreachable, StorageFull, StoreRefused."""
    report = Repaired()
    lying = survey(backend)
    repairs = {
        name: _DomainRepair(domain(name), lying.get(name, Inventory()), report)
        for name in sorted({*lying, shared})
    }
    count = sum(len(each.lying.packs) for each in repairs.values())
    done = 0
    for each in repairs.values():
        for _ in each.packs():
            done += 1
            if progress is not None:
                progress(done, count)
    for each in repairs.values():
        each.snapshots(repairs[shared], sources)
    for each in repairs.values():
        each.send_again(sources)
    for each in repairs.values():
        each.mark(repairs[shared])
    broken = [name for name, each in repairs.items() if each.unreadable_tombstones]
    if broken:
        _replace_tombstones(repairs, broken, backend, shared)
    return report


def _replace_tombstones(
    repairs: Mapping[str, _DomainRepair], broken: list[str], backend: Backend, shared: str
) -> None:
    """Put another tombstone in the place of each that cannot be read, so that uploads and
    collections can go on.

    What the old one names may be being removed just now. It is none of what acknowledged snapshots
    need (docs/formats/repository.md), so naming all else that there is names all of it. Where two
    packs have the same needed chunk, either may be on its way out: the chunk is written anew.
    """
    lying = survey(backend)
    domains = {name: each.domain for name, each in repairs.items()}
    for domain in domains.values():
        domain.index.refresh()
    marks = mark(domains, shared)
    for name in broken:
        domain, here = domains[name], lying.get(name, Inventory())
        place: dict[bytes, bytes] = {}
        several: set[bytes] = set()
        for info in domain.index.packs():
            if info.id in here.packs:
                for chunk in info.names():
                    if chunk in marks[name].chunks and place.setdefault(chunk, info.id) != info.id:
                        several.add(chunk)
        written: set[bytes] = set()
        for kind in (DATA, META):
            rewriter = Rewriter(domain, kind)
            chosen = [
                chunk
                for chunk in several
                if (found := domain.index.pack(place[chunk])) is not None and found.kind == kind
            ]
            for chunk, data in Reader(domain).chunks(chosen, needed_by="a repair"):
                rewriter.add(chunk, data)
            written.update(info.id for info in rewriter.finish())
        needed = {id for chunk, id in place.items() if chunk not in several} | written
        roots = marks[name].root_names()
        instead = tombstone(
            REMOVING,
            here.packs.keys() - needed,
            [key for key in here.roots if root_name(key) not in roots],
        )
        for key in repairs[name].unreadable_tombstones:
            domain.put_object(TOMBSTONE, key, encode_tombstone(instead))


class _DomainRepair:
    def __init__(self, domain: Domain, lying: Inventory, report: Repaired) -> None:
        self.domain = domain.with_index(domain.new_index())
        self.lying = lying
        self.report = report
        self.held: list[Snapshot] = []
        self.unreadable: list[str] = []
        self.unreadable_tombstones: list[str] = []
        self._named_roots: set[str] = set()
        self.layers: set[str] = set()
        self.images: dict[str, MemoryRef] = {}
        self.lost_layers: dict[str, Losses] = {}
        self.lost_images: dict[str, Losses] = {}

    # -- packs and indexes ------------------------------------------------------------------
    def packs(self) -> Iterator[None]:
        """Read all packs, write anew what is good in bad ones, then let indexes name good packs
        alone. Yields once for each pack read."""
        domain = self.domain
        faults: list[IntegrityError] = []
        domain.index.refresh(faults)
        dead = self._look()
        indexed = {info.id: info for info in domain.index.packs() if info.id not in dead}
        good: dict[bytes, PackInfo] = {}
        have: set[bytes] = set()
        bad: dict[bytes, _Bad] = {}
        for id, found in self._read((self.lying.packs.keys() | indexed.keys()) - dead):
            if isinstance(found, PackInfo):
                good[id] = found
                have.update(found.names())
            elif found is not None:
                bad[id] = msgspec.structs.replace(found, data=None)
                self._save(found, have)
            yield
        for id, info in indexed.items():
            if id not in good:
                bad.setdefault(id, _Bad(info, None))
        self._save_from_dead(dead, bad, have)
        self._index(good, bad, {str(fault.details.get("object")) for fault in faults})
        if bad:
            write_tombstone(domain, tombstone(NAMED, bad, ()))
            self.report.packs += sorted(domain.pack_key(id) for id in bad)
        # From here on with what the indexes say now, and no reliance on what is going.
        self.domain = domain.with_index(domain.new_index())
        self.domain.index.refresh()
        self.domain.index.exclude(dead.union(bad))
        self.domain.avoid(self._named_roots)

    def _look(self) -> set[bytes]:
        """The packs that tombstones name. Of one that cannot be read nobody knows what it names."""
        dead: set[bytes] = set()
        for info in self.domain.ids(TOMBSTONES):
            try:
                found, _ = read_tombstone(self.domain, info.key)
            except ObjectMissing:
                continue
            except IntegrityError:
                self.unreadable_tombstones.append(info.key)
                continue
            dead.update(found.pack_ids())
            self._named_roots.update(found.roots)
        return dead

    def _save_from_dead(
        self, dead: set[bytes], bad: Mapping[bytes, _Bad], have: set[bytes]
    ) -> None:
        """What bad packs have lost may lie in packs that tombstones name: they were not needed as
        long as the others were whole."""
        lost = {
            name for each in bad.values() if each.info is not None for name in each.info.names()
        }
        lost -= have
        for id in dead & self.lying.packs.keys():
            info = self.domain.index.pack(id)
            if info is None or lost.isdisjoint(info.names()):
                continue
            try:
                data, _ = self.domain.backend.get(self.domain.pack_key(id), limit=MAX_PACK)
            except (ObjectMissing, IntegrityError):
                continue
            self._save(_Bad(info, data), have, lost)

    def _index(
        self, good: Mapping[bytes, PackInfo], bad: Iterable[bytes], faults: set[str]
    ) -> None:
        """Let the indexes name all good packs as their footers say, and no bad one."""
        index = self.domain.index
        named = index.named()
        known = {id: info for id in good if (info := index.pack(id)) is not None}
        wrong = {id for id, info in known.items() if info != good[id]}.union(bad)
        old = {key for key, ids in named.items() if not ids.isdisjoint(wrong)}
        old |= faults & self.lying.indexes.keys()
        kept = {id for key in old & named.keys() for id in named[key]}
        kept.update(good.keys() - known.keys())
        infos = [good[id] for id in sorted(kept) if id in good]
        if infos:
            self.domain.write_index(infos)
        if old:
            self.domain.backend.delete(sorted(old))
        self.report.indexes += len(old)

    def _read(self, ids: Iterable[bytes]) -> Iterator[tuple[bytes, PackInfo | _Bad | None]]:
        waiting = sorted(ids)
        with ThreadPoolExecutor(READERS, "read packs") as pool:
            for at in range(0, len(waiting), READERS):
                part = waiting[at : at + READERS]
                yield from zip(part, pool.map(self._judge, part), strict=True)

    def _judge(self, id: bytes) -> PackInfo | _Bad | None:
        """A pack's records where all of it is good. None where a collection has removed it."""
        domain = self.domain
        key = domain.pack_key(id)
        indexed = domain.index.pack(id)
        try:
            data, _ = domain.backend.get(key, limit=MAX_PACK)
        except ObjectMissing:
            return None
        except IntegrityError:
            return _Bad(indexed, None)  # larger than any pack
        try:
            found = parse_records(data, domain.keys, id, key)
            if blake3(data, max_threads=2).digest() == id:
                for _ in contents(data, found, domain.keys):
                    pass
                return found
        except IntegrityError:
            return _Bad(indexed, data)
        return _Bad(indexed if indexed is not None else found, data)

    def _save(self, bad: _Bad, have: set[bytes], only: set[bytes] | None = None) -> None:
        """Write anew what the good blocks of a pack hold (`only` these chunks, if given) and no
        good pack (so far) does."""
        if bad.info is None or bad.data is None:
            return
        rewriter = None
        view = memoryview(bad.data)
        number, raw = -1, None
        for name, block, offset, length in bad.info.records():
            if block != number:
                number, raw = block, self._open(view, bad.info, block)
            if raw is None or name in have or (only is not None and name not in only):
                continue
            piece = raw[offset : offset + length]
            if not names_content(bad.info.kind, name, piece, self.domain.keys):
                continue
            if rewriter is None:
                rewriter = Rewriter(self.domain, bad.info.kind)
            rewriter.add(name, piece)
            have.add(name)
            self.report.saved += 1
        if rewriter is not None:
            rewriter.finish()

    def _open(self, view: memoryview, info: PackInfo, number: int) -> bytes | None:
        block = info.block(number)
        try:
            return open_block(
                view[block.offset : block.offset + block.stored], info, number, self.domain.keys
            )
        except IntegrityError:
            return None

    # -- snapshots --------------------------------------------------------------------------
    def snapshots(self, shared: _DomainRepair, sources: Sequence[Source]) -> None:
        """Read the snapshots, those that cannot be read from a source; note what they need."""
        faults: dict[str, IntegrityError] = {}
        self.held = list(read_snapshots(self.domain, faults))
        for id in faults:
            found = _from_sources(id, sources)
            if found is None:
                self.unreadable.append(id)
                continue
            payload = msgspec.msgpack.encode(found)
            self.domain.put_object(SNAPSHOT, self.domain.snapshot_key(id), payload)
            self.held.append(found)
            self.report.snapshots += 1
        for snapshot in self.held:
            for number, layer in enumerate(snapshot.layers):
                (self if number else shared).layers.add(layer.id)
            if snapshot.memory is not None:
                self.images[snapshot.memory.id] = snapshot.memory

    def send_again(self, sources: Sequence[Source]) -> None:
        """Send layers and images that lack something from sources that have them."""
        for layer in sorted(self.layers):
            losses = losses_of_layer(self.domain, layer)
            if losses and any(self._send_layer(layer, source) for source in sources):
                losses = losses_of_layer(self.domain, layer)
                self.report.layers += 1
            if losses:
                self.lost_layers[layer] = losses
        for image, ref in sorted(self.images.items()):
            losses = losses_of_image(self.domain, image)
            if losses and any(self._send_image(ref, source) for source in sources):
                losses = losses_of_image(self.domain, image)
                self.report.images += 1
            if losses:
                self.lost_images[image] = losses

    def _send_layer(self, layer: str, source: Source) -> bool:
        try:
            manifest, tree = source.manifest(layer), source.layer_path(layer)
            with Upload(self.domain) as up:
                push_layer(self.domain, up, manifest, tree)
        except IntegrityError:
            return False  # it does not have it, or not any more as it was
        publish_layer(self.domain, manifest)
        return True

    def _send_image(self, ref: MemoryRef, source: Source) -> bool:
        try:
            files = source.image_path(ref.id)
            with Upload(self.domain) as up:
                image = push_image(self.domain, up, ref, files)
        except IntegrityError:
            return False
        publish_image(self.domain, image)
        return True

    def mark(self, shared: _DomainRepair) -> None:
        """Mark the snapshots that lack something, and take away the marks of those that do not."""
        marked = self.lying.damaged
        now = self.domain.backend.now()
        for snapshot in self.held:
            lost = [
                losses
                for number, layer in enumerate(snapshot.layers)
                if (losses := (self if number else shared).lost_layers.get(layer.id))
            ]
            if snapshot.memory is not None and snapshot.memory.id in self.lost_images:
                lost.append(self.lost_images[snapshot.memory.id])
            if lost:
                self._mark(
                    Damage(
                        snapshot.id,
                        snapshot.session,
                        now,
                        [name for losses in lost for name in losses.objects],
                        b"".join(sorted(set().union(*(losses.lost for losses in lost)))),
                    )
                )
            elif snapshot.id in marked:
                remove_damage(self.domain, snapshot.id)
                self.report.healed.append(snapshot.id)
        for id in self.unreadable:
            self._mark(Damage(id, "", now, [f"the manifest of {snapshot_object(id)}"], b""))

    def _mark(self, damage: Damage) -> None:
        write_damage(self.domain, damage)
        self.report.damaged.append(damage)


def _from_sources(snapshot: str, sources: Sequence[Source]) -> Snapshot | None:
    for source in sources:
        try:
            return source.snapshot(snapshot)
        except (IntegrityError, SnapshotNotFound):
            continue
    return None
