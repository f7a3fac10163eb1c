"""The canonical form of a layer: its entries in one fixed order and encoding, and the id over them.

Guarantee: two trees have the same layer id exactly when a session could not tell them apart: names,
types, contents, permissions, owners, times to the nanosecond, attributes, hard links and what they
hide of lower layers. Nothing of the host (inode numbers, change times, link counts, disk blocks)
enters. docs/formats/manifest.md specifies the bytes.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property

import msgspec

from sojourn.errors import CaptureFailed, IntegrityError
from sojourn.model.snapshots import LayerRef
from sojourn.store.fingerprints import layer_digest
from sojourn.store.trees import GID, INODE, MODE, MTIME, NLINK, RDEV, SIZE, UID, LocalScan, split

FORMAT = 1
OPAQUE = b"trusted.overlay.opaque"
HIDES = b"trusted.overlay.whiteout"

FILE, DIRECTORY, SYMLINK, FIFO, SOCKET, CHAR, BLOCK, WHITEOUT = "fdlpscbw"
TYPE_NAMES = {
    FILE: "file",
    DIRECTORY: "dir",
    SYMLINK: "symlink",
    FIFO: "fifo",
    SOCKET: "socket",
    CHAR: "char",
    BLOCK: "block",
    WHITEOUT: "whiteout",
}
_TYPES = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFSOCK: SOCKET,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCK,
}
FORMATS = {letter: bits for bits, letter in _TYPES.items()}


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One entry of a layer. `path` is relative raw bytes (b"" the root).

    `link` names the first entry (in order) of the same hard-linked file; attributes stand on both.
    """

    path: bytes
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_s: int
    mtime_ns: int
    digest: bytes
    target: bytes
    major: int
    minor: int
    link: bytes | None
    xattrs: tuple[tuple[bytes, bytes], ...]

    @property
    def mtime(self) -> int:
        """Modification time in nanoseconds since 1970."""
        return self.mtime_s * 1_000_000_000 + self.mtime_ns

    @property
    def opaque(self) -> bool:
        """Whether a directory hides what lower layers have below it."""
        return self.type == DIRECTORY and (OPAQUE, b"y") in self.xattrs


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, list[Entry]])


class Manifest:
    """The entries of one layer, sorted by path, with the layer's id."""

    def __init__(self, entries: list[Entry], encoded: bytes | None = None) -> None:
        self.entries = entries
        self.encoded = encoded if encoded is not None else _encoder.encode((FORMAT, entries))
        self.id = layer_digest(self.encoded).hex()

    @cached_property
    def by_path(self) -> dict[bytes, Entry]:
        """Entries by path."""
        return {entry.path: entry for entry in self.entries}

    @cached_property
    def paths(self) -> list[bytes]:
        """All paths, sorted."""
        return [entry.path for entry in self.entries]

    @cached_property
    def digests(self) -> dict[bytes, bytes]:
        """Content hashes of regular files by path."""
        return {entry.path: entry.digest for entry in self.entries if entry.digest}

    @cached_property
    def ref(self) -> LayerRef:
        """The reference that snapshots hold. Hard-linked files count once, the root not at all, so
        that `entries` is zero for a tree without entries."""
        total = sum(e.size for e in self.entries if e.type == FILE and e.link is None)
        return LayerRef(id=self.id, bytes=total, entries=len(self.entries) - 1)

    def below(self, directory: bytes) -> Iterator[bytes]:
        """Paths of everything below a directory, sorted."""
        paths = self.paths
        if not directory:
            yield from paths[1:]
            return
        prefix = directory + b"/"
        at = bisect_left(paths, prefix)
        while at < len(paths) and paths[at].startswith(prefix):
            yield paths[at]
            at += 1

    @classmethod
    def decode(cls, encoded: bytes, name: str, layer: str) -> Manifest:
        """Read a manifest's payload and check its form and id. Raises IntegrityError."""
        if layer_digest(encoded).hex() != layer:
            raise IntegrityError(f"The manifest of {name} is not the one of its id.", object=name)
        try:
            format, entries = _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(
                f"The manifest of {name} is malformed: {error}", object=name
            ) from None
        if format != FORMAT:
            raise IntegrityError(f"The manifest of {name} has format {format}.", object=name)
        found = cls(entries, encoded)
        cause = found.flaw()
        if cause is not None:
            raise IntegrityError(f"The manifest of {name} is inconsistent: {cause}.", object=name)
        return found

    def flaw(self) -> str | None:
        """The first breach of the format's rules, if any. Keeps a forged manifest from naming
        anything outside its tree."""
        entries = self.entries
        if not entries or entries[0].path or entries[0].type != DIRECTORY:
            return "no root directory"
        directories = {b""}
        first: dict[bytes, Entry] = {}
        previous = b""
        for entry in entries[1:]:
            path = entry.path
            if path <= previous:
                return f"order at {path!r}"
            previous = path
            parent, name = split(path)
            if path[0] == 0x2F or parent not in directories or name in {b"", b".", b".."}:
                return f"path {path!r}"
            if b"\0" in name:
                return f"path {path!r}"
            kind = entry.type
            if kind not in TYPE_NAMES or not 0 <= entry.mode <= 0o7777:
                return f"type of {path!r}"
            if kind == DIRECTORY:
                directories.add(path)
            if not 0 <= entry.mtime_ns < 1_000_000_000 or entry.size < 0:
                return f"numbers of {path!r}"
            if len(entry.digest) != (32 if kind == FILE else 0):
                return f"digest of {path!r}"
            if (kind == SYMLINK) != bool(entry.target):
                return f"target of {path!r}"
            if entry.link is not None:
                other = first.get(entry.link)
                if (
                    other is None
                    or msgspec.structs.replace(other, path=path, link=entry.link) != entry
                ):
                    return f"link of {path!r}"
            elif kind != DIRECTORY:
                first[path] = entry
        return None


