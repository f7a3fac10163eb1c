"""Archives made of dictionaries, and ways to forge them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from blake3 import blake3

from sojourn.model import Limits, Policy, Session, SessionState
from sojourn.model.snapshots import Snapshot
from sojourn.repository.archives import Archive, Written, open_archive, write_archive
from sojourn.repository.backends.archive_file import HEADER, TRAILER, ArchiveReader
from sojourn.repository.session_records import SessionRecord, SnapshotNote
from sojourn.store.manifests import Manifest
from support.repositories import Node


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


def session_of(head: str, **changes: object) -> Session:
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
    notes = [SnapshotNote(one.id, one.label) for one in snapshots]
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
