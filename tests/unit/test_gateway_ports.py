"""Exposed ports in the gateway, over real sockets: access, HTTP, WebSocket, TCP, bounds."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

import h11
import pytest

from sojourn.errors import WrongState
from sojourn.gateway import port_http, ports
from sojourn.model.ports import PortKind
from support.port_rig import SESSION, TOKEN, PortRig, ask, port_rig

PATH = f"/s/{SESSION}/8000"
HOST = f"8000-{SESSION.replace('_', '-')}.localhost"
ACCESS = f"Authorization: Bearer {TOKEN}\r\n"


async def echo_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request with its head as the body."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(head), head))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def head(
    method: str = "GET", target: str = f"{PATH}/", host: str = "127.0.0.1", more: str = ACCESS
) -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def closing(**facts: str) -> bytes:
    facts["more"] = facts.get("more", ACCESS) + "Connection: close\r\n"
    return head(**facts)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def run(work) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        async with port_rig() as rig:
            async with asyncio.timeout(60):
                await work(rig)

    asyncio.run(main())


def test_by_path_and_by_host() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        answer = await ask(port, closing(target=f"{PATH}/a?b=c"))
        assert status(answer) == 200 and b"GET /a?b=c HTTP/1.1\r\n" in answer
        assert b"x-forwarded-prefix: " + PATH.encode() in answer.lower()
        answer = await ask(port, closing(host=f"{HOST}:{port}", target="/a"))
        assert status(answer) == 200 and f"host: {HOST}:{port}\r\n".encode() in answer.lower()
        assert TOKEN.encode() not in answer

    run(work)


def test_what_is_not_there_and_what_is_not_yours_look_the_same() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        wrong = ACCESS.replace(TOKEN, "wrong")
        other = f"/s/{SESSION[:-1]}z/8000/"
        answers = {
            await ask(port, closing(target=target, more=more))
            for target, more in (
                (f"{PATH}/", ""),
                (f"{PATH}/", wrong),
                (f"{PATH}/?sojourn_token=x", ""),
                (f"/s/{SESSION}/8001/", ACCESS),
                (other, ACCESS),
                ("/", ACCESS),
                ("/v1/sessions", ACCESS),
            )
        }
        assert len(answers) == 1 and status(answers.pop()) == 404
        assert rig.dials == 0

    run(work)


def test_a_public_port_needs_nothing_and_passes_authorization_on() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head, public=True)
        answer = await ask(port, closing(more="Authorization: Bearer own\r\n"))
        assert status(answer) == 200 and b"Bearer own" in answer

    run(work)


def test_a_browser_gets_a_cookie_and_an_address_without_the_token() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        page = {"host": HOST, "target": f"/\\/x/?a=1&sojourn_token={TOKEN}"}
        answer = await ask(port, closing(**page, more="Sec-Fetch-Mode: navigate\r\n"))
        assert status(answer) == 303
        assert b"location: /x/?a=1\r\n" in answer.lower()  # never another host
        cookie = f"sojourn_token={TOKEN}"
        assert f"set-cookie: {cookie}; path=/; httponly; samesite=lax".encode() in answer.replace(
            b"Set-Cookie", b"set-cookie"
        ).lower().replace(cookie.lower().encode(), cookie.encode())
        answer = await ask(port, closing(host=HOST, target="/", more=f"Cookie: {cookie}\r\n"))
        assert status(answer) == 200 and TOKEN.encode() not in answer
        answer = await ask(port, closing(**page, more=""))  # a program
        assert status(answer) == 200 and b"set-cookie" in answer.lower()

    run(work)


def test_one_connection_serves_many_requests() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(5):
            writer.write(head(target=f"{PATH}/{number}"))
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert f"GET /{number} ".encode() in await reader.readexactly(length)
        assert rig.dials == 1
        writer.close()

    run(work)


def test_requests_sent_at_once_are_answered_in_order() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        asked = b"".join(head(target=f"{PATH}/{number}") for number in range(10))
        answer = await ask(port, asked + closing(target=f"{PATH}/last"))
        order = [answer.index(f"GET /{number} ".encode()) for number in range(10)]
        assert order == sorted(order) and b"GET /last " in answer

    run(work)


def test_a_kept_connection_that_the_program_closed_is_made_anew() -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()  # without having said so

    async def work(rig: PortRig) -> None:
        port = await rig.expose(one)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(head())
            answer = await reader.readuntil(b"ok")
            assert status(answer) == 200
            await asyncio.sleep(0.02)
        assert rig.dials == 3
        writer.close()

    run(work)


async def digest_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends the body back as it comes."""
    connection = h11.Connection(h11.SERVER)
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    go = h11.InformationalResponse(status_code=100, headers=[])
                    writer.write(connection.send(go) or b"")
                connection.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Request):
                writer.write(connection.send(h11.Response(status_code=200, headers=[])) or b"")
            elif isinstance(event, h11.Data):
                writer.write(connection.send(h11.Data(data=bytes(event.data))) or b"")
                await writer.drain()
            elif isinstance(event, h11.EndOfMessage):
                writer.write(connection.send(event) or b"")
                break
            else:
                break
    except (ConnectionError, h11.RemoteProtocolError):
        pass  # the test looks at what came back
    writer.close()