def manifest_of(scan: LocalScan, digests: dict[bytes, bytes]) -> Manifest:
    """The canonical form of a scanned tree (with extras) whose file contents have `digests`."""
    entries: list[Entry] = []
    first: dict[int, bytes] = {}
    marked: set[bytes] = set()  # directories whose empty files may be whiteouts
    extras = scan.extras
    for path in sorted(scan.entries):
        facts = scan.entries[path]
        xattrs, target = extras[path]
        mode = facts[MODE]
        kind = _TYPES.get(stat.S_IFMT(mode))
        if kind is None:
            raise CaptureFailed("An entry has a type this version does not know.", path=repr(path))
        link: bytes | None = None
        size = 0
        digest = b""
        major = minor = 0
        if kind == DIRECTORY:
            if xattrs and (OPAQUE, b"x") in xattrs:
                marked.add(path)
        elif is_whiteout(facts[MODE], facts[RDEV]) or (
            marked
            and kind == FILE
            and facts[SIZE] == 0
            and split(path)[0] in marked
            and any(key == HIDES for key, _ in xattrs)
        ):
            # Overlay links whiteouts to one another and none of their facts can be seen inside.
            entries.append(whiteout(path))
            continue
        else:
            if kind == FILE:
                size = facts[SIZE]
                digest = digests[path]
            elif kind in (CHAR, BLOCK):
                major, minor = os.major(facts[RDEV]), os.minor(facts[RDEV])
            if facts[NLINK] > 1:
                link = first.setdefault(facts[INODE], path)
                if link == path:
                    link = None
        seconds, nanoseconds = divmod(facts[MTIME], 1_000_000_000)
        entries.append(
            Entry(
                path,
                kind,
                mode & 0o7777,
                facts[UID],
                facts[GID],
                size,
                seconds,
                nanoseconds,
                digest,
                target,
                major,
                minor,
                link,
                xattrs,
            )
        )
    return Manifest(entries)


def is_whiteout(mode: int, rdev: int) -> bool:
    """Whether an entry is overlay's device form of a whiteout."""
    return rdev == 0 and stat.S_ISCHR(mode)


def whiteout(path: bytes) -> Entry:
    """The canonical whiteout at a path."""
    return Entry(path, WHITEOUT, 0, 0, 0, 0, 0, 0, b"", b"", 0, 0, None, ())
