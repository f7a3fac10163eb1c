"""The gateway: serves the network of all sandboxes that are attached.

Guarantee: an attached sandbox is served by its own policy alone, from the moment its attachment is
answered until it is detached; nothing one sandbox does ends another's tunnels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from sojourn.errors import InvalidRequest, SandboxLost
from sojourn.gateway.authority import Authority, open_authority
from sojourn.gateway.carriers import Carriers
from sojourn.gateway.control import Request
from sojourn.gateway.inbound import Inbound
from sojourn.gateway.leases import AnyLease, Lease, lease_of
from sojourn.gateway.messages import Attach, Detach, Start
from sojourn.gateway.outbound import Outbound
from sojourn.gateway.ports import Ports, serve_ports
from sojourn.gateway.records import Recorder, Server
from sojourn.gateway.resolving import Outside
from sojourn.gateway.scopes import Scope
from sojourn.gateway.tunnels import Tunnel
from sojourn.wire.tunnels import Kind

log = logging.getLogger(__name__)

MOST_TUNNELS = 1024
_BACKLOG = 256


class _Attached:
    """One sandbox: its socket, its tunnels, what holds for it."""

    def __init__(
        self,
        attach: Attach,
        outside: Outside,
        authority: Authority,
        server: Server,
        inbound: Inbound,
        lease: AnyLease,
    ) -> None:
        self.attach = attach
        self._inbound = inbound
        recorder = Recorder(server, attach.session, attach.sandbox, attach.epoch)
        self.scope = Scope(attach.policy, attach.secrets, recorder, outside)
        self._outbound = Outbound(self.scope, authority)
        self._carriers = Carriers(self._opened, MOST_TUNNELS, lease)
        self._listener: asyncio.Server | None = None
        self._inode = -1

    async def listen(self) -> None:
        """Answer at the sandbox's socket."""
        path = Path(self.attach.socket)
        path.unlink(missing_ok=True)
        bound = _bind(path)
        self._inode = path.lstat().st_ino
        self._listener = await asyncio.get_running_loop().create_unix_server(
            self._carriers.protocol, sock=bound, backlog=_BACKLOG
        )

    def cut(self) -> None:
        """Reset what is open; the sandbox stays attached."""
        self._carriers.close()

    def close(self) -> None:
        """End everything of it."""
        if self._listener is not None:
            self._listener.close()
        self._carriers.close()
        self.scope.denials.close()
        with contextlib.suppress(OSError):
            path = Path(self.attach.socket)
            # Another process may listen there by now.
            if path.lstat().st_ino == self._inode:
                path.unlink()

    async def _opened(self, tunnel: Tunnel) -> None:
        if tunnel.kind is not Kind.INBOUND:
            await self._outbound.serve(tunnel)
            return
        await self._inbound.serve(tunnel.host, tunnel)


class Gateway:
    """All attached sandboxes. `server` is told what leaves."""

    def __init__(self, start: Start, server: Server) -> None:
        self.authority = open_authority(Path(start.authority))
        self.inbound = Inbound()
        self._lease = lease_of(start.lease)
        self._watching: asyncio.Task[None] | None = None
        self._outside = Outside(
            namespace=start.namespace,
            nameservers=start.nameservers,
            private=start.private,
            roots=start.roots,
            lease=self._lease,
        )
        self._server = server
        self._attached: dict[str, _Attached] = {}
        self._changing = asyncio.Lock()
        self._ports_channel = start.ports
        self._ports: Ports | None = None

    async def open(self) -> None:
        """Check what it was started with. Raises HostUnfit."""
        await self._outside.check()
        self._ports = serve_ports(self.inbound, self._ports_channel, self._lease)
        if isinstance(self._lease, Lease):
            self._watching = asyncio.create_task(self._lease.watch(self._cut))

    async def handle(self, body: Request) -> None:
        """Do what the server asks for, one after another."""
        async with self._changing:
            if isinstance(body, Attach):
                await self.attach(body)
            elif isinstance(body, Detach):
                self.detach(body.sandbox)
            else:
                raise InvalidRequest(f"{type(body).__name__} is nothing to ask a gateway for")

    async def attach(self, attach: Attach) -> None:
        """Serve a sandbox, or serve it by another policy from now on."""
        known = self._attached.get(attach.sandbox)
        if known is not None and known.attach.socket == attach.socket:
            known.attach = attach
            known.scope.update(attach.policy, attach.secrets)
            return
        if known is not None:
            self.detach(attach.sandbox)
        attached = _Attached(
            attach, self._outside, self.authority, self._server, self.inbound, self._lease
        )
        try:
            await attached.listen()
        except OSError as error:
            attached.close()
            raise SandboxLost(
                f"the sandbox's directory takes no socket: {error.strerror}"
            ) from error
        self._attached[attach.sandbox] = attached

    def detach(self, sandbox: str) -> None:
        """Serve it no more. Idempotent."""
        attached = self._attached.pop(sandbox, None)
        if attached is not None:
            attached.close()

    def _cut(self) -> None:
        log.warning("the node's lease is over: every connection is reset")
        for attached in self._attached.values():
            attached.cut()
        if self._ports is not None:
            self._ports.cut()

    def close(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
        for sandbox in list(self._attached):
            self.detach(sandbox)
        if self._ports is not None:
            self._ports.close()
        self._outside.close()


def _bind(path: Path) -> socket.socket:
    """A socket bound below a directory whose path may be longer than a socket's may be."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(f"/proc/self/fd/{directory}/{path.name}")
        path.chmod(0o600)
    except BaseException:
        bound.close()
        raise
    finally:
        os.close(directory)
    return bound
