"""What a memory image of gVisor would bring back though it was gone.

Guarantee: no restored program is told of a descriptor that it had removed from an epoll set. The
image itself is never changed: what is restored is a copy of its small part, and the image as it is
where that part cannot be read to its end just as expected.

Two registrations of a set that were found not ready in the same look stay linked, so that a removed
one is saved with one that is left. After the restore the runtime marks every registration it finds
as ready, and tells the program of the removed one at every look as long as the set lives (until
releases of March 2026). A program that knows it by a number spins; one that keeps an address in its
registrations uses memory it has freed. A removed registration without events to wait for is not
marked, so that is what the copy makes of it.

The file is a row of pieces, each with its length; together they are values that say what they are:
types with the names of their fields, then objects by number.
"""

from __future__ import annotations

import bisect
import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

STATE = "checkpoint.img"
_MAGIC = b"gVisorSF"
_DIGEST_SIZE = 32
# Of the part that is read: a session with a few programs has half a MiB of it. To read this much
# takes half a second, which the server's other sessions feel.
_MOST_BYTES = 8 << 20
_MOST_PARTS = 1 << 20  # twice what is in the largest honest one
_MOST_KNOWN = 64
_OBJECTS = 1 << 63  # of a length: it counts objects
# Nearly all pieces are of one byte; a row of these is taken at once.
_SINGLE = re.compile(rb"(?:\x00\x00\x00\x01[\x00-\xff])+")
_KEY = "pkg/sentry/vfs.epollInterestKey"
_REGISTRATION = "pkg/sentry/vfs.epollInterest"

(
    *_PLAIN,
    _NIL,
    _REF,
    _STRING,
    _SLICE,
    _ARRAY,
    _MAP,
    _STRUCT,
    _NO_FIELDS,
    _FIELDS,
    _INTERFACE,
    _COMPLEX_64,
    _COMPLEX_128,
    _TYPE,
) = range(18)
_UINT = 2


class _Row(NamedTuple):
    """Bytes of the stream: where they begin in it and in the file, and how far apart they are."""

    begin: int
    place: int
    stride: int


class _Value(NamedTuple):
    """A struct, a map, a reference: what has parts that are looked at."""

    kind: int
    type: int  # of a struct: the number of its type; of a reference: that of the object
    at: int = 0  # of a struct: where its fields are written
    refers: Sequence[tuple[int, int]] = ()  # of a map: the types of its keys, to which objects


