"""The users of a sandbox: who commands run as, whose files are whose, and where paths begin.

Guarantee: the user E2B's programs expect (`user`, number 1000 where that is free, home /home/user)
is there before anything runs as it, in sessions of any origin; an entry that the sandbox already
has is left as it is. Names are read inside the sandbox, so they are what its own programs see.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Iterator

import msgspec

from sojourn.errors import FileConflict, FileMissing, InvalidRequest, NotFound, Unauthenticated
from sojourn.node.guest import Guest

DEFAULT = "user"
_HOME = b"/home/user"
_MAX_ACCOUNTS = 1024 * 1024
_NUMBER = 1000
_REMEMBERED = 1000


class Account(msgspec.Struct, frozen=True):
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


ROOT = Account("root", 0, 0, "/root")
PREPARED = Account(DEFAULT, -1, -1, _HOME.decode())
"""The default user where only its name is asked for: it is there, once a sandbox is prepared."""


class Accounts:
    """The accounts and groups of a sandbox at one moment."""

    def __init__(self, passwd: bytes, group: bytes) -> None:
        self.users: dict[str, Account] = {}
        self._names: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        for fields in _lines(passwd, 6):
            name, _, uid, gid, _, home = fields[:6]
            if _is_number(uid) and _is_number(gid):
                self.users.setdefault(name, Account(name, int(uid), int(gid), home or "/"))
                self._names.setdefault(int(uid), name)
        for fields in _lines(group, 3):
            if _is_number(fields[2]):
                self._groups.setdefault(int(fields[2]), fields[0])

    def user(self, uid: int) -> str:
        """A user's name, else its number."""
        return self._names.get(uid, str(uid))

    def group(self, gid: int) -> str:
        """A group's name, else its number."""
        return self._groups.get(gid, str(gid))

    def find(self, name: str) -> Account:
        """An account. Raises Unauthenticated for one the sandbox does not have."""
        try:
            return self.users[name]
        except KeyError:
            raise Unauthenticated(
                f"the sandbox has no user {name!r}", next_step="Use user or root."
            ) from None

    def free_number(self) -> int:
        """A number that no user and no group has, from 1000 on."""
        taken = self._names.keys() | self._groups.keys()
        return next(number for number in range(_NUMBER, 65000) if number not in taken)


def _is_number(text: str) -> bool:
    # These files are written by whoever is inside.
    return len(text) <= 10 and text.isascii() and text.isdigit()


def _lines(text: bytes, least: int) -> Iterator[list[str]]:
    for line in text.decode("utf-8", "replace").split("\n"):
        fields = line.split(":")
        if len(fields) >= least and fields[0]:
            yield fields


def user_of(authorization: str | None, username: str | None = None) -> str:
    """Who a request is to act as: E2B's clients say it as the user of Basic authorization, without
    a password, or in the query; without one it is `user`. Raises InvalidRequest."""
    if username:
        return username
    if authorization is None or not authorization.lower().startswith("basic "):
        return DEFAULT
    try:
        said = base64.b64decode(authorization[6:].strip(), validate=True).decode()
    except ValueError:
        raise InvalidRequest("the Authorization header is not valid") from None
    return said.partition(":")[0] or DEFAULT


def place(path: str, account: Account) -> bytes:
    """An absolute path: relative ones and `~` begin at the user's home. Raises InvalidRequest."""
    if "\0" in path:
        raise InvalidRequest("the path holds a NUL byte", field="path")
    if path == "~" or path.startswith("~/"):
        path = account.home + path[1:]
    joined = posixpath.join(account.home, path)
    # As the clients' own service does: dots are taken away before any link is looked at.
    cleaned = posixpath.normpath(joined).replace("//", "/")
    return cleaned.encode("utf-8", "surrogateescape")


async def read_whole(guest: Guest, path: bytes) -> bytes:
    """A small file; empty where there is none."""
    held = bytearray()
    try:
        async for chunk in guest.read(path, 0, _MAX_ACCOUNTS):
            held += chunk
    except (FileMissing, FileConflict):
        return b""
    return bytes(held)


class Remembered:
    """Accounts as read last, as long as their files look the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Accounts]] = {}

    async def accounts(self, guest: Guest, sandbox: str) -> Accounts:
        """Who is in the sandbox now."""
        looks = (*await _look(guest, b"/etc/passwd"), *await _look(guest, b"/etc/group"))
        known = self._known.get(sandbox)
        if known is not None and known[0] == looks:
            return known[1]
        found = await accounts(guest)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        # What was changed between the look and the reading looks different the next time.
        self._known[sandbox] = (looks, found)
        return found


async def _look(guest: Guest, path: bytes) -> tuple[object, ...]:
    try:
        stat = await guest.stat(path)
    except NotFound:
        return (None,)
    return (stat.inode, stat.size, stat.mtime_ns)


async def accounts(guest: Guest) -> Accounts:
    """Who is in the sandbox now."""
    return Accounts(await read_whole(guest, b"/etc/passwd"), await read_whole(guest, b"/etc/group"))


async def prepare(guest: Guest) -> None:
    """Have the default user with a home. Idempotent, and right again after a crash in between:
    the home comes last, and without it nothing is taken as done."""
    known = await accounts(guest)
    account = known.users.get(DEFAULT)
    if account is None:
        number = known.free_number()
        account = Account(DEFAULT, number, number, _HOME.decode())
        group = await read_whole(guest, b"/etc/group")
        if not any(line.startswith(b"user:") for line in group.splitlines()):
            await _append(guest, b"/etc/group", group, b"user:x:%d:\n" % number)
        passwd = await read_whole(guest, b"/etc/passwd")
        line = b"user:x:%d:%d::%s:/bin/bash\n" % (number, number, _HOME)
        await _append(guest, b"/etc/passwd", passwd, line)
    home = account.home.encode()
    try:
        await guest.stat(home)
    except NotFound:
        await guest.mkdir(home)
        await guest.chown(home, account.uid, account.gid)


async def _append(guest: Guest, path: bytes, present: bytes, line: bytes) -> None:
    """Add a line, in a file that is there whole at every moment."""
    joined = present if not present or present.endswith(b"\n") else present + b"\n"
    await guest.write_file(path, joined + line, mode=0o644, user="root")
