"""What a server pays to ask a node: this transport and others, one at a time and 50 at once.

The node is a process of its own that reads a command's request and answers as a short command
does; the other side is the event loop of a server. Beside times, processor time of the asking side
is told, which load of the machine does not change. Nodes speak no HTTP/2 (their HTTP server does
not): for it the framing alone of one exchange is measured, in memory, beside that of HTTP/1.1.

    python -m bench.transport
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import ssl
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import httpcore
import uvloop

from sojourn.model.nodes import Node, NodeState, Resources
from sojourn.server.answers import Shutdown
from sojourn.server.app import serve_app
from sojourn.server.cluster import pki
from sojourn.server.cluster.pki import ClusterAuthority, Credentials
from sojourn.server.cluster.upstream import Upstream
from sojourn.server.listening import listen

ROUNDS = int(os.environ.get("SOJOURN_BENCH_ROUNDS", "1"))
ALONE, AT_ONCE, CLIENTS = 300 * ROUNDS, 10 * ROUNDS, 50
NODE = "nod_000000000000000000000000"
BODY = b'{"argv":["true"],"timeout":null,"stdin":null}'
ANSWER = b"x" * 300
HEADERS = [
    (b"host", b"node"),
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(BODY)),
    (b"sojourn-principal", b"e" * 120),
]
TARGET = b"/v1/sessions/ses_000000000000000000000000/exec"
Ask = Callable[[], Awaitable[None]]


async def _node(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for answer in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{answer}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"300")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER, "more_body": False})


def _serve(credentials: Credentials, told: Any) -> None:
    async def main() -> None:
        plain, plain_url = listen("127.0.0.1:0")
        secure, secure_url = listen("127.0.0.1:0")
        servers = [
            serve_app(_node, Shutdown()).serve(sockets=[plain]),
            serve_app(_node, Shutdown(), context=pki.node_context(credentials)).serve(
                sockets=[secure]
            ),
        ]
        told.send((int(plain_url.rpartition(":")[2]), int(secure_url.rpartition(":")[2])))
        await asyncio.gather(*servers)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _pool(url: httpcore.URL, context: ssl.SSLContext | None) -> tuple[Ask, Any]:
    pool = httpcore.AsyncConnectionPool(
        ssl_context=context, max_connections=200, max_keepalive_connections=200
    )
    extensions = {"sni_hostname": pki.node_host(NODE)}

    async def ask() -> None:
        answer = await pool.handle_async_request(
            httpcore.Request(
                b"POST", url, headers=HEADERS, content=BODY, extensions=dict(extensions)
            )
        )
        assert await answer.aread() == ANSWER
        await answer.aclose()

    return ask, pool.aclose


def _ours(port: int, context: ssl.SSLContext) -> tuple[Ask, Any]:
    upstream = Upstream(context)
    node = Node(
        NODE, "n", f"127.0.0.1:{port}", NodeState.READY, 1, 60.0, False, {}, [], Resources(),
        Resources(), None, [], "", 0.0, 0.0,
    )  # fmt: skip

    async def ask() -> None:
        answer = await upstream.send(node, b"POST", TARGET, HEADERS, BODY)
        assert await answer.read(1000) == ANSWER
        await answer.close()

    async def close() -> None:
        upstream.close()

    return ask, close


async def _timed(ask: Ask) -> tuple[list[float], float]:
    """Milliseconds of each, and microseconds of processor time for one."""
    taken = []
    for _ in range(50):
        await ask()
    spent = time.process_time()
    for _ in range(ALONE):
        began = time.perf_counter()
        await ask()
        taken.append((time.perf_counter() - began) * 1000)
    return taken, (time.process_time() - spent) / ALONE * 1e6


async def _at_once(ask: Ask) -> tuple[list[float], float]:
    taken: list[float] = []

    async def client(count: int, keep: bool) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await ask()
            if keep:
                taken.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(client(2, False) for _ in range(CLIENTS)))
    spent = time.process_time()
    await asyncio.gather(*(client(AT_ONCE, True) for _ in range(CLIENTS)))
    return taken, (time.process_time() - spent) / len(taken) * 1e6


def _framing_http1() -> None:
    client, server = h11.Connection(h11.CLIENT), h11.Connection(h11.SERVER)
    sent = client.send(h11.Request(method=b"POST", target=TARGET, headers=HEADERS)) or b""
    sent += client.send(h11.Data(data=BODY)) or b""
    client.send(h11.EndOfMessage())
    server.receive_data(sent)
    while not isinstance(server.next_event(), h11.EndOfMessage):
        pass
    answer = [(b"content-length", b"300")]
    sent = server.send(h11.Response(status_code=200, headers=answer)) or b""
    sent += server.send(h11.Data(data=ANSWER)) or b""
    server.send(h11.EndOfMessage())
    client.receive_data(sent)
    while not isinstance(client.next_event(), h11.EndOfMessage):
        pass


def _framing_http2() -> Callable[[], None] | None:
    try:
        from h2.config import H2Configuration
        from h2.connection import H2Connection
        from h2.events import RequestReceived, StreamEnded
    except ImportError:
        return None
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    server = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    asked = [
        (b":method", b"POST"),
        (b":path", TARGET),
        (b":scheme", b"https"),
        (b":authority", b"node"),
        *HEADERS[1:],
    ]

    def exchange() -> None:
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, asked)
        client.send_data(stream, BODY, end_stream=True)
        for event in server.receive_data(client.data_to_send()):
            if isinstance(event, RequestReceived):
                server.acknowledge_received_data(len(BODY), stream)
        server.send_headers(stream, [(b":status", b"200"), (b"content-length", b"300")])
        server.send_data(stream, ANSWER, end_stream=True)
        events = client.receive_data(server.data_to_send())
        client.acknowledge_received_data(len(ANSWER), stream)
        server.receive_data(client.data_to_send())
        assert any(isinstance(event, StreamEnded) for event in events)

    return exchange


def _processor(work: Callable[[], None], count: int = 3000) -> float:
    for _ in range(100):
        work()
    began = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began) / count * 1e6


async def _measure(plain: int, secure: int, authority: ClusterAuthority) -> None:
    context = pki.upstream_context(authority.server_credentials("srv"))
    variants = {
        "plain HTTP/1.1, httpcore's pool": _pool(
            httpcore.URL(scheme=b"http", host=b"127.0.0.1", port=plain, target=TARGET), None
        ),
        "mutual TLS, httpcore's pool": _pool(
            httpcore.URL(scheme=b"https", host=b"127.0.0.1", port=secure, target=TARGET), context
        ),
        "mutual TLS, own pool (used)": _ours(secure, context),
    }
    print("| transport | alone, median | processor | 50 at once, median | p99 | processor |")
    print("|---|---|---|---|---|---|")
    for name, (ask, close) in variants.items():
        alone, cost = await _timed(ask)
        crowd, crowd_cost = await _at_once(ask)
        await close()
        p99 = sorted(crowd)[int(len(crowd) * 0.99)]
        print(
            f"| {name} | {statistics.median(alone):.2f} ms | {cost:.0f} µs |"
            f" {statistics.median(crowd):.1f} ms | {p99:.1f} ms | {crowd_cost:.0f} µs |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    authority = ClusterAuthority.make()
    key, request = pki.make_request()
    credentials = Credentials(key, authority.sign_node(request, NODE), authority.certificate)
    told, tells = multiprocessing.Pipe(duplex=False)
    node = multiprocessing.Process(target=_serve, args=(credentials, tells), daemon=True)
    node.start()
    try:
        plain, secure = told.recv()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(plain, secure, authority))
    finally:
        node.kill()
        node.join()
    print(
        f"\nframing of one exchange, both sides: HTTP/1.1 {_processor(_framing_http1):.0f} µs",
        end="",
    )
    http2 = _framing_http2()
    print("" if http2 is None else f", HTTP/2 {_processor(http2):.0f} µs")


if __name__ == "__main__":
    main()
