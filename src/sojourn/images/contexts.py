"""What COPY takes from the directory of a build.

Guarantee: only what lies in the directory is read, whatever links it holds: links are copied as
links, never followed. The digest of what is copied is over names, kinds, modes and contents, so a
step is repeated when one of these changed and not for a time alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sojourn.errors import ContainerfileInvalid
from sojourn.wire.tar import END, Entry, encode_entry, padding

_PIECE = 1 << 18
_IGNORED = (".containerignore", ".dockerignore")
_MAX_MEMBERS = 500_000


class Copy(msgspec.Struct, frozen=True):
    """What one COPY does: unpack `members` (path here, name there) in directory `into`."""

    into: str
    members: list[tuple[Path, str]]
    digest: str
    mode: int | None = None

    def pieces(self) -> Iterator[bytes]:
        """The members as a tar stream."""
        for path, name in self.members:
            facts = path.lstat()
            entry = _entry(path, name, facts, self.mode)
            if entry.type != "file":
                yield encode_entry(entry)
                continue
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                yield encode_entry(msgspec.structs.replace(entry, size=size))
                left = size
                while left and (piece := file.read(min(_PIECE, left))):
                    left -= len(piece)
                    yield piece
                if left:
                    raise ContainerfileInvalid(f"{path} became shorter while it was read")
                yield padding(size)
        yield END


class Context:
    """The directory of a build."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._ignored = self._read_ignored()

    def _read_ignored(self) -> list[re.Pattern[str]]:
        for name in _IGNORED:
            path = self.root / name
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()
                wanted = [line.strip() for line in lines]
                wanted = [line for line in wanted if line and not line.startswith("#")]
                for line in wanted:
                    if line.startswith("!"):
                        raise ContainerfileInvalid(f"{name}: exceptions ({line}) are not supported")
                return [_pattern(line) for line in wanted]
        return []

    def _is_ignored(self, path: Path) -> bool:
        name = path.relative_to(self.root).as_posix()
        return any(one.fullmatch(name) for one in self._ignored)

    def copy(self, line: int, words: list[str], cwd: str, mode: str | None) -> Copy:
        """What `COPY words...` does in a directory. Raises ContainerfileInvalid."""
        *sources, target = words
        place = os.path.normpath(os.path.join(cwd or "/", target))  # noqa: PTH118 - a path there
        found = [one for source in sources for one in self._sources(line, source)]
        many = len(found) > 1 or target.endswith(("/", "/.")) or target in (".", "")
        members: list[tuple[Path, str]] = []
        into = place
        for path in found:
            if path.is_dir() and not path.is_symlink():
                members += self._below(path)
            elif many:
                members.append((path, path.name))
            else:
                into, name = os.path.split(place)
                members.append((path, name))
        if len(members) > _MAX_MEMBERS:
            raise ContainerfileInvalid(
                f"line {line}: COPY takes over {_MAX_MEMBERS} files", line=line
            )
        bits = int(mode, 8) if mode is not None else None
        return Copy(into or "/", members, _digest(members, bits), bits)

    def _sources(self, line: int, source: str) -> list[Path]:
        name = source.lstrip("/") or "."
        found = sorted(self.root.glob(name)) if re.search(r"[*?\[]", name) else [self.root / name]
        kept = []
        for path in found:
            if not path.parent.resolve().is_relative_to(self.root) and path != self.root:
                raise ContainerfileInvalid(
                    f"line {line}: {source!r} leads out of the build's directory", line=line
                )
            if os.path.lexists(path) and (path == self.root or not self._is_ignored(path)):
                kept.append(path)
        if not kept:
            raise ContainerfileInvalid(
                f"line {line}: there is no {source!r} in the build's directory", line=line
            )
        return kept

    def _below(self, top: Path) -> list[tuple[Path, str]]:
        found: list[tuple[Path, str]] = []
        pending = [top]
        while pending:
            directory = pending.pop()
            for path in sorted(directory.iterdir()):
                mode = path.lstat().st_mode
                kept = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
                if not kept or self._is_ignored(path):
                    continue
                found.append((path, path.relative_to(top).as_posix()))
                if stat.S_ISDIR(mode):
                    pending.append(path)
        return sorted(found, key=lambda one: one[1])


def _pattern(text: str) -> re.Pattern[str]:
    """A line of an ignore file, for a path or anything below it."""
    name = text.strip("/")
    out = ""
    at = 0
    while at < len(name):
        if name.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif name.startswith("**", at):
            out, at = out + ".*", at + 2
        elif name[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif name[at] == "?":
            out, at = out + "[^/]", at + 1
        else:
            out, at = out + re.escape(name[at]), at + 1
    return re.compile(f"{out}(?:/.*)?", re.DOTALL)


def _entry(path: Path, name: str, facts: os.stat_result, mode: int | None) -> Entry:
    kind, target = "file", b""
    if stat.S_ISLNK(facts.st_mode):
        kind, target = "symlink", os.fsencode(path.readlink())
    elif stat.S_ISDIR(facts.st_mode):
        kind = "dir"
    bits = stat.S_IMODE(facts.st_mode)
    if mode is not None and kind == "file":
        bits = mode
    return Entry(os.fsencode(name), kind, bits, 0, 0, mtime_ns=facts.st_mtime_ns, target=target)


def _digest(members: list[tuple[Path, str]], mode: int | None) -> str:
    state = hashlib.sha256()
    for path, name in members:
        entry = _entry(path, name, path.lstat(), mode)
        content = b""
        if entry.type == "file":
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        facts = (entry.name, entry.type, entry.mode, entry.target, content)
        state.update(msgspec.msgpack.encode(facts))
    return state.hexdigest()
