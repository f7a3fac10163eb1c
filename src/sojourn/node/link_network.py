"""The network of a session over the link: whether connections leave, and connections into it.

Guarantee: a supervisor is only asked for what it said it can do, so that one of an older memory
image, which knows nothing of tunnels, is never broken by the question.
"""

from __future__ import annotations

from sojourn.errors import InvalidRequest, SojournError, Unsupported
from sojourn.node.link_connection import Connection
from sojourn.wire.frames import Feature, Op
from sojourn.wire.guest import Reach

TOKEN_BYTES = 16

_REACHES = {0: Reach.OFF, 1: Reach.PROXY, 2: Reach.TRANSPARENT}


class NetworkCalls(Connection):
    """The part of `Guest` that deals with the network."""

    @property
    def features(self) -> Feature:
        """What the supervisor can do, as of the last attach."""
        return self.hello.features if self.hello is not None else Feature(0)

    async def network(self, on: bool) -> Reach:
        """Let connections out, or no longer. Raises Unsupported."""
        self._require(Feature.TUNNELS)
        reader = await self.call(Op.NETWORK, bytes([on]))
        number = reader.u8()
        try:
            return _REACHES[number]
        except KeyError:
            raise SojournError(f"the supervisor tells of an unknown reach ({number})") from None

    async def dial(self, token: bytes, port: int) -> None:
        """Have a connection to a port inside opened as a tunnel. Raises Conflict,
        QuotaExceeded, Unsupported."""
        if len(token) != TOKEN_BYTES or not 0 < port < 65536:
            raise InvalidRequest(f"a dial needs {TOKEN_BYTES} bytes and a port, not {port}")
        self._require(Feature.TUNNELS)
        await self.call(Op.DIAL, token + port.to_bytes(2, "little"))

    def _require(self, feature: Feature) -> None:
        if feature not in self.features:
            raise Unsupported(
                "the memory of this session is of a version without a network",
                next_step="Resume its files alone: fork or roll back with memory=false.",
            )
