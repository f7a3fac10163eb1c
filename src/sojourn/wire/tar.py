"""Trees of files as tar streams (POSIX pax), encoded and decoded without any input or output.

Guarantee: names and link targets are exact bytes, times exact to the nanosecond, and links,
hardlinks, pipes, modes and owners are kept. A decoded stream is bounded in what it can make a
reader hold, and is refused where its names could leave the directory it is unpacked into; that a
name does not pass through a symbolic link is left to the one who writes the files.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

import msgspec

from sojourn.errors import InvalidRequest, PathInvalid, TooLarge

MEDIA_TYPE = "application/x-tar"

BLOCK = 512
MAX_NAME = 4096
MAX_PAX = 1024 * 1024
MAX_ENTRIES = 1_000_000
END = b"\0" * (2 * BLOCK)

_TYPES = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "fifo": tarfile.FIFOTYPE,
    "char": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
}
_NAMES = {kind: name for name, kind in _TYPES.items()} | {
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
}
_EXTENDED = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)
_FACTS = frozenset({b"path", b"linkpath", b"mtime", b"uid", b"gid", b"size"})
_SPARSE = b"GNU.sparse"
_XATTR = b"SCHILY.xattr."
_BILLION = 1_000_000_000


class Entry(msgspec.Struct, frozen=True):
    """One member. `name` is relative, `.` for the tree itself; `target` is a symbolic link's text
    or the name of the earlier member a hardlink stands for; `size` counts a file's bytes."""

    name: bytes
    type: str
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


class EntryEnd(msgspec.Struct, frozen=True):
    """The member that began last is complete."""


Event = Entry | bytes | EntryEnd
"""A decoded stream is, for each member: its Entry, pieces of its content, EntryEnd."""


def padding(size: int) -> bytes:
    """What follows a file's content up to the next block."""
    return b"\0" * (-size % BLOCK)