class Findings:
    """What was found in images that were read not long ago: many sandboxes may be restored from one
    at once, and to read it takes tens of milliseconds of a processor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], Future[list[list[int]]]] = {}

    def of(self, file: Path) -> list[list[int]]:
        """`removed_registrations` of a file, which is read once however many ask. Raises what that
        raises, and OSError."""
        found = file.stat()
        if found.st_size > _MOST_BYTES:
            raise ValueError(f"{found.st_size} bytes")
        # What is in the file of an image never changes; another one in its place is another file.
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        with self._lock:
            known = self._known.get(key)
            mine = known is None
            if known is None:
                while len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                known = self._known[key] = Future()
        if mine:
            try:
                known.set_result(removed_registrations(file.read_bytes()))
            except BaseException as error:  # noqa: BLE001 - others wait for it
                with self._lock:
                    self._known.pop(key, None)
                known.set_exception(error)
        return known.result()


def image_to_restore(image: Path, room: Path, findings: Findings) -> Path:
    """The directory to restore from: the image, or one in `room` that differs from it in what must
    not come back. Raises OSError."""
    try:
        places = findings.of(image / STATE)
    except (LookupError, ValueError, RecursionError) as error:
        log.warning("%s is not read to its end (%s) and restored as it is", image / STATE, error)
        return image
    if not places:
        return image
    raw = (image / STATE).read_bytes()
    changed = bytearray(raw)
    for row in places:
        for place in row:
            changed[place] = 0x80  # another group of seven bits follows
        changed[row[-1]] = 0
    room.mkdir(mode=0o700, parents=True)
    for part in image.iterdir():
        if part.name != STATE:
            (room / part.name).symlink_to(part.resolve())
    (room / STATE).touch(mode=0o600)
    (room / STATE).write_bytes(changed)
    log.info("%s: %d removed registrations do not come back", image, len(places))
    return room


def removed_registrations(raw: bytes) -> list[list[int]]:
    """Where in the file the events of each removed registration are written. Raises ValueError,
    LookupError or RecursionError for a file that is not as expected."""
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{len(raw)} bytes")
    stream, rows = _stream(raw)
    reader = _Reader(stream)
    found: list[list[int]] = []
    while reader.at < len(stream):
        for begin, end in reader.removed():
            found.append([_place(rows, at) for at in range(begin, end)])
    return found


def _stream(raw: bytes) -> tuple[bytes, list[_Row]]:
    if not raw.startswith(_MAGIC):
        raise ValueError("not a state file")
    at = len(_MAGIC) + 8
    at += int.from_bytes(raw[len(_MAGIC) : at], "big") + _DIGEST_SIZE
    stream, rows = bytearray(), []
    while at < len(raw):
        if singles := _SINGLE.match(raw, at):
            rows.append(_Row(len(stream), at + 4, 5))
            stream += raw[at + 4 : singles.end() : 5]
            at = singles.end()
            continue
        size = int.from_bytes(raw[at : at + 4], "big")
        rows.append(_Row(len(stream), at + 4, 1))
        stream += raw[at + 4 : at + 4 + size]
        at += 4 + size
    if at != len(raw):
        raise ValueError("a piece is cut short")
    return bytes(stream), rows


def _place(rows: list[_Row], at: int) -> int:
    row = rows[bisect.bisect(rows, at, key=lambda row: row.begin) - 1]
    return row.place + (at - row.begin) * row.stride


class _Reader:
    def __init__(self, stream: bytes) -> None:
        self._stream = stream
        self._parts = 0
        self.at = 0

    def removed(self) -> list[tuple[int, int]]:
        """One graph of objects: from where to where the events of its removed registrations are."""
        count = self._number()
        if not count & _OBJECTS:
            raise ValueError("bytes where objects are expected")
        types: list[tuple[str, list[str]]] = []
        objects: dict[int, _Value] = {}
        left = count & ~_OBJECTS
        while left:
            kind = self._number()
            if kind == _TYPE:
                name = self._text().decode()
                types.append((name, [self._text().decode() for _ in range(self._count())]))
            elif kind == _UINT:
                number = self._number()
                one = self._value(self._number())
                if one is not None and one.kind in (_STRUCT, _MAP):
                    self._counted(1)
                    objects[number] = one
                left -= 1
            else:
                raise ValueError(f"a value of kind {kind} is no object")
        numbers = {name: number for number, (name, _) in enumerate(types, 1)}
        if _REGISTRATION not in numbers:
            return []
        kept = {
            target for one in objects.values() for key, target in one.refers if key == numbers[_KEY]
        }
        events = types[numbers[_REGISTRATION] - 1][1].index("mask")
        found = [
            self._field(one.at, events)
            for number, one in objects.items()
            if one[:2] == (_STRUCT, numbers[_REGISTRATION]) and number not in kept
        ]
        # None at all is written as nothing.
        return [(begin + 1, end) for begin, end in found if self._stream[begin] == _UINT]

    def _field(self, at: int, index: int) -> tuple[int, int]:
        """From where to where a field of a struct is written, with its kind."""
        here, self.at = self.at, at
        if self._number() != _FIELDS:
            if index:
                raise IndexError("a struct has one field")
            self.at = at
        else:
            if index >= self._number():
                raise IndexError("a struct has fewer fields")
            for _ in range(index):
                self._value(self._number())
        begin = self.at
        self._value(self._number())
        end, self.at = self.at, here
        return begin, end

    def _number(self) -> int:
        stream, at = self._stream, self.at
        value = stream[at]
        if value >= 0x80:
            value &= 0x7F
            shift = 7
            while True:
                at += 1
                if shift > 63:
                    raise ValueError("a number of more than 64 bits")
                byte = stream[at]
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
        self.at = at + 1
        return value

    def _count(self) -> int:
        """How many parts follow. Some take no room: a forged file must not keep anybody busy."""
        return self._counted(self._number())

    def _counted(self, count: int) -> int:
        self._parts += count
        if self._parts > _MOST_PARTS:
            raise ValueError("more parts than an image has")
        return count

    def _text(self) -> bytes:
        return self._bytes(self._number())

    def _bytes(self, size: int) -> bytes:
        text = self._stream[self.at : self.at + size]
        if len(text) != size:
            raise ValueError("a text is cut short")
        self.at += size
        return text

    def _type(self) -> None:
        """The description of a type that has no name."""
        kind = self._number()
        if kind == 0:
            self._number()
        elif kind in (1, 3):  # a pointer, a slice
            self._type()
        elif kind == 2:  # an array
            self._number()
            self._type()
        elif kind == 4:  # a map
            self._type()
            self._type()
        elif kind != 5:
            raise ValueError(f"a type of kind {kind}")

    def _reference(self) -> _Value:
        target = self._number()
        steps = self._count()
        for _ in range(steps):
            step = self._number()
            if step & 1:  # negative: the length of a field's name
                self._bytes((step >> 1) + 1)
        if steps:
            self._type()
        return _Value(_REF, target)

    def _value(self, kind: int) -> _Value | None:
        """Past a value; what it is, where that is looked at."""
        if kind < _NIL:
            self._number()
        elif kind == _REF:
            return self._reference()
        elif kind == _STRUCT:
            return self._struct()
        elif kind == _STRING:
            self._text()
        elif kind == _SLICE:
            self._number()
            self._number()
            self._reference()
        elif kind == _ARRAY:
            size = self._count()
            each = self._number() if size else 0
            for _ in range(size):
                self._value(each)
        elif kind == _MAP:
            return self._map()
        elif kind == _INTERFACE:
            self._type()
            self._value(self._number())
        elif kind in (_COMPLEX_64, _COMPLEX_128):
            self._number()
            self._number()
        elif kind not in (_NIL, _NO_FIELDS):
            raise ValueError(f"a value of kind {kind}")
        return None

    def _map(self) -> _Value:
        refers: list[tuple[int, int]] = []
        kinds: list[int] = []
        for _ in range(self._count()):
            pair = []
            for side in range(2):
                if len(kinds) <= side:
                    kinds.append(self._number())
                pair.append(self._value(kinds[side]))
            key, value = pair
            if key is not None and value is not None and (key.kind, value.kind) == (_STRUCT, _REF):
                refers.append((key.type, value.type))
        return _Value(_MAP, 0, refers=refers)

    def _struct(self) -> _Value:
        """The fields of a struct are where they are written, each with its kind."""
        number = self._number()
        at = self.at
        kind = self._number()
        if kind == _FIELDS:
            for _ in range(self._count()):
                self._value(self._number())
        else:
            self._value(kind)
        return _Value(_STRUCT, number, at)
