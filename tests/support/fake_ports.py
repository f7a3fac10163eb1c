"""In-memory secrets and exposed ports, for the fake session service."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from typing import Any

from sojourn.errors import Conflict, PortNotFound, SecretNotFound
from sojourn.server.base import Principal
from sojourn.server.ports import check_port
from sojourn.server.secrets import check_secret_name, check_uses, check_value
from sojourn.wire.networks import ExposePort, PortInfo, SecretInfo, SetSecret


class FakeSecrets:
    """`sojourn.server.base.SecretService`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], SecretInfo] = {}

    async def set(self, who: Principal, name: str, request: SetSecret) -> SecretInfo:
        check_secret_name(name)
        check_value(request.value)
        info = SecretInfo(name, check_uses(request.uses), time.time(), time.time())
        self._kept[who.tenant, name] = info
        return info

    async def list(self, who: Principal) -> builtins.list[SecretInfo]:
        return [info for (tenant, _), info in sorted(self._kept.items()) if tenant == who.tenant]

    async def delete(self, who: Principal, name: str) -> None:
        if self._kept.pop((who.tenant, name), None) is None:
            raise SecretNotFound(f"there is no secret {name!r}")


class FakePorts:
    """`sojourn.server.base.PortService`; `find` looks a session up for its tenant."""

    def __init__(self, find: Callable[[Principal, str], Any]) -> None:
        self._find = find
        self._kept: dict[tuple[str, int], PortInfo] = {}

    def on_request(self, decide: Any) -> None:
        """No request comes in."""

    async def serve(self) -> str:
        return "localhost:1"

    def _session(self, who: Principal, ref: str) -> str:
        return str(self._find(who, ref).info.id)

    async def expose(self, who: Principal, ref: str, request: ExposePort) -> PortInfo:
        sources = check_port(request)
        session = self._session(who, ref)
        kept = self._kept.get((session, request.port))
        if kept is not None and (kept.kind, kept.public) != (request.kind, request.public):
            raise Conflict("it is exposed otherwise")
        info = kept or PortInfo(
            session=session,
            port=request.port,
            kind=request.kind,
            public=request.public,
            url=f"http://{request.port}-{session}.localhost:1/",
            path_url=f"http://127.0.0.1:1/s/{session}/{request.port}/",
            address=None,
            token=None if request.public else "token-of-a-port",
            sources=sources,
            created_at=time.time(),
        )
        self._kept[session, request.port] = info
        return info

    async def list(self, who: Principal, ref: str) -> builtins.list[PortInfo]:
        session = self._session(who, ref)
        return [info for (name, _), info in sorted(self._kept.items()) if name == session]

    async def unexpose(self, who: Principal, ref: str, number: int) -> None:
        if self._kept.pop((self._session(who, ref), number), None) is None:
            raise PortNotFound(f"port {number} is not exposed")
