"""Images in a tar file: an OCI layout, or what `docker save` writes.

Guarantee: the file is only read, never unpacked; whatever names stand in it, they are looked up in
it and nowhere else. What a layer gives out is proven by its digests at its end: nothing of it may
be used before that.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator
from typing import IO

import msgspec

from sojourn.errors import ImageInvalid, InvalidRequest
from sojourn.images.compression import unpacked
from sojourn.images.documents import (
    MAX_DOCUMENT,
    MAX_LAYERS,
    Blob,
    Descriptor,
    ImageDocument,
    Index,
    Platform,
    check_image,
    choose,
    decode,
    find_manifest,
    read_document,
    verified,
)
from sojourn.wire.tar import BLOCK, Decoder, Entry

_PIECE = 1 << 20
_MAX_MEMBERS = 10_000
_WHAT = "Give an OCI layout, or a file that `docker save` wrote (not compressed)."
_REFUSED = ("nondistributable", "foreign", "encrypted")


class Layer(msgspec.Struct, frozen=True):
    """One layer: `tar` begins to read it, unpacked and compared with its digests as it goes."""

    diff_id: str
    tar: Callable[[], Iterator[bytes]]


class Image(msgspec.Struct, frozen=True):
    """An image: its manifest's digest (None where it has none), configuration and layers."""

    digest: str | None
    document: ImageDocument
    layers: list[Layer]


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    """One image in the `manifest.json` of `docker save`."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class TarFile:
    """The members of a tar file by name."""

    def __init__(self, file: IO[bytes]) -> None:
        self._fd = file.fileno()
        self._places: dict[bytes, tuple[int, int]] = {}
        self._links: dict[bytes, bytes] = {}
        try:
            self._index()
        except InvalidRequest as error:
            raise ImageInvalid(f"it is no tar file: {error.message}", next_step=_WHAT) from error

    def _index(self) -> None:
        """Note where each member's content is. Only headers are read, each of bounded length."""
        end = os.fstat(self._fd).st_size
        at = 0
        for _ in range(_MAX_MEMBERS):
            entry, at = self._header(at)
            if entry is None:
                return
            if entry.type == "file":
                if entry.size > end - at:
                    raise ImageInvalid("the archive ends too early")
                self._places[entry.name] = (at, entry.size)
                self._links.pop(entry.name, None)
                at += entry.size + -entry.size % BLOCK
            elif entry.type == "symlink":
                # How older versions of docker save one layer of two images.
                target = posixpath.join(posixpath.dirname(entry.name), entry.target)
                self._links[entry.name] = posixpath.normpath(target)
        raise ImageInvalid(f"the archive holds over {_MAX_MEMBERS} members")

    def _header(self, at: int) -> tuple[Entry | None, int]:
        """The member whose headers begin at an offset, and where its content does."""
        decoder = Decoder(rooted=True)
        while True:
            block = os.pread(self._fd, BLOCK, at)
            if len(block) < BLOCK:
                if block or not decoder.complete:
                    raise ImageInvalid("the archive ends too early")
                return None, at
            at += BLOCK
            for event in decoder.feed(block):
                if isinstance(event, Entry):
                    return event, at
            if decoder.complete and not any(block):
                return None, at

    def _place(self, name: str) -> tuple[int, int] | None:
        path = os.fsencode(posixpath.normpath(name))
        return self._places.get(path) or self._places.get(self._links.get(path, b""))

    def size(self, name: str) -> int | None:
        """How long a member is; None: there is none."""
        place = self._place(name)
        return None if place is None else place[1]

    def pieces(self, name: str) -> Iterator[bytes]:
        """A member's content. Raises ImageInvalid where there is no such member."""
        place = self._place(name)
        if place is None:
            raise ImageInvalid(f"the archive has no {name[:200]!r}")
        at, end = place[0], place[0] + place[1]
        while at < end:
            piece = os.pread(self._fd, min(_PIECE, end - at), at)
            if not piece:
                raise ImageInvalid("the archive ends too early")
            at += len(piece)
            yield piece

    def document(self, name: str) -> bytes:
        """A small member's content. Raises ImageInvalid."""
        if (self.size(name) or 0) > MAX_DOCUMENT:
            raise ImageInvalid(f"{name!r} in the archive is over {MAX_DOCUMENT} bytes")
        return b"".join(self.pieces(name))


