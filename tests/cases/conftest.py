"""Fixtures of the cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.raw import request
from support.servers import ServerProcess


@pytest.fixture
def raw(shared_server: ServerProcess) -> Callable[..., tuple[int, Any]]:
    """One plain request to the shared server: its status and JSON body (or bytes)."""

    def send(
        method: str,
        target: str,
        body: Any = None,
        token: str | None = "",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return request(
            shared_server.url,
            method,
            target,
            content,
            shared_server.token if token == "" else token,
            headers,
        )

    return send
