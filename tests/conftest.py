"""Fixtures of the whole suite: one real server for the tests that only need sessions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from support.durable import stock
from support.servers import ServerProcess


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that lives as long as the suite; use `server` where it is killed or filled up."""
    server = ServerProcess(tmp_path_factory.mktemp("shared") / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture
def client(shared_server: ServerProcess) -> Iterator[Sojourn]:
    """A client of the shared server."""
    with shared_server.client() as client:
        yield client


@pytest.fixture
def session(client: Sojourn) -> Iterator[Session]:
    """A new session, deleted afterwards."""
    session = client.sessions.create()
    yield session
    session.delete()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the test's own, started; it may be killed and restarted."""
    server = ServerProcess(tmp_path / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An object store with nothing but the template in it, to be copied and not changed."""
    return stock(tmp_path_factory.mktemp("stocked"))


@pytest.fixture
def place(stocked: Path, tmp_path: Path) -> Path:
    """An object store of the test's own that has the template. Its objects are shared with the
    other ones: no test writes over one in its place."""
    return Path(shutil.copytree(stocked, tmp_path / "objects", copy_function=os.link))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need root say so by a marker; anything that uses a server does."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & {"shared_server", "client", "session", "server"}:
            item.add_marker(pytest.mark.privileged)
        if item.get_closest_marker("privileged") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
