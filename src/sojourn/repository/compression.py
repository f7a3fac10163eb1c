"""Compression with zstd, and decompression that cannot be made to take more than it was told.

Guarantee: `decompress` gives exactly the number of bytes the caller expects, or raises ValueError
before it takes memory for more. A frame carries a length of its own that the library trusts when
it allocates, therefore that is compared first.
"""

from __future__ import annotations

import threading

import zstandard

LEVEL = 3


class _Local(threading.local):
    """The library's objects hold state: every thread has its own."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def compress(data: bytes | bytearray | memoryview, level: int = LEVEL) -> bytes:
    """One frame that says its content's length."""
    compressor = _local.compressors.get(level)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(level=level)
        _local.compressors[level] = compressor
    return compressor.compress(data)


def decompress(data: bytes | memoryview, length: int) -> bytes:
    """The content, which must have `length` bytes. Raises ValueError."""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != length or length == 0 or frame.dict_id:
            raise ValueError("its compressed form is of another length than declared")
        raw = _local.decompressor.decompress(data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed ({error})") from None
    if len(raw) != length:
        raise ValueError("its compressed form is of another length than declared")
    return raw
