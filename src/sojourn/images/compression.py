"""Layers as they are unpacked: gzip, zstd or plain, told by how they begin.

Guarantee: whatever a blob unpacks to, no more than a piece of it is held at a time; a stream that
is cut off or damaged is refused. That it is the layer that was meant its digest says, which is that
of the unpacked bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import IO, cast

import zstandard

from sojourn.errors import ImageInvalid

PIECE = 1 << 18
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_WINDOW = 1 << 27  # the largest that common tools write


def unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A layer's bytes as they are before compression. Raises ImageInvalid."""
    source = iter(pieces)
    start = b""
    for piece in source:
        start += piece
        if len(start) >= 4:
            break

    def whole() -> Iterator[bytes]:
        if start:
            yield start
        yield from source

    if start.startswith(_GZIP):
        return _gzip(whole())
    if start.startswith(_ZSTD):
        return _zstd(whole())
    return whole()


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    member = zlib.decompressobj(wbits=31)
    begun = False
    try:
        for piece in pieces:
            held = piece
            while held:
                if member.eof:
                    if not held.startswith(_GZIP[: len(held)]):
                        break  # what tools pad the end of a stream with
                    member = zlib.decompressobj(wbits=31)
                begun = True
                data = member.decompress(held, PIECE)
                held = member.unconsumed_tail or member.unused_data
                if data:
                    yield data
        while not member.eof:
            data = member.decompress(b"", PIECE)
            if not data:
                break
            yield data
    except zlib.error as error:
        raise ImageInvalid(f"a layer's compression is damaged: {error}") from error
    if begun and not member.eof:
        raise ImageInvalid("a layer ends in the midst of its compression")


class _Reader:
    """Pieces as something to read from."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = b""

    def read(self, size: int) -> bytes:
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._held = piece
        given, self._held = self._held[:size], self._held[size:]
        return given


def _zstd(pieces: Iterable[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    source = cast(IO[bytes], _Reader(pieces))
    try:
        with decompressor.stream_reader(source, read_size=PIECE, read_across_frames=True) as reader:
            while data := reader.read(PIECE):
                yield data
    except zstandard.ZstdError as error:
        raise ImageInvalid(f"a layer's compression is damaged: {error}") from error
