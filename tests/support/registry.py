"""A registry of images: the distribution API over real HTTP, with logins, redirects and faults."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.images import MadeImage, digest

LOGIN = ("robot", "s3cret-password")


class Registry:
    """`repositories` maps a name to {tag or digest: bytes of a manifest}; faults are switched on by
    setting the fields below. `requests` are method, path and headers of all that came."""

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.login: str | None = None  # None, "basic" or "bearer"
        self.redirect: str | None = None  # where blobs are sent to: "self", or a URL
        self.cut_after: int | None = None  # bytes of a blob after which the connection breaks
        self.cuts = 0
        self.busy = 0  # so many requests are answered 503
        self.corrupt = False
        self.ranges = True
        self.garbled: tuple[int, dict[str, str]] | None = None  # answers all but the first question
        self._token = "token-of-the-service"
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.answer(self)

            def do_POST(self) -> None:
                owner.renew(self)

            def log_message(self, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def push(self, image: MadeImage, name: str, tag: str) -> str:
        """Put an image there; the digest of its manifest."""
        self.blobs |= image.blobs
        top = image.blobs[image.top["digest"]]
        self.put_manifest(name, tag, top, image.top["mediaType"])
        return str(image.top["digest"])

    def push_index(self, images: list[MadeImage], name: str, tag: str) -> str:
        """Put several images there under one name, one for each machine."""
        for image in images:
            self.push(image, name, f"one-{image.architecture}")
        attestation = {
            **images[0].top,
            "platform": {"os": "unknown", "architecture": "unknown"},
        }
        entries = [{**image.top, "platform": image.platform} for image in images]
        index = json.dumps({"schemaVersion": 2, "manifests": [attestation, *entries]}).encode()
        self.put_manifest(name, tag, index, "application/vnd.oci.image.index.v1+json")
        return digest(index)

    def put_manifest(self, name: str, tag: str, payload: bytes, kind: str) -> None:
        self.manifests[name, tag] = (payload, kind)
        self.manifests[name, digest(payload)] = (payload, kind)

    # -- answering --------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append((request.path, {k.lower(): v for k, v in request.headers.items()}))
        parts = urlsplit(request.path)
        if self.busy > 0 and not parts.path.startswith("/token"):
            self.busy -= 1
            self._send(request, 503, b"", {"Retry-After": "0"})
        elif parts.path == "/token":
            self._give_token(request, parse_qs(parts.query))
        elif parts.path == "/v2/":
            self._send(request, 200 if self._allowed(request) else 401, b"{}")
        elif self.garbled is not None:
            self._send(request, self.garbled[0], b"", self.garbled[1])
        elif parts.path.startswith("/elsewhere/"):
            self._give_blob(request, parts.path.removeprefix("/elsewhere/"))
        elif not self._allowed(request):
            self._challenge(request)
        else:
            self._give(request, parts.path)

    def _allowed(self, request: BaseHTTPRequestHandler) -> bool:
        given = request.headers.get("Authorization")
        if self.login is None:
            return True
        if self.login == "bearer":
            return given == f"Bearer {self._token}"
        return given == self.basic()

    @staticmethod
    def basic() -> str:
        return "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()

    def _challenge(self, request: BaseHTTPRequestHandler) -> None:
        told = 'Basic realm="here"'
        if self.login == "bearer":
            told = (
                f'Bearer realm="http://{self.host}/token",service="tests",scope="repository:a:pull"'
            )
        self._send(request, 401, b"{}", {"WWW-Authenticate": told})

    def renew(self, request: BaseHTTPRequestHandler) -> None:
        """A token for an identity token."""
        form = parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())
        right = form["refresh_token"] == ["identity"] and form["grant_type"] == ["refresh_token"]
        answer = {"access_token": self._token} if right else {}
        self._send(request, 200 if right else 401, json.dumps(answer).encode())

    def _give_token(self, request: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        if request.headers.get("Authorization") != self.basic() or query["service"] != ["tests"]:
            self._send(request, 401, b"{}")
            return
        self._send(request, 200, json.dumps({"token": self._token}).encode())

    def _give(self, request: BaseHTTPRequestHandler, path: str) -> None:
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+)", path)
        assert found is not None, path
        name, kind, what = found.groups()
        if kind == "manifests":
            manifest = self.manifests.get((name, what))
            if manifest is None:
                self._send(request, 404, b"{}")
                return
            self._send(request, 200, manifest[0], {"Content-Type": manifest[1]})
        elif self.redirect is not None:
            place = f"/elsewhere/{what}" if self.redirect == "self" else f"{self.redirect}{what}"
            self._send(request, 307, b"", {"Location": place})
        else:
            self._give_blob(request, what)

    def _give_blob(self, request: BaseHTTPRequestHandler, what: str) -> None:
        data = self.blobs.get(what)
        if data is None:
            self._send(request, 404, b"{}")
            return
        if self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        headers = {}
        if wanted and self.ranges:
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(request, 206 if headers else 200, data[start:], headers)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if self.cut_after is not None and len(body) > self.cut_after and self.cuts > 0:
            self.cuts -= 1
            request.wfile.write(body[: self.cut_after])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(2)
            return
        request.wfile.write(body)
