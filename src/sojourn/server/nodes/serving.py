"""A node, from its settings to its end.

Guarantee: it serves servers alone, over mutual TLS, and believes them who asks. A node that was
fenced ends its sandboxes and starts anew under a new incarnation, in the same process. A clean stop
leaves running sandboxes to the next start, as each session's policy says: started again within the
lease it goes on with them; later they stand still, and then the sessions go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sojourn.errors import InvalidRequest, SojournError
from sojourn.model.nodes import Resources
from sojourn.server.app import ApiProtocol, make_server
from sojourn.server.cluster import joining, pki, scheduler
from sojourn.server.cluster.identity import Identity
from sojourn.server.e2b.ids import load_key
from sojourn.server.e2b.settings import Settings
from sojourn.server.gateways import EgressSettings
from sojourn.server.health_listener import health_listener
from sojourn.server.listening import listen
from sojourn.server.nodes.identity import NodeSettings
from sojourn.server.nodes.lease import LEASE_SECONDS
from sojourn.server.nodes.routes import NodeApp
from sojourn.server.nodes.tunnels import Tunnels
from sojourn.server.port_settings import PortSettings
from sojourn.server.replication import StoreSettings
from sojourn.server.service_factory import open_service
from sojourn.server.sessions import Sessions

log = logging.getLogger(__name__)

_RENEW_SECONDS = 6 * 3600.0


class RunSettings(msgspec.Struct, frozen=True):
    """How a node runs. `identity` is what it was given when it joined. `listen` is HOST:PORT where
    servers reach it, `address` the same as they see it, where that is another. Without `tls` it
    believes whoever connects: for tests on one machine."""

    identity: Identity
    data: Path
    listen: str
    address: str | None = None
    lease: float = LEASE_SECONDS
    capacity: Resources | None = None
    taints: list[str] = []
    overcommit: scheduler.Settings = scheduler.Settings()
    egress: EgressSettings = EgressSettings()
    e2b: Settings = Settings()
    cache_bytes: int | None = None
    collect_every: float = 6 * 3600.0
    health: str | None = None
    tls: bool = True

    def __repr__(self) -> str:
        return f"RunSettings({self.identity.node})"


def run_node(settings: RunSettings) -> None:
    """Serve in this process until SIGTERM or SIGINT, saying `ready ADDRESS` on standard output."""
    import uvloop

    def ready(address: str) -> None:
        sys.stdout.write(f"ready {address}\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_node(settings, ready))


async def serve_node(settings: RunSettings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called with the node's address when servers may
    ask, each time it has started."""
    found, address = _listen(settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(found.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
            stack.callback(loop.remove_signal_handler, number)
        context = pki.node_context(settings.identity.credentials) if settings.tls else None
        if context is not None:
            renewing = asyncio.create_task(_renew(settings, context), name="node certificate")
            stack.push_async_callback(_cancel, renewing)
        serving: list[bool] = [False]
        await stack.enter_async_context(health_listener(settings.health, lambda: serving[0]))
        while not stopping.is_set():
            async with _service(settings, address) as service:
                serving[0] = True
                await _serve(settings, service, found, context, stopping, lambda: ready(address))
                serving[0] = False
            if not stopping.is_set():
                log.warning("the node starts anew")


async def _renew(settings: RunSettings, context: ssl.SSLContext) -> None:
    """Have the node's certificate renewed long before it ends; connections of before go on."""
    identity = settings.identity
    while True:
        try:
            fresh = await joining.renewed(settings.data, identity)
        except SojournError as error:
            log.warning("the node's certificate is not renewed yet: %s", error)
        else:
            if fresh is not identity:
                pki.load_credentials(context, fresh.credentials)
                identity = fresh
                log.info("the node has a new certificate")
        await asyncio.sleep(_RENEW_SECONDS)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _listen(settings: RunSettings) -> tuple[socket.socket, str]:
    found, url = listen(settings.listen)
    address = settings.address or url.removeprefix("http://")
    if address.rpartition(":")[0] in ("0.0.0.0", "[::]"):
        found.close()
        raise InvalidRequest(
            f"servers cannot reach a node at {address}",
            next_step="Say at which HOST:PORT they do (--address).",
            field="address",
        )
    return found, address


def _service(
    settings: RunSettings, address: str
) -> contextlib.AbstractAsyncContextManager[Sessions]:
    identity = settings.identity
    return open_service(
        settings.data,
        StoreSettings(
            url=identity.store,
            secret=identity.store_key,
            cache_bytes=settings.cache_bytes,
            collect_every=settings.collect_every,
        ),
        settings.egress,
        # Servers carry what comes from outside.
        PortSettings(address="127.0.0.1"),
        identity.database,
        NodeSettings(
            id=identity.node,
            address=address,
            lease=settings.lease,
            capacity=settings.capacity,
            labels=identity.labels,
            taints=settings.taints,
            overcommit=settings.overcommit,
        ),
    )


async def _serve(
    settings: RunSettings,
    service: Sessions,
    found: socket.socket,
    context: ssl.SSLContext | None,
    stopping: asyncio.Event,
    ready: Callable[[], None],
) -> None:
    """One incarnation, until it is to stop or was fenced."""
    node = service.node
    assert node is not None
    tunnels = Tunnels(service.ports.listener)
    server = make_server(
        service,
        ready=ready,
        e2b_key=load_key(settings.data),
        e2b=settings.e2b,
        around=lambda app: NodeApp(app, node),
        context=context,
        protocol=_protocol(tunnels),
    )
    serving = asyncio.create_task(server.serve(sockets=[found.dup()]), name="serve")
    ends = [
        asyncio.create_task(stopping.wait()),
        asyncio.create_task(node.identity.gone.wait()),
    ]
    try:
        await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
        server.handle_exit(signal.SIGTERM, None)
        await serving
    finally:
        for end in ends:
            end.cancel()
        await tunnels.close()
    if stopping.is_set() and not node.identity.gone.is_set():
        await node.leave()


def _protocol(tunnels: Tunnels) -> type[ApiProtocol]:
    """Requests, or the bytes of an exposed port, as the connection says when it is made."""

    class NodeProtocol(ApiProtocol):
        """What a node speaks."""

        def connection_made(self, transport: Any) -> None:
            secured = transport.get_extra_info("ssl_object")
            if secured is not None and secured.selected_alpn_protocol() == pki.TUNNEL_PROTOCOL:
                tunnels.accept(transport)
                return
            super().connection_made(transport)

    return NodeProtocol
