"""Fixtures of the HTTP contract: a server over a fake service, and each client twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sojourn import Sojourn
from support.http_rig import HttpRig
from support.twins import Loop, blocking_twin


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    """A running server."""
    found = HttpRig(tmp_path_factory.mktemp("http") / "sessions")
    yield found
    found.stop()


@pytest.fixture(params=["blocking", "asynchronous"])
def api(request: pytest.FixtureRequest, rig: HttpRig) -> Iterator[Any]:
    """A client of tenant a, each twin in turn."""
    if request.param == "blocking":
        with Sojourn(rig.url, "token-a") as client:
            yield client
        return
    loop = Loop()
    client = blocking_twin(rig.url, "token-a", loop)
    yield client
    client.close()
    loop.stop()


@pytest.fixture
def work(api: Any) -> Iterator[Any]:
    """A session."""
    session = api.sessions.create()
    yield session
    session.delete()
