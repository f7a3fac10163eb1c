"""What /proc/net/tcp and tcp6 tell of connections that no image of memory may hold.

Guarantee: a socket that is connecting is found, and so is every connection whose program has not
taken it from the queue of a listener yet. The runtime waits for ever when it restores an endpoint
that is half made (SYN sent, SYN received). Only sockets are in the tables: where a queue is full
the client is connected and the other end, half made, is not in them at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

ESTABLISHED, SYN_SENT, SYN_RECEIVED, FIN_WAIT_1, LISTEN = 0x01, 0x02, 0x03, 0x04, 0x0A

_HALF_MADE = (SYN_SENT, SYN_RECEIVED)
# A client may have said all it has to say before anybody listens to it.
_MADE_BY_CLIENT = (ESTABLISHED, FIN_WAIT_1)
_HEX = "([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})"
_LINE = re.compile(rf"\s*\d+:\s+{_HEX}\s+{_HEX}\s+([0-9A-F]{{2}})\s")
_LOOPBACK_6 = "00000000000000000000000001000000"
_MAPPED = "0000000000000000FFFF0000"  # an IPv4 address in an IPv6 one, as the tables write it


class Socket(NamedTuple):
    """A line of the tables; addresses as they are written there."""

    address: str
    port: int
    peer: str
    peer_port: int
    state: int


class Obstacles(NamedTuple):
    """`connecting` is the local port of a socket that is half made; `waiting` how many connections
    wait at a listener's port to be taken; `others` whether there is any socket but listeners."""

    connecting: int | None
    waiting: dict[int, int]
    others: bool

    @property
    def none(self) -> bool:
        """Whether nothing stands in the way."""
        return self.connecting is None and not self.waiting

    @property
    def full(self) -> int | None:
        """The port of a listener whose queue may be full: the least one holds one connection."""
        return next((port for port, count in self.waiting.items() if count > 1), None)


def read_table(text: bytes) -> list[Socket]:
    """The sockets of one table."""
    found = []
    for line in text.decode("ascii", "replace").splitlines()[1:]:
        if told := _LINE.match(line):
            address, port, peer, peer_port, state = told.groups()
            found.append(Socket(address, int(port, 16), peer, int(peer_port, 16), int(state, 16)))
    return found


def _inside(address: str) -> bool:
    plain = address.removeprefix(_MAPPED)
    # The last byte written of an IPv4 address is its first.
    return (len(plain) == 8 and plain.endswith("7F")) or plain == _LOOPBACK_6


def obstacles(sockets: Iterable[Socket]) -> Obstacles:
    """What of these sockets stands in the way of an image of memory."""
    every = list(sockets)
    listening = {one.port for one in every if one.state == LISTEN}
    # Ports alone: the two ends of one connection may write its addresses differently.
    ends = {(one.port, one.peer_port) for one in every if one.state != LISTEN}
    waiting = Counter(
        one.peer_port
        for one in every
        if one.state in _MADE_BY_CLIENT
        and one.peer_port in listening
        and _inside(one.peer)
        and (one.peer_port, one.port) not in ends
    )
    return Obstacles(
        connecting=next((one.port for one in every if one.state in _HALF_MADE), None),
        waiting=dict(waiting),
        others=any(one.peer_port for one in every if one.state != LISTEN),
    )
