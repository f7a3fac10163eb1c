"""Listening sockets by an operator's words.

Guarantee: an address that cannot be had is refused before anything is opened, with what to do.
"""

from __future__ import annotations

import socket

from sojourn.errors import InvalidRequest


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket for HOST:PORT (port 0 takes a free one), and its URL."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(
            f"cannot listen on {address!r}: it is not HOST:PORT",
            next_step="Give an address of this machine and a port, such as 127.0.0.1:7070.",
            field="listen",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, int(port)))
    except OSError as error:
        found.close()
        raise InvalidRequest(
            f"cannot listen on {address}: {error.strerror or error}",
            next_step="Choose another address, or port 0 for a free one.",
            field="listen",
        ) from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return found, f"http://{shown}:{found.getsockname()[1]}"
