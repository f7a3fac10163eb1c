"""Connections that fail: typed errors, and repeated only where that does no harm."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from sojourn import Interrupted, InvalidRequest, Sojourn, SojournError, Unreachable
from sojourn.client import core
from sojourn.client.streams import JOINED_BYTES, Head
from sojourn.client.transport import Transport, content_of
from sojourn.errors import NodeUnavailable

Serve = Callable[[list[bytes]], "Scripted"]


class Scripted:
    """A server that answers each connection with the next script and closes it."""

    def __init__(self, answers: list[bytes]) -> None:
        self.requests: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                connection.sendall(answer)

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(core, "RETRY_DELAYS", (0.0, 0.0, 0.0))
    made: list[Scripted] = []

    def start(answers: list[bytes]) -> Scripted:
        made.append(Scripted(answers))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def answer(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


HEALTH = answer(b'{"status":"ok","version":"1"}')


def test_a_read_is_repeated(serve: Serve) -> None:
    server = serve([b"", HEALTH[:-5], HEALTH])
    with Sojourn(server.url) as client:
        assert client.health().status == "ok"
    assert len(server.requests) == 3


def test_a_read_is_given_up_after_some_tries(serve: Serve) -> None:
    server = serve([b""] * 10)
    with Sojourn(server.url) as client, pytest.raises(Unreachable):
        client.health()
    assert len(server.requests) == 1 + len(core.RETRY_DELAYS)


def test_a_command_is_not_repeated(serve: Serve) -> None:
    server = serve([b"", b""])
    transport = Transport(core.Address(server.url, "t"))
    with pytest.raises(Unreachable, match="was lost before the answer"):
        transport.send(core.Request(b"POST", "/v1/x", content=b"x"))
    assert len(server.requests) == 1
    transport.close()


def moved(code: str, **details: str) -> bytes:
    body = {"code": code, "message": "m", "next_step": "", "details": details}
    return answer(msgspec.json.encode(body), 503)


def test_what_may_be_repeated_is_when_its_node_is_lost(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MOVED_DELAYS", (0.0, 0.0))
    lost, away = moved("interrupted", node="nod_a"), moved("node_unavailable")
    server = serve([lost, away, answer(b"[]")])
    assert Sojourn(server.url, "token").tokens.list() == []
    assert len(server.requests) == 3
    # Not for ever; not what went under for another reason; not what would be done twice.
    server = serve([away] * 3)
    with pytest.raises(NodeUnavailable):
        Sojourn(server.url, "token").tokens.list()
    assert len(server.requests) == 3
    server = serve([moved("interrupted")])
    with pytest.raises(Interrupted):
        Sojourn(server.url, "token").tokens.list()
    server = serve([lost])
    with pytest.raises(Interrupted):
        Sojourn(server.url, "token").tokens.create("acme")


def test_head_and_body_travel_together(serve: Serve) -> None:
    server = serve([HEALTH])
    transport = Transport(core.Address(server.url, "t"))
    transport.send(core.Request(b"POST", "/v1/x", content=b"the body"))
    assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert server.requests[0].endswith(b"\r\n\r\nthe body")
    assert b"authorization: Bearer t\r\n" in server.requests[0]
    transport.close()


def test_held_bytes_are_never_lost() -> None:
    head = Head()
    assert head.before_write(b"head") == ()
    assert head.before_read() == b"head"
    assert head.before_write(b"head") == ()
    assert head.before_write(b"body") == (b"headbody",)
    assert head.before_write(b"more") == (b"more",)
    assert head.before_read() == b""
    assert head.before_write(b"head") == ()
    large = b"x" * (JOINED_BYTES + 1)
    assert head.before_write(large) == (b"head", large)


def test_a_cut_off_download_is_no_whole_one(serve: Serve) -> None:
    server = serve([b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nhalf"])
    transport = Transport(core.Address(server.url, None))
    with pytest.raises(Interrupted):
        list(transport.content(core.Request(b"GET", "/v1/x")))
    transport.close()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Sojourn(f"http://127.0.0.1:{port}") as client, pytest.raises(Unreachable) as caught:
        client.health()
    assert str(port) in caught.value.message


def test_another_protocol_answers(serve: Serve) -> None:
    server = serve([b"SSH-2.0-x\r\n"] * 4)
    with Sojourn(server.url) as client, pytest.raises(Unreachable):
        client.health()


def test_another_service_answers(serve: Serve) -> None:
    server = serve([answer(b"<html>", 502)])
    with Sojourn(server.url) as client, pytest.raises(SojournError, match="502"):
        client.health()


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", "x"])
def test_impossible_addresses(url: str) -> None:
    with pytest.raises(InvalidRequest):
        Sojourn(url)


def test_contents() -> None:
    assert content_of("\u00e9") == b"\xc3\xa9"
    assert content_of(bytearray(b"x")) == b"x"
    with pytest.raises(SojournError):
        content_of(5)
