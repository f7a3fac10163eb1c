"""Fixtures of the whole suite: one real server for the tests that only need sessions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sojourn.client import Session, Sojourn
from support.durable import stock
from support.object_stores import S3Server
from support.servers import ServerProcess
from support.templates import lay_small

TEMPLATES = "SOJOURN_TEMPLATE_DIR"
HOST_TEMPLATES = os.environ.get(TEMPLATES)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker ends the whole run where it is to tell of text that is none, such as a log line that
    a test made of half a character."""
    return _as_text((yield))


def _as_text(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_as_text(key): _as_text(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(_as_text(one) for one in value)
    return value


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that lives as long as the suite; use `server` where it is killed or filled up."""
    server = ServerProcess(tmp_path_factory.mktemp("shared") / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(TEMPLATES, raising=False)
        if HOST_TEMPLATES is not None:
            patch.setenv(TEMPLATES, HOST_TEMPLATES)
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
def s3_server() -> Iterator[S3Server]:
    """A server of buckets that lives as long as the suite; each test has a bucket of its own."""
    with S3Server.running() as server:
        yield server


@pytest.fixture(scope="session")
def small_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of templates with the small one in it; see `support.templates`."""
    directory = tmp_path_factory.mktemp("templates")
    lay_small(directory)
    return directory


@pytest.fixture(scope="module")
def small_template(small_templates: Path) -> Iterator[None]:
    """The servers that this module's tests start have the small template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TEMPLATES, str(small_templates))
        yield


@pytest.fixture(scope="session")
def with_template(tmp_path_factory: pytest.TempPathFactory, small_templates: Path) -> Path:
    """An object store with nothing but the small template in it."""
    return stock(tmp_path_factory.mktemp("stocked"), SOJOURN_TEMPLATE_DIR=str(small_templates))


@pytest.fixture(scope="module")
def stocked(with_template: Path, small_template: None) -> Path:
    """An object store to be copied and not changed, for servers with the small template, which is
    all it has."""
    return with_template


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
