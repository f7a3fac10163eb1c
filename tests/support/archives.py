"""Archives made of dictionaries, and ways to forge them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from blake3 import blake3

from sojourn.model import Limits, Policy, Session, SessionState, new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotKind
from sojourn.repository import config
from sojourn.repository.archive_checks import DOMAIN
from sojourn.repository.archives import Archive, Written, open_archive, write_archive
from sojourn.repository.backends.archive_file import (
    HEADER,
    TRAILER,
    ArchiveReader,
    ArchiveWriter,
)
from sojourn.repository.domains import Domain
from sojourn.repository.images import ImageMap, encode_image
from sojourn.repository.layers import segments_of
from sojourn.repository.layers_out import publish_layer
from sojourn.repository.packs import CHUNK_DATA, CHUNK_SEGMENT
from sojourn.repository.repository import SHARED, Repository
from sojourn.repository.sealed import IMAGE, SNAPSHOT, seal
from sojourn.repository.session_records import SessionRecord, SnapshotNote, decode_snapshot
from sojourn.repository.uploads import Upload
from sojourn.store.fingerprints import fingerprint
from sojourn.store.manifests import Entry, Manifest
from support.repositories import CONFIG, Node


class Trees:
    """The trees and images of a node, as a push reads them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def manifest(self, layer: str) -> Manifest:
        return self._node.trees[layer][0]

    def layer_path(self, layer: str) -> Path:
        return self._node.trees[layer][1]

    def image_path(self, image: str) -> Path:
        return self._node.images[image][1]


def session_of(head: object, **changes: object) -> Session:
    made = Session(
        id="ses_" + "1" * 24,
        tenant="ten_1",
        name="box",
        labels={"a": "b"},
        template="debian",
        env={"A": "1"},
        limits=Limits(),
        policy=Policy(),
        driver="gvisor",
        state=SessionState.RUNNING,
        epoch=3,
        head=head,
        parent_session=None,
        forked_from=None,
        sandbox="sbx_1",
        node="local",
        idle_deadline=None,
        lifetime_deadline=None,
        cause=None,
        created_at=0.0,
        updated_at=0.0,
    )
    return msgspec.structs.replace(made, **changes)


def record_of(snapshots: Sequence[Snapshot], **changes: object) -> SessionRecord:
    notes = [SnapshotNote(id=one.id, label=one.label) for one in snapshots]
    return SessionRecord(
        session=session_of(snapshots[-1].id, **changes), snapshots=notes, written_at=0.0, owner=""
    )


def written(
    file: IO[bytes], node: Node, snapshots: Sequence[Snapshot], secret: bytes | None = None
) -> Written:
    return write_archive(file.fileno(), record_of(snapshots), snapshots, Trees(node), secret)


def data_of(node: Node, snapshots: Sequence[Snapshot], secret: bytes | None = None) -> bytes:
    with tempfile.TemporaryFile() as file:
        written(file, node, snapshots, secret)
        file.seek(0)
        return file.read()


def opened(data: bytes, secret: bytes | None = None, expect: str | None = None) -> Archive:
    """The archive of these bytes, found good. The file stays open as long as it is used."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - kept by the archive
    file.write(data)
    file.flush()
    archive = open_archive(ArchiveReader(file.fileno(), expect=expect), secret)
    archive.file = file  # type: ignore[attr-defined]
    return archive


def objects(data: bytes) -> list[tuple[str, bytes]]:
    """The objects of an archive in order."""
    length, _ = TRAILER.unpack_from(data, len(data) - 32 - TRAILER.size)
    end = len(data) - 32 - TRAILER.size
    listed = msgspec.msgpack.decode(data[end - length : end], type=list[tuple[str, int]])
    found, at = [], HEADER.size
    for key, size in listed:
        found.append((key, data[at : at + size]))
        at += size
    return found


def joined(
    parts: Sequence[tuple[str, bytes]],
    *,
    header: bytes = HEADER.pack(b"SJAR", 1, 0),
    directory: bytes | None = None,
) -> bytes:
    """An archive of these objects with a digest that holds, as anyone can make it."""
    listed = msgspec.msgpack.encode([(key, len(data)) for key, data in parts])
    listed = listed if directory is None else directory
    body = header + b"".join(data for _, data in parts)
    body += listed + TRAILER.pack(len(listed), b"SJAE")
    return body + blake3(body).digest()


def changed(data: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    """An archive with objects changed (None: left out)."""

    def parts() -> Iterator[tuple[str, bytes]]:
        for key, part in objects(data):
            new = change(key, part)
            if new is not None:
                yield key, new

    return joined(list(parts()))


def entry(path: bytes, kind: str = "f", **facts: object) -> Entry:
    """An entry of a manifest; a file's digest and size follow from `content`."""
    content = facts.pop("content", b"")
    assert isinstance(content, bytes)
    values: dict[str, object] = {
        "path": path,
        "type": kind,
        "mode": 0o777 if kind == "l" else 0o755,
        "uid": 0,
        "gid": 0,
        "size": len(content) if kind == "f" else 0,
        "mtime_s": 0,
        "mtime_ns": 0,
        "digest": blake3(content).digest() if kind == "f" else b"",
        "target": b"",
        "major": 0,
        "minor": 0,
        "link": None,
        "xattrs": (),
    }
    return Entry(**(values | facts))


