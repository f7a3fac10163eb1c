"""Numbers of the host's ports that exposed TCP ports listen at.

Guarantee: a number that one exposed port had is not given to another soon, so that whoever still
has the address of a deleted session does not reach someone else's. It is written down before it is
used.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

REMEMBERED = 10_000
_TRIES = 200


def listening(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)
    except BaseException:
        made.close()
        raise
    return made


class HostPorts:
    """Gives out numbers, and remembers them in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._used: dict[int, None] | None = None  # oldest first

    def _read(self) -> dict[int, None]:
        try:
            lines = self._path.read_text("ascii", "replace").split()
        except FileNotFoundError:
            lines = []
        return dict.fromkeys(int(line) for line in lines if line.isdigit())

    def listen(self, host: str) -> socket.socket:
        """Listen at a number that was not used lately. Raises OSError."""
        if self._used is None:
            self._used = self._read()
        rejected: list[socket.socket] = []
        try:
            for _ in range(_TRIES):
                made = listening(host, 0)
                number = made.getsockname()[1]
                if number in self._used:
                    rejected.append(made)  # held, so that it is not given again at once
                    continue
                try:
                    self._remember(number)
                except BaseException:
                    made.close()
                    raise
                return made
        finally:
            for one in rejected:
                one.close()
        raise OSError(errno.EADDRINUSE, "no port is free that was not used lately")

    def _remember(self, number: int) -> None:
        assert self._used is not None
        used = self._used | {number: None}
        if len(used) > REMEMBERED:
            # The older half goes at once, so that the file is written anew but rarely.
            used = dict.fromkeys(list(used)[-REMEMBERED // 2 :])
            fresh = self._path.with_name(f"{self._path.name}.new")
            _write(fresh, "".join(f"{one}\n" for one in used), os.O_TRUNC)
            fresh.replace(self._path)
        else:
            _write(self._path, f"{number}\n", os.O_APPEND)
        self._used = used


def _write(path: Path, text: str, flag: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