@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_body_goes_there_and_back_exactly(chunked: bool) -> None:
    data = os.urandom(12 << 20)

    async def work(rig: PortRig) -> None:
        port = await rig.expose(digest_body)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = h11.Connection(h11.CLIENT)
        size = ("transfer-encoding", "chunked") if chunked else ("content-length", str(len(data)))
        request = h11.Request(
            method="POST",
            target=f"{PATH}/",
            headers=[
                ("host", "x"),
                ("authorization", f"Bearer {TOKEN}"),
                ("expect", "100-continue"),
                size,
            ],
        )
        writer.write(client.send(request) or b"")

        async def send() -> None:
            for at in range(0, len(data), 100_000):
                writer.write(client.send(h11.Data(data=data[at : at + 100_000])) or b"")
                await writer.drain()
            writer.write(client.send(h11.EndOfMessage()) or b"")

        sending = asyncio.create_task(send())
        back = hashlib.sha256()
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                client.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Data):
                back.update(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        await sending
        assert back.digest() == hashlib.sha256(data).digest()
        writer.close()

    run(work)


def test_an_answer_before_the_end_of_the_body() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 4\r\n\r\nlong")

    async def work(rig: PortRig) -> None:
        port = await rig.expose(refuse)
        start = head(method="POST", more=ACCESS + "Content-Length: 1000000\r\n")
        answer = await ask(port, start + b"x" * 1000)
        assert status(answer) == 413 and answer.endswith(b"long")

    run(work)


def test_head_and_answers_without_a_body() -> None:
    async def work(rig: PortRig) -> None:
        async def program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            if asked.startswith(b"HEAD"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        port = await rig.expose(program)
        answer = await ask(port, closing(method="HEAD"))
        assert status(answer) == 200 and b"content-length: 5000" in answer.lower()
        assert answer.endswith(b"\r\n\r\n")
        assert status(await ask(port, closing(method="DELETE"))) == 204

    run(work)


def test_events_come_as_they_are_sent() -> None:
    go = asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await go.wait()
        writer.write(b"data: 2\n\n")
        writer.close()

    async def work(rig: PortRig) -> None:
        port = await rig.expose(events)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head())
        await reader.readuntil(b"data: 1\n\n")
        go.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"data: 2\n\n" in rest
        writer.close()

    run(work)


def test_a_broken_answer_is_no_whole_one() -> None:
    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def work(rig: PortRig) -> None:
        port = await rig.expose(breaking)
        answer = await ask(port, head())
        assert b"hello" in answer and b"0\r\n\r\n" not in answer

    run(work)


async def socket_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Switches protocols, then sends all bytes back."""
    asked = await reader.readuntil(b"\r\n\r\n")
    assert b"upgrade: websocket" in asked.lower()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Accept: x\r\n\r\nearly"
    )
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_a_switch_of_protocols_passes_bytes() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(socket_echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        upgrade = ACCESS + "Connection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(head(more=upgrade) + b"\x81\x02at")
        answer = await reader.readuntil(b"\r\n\r\n")
        assert status(answer) == 101 and b"sec-websocket-accept: x" in answer.lower()
        back = b""
        while len(back) < len(b"early\x81\x02at"):
            back += await reader.read(100)
        assert back == b"early\x81\x02at"
        writer.write(b"\x00" * 300_000)
        assert await reader.readexactly(300_000) == b"\x00" * 300_000
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    run(work)


def test_an_unasked_switch_is_refused() -> None:
    async def work(rig: PortRig) -> None:
        async def program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: y\r\n\r\n")

        port = await rig.expose(program)
        assert status(await ask(port, head())) == 502

    run(work)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX y: 1\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        head(more=f"X: {'a' * 70_000}\r\n"),
    ],
)
def test_what_is_no_request_is_answered_and_ends(request_bytes: bytes) -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head, public=True)
        answer = await ask(port, request_bytes)
        assert 400 <= status(answer) < 502 and b'"code":"invalid_request"' in answer
        assert rig.dials == 0

    run(work)


def test_no_second_request_hides_in_a_body() -> None:
    seen: list[bytes] = []

    async def program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.append(data)
            if b"\r\n\r\n" in b"".join(seen):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def work(rig: PortRig) -> None:
        port = await rig.expose(program, public=True)
        inner = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
        asked = (
            f"POST {PATH}/ HTTP/1.1\r\nHost: a\r\nContent-Length: {len(inner) + 5}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ).encode()
        await ask(port, asked + inner, until=b"\r\n\r\n")
        await asyncio.sleep(0.05)
        assert b"/hidden" not in b"".join(seen)

    run(work)


def test_a_refusal_to_wake_is_told() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)

        async def asleep() -> None:
            raise WrongState("the session sleeps", next_step="Resume it.")

        rig.before = asleep
        answer = await ask(port, closing())
        assert status(answer) == 503
        assert b"the session sleeps" in answer and b"Resume it." in answer

    run(work)


def test_slow_heads_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_http, "HEAD_SECONDS", 0.5)

    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 20:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.1)
                if reader.at_eof():
                    raise ConnectionError
        assert time.monotonic() - began < 10
        writer.close()

    run(work)


def test_silent_connections_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAX_CLIENTS", 20)

    async def work(rig: PortRig) -> None:
        port = await rig.expose(echo_head)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await asyncio.sleep(0.05)
        assert status(await ask(port, closing())) == 200
        for _, writer in silent:
            writer.close()

    run(work)


def test_withdrawn_ports_end_what_is_under_way() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(socket_echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(more=ACCESS + "Connection: Upgrade\r\nUpgrade: websocket\r\n"))
        await reader.readuntil(b"early")
        rig.withdraw()
        with pytest.raises(ConnectionError):
            if not await reader.read():
                raise ConnectionError
        assert status(await ask(port, closing())) == 404
        writer.close()

    run(work)


def test_what_moves_is_told_and_what_rests_too() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.3)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def work(rig: PortRig) -> None:
        port = await rig.expose(slow)
        await ask(port, closing())
        # A request that waits for its answer is something that goes on.
        assert sum(bool(one.ids) for one in rig.moved) >= 2
        for _ in range(40):
            if rig.moved[-1].quiet:
                break
            await asyncio.sleep(0.1)
        assert rig.moved[-1].quiet == [f"{SESSION}:8000"]

    run(work)


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read(-1)  # to the end: half-closed connections stay so
    writer.write(data.upper())
    writer.close()


def test_tcp_passes_bytes_and_ends() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(upper, public=True, kind=PortKind.TCP)
        assert await ask(port, b"hello" * 50_000, end=True) == b"HELLO" * 50_000

    run(work)


def test_tcp_answers_its_sources_alone() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(upper, public=True, kind=PortKind.TCP, sources=["203.0.113.0/24"])
        with pytest.raises(ConnectionError):
            if await ask(port, b"hello", end=True) == b"":
                raise ConnectionError
        assert rig.dials == 0

    run(work)


def test_a_dial_that_is_given_up_is_told() -> None:
    async def work(rig: PortRig) -> None:
        given_up = asyncio.Event()
        told = rig._told

        def watch(message: object, descriptors: list[int]) -> None:
            if type(message).__name__ == "GiveUp":
                given_up.set()
            told(message, descriptors)  # type: ignore[arg-type]

        rig.channel._received = watch  # type: ignore[assignment]
        port = await rig.expose(echo_head)
        waits = asyncio.Event()

        async def never() -> None:
            waits.set()
            await asyncio.sleep(60)

        rig.before = never
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head())
        await waits.wait()
        rig.withdraw()
        async with asyncio.timeout(10):
            await given_up.wait()
        writer.close()

    run(work)


def test_a_port_that_is_told_again_goes_on() -> None:
    async def work(rig: PortRig) -> None:
        port = await rig.expose(socket_echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(more=ACCESS + "Connection: Upgrade\r\nUpgrade: websocket\r\n"))
        await reader.readuntil(b"early")
        exposed = rig.ports.find(SESSION, 8000)
        assert exposed is not None
        rig.channel.send(exposed.told)
        await asyncio.sleep(0.05)
        assert rig.ports.find(SESSION, 8000) is exposed and len(exposed.clients) == 1
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        writer.close()

    run(work)
