"""Object stores for tests: a real S3 server process, and a proxy that makes it fail.

    with S3Server.running() as server, FaultProxy.before(server.url) as proxy:
        bucket = server.make_bucket()
        backend = open_backend(f"s3://{bucket}/some/prefix", options=s3_options(proxy.url))
        proxy.answer(503, times=2, method="PUT")          # the next two PUTs
        proxy.drop(after=True, key=r"/config$")           # done, but the answer is lost
        ...
        assert proxy.count("PUT") == 3

The server is moto: one process, everything in memory, conditional writes, pages of listings, bulk
deletion; it checks signatures only when told to, and keeps nothing when it ends. The proxy is
asyncio in a thread of the test. Both use free ports of the loopback address and end with their
`with`.

A fault applies to the next `times` requests (None: to all from now on) that match `method` and
`key`, a regular expression searched in the request's target (path and query, as sent). The first
fault that matches and is not used up is taken. `clear()` removes all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ACCESS_KEY = "AKIATESTACCESSKEY000"
SECRET_KEY = "test-secret-do-not-show-0123456789abcdef"


def s3_options(url: str, *, timeout: float = 10, patience: float = 5) -> dict[str, str]:
    """What `open_backend(..., options=...)` needs to use the server or proxy at `url`."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": "",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_ENDPOINT_URL_S3": "",
        "AWS_CA_BUNDLE": "",
        "SOJOURN_STORE_TIMEOUT": str(timeout),
        "SOJOURN_STORE_PATIENCE": str(patience),
    }


