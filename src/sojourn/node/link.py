"""`GuestLink`: the node's view of one supervisor, over the socket it connects to.

Guarantee: that of `sojourn.node.guest.Guest`. The link belongs to one event loop.
"""

from __future__ import annotations

from sojourn.errors import SandboxLost
from sojourn.node.guest import Guest
from sojourn.node.link_connection import encode
from sojourn.node.link_files import FileCalls
from sojourn.node.link_network import NetworkCalls
from sojourn.node.link_processes import ProcessCalls
from sojourn.wire import frames
from sojourn.wire.frames import Op
from sojourn.wire.guest import GuestActivity, OpenUnlinked


class GuestLink(ProcessCalls, FileCalls, NetworkCalls):
    """A supervisor reached through `node.sock` in the sandbox's control directory."""

    async def shell(self) -> bytes | None:
        """The session's shell (/bin/bash, else /bin/sh), as of the last attach."""
        hello = self.hello if self.hello is not None else await self.info()
        return hello.shell or None

    @property
    def boot(self) -> bytes:
        """Random bytes chosen when the supervisor started, and anew by each refresh."""
        if self.hello is None:
            raise SandboxLost("the supervisor has not connected yet")
        return self.hello.boot

    async def info(self) -> frames.Hello:
        """What the supervisor says of itself now."""
        self.hello = frames.Hello(await self.call(Op.INFO))
        return self.hello

    async def activity(self) -> GuestActivity:
        """What tells whether something changed in memory."""
        return frames.read_activity(await self.call(Op.ACTIVITY))

    async def unlinked(self, *, maps: bool = False) -> list[OpenUnlinked]:
        """Files in use whose name is gone, outside of memory file systems; with `maps` also those
        that are only mapped."""
        return frames.read_unlinked(await self.call(Op.UNLINKED, bytes([maps])))

    async def sync(self) -> None:
        """Flush file systems inside."""
        await self.call(Op.SYNC)

    async def refresh(self, *, generation: str, hostname: str | None = None) -> None:
        """After a restore: publish the generation inside, reseed, and set the host name where
        the sandbox lets its first process do so."""
        body = encode(
            lambda: frames.text(generation.encode()) + frames.text((hostname or "").encode())
        )
        await self.call(Op.REFRESH, body)


def _is_a_guest(link: GuestLink) -> Guest:
    """Lets the type checker prove that the link implements the whole interface."""
    return link
