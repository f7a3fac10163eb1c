"""Requests to E2B's interfaces that no SDK would send: refused, never a fault of the server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from e2b import Sandbox

from sojourn.server.e2b import connect
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged

UNARY = [
    *(f"process.Process/{name}" for name in ("List", "Update", "SendInput", "StreamInput")),
    *(f"process.Process/{name}" for name in ("SendSignal", "CloseStdin")),
    *(f"filesystem.Filesystem/{name}" for name in ("Stat", "MakeDir", "Move", "ListDir")),
    *(f"filesystem.Filesystem/{name}" for name in ("Remove", "CreateWatcher")),
    *(f"filesystem.Filesystem/{name}" for name in ("GetWatcherEvents", "RemoveWatcher")),
]
STREAMS = ["process.Process/Start", "process.Process/Connect", "filesystem.Filesystem/WatchDir"]
FIELDS = [
    *("path", "source", "destination", "process", "pid", "tag", "input", "stdin", "pty", "signal"),
    *("size", "cols", "rows", "depth", "recursive", "includeEntry", "watcherId", "selector", "cmd"),
    *("args", "envs", "cwd", "timeout", "count", "name", "memory", "metadata", "templateID"),
    *("code", "context_id", "language", "env_vars", "network", "allowOut", "denyOut", "envVars"),
]


@pytest.fixture(scope="module")
def http(shared_server: ServerProcess) -> Iterator[tuple[httpx.Client, str]]:
    point = {
        "api_url": shared_server.url,
        "sandbox_url": shared_server.url,
        "api_key": shared_server.token,
    }
    box = Sandbox.create(timeout=600, **point)
    headers = box.connection_config.sandbox_headers | {"X-API-Key": shared_server.token}
    with httpx.Client(base_url=shared_server.url, headers=headers, timeout=60) as client:
        yield client, box.sandbox_id
    box.kill(**point)


def anything(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return source.choice([True, False])
    if kind == 2:
        return source.choice([0, -1, 1, 9, 2**31, 2**64, 10**30, 1.5])
    if kind in (3, 4):
        return source.choice(
            [
                "",
                "a",
                "/tmp",
                "\0",
                "../..",
                "a" * 5000,
                "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
                "ü",
                "YQ==",
                "~",
                "SIGNAL_SIGKILL",
            ]
        )
    if kind in (5, 6):
        return {
            source.choice(FIELDS): anything(source, depth + 1) for _ in range(source.randrange(4))
        }
    return [anything(source, depth + 1) for _ in range(source.randrange(3))]


def body(source: random.Random) -> bytes:
    if source.random() < 0.15:
        return source.randbytes(source.randrange(40))
    value = {source.choice(FIELDS): anything(source, 1) for _ in range(source.randrange(1, 5))}
    return msgspec.json.encode(value)


def test_calls(http: tuple[httpx.Client, str]) -> None:
    client, _ = http
    source = random.Random(1)
    for number in range(220):
        path = source.choice(UNARY)
        answer = client.post(
            f"/{path}", content=body(source), headers={"Content-Type": connect.UNARY}
        )
        assert answer.status_code < 500 or answer.status_code == 501, (number, path, answer.text)
        assert isinstance(answer.json(), dict)


def test_streams_end(http: tuple[httpx.Client, str]) -> None:
    client, _ = http
    source = random.Random(2)
    for number in range(80):
        path = source.choice(STREAMS)
        content = body(source)
        if source.random() < 0.7:
            content = b"\0" + len(content).to_bytes(4, "big") + content
        answer = client.post(
            f"/{path}",
            content=content,
            headers={"Content-Type": connect.STREAM, "Connect-Timeout-Ms": "2000"},
        )
        assert answer.status_code == 200, (number, path, answer.text)
        # The last message says how it ended.
        at, last = 0, b""
        while at < len(answer.content):
            size = int.from_bytes(answer.content[at + 1 : at + 5], "big")
            last = answer.content[at : at + 5 + size]
            at += 5 + size
        assert last[0] == 2 and at == len(answer.content), (number, path, answer.content)
        error = msgspec.json.decode(last[5:]).get("error", {})
        assert error.get("code") != "internal", (number, path, error)


def test_the_control_plane(http: tuple[httpx.Client, str]) -> None:
    client, sandbox = http
    source = random.Random(3)
    verbs = ["timeout", "refreshes", "fork", "snapshots", "metrics", "network", "logs", "nothing"]
    for number in range(60):
        path = (
            f"/sandboxes/{source.choice([sandbox, 'ses-0', '%00', 'a b'])}/{source.choice(verbs)}"
        )
        method = source.choice(["GET", "POST", "PUT", "DELETE", "PATCH"])
        content = body(source) if source.random() < 0.7 else b'{"timeout": -1, "count": 0}'
        answer = client.request(method, path, content=content)
        assert answer.status_code < 500 or answer.status_code == 501, (number, path, answer.text)
    for query in ("limit=0", "limit=x", "nextToken=x", "startedAfter=x", "state=x", "metadata=%00"):
        assert client.get(f"/v2/sandboxes?{query}").status_code in (200, 400), query


def test_files_and_code(http: tuple[httpx.Client, str]) -> None:
    client, _ = http
    source = random.Random(4)
    kinds = [
        *("", "multipart/form-data", "multipart/form-data; boundary=b", "application/octet-stream"),
        "multipart/form-data; boundary=" + "x" * 3000,
    ]
    for number in range(60):
        headers = {"Content-Type": source.choice(kinds)}
        if source.random() < 0.3:
            headers["Content-Encoding"] = source.choice(["gzip", "br", "identity"])
        content = source.choice(
            [body(source), b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--']
        )
        query = source.choice(["", "?path=", "?path=%00", "?path=/tmp/x", "?path=/proc/self/mem"])
        answer = client.post(f"/files{query}", content=content, headers=headers)
        assert answer.status_code < 500 or answer.status_code == 501, (number, answer.text)
        answer = client.post("/execute", content=msgspec.json.encode({"code": anything(source)}))
        assert answer.status_code < 500, (number, answer.text)
