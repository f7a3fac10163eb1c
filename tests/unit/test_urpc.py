"""The client of the control socket, against sockets that answer in every bad way."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sojourn.node.isolation import urpc

Handler = Callable[[socket.socket, dict[str, object], list[int]], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Handler], Path]]:
    listener = socket.socket(socket.AF_UNIX)
    path = tmp_path / "control.sock"
    threads = []

    def start(handler: Handler) -> Path:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                data, files, _, _ = socket.recv_fds(link, 65536, 8)
                while True:
                    try:
                        request = json.loads(data)
                        break
                    except ValueError:
                        data += link.recv(65536)
                handler(link, request, files)
                for file in files:
                    os.close(file)

        threads.append(threading.Thread(target=answer))
        threads[0].start()
        return path

    yield start
    for thread in threads:
        thread.join(5)
    listener.close()


def test_result_is_returned(serve: Callable[[Handler], Path]) -> None:
    seen = []

    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        seen.append(request)
        link.sendall(b'{"success":true,"err":"","result":{"a":[1,"}"]}}')

    assert urpc.call(serve(handler), "m.F", {"x": 1}) == {"a": [1, "}"]}
    assert seen == [{"method": "m.F", "arg": {"x": 1}}]


def test_answer_in_pieces(serve: Callable[[Handler], Path]) -> None:
    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        for byte in b'{"success":true,"result":{"n":{"m":"}"}}}':
            link.sendall(bytes([byte]))

    assert urpc.call(serve(handler), "m.F") == {"n": {"m": "}"}}


def test_files_arrive(serve: Callable[[Handler], Path], tmp_path: Path) -> None:
    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        for number, file in enumerate(files):
            os.write(file, b"%d" % number)
        link.sendall(b'{"success":true}')

    targets = [tmp_path / f"f{number}" for number in range(3)]
    files = [os.open(target, os.O_CREAT | os.O_WRONLY) for target in targets]
    urpc.call(serve(handler), "m.F", files=files)
    for file in files:
        os.close(file)
    assert [target.read_text() for target in targets] == ["0", "1", "2"]


def test_long_request(serve: Callable[[Handler], Path]) -> None:
    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        link.sendall(json.dumps({"success": True, "result": len(str(request["arg"]))}).encode())

    assert urpc.call(serve(handler), "m.F", "x" * 1_000_000) == 1_000_000


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'{"success":false,"err":"it broke:\\ngoroutine 1 [running]"}', urpc.UrpcError),
        (b'{"success":false,"err":"unknown method"}', urpc.UnknownMethod),
        (b'{"success":false}', urpc.UrpcError),
        (b"", urpc.UrpcUnreachable),
        (b'{"success":tr', urpc.UrpcUnreachable),
        (b"[1]}", urpc.UrpcUnreachable),
    ],
)
def test_bad_answers(
    serve: Callable[[Handler], Path], answer: bytes, kind: type[Exception]
) -> None:
    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        link.sendall(answer)

    with pytest.raises(kind) as caught:
        urpc.call(serve(handler), "m.F", timeout=5)
    assert type(caught.value) is kind
    assert "goroutine" not in str(caught.value)


def test_silence_ends_with_the_timeout(serve: Callable[[Handler], Path]) -> None:
    release = threading.Event()

    def handler(link: socket.socket, request: dict[str, object], files: list[int]) -> None:
        release.wait(10)

    with pytest.raises(urpc.UrpcUnreachable, match="no answer"):
        urpc.call(serve(handler), "m.F", timeout=0.05)
    release.set()


def test_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(urpc.UrpcUnreachable):
        urpc.call(tmp_path / "missing.sock", "m.F")
