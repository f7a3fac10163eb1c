"""Looking at all of an archive before anything of it is used.

Guarantee: an archive that passes holds one session record, exactly the snapshots it names, exactly
the layers, images and chunks these need, and nothing else; every manifest is one a tree can have,
every chunk is what its name says, every length is the one that is used. So what it will take on the
disk is known (`needed`) before anything is written, and no more of it is decompressed than it says
itself it is made of: a small file cannot ask for much memory or time.

What is refused as too much although it could be meant honestly: a layer whose manifest has more
than `MANIFEST_BYTES`, more than `MAX_SNAPSHOTS` snapshots, files and images of more than
`MAX_CONTENT` with their holes, and metadata that shrank to less than one part in `RATIO`.

Memory: some 120 bytes for each chunk, one layer's manifest (600 bytes an entry) or one image's map
at a time, and two packs (of at most 128 MiB each).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import msgspec
from blake3 import blake3

from sojourn.errors import ArchiveInvalid
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot
from sojourn.repository.backends.archive_file import ArchiveReader
from sojourn.repository.config import KEY, KEYS
from sojourn.repository.cutting import SMALL_FILE, decode_recipe, zeros_id
from sojourn.repository.domains import INDEXES, PACKS, SESSIONS, SNAPSHOTS, Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images_in import read_image
from sojourn.repository.keys import DomainKeys
from sojourn.repository.layers import decode_layer
from sojourn.repository.layers_in import flaw_of_tree, read_manifest
from sojourn.repository.packs import (
    CHUNK_DATA,
    CHUNK_RECIPE,
    CHUNK_SEGMENT,
    META,
    PackInfo,
    parse_pack,
    read_footer,
)
from sojourn.repository.records import MAX_PACK
from sojourn.repository.repository import SHARED, Repository
from sojourn.repository.sealed import HEADER as SEALED_HEADER
from sojourn.repository.sealed import LAYER
from sojourn.repository.session_records import SessionRecord
from sojourn.store.images import object_name as image_name
from sojourn.store.layers import object_name
from sojourn.store.manifests import FILE, Manifest

DOMAIN = "session"
MANIFEST_BYTES = 256 << 20
MAX_SNAPSHOTS = 16384
MAX_LAYERS = 512  # of a snapshot: the kernel takes 500
MAX_FILES = 1024  # of a memory image
MAX_CONTENT = 1 << 40  # bytes, zeros too: they are hashed even where they are not written
RATIO = 200
_SLACK = 64 << 20
_BLOCK = 4096
_AT_ONCE = 2
_SNAPSHOT_ID = re.compile(r"snp_[0-9a-z]{24}")


class Contents(msgspec.Struct, frozen=True):
    """What an archive holds. `snapshots` have parents before children; `layers` maps ids to the
    domains they lie in; `needed` is what has to be written of all that is not there already."""

    record: SessionRecord
    snapshots: list[Snapshot]
    layers: dict[str, set[str]]
    images: set[str]
    needed: int


def check_archive(
    reader: ArchiveReader, repository: Repository, present: Callable[[str], bool]
) -> Contents:
    """Raises ArchiveInvalid, and IntegrityError or ObjectMissing which mean the same."""
    return _Check(reader, repository, present).run()


class _Check:
    def __init__(
        self, reader: ArchiveReader, repository: Repository, present: Callable[[str], bool]
    ) -> None:
        self._reader = reader
        self._repository = repository
        self._present = present
        self._keys = reader.keys()
        self._expected = {KEY}
        self._packs: dict[str, list[PackInfo]] = {}
        self._used: dict[str, set[bytes]] = {DOMAIN: set(), SHARED: set()}
        self._content = 0  # bytes of files and images, zeros aside
        self._zeros = 0
        self._needed = 0

    def run(self) -> Contents:
        self._check_keys()
        self._check_declared()
        for name in (SHARED, DOMAIN):
            self._packs[name] = self._read_packs(self._repository.domain(name))
        record, snapshots = self._read_snapshots()
        layers = self._check_layers(snapshots)
        images = self._check_images(snapshots)
        if self._content + self._zeros > MAX_CONTENT:
            raise ArchiveInvalid(
                f"The archive's files and memory have {self._content + self._zeros} bytes; at most"
                f" {MAX_CONTENT} are taken."
            )
        if self._keys != self._expected:
            other = min(self._keys ^ self._expected)
            raise ArchiveInvalid(f"The archive holds or lacks {other} for no reason.", key=other)
        self._check_used()
        self._check_contents()
        return Contents(record, snapshots, layers, images, self._needed)

    # -- what is there --------------------------------------------------------------------------
    def _check_keys(self) -> None:
        wrapped = [key for key in self._keys if key.startswith(KEYS)]
        if len(wrapped) != self._repository.config.encrypted:
            raise ArchiveInvalid(f"The archive holds {len(wrapped)} wrapped keys.")
        self._expected.update(wrapped)

    def _check_declared(self) -> None:
        """What sealed objects say of their length is bounded by what there is of them."""
        total = 0
        for key in self._keys:
            if "/packs/" in key:
                continue
            if self._reader.head(key).size < SEALED_HEADER.size:
                raise ArchiveInvalid(f"{key} is cut off.", key=key)
            head = self._reader.get_ranges(key, [(0, SEALED_HEADER.size)])[0]
            total += SEALED_HEADER.unpack(head)[5]
        if total > RATIO * self._reader.size + _SLACK:
            raise ArchiveInvalid(f"The archive's records would take {total} bytes of memory.")

    def _read_packs(self, domain: Domain) -> list[PackInfo]:
        """The packs of a domain by their own footers, and its index, which must say the same."""
        found: list[PackInfo] = []
        names: set[bytes] = set()
        meta = records = 0
        for info in domain.ids(PACKS):
            pack = read_footer(self._reader, info.key, domain.keys)
            if domain.pack_key(pack.id) != info.key:
                raise ArchiveInvalid(f"{info.key} is not where a pack lies.", key=info.key)
            before = len(names)
            names.update(pack.names())
            if len(names) != before + len(pack):
                raise ArchiveInvalid(f"{info.key} has a chunk that is there twice.", key=info.key)
            meta += pack.raw if pack.kind == META else 0
            records += len(pack.blocks) + len(pack.chunks) + 256
            self._expected.add(info.key)
            found.append(pack)
        if meta > RATIO * self._reader.size + _SLACK:
            raise ArchiveInvalid(f"The archive's manifests would take {meta} bytes of memory.")
        declared = 0
        indexes = [info.key for info in domain.ids(INDEXES)]
        for key in indexes:
            head = self._reader.get_ranges(key, [(0, SEALED_HEADER.size)])[0]
            declared += SEALED_HEADER.unpack(head)[5]
        if declared > records + _SLACK:
            raise ArchiveInvalid("The archive's indexes name more than there is.")
        # One by one: who only reads passes over a bad index.
        named = [pack for key in indexes for pack in domain.read_index(key)]
        by_id = {pack.id: pack for pack in named}
        if len(named) != len(by_id) or by_id != {pack.id: pack for pack in found}:
            raise ArchiveInvalid("The archive's indexes do not name what is in it.")
        self._expected.update(indexes)
        return found

    def _read_snapshots(self) -> tuple[SessionRecord, list[Snapshot]]:
        repository = self._repository
        sessions = list(repository.domain(DOMAIN).ids(SESSIONS))
        if len(sessions) != 1:
            raise ArchiveInvalid(f"The archive holds {len(sessions)} sessions instead of one.")
        self._expected.add(sessions[0].key)
        record = repository.read_session(DOMAIN, sessions[0].key.rpartition("/")[2])
        ids = {info.key.rpartition("/")[2] for info in repository.domain(DOMAIN).ids(SNAPSHOTS)}
        if len(ids) > MAX_SNAPSHOTS:
            raise ArchiveInvalid(f"The archive holds more than {MAX_SNAPSHOTS} snapshots.")
        if {note.id for note in record.snapshots} != ids or len(record.snapshots) != len(ids):
            raise ArchiveInvalid("The archive's snapshots are not those its session names.")
        if record.session.head not in ids:
            raise ArchiveInvalid("The archive lacks the snapshot its session stands at.")
        found = {}
        for id in sorted(ids):
            if not _SNAPSHOT_ID.fullmatch(id):
                raise ArchiveInvalid(f"{id} is no id of a snapshot.")
            self._expected.add(repository.domain(DOMAIN).snapshot_key(id))
            found[id] = self._read_snapshot(id)
        return record, in_order(found)

    def _read_snapshot(self, id: str) -> Snapshot:
        snapshot = self._repository.read_snapshot(DOMAIN, id)
        if snapshot.format != 1:
            raise ArchiveInvalid(f"Snapshot {id} has format {snapshot.format}.")
        if not 0 < len(snapshot.layers) <= MAX_LAYERS:
            raise ArchiveInvalid(f"Snapshot {id} has {len(snapshot.layers)} layers.")
        if snapshot.memory is not None and len(snapshot.memory.files) > MAX_FILES:
            raise ArchiveInvalid(f"The memory of snapshot {id} has too many files.")
        return snapshot

    # -- layers -----------------------------------------------------------------------------
    def _check_layers(self, snapshots: list[Snapshot]) -> dict[str, set[str]]:
        refs: dict[tuple[str, str], LayerRef] = {}
        for snapshot in snapshots:
            for number, ref in enumerate(snapshot.layers):
                place = (DOMAIN if number else SHARED, ref.id)
                if refs.setdefault(place, ref) != ref:
                    raise ArchiveInvalid(f"Two snapshots say otherwise of layer {ref.id}.")
        found: dict[str, set[str]] = {}
        for (name, id), ref in refs.items():
            domain = self._repository.domain(name)
            self._expected.add(domain.layer_key(id))
            manifest = self._read_manifest(domain, ref)
            needed = self._use_files(domain, manifest)
            if id not in found and not self._present(id):
                self._needed += needed
            found.setdefault(id, set()).add(name)
        return found

    def _read_manifest(self, domain: Domain, ref: LayerRef) -> Manifest:
        layer = decode_layer(domain.get_root(LAYER, domain.layer_key(ref.id)), ref.id)
        if layer.ref != ref:
            raise ArchiveInvalid(f"The record of layer {ref.id} tells another size.")
        names = [domain.keys.chunk_name(CHUNK_SEGMENT, one) for one in layer.segments]
        size = sum(self._length(domain, name) for name in names)
        if size > MANIFEST_BYTES:
            raise ArchiveInvalid(f"The manifest of layer {ref.id} would have {size} bytes.")
        self._used[domain.name].update(names)
        manifest = read_manifest(domain, ref.id)
        cause = flaw_of_tree(manifest)
        if cause is not None:
            raise ArchiveInvalid(f"The manifest of layer {ref.id} cannot be a tree: {cause}.")
        return manifest

    def _use_files(self, domain: Domain, manifest: Manifest) -> int:
        """Note the chunks of a layer's files; answers the bytes they take on a disk."""
        used, keys = self._used[domain.name], domain.keys
        total = 0
        large: dict[bytes, int] = {}
        for entry in manifest.entries:
            if entry.type != FILE or entry.link is not None:
                total += _BLOCK if entry.link is None else 0
                continue
            if not entry.size:
                continue
            total += -(-entry.size // _BLOCK) * _BLOCK
            if entry.size > SMALL_FILE:
                if large.setdefault(entry.digest, entry.size) != entry.size:
                    raise ArchiveInvalid(f"Layer {manifest.id} has one file in two sizes.")
                continue
            self._content += entry.size
            name = keys.chunk_name(CHUNK_DATA, entry.digest)
            if self._length(domain, name) != entry.size:
                raise ArchiveInvalid(f"{entry.path!r} of layer {manifest.id} has another size.")
            used.add(name)
        if large:
            zeros = self._use_recipes(domain, manifest, large)
            for entry in manifest.entries:
                if entry.size > SMALL_FILE and entry.link is None:
                    total -= zeros[entry.digest]
                    self._content += entry.size - zeros[entry.digest]
                    self._zeros += zeros[entry.digest]
        return total

    def _use_recipes(
        self, domain: Domain, manifest: Manifest, large: dict[bytes, int]
    ) -> dict[bytes, int]:
        """Note the chunks of large files; answers for each how much of it is zeros."""
        keys, used = domain.keys, self._used[domain.name]
        asked = {keys.chunk_name(CHUNK_RECIPE, digest): digest for digest in large}
        if sum(self._length(domain, name) for name in asked) > MANIFEST_BYTES:
            raise ArchiveInvalid(f"The recipes of layer {manifest.id} would take too much memory.")
        used.update(asked)
        zeros: dict[bytes, int] = {}
        name = object_name(manifest.id)
        for chunk, data in Reader(domain).chunks(asked, needed_by=name):
            digest = asked[chunk]
            zeros[digest] = 0
            for content, length in decode_recipe(data, large[digest], name):
                if content == zeros_id(length):
                    zeros[digest] += length
                    # A hole needs no chunk, but a writer that did not see the hole has sent one.
                    part = keys.chunk_name(CHUNK_DATA, content)
                    if domain.index.locate(part) is not None:
                        used.add(part)
                    continue
                part = keys.chunk_name(CHUNK_DATA, content)
                if self._length(domain, part) != length:
                    raise ArchiveInvalid(f"A large file of {name} has other lengths.")
                used.add(part)
        return zeros

    @staticmethod
    def _length(domain: Domain, name: bytes) -> int:
        place = domain.index.locate(name)
        if place is None:
            raise ArchiveInvalid(f"The archive lacks a chunk, {name.hex()}.", chunk=name.hex())
        return place.length

    # -- images -----------------------------------------------------------------------------
    def _check_images(self, snapshots: list[Snapshot]) -> set[str]:
        refs: dict[str, MemoryRef] = {}
        for snapshot in snapshots:
            ref = snapshot.memory
            if ref is not None and refs.setdefault(ref.id, ref) != ref:
                raise ArchiveInvalid(f"Two snapshots say otherwise of {image_name(ref.id)}.")
        domain = self._repository.domain(DOMAIN)
        used, keys = self._used[DOMAIN], domain.keys
        for id, ref in refs.items():
            self._expected.add(domain.image_key(id))
            image = read_image(domain, id)
            if image.ref != ref:
                raise ArchiveInvalid(f"{image_name(id)} is not what its snapshot says.")
            size = 0
            for file in image.files:
                size += sum(length for length, source, _ in image.pieces(file) if source)
            self._content += size
            self._zeros += ref.bytes - size
            if not self._present(id):
                self._needed += size + len(image.files) * _BLOCK
            for content in image.chunk_ids():
                name = keys.chunk_name(CHUNK_DATA, content)
                self._length(domain, name)
                used.add(name)
        return set(refs)

    # -- contents ---------------------------------------------------------------------------
    def _check_used(self) -> None:
        for name, packs in self._packs.items():
            if sum(map(len, packs)) != len(self._used[name]):
                raise ArchiveInvalid("The archive holds chunks that nothing in it uses.")
        raw = sum(pack.raw for packs in self._packs.values() for pack in packs if pack.kind != META)
        if raw > self._content + _SLACK:
            raise ArchiveInvalid(f"The archive's packs would take {raw} bytes for nothing.")

    def _check_contents(self) -> None:
        """Open every block of every pack and compare every chunk with its name."""
        work = [
            (pack, self._repository.domain(name).pack_key(pack.id), keys)
            for name, packs in self._packs.items()
            for keys in [self._repository.domain(name).keys]
            for pack in packs
        ]
        with ThreadPoolExecutor(_AT_ONCE, "check packs") as pool:
            for _ in _bounded(pool, work, self._check_pack):
                pass

    def _check_pack(self, one: tuple[PackInfo, str, DomainKeys]) -> None:
        pack, key, keys = one
        data = self._reader.get(key, limit=MAX_PACK)[0]
        if blake3(data).digest() != pack.id or parse_pack(data, keys, name=key) != pack:
            raise ArchiveInvalid(f"{key} is not what its name says.", key=key)


Work = tuple[PackInfo, str, DomainKeys]


def _bounded(
    pool: ThreadPoolExecutor, work: Iterable[Work], call: Callable[[Work], None]
) -> Iterator[None]:
    """The results of a call on each, never more than a few under way or waiting."""
    left = iter(work)
    running = [pool.submit(call, one) for one in islice(left, _AT_ONCE)]
    try:
        while running:
            running.pop(0).result()
            yield
            running += [pool.submit(call, one) for one in islice(left, 1)]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


def in_order(found: dict[str, Snapshot]) -> list[Snapshot]:
    """Parents before children, else by age. Raises ArchiveInvalid where they go round."""
    children: dict[str | None, list[Snapshot]] = {}
    for one in sorted(found.values(), key=lambda one: (one.created_at, one.id)):
        children.setdefault(one.parent, []).append(one)
    if any(parent is not None and parent not in found for parent in children):
        raise ArchiveInvalid("A snapshot of the archive comes from one that is not in it.")
    ordered: list[Snapshot] = []
    waiting = children.get(None, [])
    while waiting:
        ordered += waiting
        waiting = [child for one in waiting for child in children.get(one.id, [])]
    if len(ordered) != len(found):
        raise ArchiveInvalid("Snapshots of the archive descend from one another.")
    return ordered
