"""The frames of a tunnel between a sandbox and the gateway; docs/formats/tunnels.md specifies them.

Guarantee: decoding never allocates more than a frame may hold; what is no frame is a TunnelError.
The other end is inside the sandbox, so nothing it sends is trusted.

A tunnel is one connection to `net.sock`, always opened from inside, and carries one stream of bytes
in each direction. Around a freeze it is parked: DETACH goes both ways, each end keeps what it has
not passed on, and RESUME takes it up on a new connection. A connection whose first frame is DETACH
carries no tunnel: it announces that all tunnels are about to be parked, so that the gateway reads
on also where it had enough, and the last frame of a tunnel with a full socket gets through. It is
answered by DETACH and closed.
"""

from __future__ import annotations

import enum
import struct

HEADER = struct.Struct("<IB3x")  # bytes of the body, type
MAX_BODY = 64 << 10
SOCKET = "net.sock"

OPEN = struct.Struct("<QBHH")  # tunnel, kind, port, bytes of the host (or token) that follow
RESUME = struct.Struct("<QQQ")  # tunnel, bytes of data the guest received, bytes it sent
OPENED = struct.Struct("<Q")  # bytes of data the gateway received; 0 for a new tunnel


class TunnelError(ValueError):
    """The bytes are not a frame of this protocol."""


class Frame(enum.IntEnum):
    """Types of frames."""

    OPEN = 1  # from inside, first
    RESUME = 2  # from inside, first
    OPENED = 3  # the answer to either
    REFUSED = 4  # the answer to either: one byte, a Refusal; the tunnel is over
    DATA = 5
    END = 6  # no more data from this end
    RESET = 7  # the tunnel is over, whatever was under way is lost
    DETACH = 8  # nothing follows from this end on this connection


class Kind(enum.IntEnum):
    """What a tunnel is for."""

    CONNECT = 1  # a program's connection to host (a name or an address) and port
    INBOUND = 2  # the answer to a dial; a token of 16 bytes stands in place of the host
    PROXY = 3  # a program speaks to the HTTP or SOCKS proxy itself


class Refusal(enum.IntEnum):
    """Why there is no tunnel."""

    POLICY = 1
    UNREACHABLE = 2
    REFUSED = 3
    TIMEOUT = 4
    NAME = 5
    QUOTA = 6
    UNKNOWN = 7  # nothing to resume


def frame(kind: Frame, body: bytes = b"") -> bytes:
    """A whole frame. Raises TunnelError when the body is over the limit."""
    if len(body) > MAX_BODY:
        raise TunnelError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    return HEADER.pack(len(body), kind) + body
