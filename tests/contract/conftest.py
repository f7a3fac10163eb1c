"""The database of each connector, for the tests of what all of them promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.database import Database
from support.databases import CONNECTORS, Harness, PostgresHarness, SqliteHarness
from support.postgres import postgres_server


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresHarness]:
    """A server that lives as long as the suite, and a database of it with all tables."""

    async def nothing(database: Database) -> None:
        assert await database.object_store() is None

    with postgres_server(tmp_path_factory.mktemp("postgres")) as server:
        harness = PostgresHarness(server, server.create())
        harness.run(nothing)
        yield harness


@pytest.fixture(params=CONNECTORS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """A database without a row in it, ready to be opened."""
    if request.param == "sqlite":
        return SqliteHarness(tmp_path)
    harness: PostgresHarness = request.getfixturevalue("postgres")
    harness.server.empty(harness.name)
    return harness
