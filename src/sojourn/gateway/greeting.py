"""The first message of a TLS connection, read for the name it asks for.

Guarantee: reading stays within the bytes given and their bound; a greeting that could be read in
two ways (two names, a length that does not fit) is refused.
"""

from __future__ import annotations

LARGEST = 64 << 10
_HANDSHAKE = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0


class GreetingRefused(ValueError):
    """The bytes are no greeting that may pass."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise GreetingRefused("a TLS greeting ends within a field")
        self._at += size
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> _Reader:
        return _Reader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(self.left)

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def server_name(data: bytes) -> tuple[bool, bytes | None]:
    """Whether the greeting is whole, and the name it asks for. Raises GreetingRefused."""
    message = bytearray()
    at = 0
    while True:
        if len(data) >= at + 1 and data[at] != _HANDSHAKE:
            raise GreetingRefused("no TLS greeting")
        if len(data) < at + 5:
            return _unfinished(data)
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if data[at + 1] != 3 or not 0 < length <= 16384:
            raise GreetingRefused("no TLS greeting")
        message += data[at + 5 : at + 5 + length]
        if message[:1] and message[0] != _CLIENT_HELLO:
            raise GreetingRefused("TLS begins with no greeting")
        if len(message) >= 4:
            needed = int.from_bytes(message[1:4], "big") + 4
            if needed > LARGEST:
                raise GreetingRefused("a TLS greeting is too large")
            if len(message) >= needed:
                return True, _name(_Reader(bytes(message[4:needed])))
        if len(data) < at + 5 + length:
            return _unfinished(data)
        at += 5 + length


def _unfinished(data: bytes) -> tuple[bool, None]:
    if len(data) > LARGEST:
        raise GreetingRefused("a TLS greeting is too large")
    return False, None


def _name(hello: _Reader) -> bytes | None:
    hello.take(2 + 32)
    hello.block(1)
    hello.block(2)
    hello.block(1)
    if not hello.left:
        return None
    extensions = hello.block(2)
    found: bytes | None = None
    while extensions.left:
        kind = extensions.number(2)
        body = extensions.block(2)
        if kind != _SERVER_NAME:
            continue
        names = body.block(2)
        if found is not None or body.left:
            raise GreetingRefused("a TLS greeting asks for two names")
        if names.number(1) != 0:
            raise GreetingRefused("a TLS greeting asks for no host name")
        found = names.block(2).rest()
        if names.left:
            raise GreetingRefused("a TLS greeting asks for two names")
    return found