class S3Server:
    """A moto server process."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process
        self._buckets = 0

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        *,
        free_requests: int | None = None,
        certificate: tuple[Path, Path] | None = None,
        inside: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> Iterator[S3Server]:
        """Start one on a free port; it is gone afterwards. With `free_requests` only so many are
        answered before signatures are checked; with `certificate` and its key it speaks TLS.
        `inside` goes before its command and puts it into a network namespace."""
        command = [*inside, sys.executable, "-m", "moto.server", "-H", address, "-p", "0"]
        if certificate is not None:
            command += ["-s", "-c", str(certificate[0]), "-k", str(certificate[1])]
        checked = {}
        if free_requests is not None:
            checked["INITIAL_NO_AUTH_ACTION_COUNT"] = str(free_requests)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **checked},
        )
        drain: threading.Thread | None = None
        try:
            assert process.stderr is not None
            said = b""
            for line in process.stderr:
                said += line
                found = re.search(rb"Running on (https?://[0-9.]+:\d+)", line)
                if found:
                    break
            else:
                raise AssertionError(f"The S3 server did not start: {said.decode()}")
            # Its log of requests has to go somewhere, or it would stop at a full pipe.
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            yield cls(found.group(1).decode(), process)
        finally:
            process.kill()
            process.wait()
            if drain is not None:
                drain.join()
            if process.stderr is not None:
                process.stderr.close()

    def make_bucket(self) -> str:
        """A new, empty bucket."""
        self._buckets += 1
        name = f"bucket-{self._buckets}"
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        trust = ssl._create_unverified_context() if self.url.startswith("https") else None
        with urllib.request.urlopen(request, context=trust):
            return name

    def make_user(self) -> dict[str, str]:
        """Variables with the credentials of a new user who may do everything with buckets. Three
        requests, of the free ones."""
        self._manage(Action="CreateUser", UserName="someone")
        answer = self._manage(Action="CreateAccessKey", UserName="someone")
        allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        self._manage(
            Action="PutUserPolicy",
            UserName="someone",
            PolicyName="all",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [allowed]}),
        )
        found = {}
        for variable, tag in (
            ("AWS_ACCESS_KEY_ID", "AccessKeyId"),
            ("AWS_SECRET_ACCESS_KEY", "SecretAccessKey"),
        ):
            value = re.search(f"<{tag}>(.*?)<", answer)
            assert value is not None
            found[variable] = value.group(1)
        return found

    def _manage(self, **parameters: str) -> str:
        content = urllib.parse.urlencode({"Version": "2010-05-08", **parameters}).encode()
        service = (
            "Credential=x/20260101/us-east-1/iam/aws4_request, SignedHeaders=host, Signature=x"
        )
        request = urllib.request.Request(
            self.url, data=content, headers={"Authorization": f"AWS4-HMAC-SHA256 {service}"}
        )
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())


@dataclass
class Fault:
    """What happens to the requests that match."""

    times: int | None
    method: str | None
    key: re.Pattern[str] | None
    skip: int = 0  # matching requests to let pass before the first
    status: int | None = None
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    drop: bool = False
    after: bool = False
    keep: float | None = None
    rate: float | None = None
    flip: bool = False
    hits: int = 0

    def takes(self, method: str, target: str) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        if self.method is not None and method != self.method:
            return False
        if self.key is not None and not self.key.search(target):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


@dataclass
class Seen:
    """A request that came, and what it was answered: a status, or None when it was not (yet)."""

    method: str
    target: str
    status: int | None = None


class FaultProxy:
    """Stands before an HTTP server and injects faults. All methods may be called from tests'
    threads while requests are under way."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname and parts.port
        self._upstream = (parts.hostname, parts.port)
        self._faults: list[Fault] = []
        self._guard = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._silent = False
        self._port = 0
        self.seen: list[Seen] = []

    @classmethod
    @contextlib.contextmanager
    def before(cls, upstream: str) -> Iterator[FaultProxy]:
        """A proxy before the server at this URL."""
        proxy = cls(upstream)
        proxy._thread.start()
        try:
            proxy._run(proxy._listen())
            yield proxy
        finally:
            proxy._run(proxy._unlisten())
            proxy._loop.call_soon_threadsafe(proxy._loop.stop)
            proxy._thread.join()
            proxy._loop.close()

    @property
    def url(self) -> str:
        """The same as long as the proxy lives, also over partitions."""
        return f"http://127.0.0.1:{self._port}"

    # -- faults -----------------------------------------------------------------------------
    def answer(
        self,
        status: int,
        *,
        code: str = "",
        times: int | None = 1,
        method: str | None = None,
        key: str | None = None,
        skip: int = 0,
        message: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        after: bool = False,
    ) -> Fault:
        """Answer with this status and S3 error code. With `after` the request is done first."""
        if body is None and code:
            body = (
                f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
                f"<Message>{message}</Message><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>"
            ).encode()
        return self._add(
            times, method, key, skip, status=status, body=body or b"", headers=headers or {},
            after=after,
        )  # fmt: skip

    def delay(self, seconds: float, *, times: int | None = 1, method: str | None = None,
              key: str | None = None, skip: int = 0) -> Fault:  # fmt: skip
        """Hold the request back, then forward it."""
        return self._add(times, method, key, skip, seconds=seconds)

    def drop(self, *, after: bool = False, times: int | None = 1, method: str | None = None,
             key: str | None = None, skip: int = 0) -> Fault:  # fmt: skip
        """Cut the connection instead of answering; with `after` the request was done."""
        return self._add(times, method, key, skip, drop=True, after=after)

    def truncate(self, keep: float = 0.5, *, times: int | None = 1, method: str | None = None,
                 key: str | None = None, skip: int = 0) -> Fault:  # fmt: skip
        """Announce the whole body, send this part of it, cut the connection."""
        return self._add(times, method, key, skip, keep=keep)

    def throttle(self, bytes_per_second: float, *, times: int | None = 1,
                 method: str | None = None, key: str | None = None, skip: int = 0
                 ) -> Fault:  # fmt: skip
        """Send the answer's body at this rate."""
        return self._add(times, method, key, skip, rate=bytes_per_second)

    def flip(self, *, times: int | None = 1, method: str | None = None, key: str | None = None,
             skip: int = 0) -> Fault:  # fmt: skip
        """Change one bit in the middle of the answer's body."""
        return self._add(times, method, key, skip, flip=True)

    def partition(self, *, silent: bool = False) -> None:
        """Nothing gets through: connections are refused, those that are there are cut. With
        `silent` they are accepted and never answered."""
        self._silent = silent
        self._run(self._unlisten())
        if silent:
            self._run(self._listen())

    def heal(self) -> None:
        """End a partition."""
        self._silent = False
        self._run(self._unlisten())
        self._run(self._listen())

    def clear(self) -> None:
        """Remove all faults."""
        with self._guard:
            self._faults.clear()

    def count(self, method: str | None = None, key: str | None = None) -> int:
        """How many requests came so far that match."""
        return sum(
            (method is None or seen.method == method)
            and (key is None or re.search(key, seen.target) is not None)
            for seen in list(self.seen)
        )

    def _add(self, times, method, key, skip, **what) -> Fault:
        fault = Fault(times, method, re.compile(key) if key is not None else None, skip, **what)
        with self._guard:
            self._faults.append(fault)
        return fault

    # -- the wire ---------------------------------------------------------------------------
    def _run(self, coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, limit=1 << 20
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def _unlisten(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        clients = dict(self._clients)
        for task, writer in clients.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went
        except asyncio.CancelledError:
            pass  # a partition or the end of the proxy, which wait for this task
        finally:
            del self._clients[task]
            writer.transport.abort() if self._silent else writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False when the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        body = await reader.readexactly(int(_header(head, b"content-length") or 0))
        seen = Seen(method, target)
        self.seen.append(seen)
        if self._silent:
            await asyncio.sleep(3600)
        with self._guard:
            faults = list(self._faults)
            fault = next((f for f in faults if f.takes(method, target)), None)
        fault = fault or Fault(None, None, None)
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
        early = fault.drop or fault.status is not None
        if early and not fault.after:
            answer = b""
        else:
            answer = await self._forward(head, body)
        if fault.drop:
            writer.transport.abort()
            return False
        if fault.status is not None:
            extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
            answer = (
                f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\n{extra}"
                f"Content-Length: {len(fault.body)}\r\n\r\n"
            ).encode() + (b"" if method == "HEAD" else fault.body)
        front, _, content = answer.partition(b"\r\n\r\n")
        seen.status = int(front.split(b" ", 2)[1])
        if fault.flip and content:
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            content = content[:middle] + flipped + content[middle + 1 :]
        if fault.keep is not None:
            writer.write(front + b"\r\n\r\n" + content[: int(len(content) * fault.keep)])
            await writer.drain()
            return False
        writer.write(front + b"\r\n\r\n")
        if fault.rate is not None:
            step = max(1, int(fault.rate / 10))
            for start in range(0, len(content), step):
                writer.write(content[start : start + step])
                await writer.drain()
                await asyncio.sleep(step / fault.rate)
        else:
            writer.write(content)
        await writer.drain()
        return True

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """The server's whole answer, fit for a connection that stays open."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            # HTTP/1.0, so that the answer comes in one piece and ends with the connection.
            first, rest = head.split(b"\r\n", 1)
            writer.write(first.rsplit(b" ", 1)[0] + b" HTTP/1.0\r\n" + rest + body)
            answer = await reader.read(-1)
        finally:
            writer.close()
        front, _, content = answer.partition(b"\r\n\r\n")
        lines = front.split(b"\r\n")
        kept = [
            line
            for line in lines[1:]
            if line.split(b":")[0].lower() not in {b"connection", b"transfer-encoding"}
        ]
        status = lines[0].split(b" ", 1)[1]
        if _header(front, b"content-length") is None:
            kept.append(b"Content-Length: %d" % len(content))
        return b"\r\n".join([b"HTTP/1.1 " + status, *kept]) + b"\r\n\r\n" + content


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
