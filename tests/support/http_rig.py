"""The API over a fake service, on a real socket, in a thread of the test process."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from sojourn.server.app import make_server
from sojourn.server.listening import listen
from support.fake_service import FakeService


class HttpRig:
    """A running server; `call` runs a coroutine in its event loop."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http-rig")
        self._thread.start()
        self._ready.wait(30)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._failed = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = FakeService(self._directory)
        socket, self.url = listen("127.0.0.1:0")
        self.server = make_server(self.service, ready=self._ready.set)
        try:
            await self.server.serve(sockets=[socket])
        finally:
            await self.service.close()

    def call(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(30)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._failed is not None:
            raise self._failed

    def raw(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        token: str | None = "token-a",
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """One plain request: status, headers, body."""
        port = int(self.url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            if token is not None:
                given["authorization"] = f"Bearer {token}"
            connection.request(method, target, body, given)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()
