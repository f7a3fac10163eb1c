"""E2B's interfaces, loaded when somebody asks for them.

Guarantee: what is answered is what `sojourn.server.e2b.app` answers; only a server whose sessions
are no sandboxes and which nobody asks pays nothing for it. What a sandbox of before needs (its
ports, readers of its output) it has without a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from litestar.types import ASGIApp, Receive, Scope, Send

from sojourn.errors import SojournError
from sojourn.server.answers import Shutdown
from sojourn.server.base import Principal, SessionService
from sojourn.server.e2b import ids
from sojourn.server.e2b.settings import TEMPLATE, Settings

if TYPE_CHECKING:
    from sojourn.server.e2b.app import E2B

_log = logging.getLogger(__name__)
_APP = "sojourn.server.e2b.app"


class LazyE2B:
    """The ASGI application in front of the API's own, and before that of E2B's."""

    def __init__(
        self,
        inner: ASGIApp,
        service: SessionService,
        key: bytes,
        shutdown: Shutdown,
        settings: Settings | None = None,
    ) -> None:
        self._inner = inner
        self._service = service
        self._key = key
        self._shutdown = shutdown
        self._settings = settings
        self._app: E2B | None = None
        self._loading = asyncio.Lock()
        service.ports.on_request(self._exposes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if str(scope["type"]) == "lifespan":
            async with self._running():
                await self._inner(scope, receive, send)
        elif str(scope.get("path", "")).startswith("/v1/"):
            await self._inner(scope, receive, send)
        else:
            await (await self._loaded())(scope, receive, send)

    async def _loaded(self) -> E2B:
        async with self._loading:
            if self._app is None:
                # In a thread: requests that are under way do not wait for it.
                module = await asyncio.to_thread(importlib.import_module, _APP)
                app: E2B = module.E2B(
                    self._inner, self._service, self._key, self._shutdown, self._settings
                )
                app.start()
                self._app = app
            return self._app

    async def _exposes(self, session: str, port: int) -> Principal | None:
        """Asked until the application is loaded, which then is asked itself."""
        return await (await self._loaded()).exposes(session, port)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look(), name="sandboxes of before")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            if self._app is not None:
                await self._app.stop()

    async def _look(self) -> None:
        """Load the application where an earlier server made sandboxes."""
        for tenant, session in await self._service.every():
            if self._app is not None:
                return
            try:
                info = await self._service.get(ids.principal(tenant), session)
            except SojournError as error:
                _log.debug("session %s is not looked at: %s", session, error)
                continue
            if TEMPLATE in info.labels:
                await self._loaded()
                return
