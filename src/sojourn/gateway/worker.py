"""`python -m sojourn.gateway.worker`: the gateway as a process of its own.

Guarantee: it ends when its server does: with the channel, which is its standard input, and by the
kernel where it cannot look. Nothing a session sends reaches the process that holds sessions.

Standard input is one end of a stream socket pair. The first request is `Start`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys

import uvloop

from sojourn.errors import HostUnfit, InvalidRequest
from sojourn.gateway.control import Control, Request
from sojourn.gateway.gateway import Gateway
from sojourn.gateway.messages import Start
from sojourn.telemetry import logs

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


class _Worker:
    def __init__(self) -> None:
        self._gateway: Gateway | None = None
        self._control: Control | None = None

    async def serve(self, channel: socket.socket) -> None:
        """Until the server is gone."""
        self._control = await Control.open(channel, self._asked)
        try:
            await self._control.serve()
        finally:
            if self._gateway is not None:
                self._gateway.close()

    async def _asked(self, body: Request) -> None:
        if isinstance(body, Start):
            await self._start(body)
        elif self._gateway is None:
            raise InvalidRequest("the gateway was not started")
        else:
            await self._gateway.handle(body)

    async def _start(self, start: Start) -> None:
        if self._gateway is not None:
            raise InvalidRequest("the gateway was started already")
        assert self._control is not None
        try:
            gateway = Gateway(start, self._control)
        except (OSError, ValueError) as error:
            raise HostUnfit(
                f"the gateway cannot start: {error}",
                next_step="Correct what the message names, and start the server again.",
            ) from error
        await gateway.open()
        self._gateway = gateway


def main() -> None:
    """Serve until standard input ends."""
    # Ctrl-C in a terminal goes to the whole group; the server decides when its gateway ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # Values of secrets are in its memory: no core dump, no tracing by others of the same user.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logs.set_up_helper()
    channel = socket.socket(fileno=sys.stdin.fileno())
    uvloop.run(_Worker().serve(channel))
    # Not held up by threads that wait for a name server.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
