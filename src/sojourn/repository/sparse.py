"""Writing restored content: whole, at its place, and with holes where it is zero.

Guarantee: after `write_at` a range of a new file reads as the given bytes, whether they were
written or left out; a short write is carried on or raises, so that nothing is lost in silence on a
full disk. Whoever leaves out the end of a file sets its size.
"""

from __future__ import annotations

import os

PAGE = 4096
_ZERO_PAGE = bytes(PAGE)


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of it at an offset."""
    written = os.pwrite(fd, data, at)
    if written == len(data):
        return
    rest = memoryview(data)
    while written:
        rest = rest[written:]
        at += written
        if not rest:
            return
        written = os.pwrite(fd, rest, at)
    raise OSError(5, "the disk took no more bytes")


def write_at(fd: int, data: bytes, at: int) -> bool:
    """Write into a range that is a hole so far, leaving out whole pages of zeros. True when
    something was left out."""
    size = len(data)
    begin = 0  # of what is not written yet
    place = -at % PAGE
    holes = False
    while place + PAGE <= size:
        if data[place] or data[place : place + PAGE] != _ZERO_PAGE:
            place += PAGE
            continue
        holes = True
        if place > begin:
            write_all(fd, memoryview(data)[begin:place], at + begin)
        place += PAGE
        while data[place : place + PAGE] == _ZERO_PAGE:
            place += PAGE
        begin = place
    if begin == 0:
        write_all(fd, data, at)
    elif begin < size:
        write_all(fd, memoryview(data)[begin:], at + begin)
    return holes
