"""From an image's layers to layers of the store.

Guarantee: a layer gets into the store only after every byte of it was compared with its digests;
what an image may take of the disk and of memory is bounded while it is read, not by what it says.
The same layers on the same layers become the same layers of the store, so images share them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from sojourn.errors import ImageInvalid, InvalidRequest, StorageFull, TooLarge
from sojourn.images.archives import Image, Layer
from sojourn.images.trees import LayerTree
from sojourn.model.snapshots import LayerRef
from sojourn.store.base import Store
from sojourn.store.copying import disk_errors
from sojourn.store.manifests import Entry as Stored
from sojourn.store.trees import Directories
from sojourn.store.views import View
from sojourn.wire.tar import END, Decoder, Entry, EntryEnd, encode_entry

MAX_ENTRIES = 1_000_000
MAX_BYTES = 128 << 30
MAX_FACTS = 256 << 20  # names, link targets and attributes, which are held in memory
# Overlay file systems look a name up in each layer in turn; what is above these becomes one.
LONG_CHAIN = 16
_LOOK_EVERY = 64 << 20
_COPY = 1 << 20


class Unpacked(msgspec.Struct, frozen=True):
    """What an image became."""

    layers: list[LayerRef]
    left_out: int


class Unpacker:
    """Unpacks one image into a store. `room` tells how many bytes of the disk may still be taken;
    `stop` gives it up."""

    def __init__(self, store: Store, room: Callable[[], int], stop: threading.Event) -> None:
        self._store = store
        self._room = room
        self._stop = stop
        self._entries = 0
        self._bytes = 0
        self._facts = 0
        self._unlooked = _LOOK_EVERY  # the first byte asks
        self._left_out = 0

    def unpack(self, image: Image, keep: Callable[[str], None]) -> Unpacked:
        """The image's layers in the store, lowest first; `keep` is told of each, to hold it until
        a snapshot names it. Raises ImageInvalid, TooLarge, StorageFull."""
        layers: list[LayerRef] = []
        for layer in image.layers:
            ref = self._layer(layer, layers)
            if ref.entries:
                keep(ref.id)
                layers.append(ref)
        if not layers:
            raise ImageInvalid("the image holds no file")
        made = self._directory(image, layers)
        if made is not None:
            keep(made.id)
            layers.append(made)
        if len(layers) > LONG_CHAIN:
            low = layers[: LONG_CHAIN - 1]
            merged = self._store.squash(layers[LONG_CHAIN - 1 :], low)
            layers = low
            if merged.entries:
                keep(merged.id)
                layers = [*low, merged]
        return Unpacked(layers, self._left_out)

    def _directory(self, image: Image, layers: list[LayerRef]) -> LayerRef | None:
        """The directory that commands start in, where the image names one and has none: whoever
        runs images makes it."""
        told = image.document.config
        path = os.fsencode(told.working_dir or "").strip(b"/") if told else b""
        view = View([self._store.manifest(one.id) for one in layers])
        if not path or b"\0" in path or view.lookup(path) is not None:
            return None
        made = encode_entry(Entry(path, "dir", 0o755)) + END
        return self._layer(Layer("the image's directory", lambda: iter([made])), layers)

    def _layer(self, layer: Layer, below: list[LayerRef]) -> LayerRef:
        view = View([self._store.manifest(one.id) for one in below]) if below else None
        staged = self._store.stage_tree()
        try:
            with disk_errors("unpacking an image"):
                contents, upper = staged / "contents", staged / "fs"
                contents.mkdir()
                upper.mkdir()
                _Filling(self, layer, contents, view, below).run().write(upper, contents)
                sealed = self._store.seal_layer(upper, since=None, suspects=set())
                if sealed.ref.entries == 0:
                    sealed.discard()
                    return sealed.ref
                return sealed.take()
        finally:
            self._store.discard_tree(staged)

    def charge(self, size: int) -> None:
        """So many bytes more are to be written. Raises TooLarge, StorageFull."""
        self._bytes += size
        self._unlooked += size
        if self._bytes > MAX_BYTES:
            raise TooLarge(f"the image unpacks to over {MAX_BYTES} bytes", limit=MAX_BYTES)
        if self._unlooked >= _LOOK_EVERY:
            self._unlooked = 0
            if self._stop.is_set():
                raise ImageInvalid("the image was given up")
            if self._room() < _LOOK_EVERY:
                raise StorageFull("The node's disk has no room for the image.")

    def count(self, entry: Entry | None = None) -> None:
        """One entry more. Raises TooLarge."""
        self._entries += 1
        if entry is not None:
            self._facts += len(entry.name) + len(entry.target)
            self._facts += sum(len(key) + len(value) for key, value in entry.xattrs)
            if self._facts > MAX_FACTS:
                raise TooLarge(
                    f"the image's names and attributes are over {MAX_FACTS} bytes", limit=MAX_FACTS
                )
        if self._entries > MAX_ENTRIES:
            raise TooLarge(f"the image holds over {MAX_ENTRIES} entries", limit=MAX_ENTRIES)
        if self._entries % 4096 == 0 and self._stop.is_set():
            raise ImageInvalid("the image was given up")

    def leave_out(self, count: int) -> None:
        """Note what was not taken over."""
        self._left_out += count

    def lower_file(self, below: list[LayerRef], number: int, path: bytes, into: Path) -> None:
        """Copy a file of a layer below."""
        tree = self._store.layer_path(below[number].id)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with Directories(tree) as held:
            fd, name = held.parent(path)
            with (
                os.fdopen(os.open(name, flags, dir_fd=fd), "rb") as source,
                into.open("xb") as target,
            ):
                while piece := source.read(_COPY):
                    self.charge(len(piece))
                    target.write(piece)


class _Filling:
    """Reads one layer's tar into a tree and a directory of contents."""

    def __init__(
        self,
        unpacker: Unpacker,
        layer: Layer,
        contents: Path,
        view: View | None,
        below: list[LayerRef],
    ) -> None:
        self._unpacker = unpacker
        self._layer = layer
        self._contents = contents
        self._view = view
        self._below = below
        self._number = 0
        self._tree = LayerTree(view, self._copy_up)

    def _new(self) -> tuple[int, Path]:
        self._number += 1
        return self._number, self._contents / str(self._number)

    def _copy_up(self, path: bytes, entry: Stored) -> int:
        assert self._view is not None
        found = self._view.lookup(path)
        assert found is not None
        number, place = self._new()
        self._unpacker.lower_file(self._below, found[0], path, place)
        return number

    def run(self) -> LayerTree:
        """Read all of it. Raises ImageInvalid."""
        decoder = Decoder(rooted=True, xattrs=True)
        try:
            self._read(decoder)
        except InvalidRequest as error:
            if isinstance(error, ImageInvalid):
                raise
            raise ImageInvalid(
                f"a layer of the image cannot be used: {error.message}", layer=self._layer.diff_id
            ) from error
        self._unpacker.leave_out(self._tree.left_out)
        return self._tree

    def _read(self, decoder: Decoder) -> None:
        entry: Entry | None = None
        number: int | None = None
        descriptor = -1
        known = 0
        try:
            for piece in self._layer.tar():
                for event in decoder.feed(piece):
                    if isinstance(event, Entry):
                        entry, number = event, None
                        self._unpacker.count(entry)
                        if entry.type == "file" and entry.size:
                            number, place = self._new()
                            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                            descriptor = os.open(place, flags, 0o600)
                    elif isinstance(event, EntryEnd):
                        if descriptor >= 0:
                            os.close(descriptor)
                            descriptor = -1
                        assert entry is not None
                        self._tree.add(entry, number)
                        # Directories that no member is count as well.
                        for _ in range(max(0, self._tree.entries - known - 1)):
                            self._unpacker.count()
                        known = self._tree.entries
                    else:
                        self._unpacker.charge(len(event))
                        view = memoryview(event)
                        while view:
                            view = view[os.write(descriptor, view) :]
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if not decoder.complete:
            raise ImageInvalid("a layer of the image ends in the midst of a member")
