"""Layers applied on top of one another: what a session's file tree shows, and how two differ.

Guarantee: the view is the one the kernel's overlay file system gives over the same layers
(whiteouts, opaque directories, replaced types), worked out from manifests without touching a file.
A difference looks only at paths that the layers not shared by both snapshots can have changed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sojourn.errors import FileMissing, PathInvalid, TooLarge
from sojourn.model.snapshots import LayerRef
from sojourn.store.base import Change, EntryInfo
from sojourn.store.manifests import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FILE,
    SYMLINK,
    TYPE_NAMES,
    WHITEOUT,
    Entry,
    Manifest,
)
from sojourn.store.trees import split

READ_LIMIT = 4 * 1024 * 1024
TEXT_LIMIT = 1024 * 1024

Found = tuple[int, Entry]  # number of the layer it comes from, entry


class View:
    """The merged tree of a chain of manifests, lowest first. Look-ups are lazy and remembered."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = list(manifests)
        everywhere = list(range(len(manifests) - 1, -1, -1))
        # For each directory the layers that take part in it, from the top.
        self._parts: dict[bytes, list[int]] = {b"": everywhere}

    def lookup(self, path: bytes) -> Found | None:
        """What the tree shows at a relative path."""
        if not path:
            top = len(self.manifests) - 1
            return (top, self.manifests[top].by_path[b""]) if self.manifests else None
        found: Found | None = None
        parts: list[int] = []
        for layer in self._participants(split(path)[0]):
            entry = self.manifests[layer].by_path.get(path)
            if entry is None:
                continue
            if entry.type == WHITEOUT:
                break
            if entry.type != DIRECTORY:
                if found is None:
                    found = (layer, entry)
                break
            if found is None:
                found = (layer, entry)
            parts.append(layer)
            if entry.opaque:
                break
        self._parts[path] = parts
        return found

    def _participants(self, directory: bytes) -> list[int]:
        known = self._parts.get(directory)
        if known is not None:
            return known
        # Without recursion: a path may have thousands of components.
        missing = []
        while directory not in self._parts:
            missing.append(directory)
            directory = split(directory)[0]
        for path in reversed(missing):
            self.lookup(path)
        return self._parts[missing[0]]


def differences(a: Sequence[Manifest], b: Sequence[Manifest]) -> Iterator[Change]:
    """Changes from chain `a` to chain `b`, sorted by path."""
    common = 0
    while common < min(len(a), len(b)) and a[common].id == b[common].id:
        common += 1
    if common == len(a) == len(b):
        return
    before, after = View(a), View(b)
    for path in sorted(_candidates(a, common) | _candidates(b, common)):
        change = _change(path, before.lookup(path), after.lookup(path))
        if change is not None:
            yield change


def _candidates(chain: Sequence[Manifest], common: int) -> set[bytes]:
    """Paths whose look may depend on the layers above the common ones."""
    paths: set[bytes] = set()
    for number in range(common, len(chain)):
        for entry in chain[number].entries:
            path = entry.path
            paths.add(path)
            if path and (entry.type != DIRECTORY or entry.opaque):
                # It hides whatever lower layers have below this path.
                for lower in chain[:number]:
                    known = lower.by_path.get(path)
                    if known is not None and known.type == DIRECTORY:
                        paths.update(lower.below(path))
    return paths


def _change(path: bytes, old: Found | None, new: Found | None) -> Change | None:
    if old is None and new is None:
        return None
    before = info_of(old[1]) if old is not None else None
    after = info_of(new[1]) if new is not None else None
    shown = b"/" + path
    if old is None:
        return Change(shown, "added", [], None, after)
    if new is None:
        return Change(shown, "removed", [], before, None)
    what = what_differs(old[1], new[1])
    return Change(shown, "changed", what, before, after) if what else None


def what_differs(old: Entry, new: Entry) -> list[str]:
    """The properties in which two entries at one path differ, as a session sees them."""
    what = []
    if old.type != new.type:
        what.append("type")
    elif old.type == FILE and (old.digest != new.digest or old.size != new.size):
        what.append("content")
    if old.mode != new.mode:
        what.append("mode")
    if (old.uid, old.gid) != (new.uid, new.gid):
        what.append("owner")
    if old.mtime != new.mtime:
        what.append("mtime")
    if visible_xattrs(old) != visible_xattrs(new):
        what.append("xattrs")
    if old.type == new.type == SYMLINK and old.target != new.target:
        what.append("link")
    if (
        old.type == new.type
        and old.type in (CHAR, BLOCK)
        and (old.major, old.minor) != (new.major, new.minor)
    ):
        what.append("device")
    return what


def visible_xattrs(entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
    """Attributes without overlay's own, which the merged tree does not show."""
    if not entry.xattrs:
        return ()
    return tuple(pair for pair in entry.xattrs if not pair[0].startswith(b"trusted.overlay."))


def info_of(entry: Entry) -> EntryInfo:
    """The facts a diff shows of an entry."""
    return EntryInfo(
        type=TYPE_NAMES[entry.type],
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size,
        mtime_ns=entry.mtime,
        digest=entry.digest.hex() if entry.digest else None,
        target=entry.target or None,
    )


def relative(path: bytes) -> bytes:
    """The relative form of an absolute session path. Raises PathInvalid."""
    if not path.startswith(b"/") or b"\0" in path:
        raise PathInvalid(f"{path!r} is not an absolute path.")
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise PathInvalid(f"{path!r} contains '..'.")
    return b"/".join(parts)


def read_content(
    view: View,
    layers: Sequence[LayerRef],
    path: bytes,
    tree_of: Callable[[str], Path],
    read: Callable[[Path, bytes, Entry], bytes],
) -> bytes:
    """A regular file's content; intermediate symlinks are not followed."""
    where = relative(path)
    found = view.lookup(where)
    if found is None:
        raise FileMissing(f"{os.fsdecode(path)} does not exist.", path=os.fsdecode(path))
    number, entry = found
    if entry.type != FILE:
        raise FileMissing(
            f"{os.fsdecode(path)} is not a regular file.",
            path=os.fsdecode(path),
            type=TYPE_NAMES[entry.type],
        )
    if entry.size > READ_LIMIT:
        raise TooLarge(f"{os.fsdecode(path)} is over 4 MiB.", path=os.fsdecode(path))
    return read(tree_of(layers[number].id), where, entry)


def unified(path: bytes, old: bytes | None, new: bytes | None) -> str | None:
    """A unified diff of two texts; None where either is no text or is over 1 MiB."""
    texts = []
    for data in (old, new):
        if data is not None and (len(data) > TEXT_LIMIT or b"\0" in data):
            return None
        try:
            texts.append((data or b"").decode("utf-8"))
        except UnicodeDecodeError:
            return None
    name = os.fsdecode(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    lines = difflib.unified_diff(
        _lines(texts[0]),
        _lines(texts[1]),
        "/dev/null" if old is None else "a" + name,
        "/dev/null" if new is None else "b" + name,
    )
    out = []
    for line in lines:
        out.append(line)
        if not line.endswith("\n"):
            out.append("\n\\ No newline at end of file\n")
    return "".join(out)


def _lines(text: str) -> list[str]:
    """Lines as diff knows them: ended by a line feed and nothing else."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