def encode_entry(entry: Entry) -> bytes:
    """The blocks before a member's content."""
    info = tarfile.TarInfo(entry.name.decode("utf-8", "surrogateescape"))
    info.type = _TYPES[entry.type]
    info.mode = entry.mode
    info.uid, info.gid = entry.uid, entry.gid
    info.size = entry.size if entry.type == "file" else 0
    info.linkname = entry.target.decode("utf-8", "surrogateescape")
    info.devmajor, info.devminor = entry.major, entry.minor
    seconds, rest = divmod(entry.mtime_ns, _BILLION)
    info.mtime = max(seconds, 0)
    if rest or seconds < 0:
        sign, amount = ("-", -entry.mtime_ns) if entry.mtime_ns < 0 else ("", entry.mtime_ns)
        whole, part = divmod(amount, _BILLION)
        info.pax_headers = {"mtime": f"{sign}{whole}.{part:09d}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def clean_name(name: bytes, what: str = "member") -> bytes:
    """A member's name without needless parts, `.` for the tree itself.

    Raises PathInvalid for a name that is absolute, holds `..` or NUL, or is too long."""
    shown = name.decode("utf-8", "replace")
    if name.startswith(b"/"):
        raise PathInvalid(f"the tar's {what} {shown!r} is absolute", member=shown)
    if b"\0" in name or len(name) > MAX_NAME:
        raise PathInvalid(f"the tar's {what} {shown[:100]!r} has an impossible name", member=shown)
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise PathInvalid(f"the tar's {what} {shown!r} leaves the directory", member=shown)
    return b"/".join(parts) or b"."


class Decoder:
    """Turns received bytes, cut anywhere, into events. With `rooted` the stream is a whole root
    tree: absolute names are taken as relative to it. With `xattrs` extended attributes are told."""

    def __init__(self, *, rooted: bool = False, xattrs: bool = False) -> None:
        self._rooted = rooted
        self._xattrs = xattrs
        self._buffer = bytearray()
        self._state = "header"  # header, extended, content, padding, ended
        self._left = 0  # bytes of the present state still to come
        self._pad = 0
        self._extended = b""  # type of the extended header under way
        self._pax: dict[bytes, bytes] = {}
        self._global: dict[bytes, bytes] = {}
        self._entries = 0

    @property
    def complete(self) -> bool:
        """Whether the stream ended where a tar may end."""
        if self._state == "ended":
            return True
        return self._state == "header" and not self._buffer and not self._pax

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes. Raises InvalidRequest, PathInvalid or TooLarge."""
        self._buffer += data
        while self._state != "ended":
            if self._state == "content":
                if not self._buffer:
                    return
                piece = bytes(self._buffer[: self._left])
                del self._buffer[: len(piece)]
                self._left -= len(piece)
                yield piece
                if self._left:
                    return
                self._end_content()
                yield EntryEnd()
            elif self._state == "padding":
                dropped = min(self._left, len(self._buffer))
                del self._buffer[:dropped]
                self._left -= dropped
                if self._left:
                    return
                self._state = "header"
            else:
                wanted = self._left if self._state == "extended" else BLOCK
                if len(self._buffer) < wanted:
                    return
                block = bytes(self._buffer[:wanted])
                del self._buffer[:wanted]
                if self._state == "extended":
                    self._take_extended(block[: wanted - self._pad])
                    self._state = "header"
                    continue
                entry = self._take_header(block)
                if entry is not None:
                    yield entry
                    if self._state == "header":
                        yield EntryEnd()
        self._buffer.clear()

    def _end_content(self) -> None:
        self._state, self._left = ("padding", self._pad) if self._pad else ("header", 0)

    def _take_header(self, block: bytes) -> Entry | None:
        if not any(block):
            self._state = "ended"
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise InvalidRequest(f"the body is not a tar stream: {error}", field="body") from error
        if info.size < 0:
            raise InvalidRequest("the tar holds a negative size", field="body")
        if info.type in _EXTENDED:
            if info.size > MAX_PAX:
                raise TooLarge(f"the tar holds a header of {info.size} bytes", limit=MAX_PAX)
            self._extended = info.type
            self._pad = -info.size % BLOCK
            self._left = info.size + self._pad
            if self._left:
                self._state = "extended"
            return None
        kind = _NAMES.get(info.type)
        if kind is None or _SPARSE in self._pax:
            raise InvalidRequest(
                f"the tar holds a member of a kind that is not taken ({info.type!r})",
                next_step="Make it without sparse files (for GNU tar: without --sparse).",
                field="body",
            )
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise TooLarge(f"the tar holds over {MAX_ENTRIES} members", limit=MAX_ENTRIES)
        entry = self._entry(info, kind)
        if entry.size:
            self._state, self._left, self._pad = "content", entry.size, -entry.size % BLOCK
        return entry

    def _entry(self, info: tarfile.TarInfo, kind: str) -> Entry:
        # An empty value takes a fact back.
        facts = {key: value for key, value in (self._global | self._pax).items() if value}
        self._pax = {}
        name = facts.get(b"path", info.name.encode("utf-8", "surrogateescape"))
        if kind == "file" and name.endswith(b"/"):
            kind = "dir"  # how tars older than POSIX mark directories
        target = facts.get(b"linkpath", info.linkname.encode("utf-8", "surrogateescape"))
        if self._rooted:
            name = name.lstrip(b"/") or b"."
        if kind == "hardlink":
            if self._rooted:
                target = target.lstrip(b"/") or b"."
            target = clean_name(target, "link")
        elif kind == "symlink":
            if not target or b"\0" in target or len(target) > MAX_NAME:
                raise PathInvalid("the tar holds a symbolic link without a usable target")
        else:
            target = b""
        try:
            mtime = (
                _nanoseconds(facts[b"mtime"]) if b"mtime" in facts else int(info.mtime) * _BILLION
            )
            uid = int(facts.get(b"uid", info.uid))
            gid = int(facts.get(b"gid", info.gid))
            size = int(facts.get(b"size", info.size)) if kind == "file" else 0
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"the tar holds a malformed number: {error}", field="body"
            ) from error
        if not (0 <= uid < 2**32 and 0 <= gid < 2**32 and 0 <= size < 2**63):
            raise InvalidRequest("the tar holds a number out of range", field="body")
        if kind != "file" and info.size and kind != "hardlink":
            raise InvalidRequest("the tar holds content where none can be", field="body")
        return Entry(
            clean_name(name),
            kind,
            info.mode & 0o7777,
            uid,
            gid,
            size,
            max(min(mtime, 2**63 - 1), -(2**63)),
            target,
            info.devmajor,
            info.devminor,
            self._attributes(facts),
        )

    def _attributes(self, facts: dict[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
        if not self._xattrs:
            return ()
        return tuple(
            sorted(
                (key[len(_XATTR) :], value)
                for key, value in facts.items()
                if key.startswith(_XATTR)
            )
        )

    def _take_extended(self, payload: bytes) -> None:
        if self._extended == tarfile.GNUTYPE_LONGNAME:
            self._pax[b"path"] = payload.rstrip(b"\0")
        elif self._extended == tarfile.GNUTYPE_LONGLINK:
            self._pax[b"linkpath"] = payload.rstrip(b"\0")
        elif self._extended == tarfile.XGLTYPE:
            self._global |= _records(payload)
        else:
            self._pax |= _records(payload)


def _records(payload: bytes) -> dict[bytes, bytes]:
    """Those records `length key=value newline` of a pax header that are made use of: a stream may
    hold any number of others."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(payload) and payload[at]:
        space = payload.find(b" ", at, at + 20)
        digits = payload[at:space]
        length = int(digits) if space > at and digits.isdigit() else 0
        record = payload[space + 1 : at + length - 1]
        key, equals, value = record.partition(b"=")
        if length < 5 or at + length > len(payload) or payload[at + length - 1] != 10 or not equals:
            raise InvalidRequest("the tar holds a malformed pax header", field="body")
        if key in _FACTS or key.startswith(_XATTR):
            records[key] = value
        elif key.startswith(_SPARSE):
            records[_SPARSE] = b""
        at += length
    return records


def _nanoseconds(text: bytes) -> int:
    """A pax time, decimal seconds, exactly."""
    if len(text) > 64:
        raise ValueError("a time is too long")
    negative = text.startswith(b"-")
    whole, _, part = text.lstrip(b"-").partition(b".")
    if not (whole + part).isdigit():
        raise ValueError("a time is not a number")
    value = int(whole or b"0") * _BILLION + int(part[:9].ljust(9, b"0") or b"0")
    return -value if negative else value
