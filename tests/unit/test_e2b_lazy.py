"""E2B's interfaces are there when they are asked for or needed, and not before."""

from __future__ import annotations

import asyncio
import types
from typing import Any

from sojourn.errors import Unauthenticated
from sojourn.server.answers import Shutdown
from sojourn.server.e2b.lazy import LazyE2B
from sojourn.server.e2b.settings import TEMPLATE


class Service:
    """As much of the session service as is asked at a start and by a request without a key."""

    def __init__(self, **labels: dict[str, str]) -> None:
        self._labels = labels
        self.ports = self
        self.decide: Any = None
        self.domains = 0

    def on_request(self, decide: Any) -> None:
        self.decide = decide

    async def serve(self) -> str:
        self.domains += 1
        return "localhost:1"

    async def every(self) -> list[tuple[str, str]]:
        return [("ten", session) for session in self._labels]

    async def get(self, _who: Any, session: str) -> Any:
        return types.SimpleNamespace(id=session, labels=self._labels[session])

    async def authenticate(self, _key: str | None) -> Any:
        raise Unauthenticated("no key")

    async def standing(self, _who: Any, _ref: str) -> tuple[str, int]:
        return "suspended", 1


async def asked(lazy: LazyE2B, method: str, path: str) -> int:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await lazy(scope, receive, send)
    return int(sent[0]["status"])


async def inner(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await asyncio.sleep(0.2)
        return
    await send({"type": "http.response.start", "status": 299, "headers": []})


def made(service: Service) -> LazyE2B:
    app: Any = inner
    found: Any = service
    return LazyE2B(app, found, b"k" * 32, Shutdown())


async def lived(lazy: LazyE2B) -> None:
    nothing: Any = None
    scope: Any = {"type": "lifespan"}
    await lazy(scope, nothing, nothing)


def test_the_api_and_other_sessions_load_nothing() -> None:
    async def scenario() -> None:
        lazy = made(Service(one={}, two={"team": "a"}))
        await asyncio.gather(lived(lazy), asked(lazy, "GET", "/v1/sessions"))
        assert lazy._app is None

    asyncio.run(scenario())


def test_a_request_loads_it_once() -> None:
    async def scenario() -> None:
        lazy = made(Service())
        statuses = await asyncio.gather(*(asked(lazy, "GET", "/sandboxes") for _ in range(5)))
        assert statuses == [401] * 5 and lazy._app is not None
        assert await asked(lazy, "GET", "/nothing") == 299
        await lazy._app.stop()

    asyncio.run(scenario())


def test_a_sandbox_of_before_has_its_ports_without_a_request() -> None:
    async def scenario() -> None:
        service = Service(one={}, two={TEMPLATE: "base"})
        lazy = made(service)
        await lived(lazy)
        assert lazy._app is not None and service.domains == 1

    asyncio.run(scenario())


def test_a_request_at_a_port_asks_it() -> None:
    async def scenario() -> None:
        service = Service(ses_1={}, ses_2={TEMPLATE: "base"})
        lazy = made(service)
        assert await service.decide("ses_1", 8000) is None
        assert lazy._app is not None
        # From then on it is asked itself.
        assert (await service.decide("ses_2", 8000)).tenant == "ten"
        await lazy._app.stop()

    asyncio.run(scenario())