def open_archive(file: IO[bytes], tag: str | None, host: Platform) -> Image:
    """The image in a tar file; `tag` says which where there are several. Raises ImageInvalid."""
    tar = TarFile(file)
    if tar.size("index.json") is not None:
        return _open_layout(tar, tag, host)
    if tar.size("manifest.json") is not None:
        return _open_saved(tar, tag, host)
    raise ImageInvalid(
        "the archive holds neither an OCI layout nor what `docker save` writes",
        next_step=_WHAT,
    )


def _open_layout(tar: TarFile, tag: str | None, host: Platform) -> Image:
    def blob(descriptor: Descriptor) -> Iterator[bytes]:
        return tar.pieces(blob_name(descriptor.digest))

    index = decode(tar.document("index.json"), Index, "index")
    return open_image(blob, choose(index, host, tag, "the layout"), host)


def blob_name(digest: str) -> str:
    """Where a layout has a blob."""
    algorithm, _, name = digest.partition(":")
    return f"blobs/{algorithm}/{name}"


def open_image(blob: Blob, top: Descriptor, host: Platform) -> Image:
    """The image that a descriptor leads to. Raises ImageInvalid."""
    found, _, manifest = find_manifest(blob, top, host)
    _, document = read_document(blob, manifest.config, ImageDocument, "configuration")
    check_image(document, len(manifest.layers), host)
    layers = [
        _layer(blob, descriptor, diff_id)
        for descriptor, diff_id in zip(manifest.layers, document.rootfs.diff_ids, strict=True)
    ]
    return Image(found.digest, document, layers)


def _layer(blob: Blob, descriptor: Descriptor, diff_id: str) -> Layer:
    if any(word in descriptor.media_type for word in _REFUSED):
        raise ImageInvalid(f"a layer is of a kind that is not taken: {descriptor.media_type}")

    def tar() -> Iterator[bytes]:
        stored = verified(blob(descriptor), descriptor.digest, descriptor.size)
        yield from verified(unpacked(stored), diff_id, None)
        for _ in stored:  # what follows the end of the compression belongs to the blob's digest
            continue

    return Layer(diff_id, tar)


def _open_saved(tar: TarFile, tag: str | None, host: Platform) -> Image:
    found = decode(tar.document("manifest.json"), list[_Saved], "manifest.json")
    if tag is not None:
        found = [one for one in found if _saved_as(one, tag)]
    if len(found) != 1:
        what = "no image" if not found else f"{len(found)} images"
        raise ImageInvalid(
            f"the archive holds {what}{f' tagged {tag!r}' if tag else ''}",
            next_step="Say which image by its tag, or save one alone.",
        )
    saved = found[0]
    if len(saved.layers) > MAX_LAYERS:
        raise ImageInvalid(f"the image has over {MAX_LAYERS} layers")
    document = decode(tar.document(saved.config), ImageDocument, "configuration")
    check_image(document, len(saved.layers), host)
    layers = [
        Layer(diff_id, _saved_layer(tar, name, diff_id))
        for name, diff_id in zip(saved.layers, document.rootfs.diff_ids, strict=True)
    ]
    return Image(None, document, layers)


def _saved_layer(tar: TarFile, name: str, diff_id: str) -> Callable[[], Iterator[bytes]]:
    return lambda: verified(unpacked(tar.pieces(name)), diff_id, None)


def _saved_as(one: _Saved, tag: str) -> bool:
    return any(name == tag or name.rpartition(":")[2] == tag for name in one.repo_tags or [])