class Forger:
    """Writes an archive as the writer does, of things that were never there. What is set before
    `finish` replaces what an honest archive of one snapshot would hold."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self.backend = ArchiveWriter(self._file.fileno())
        self.repository = Repository(self.backend, *config.create(self.backend, None))
        self.domain = self.repository.domain(DOMAIN)
        self.template = self.layer([entry(b"", "d")], domain=self.repository.domain(SHARED))

    def chunk(self, data: bytes, kind: int = CHUNK_DATA, content: bytes | None = None) -> None:
        with Upload(self.domain) as up:
            up.add(kind, content or blake3(data).digest(), data)

    def layer(
        self,
        entries: Sequence[Entry],
        contents: Sequence[bytes] = (),
        domain: Domain | None = None,
    ) -> LayerRef:
        domain = domain or self.domain
        manifest = Manifest(list(entries))
        with Upload(domain) as up:
            for content in contents:
                up.add(CHUNK_DATA, blake3(content).digest(), content)
            for content, data in segments_of(manifest):
                up.add(CHUNK_SEGMENT, content, data)
        publish_layer(domain, manifest)
        return manifest.ref

    def snapshot(self, *layers: LayerRef, memory: MemoryRef | None = None, **more: object) -> str:
        refs = [self.template, *layers]
        made = Snapshot(
            id=new_id("snp"),
            session="ses_1",
            parent=None,
            kind=SnapshotKind.EXPLICIT,
            label=None,
            created_at=0.0,
            layers=refs,
            memory=memory,
            config=CONFIG,
            fingerprint=fingerprint(refs, memory, CONFIG),
        )
        made = msgspec.structs.replace(made, **more)
        payload = msgspec.msgpack.encode(made)
        self.domain.put_object(SNAPSHOT, self.domain.snapshot_key(made.id), payload)
        return made.id

    def finish(self, *snapshots: str, **session: object) -> bytes:
        record = SessionRecord(
            session=session_of(**({"head": snapshots[-1], "tenant": DOMAIN} | session)),
            snapshots=[SnapshotNote(one) for one in snapshots],
            written_at=0.0,
            owner="",
        )
        self.repository.put_session(record)
        self.backend.finish()
        self._file.seek(0)
        return self._file.read()


def with_memory(data: bytes, change: Callable[[MemoryRef], MemoryRef]) -> bytes:
    """An archive that is not encrypted, whose memory images say otherwise of themselves."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    file.write(data)
    file.flush()
    reader = ArchiveReader(file.fileno())
    domain = Repository(reader, *config.open_existing(reader, None)).domain(DOMAIN)

    def one(key: str, old: bytes) -> bytes:
        place = key.encode()
        if "/snapshots/" in key:
            found = decode_snapshot(domain.get_object(SNAPSHOT, key), key.rpartition("/")[2])
            if found.memory is not None:
                found = msgspec.structs.replace(found, memory=change(found.memory))
            return seal(SNAPSHOT, msgspec.msgpack.encode(found), domain.keys, place)
        if "/images/" in key:
            image = msgspec.msgpack.decode(domain.get_object(IMAGE, key), type=ImageMap)
            image = msgspec.structs.replace(image, ref=change(image.ref))
            return seal(IMAGE, encode_image(image), domain.keys, place)
        return old

    return changed(data, one)
