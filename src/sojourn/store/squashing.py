"""Merging adjacent layers into one, so that chains stay short.

Guarantee: the merged layer over the layers below shows the same tree as the layers it is made of;
its files are shared with theirs, not copied.

A whiteout is kept exactly where the layers below show something: the kernel lists a directory that
no lower layer has as it lies there, so a whiteout left in it would appear as a name that cannot be
opened. The merged layer is therefore good over the layers it was made for, not over others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sojourn.store.building import Shared, Staged
from sojourn.store.manifests import DIRECTORY, FILE, OPAQUE, WHITEOUT, Entry, Manifest, whiteout
from sojourn.store.trees import split
from sojourn.store.views import View


def squash_manifests(
    manifests: Sequence[Manifest], below: Sequence[Manifest]
) -> tuple[Manifest, dict[bytes, Shared | Staged]]:
    """The single layer that stands for a chain (lowest first) over the chain `below`, and where
    its files' content is."""
    state: dict[bytes, tuple[int, Entry]] = {}
    children: dict[bytes, set[bytes]] = {}
    for number, manifest in enumerate(manifests):
        for entry in manifest.entries:
            _apply(number, entry, state, children)
    return _finish(manifests, state, View(below))


def _apply(
    number: int,
    entry: Entry,
    state: dict[bytes, tuple[int, Entry]],
    children: dict[bytes, set[bytes]],
) -> None:
    path = entry.path
    existing = state.get(path)
    if entry.type == DIRECTORY and existing is not None:
        lower = existing[1]
        if lower.type != DIRECTORY:
            # What hid the layers below must go on hiding them.
            entry = _with_opaque(entry)
        elif entry.opaque:
            _clear(path, state, children)
        elif lower.opaque:
            entry = _with_opaque(entry)
    elif entry.type != DIRECTORY:
        _clear(path, state, children)
    state[path] = (number, entry)
    if path:
        children.setdefault(split(path)[0], set()).add(path)


def _clear(
    directory: bytes, state: dict[bytes, tuple[int, Entry]], children: dict[bytes, set[bytes]]
) -> None:
    stack = list(children.pop(directory, ()))
    while stack:
        gone = stack.pop()
        state.pop(gone, None)
        stack.extend(children.pop(gone, ()))


def _with_opaque(entry: Entry) -> Entry:
    kept = [pair for pair in entry.xattrs if pair[0] != OPAQUE]
    return msgspec.structs.replace(entry, xattrs=tuple(sorted([*kept, (OPAQUE, b"y")])))


def _finish(
    manifests: Sequence[Manifest], state: dict[bytes, tuple[int, Entry]], below: View
) -> tuple[Manifest, dict[bytes, Shared | Staged]]:
    hidden: set[bytes] = set()  # directories below which no lower layer shows
    firsts: dict[tuple[int, bytes], bytes] = {}
    entries: list[Entry] = []
    sources: dict[bytes, Shared | Staged] = {}
    for path in sorted(state):
        number, entry = state[path]
        parent = split(path)[0]
        sealed_off = bool(path) and parent in hidden
        if entry.type == DIRECTORY:
            if entry.opaque or sealed_off:
                hidden.add(path)
            # The mark for attribute whiteouts ("x") goes: whiteouts are written as devices.
            if (OPAQUE, b"x") in entry.xattrs:
                kept = tuple(pair for pair in entry.xattrs if pair[0] != OPAQUE)
                entry = msgspec.structs.replace(entry, xattrs=kept)
            entries.append(entry)
            continue
        if entry.type == WHITEOUT:
            if not sealed_off and below.lookup(path) is not None:
                entries.append(whiteout(path))
            continue
        # Names of one hard-linked file stay linked as far as they survive.
        original = entry.link if entry.link is not None else path
        first = firsts.setdefault((number, original), path)
        link = None if first == path else first
        entries.append(msgspec.structs.replace(entry, link=link))
        if entry.type == FILE and link is None:
            sources[path] = Shared(manifests[number].id, path)
    return Manifest(entries), sources
