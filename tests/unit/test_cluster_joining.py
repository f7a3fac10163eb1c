"""Becoming a node: over real TLS, with a real database."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest

from sojourn.database import open_database
from sojourn.errors import (
    HostUnfit,
    InvalidRequest,
    NameTaken,
    SecretsKeyInvalid,
    SojournError,
    Unauthenticated,
    Unreachable,
)
from sojourn.model.nodes import NodeState
from sojourn.server.answers import Shutdown
from sojourn.server.app import serve_app
from sojourn.server.cluster import joining, pki
from sojourn.server.cluster.administration import Administration, joining_app
from sojourn.server.cluster.identity import FILE, KEY_FILES, read_identity
from sojourn.server.cluster.joining import Joining, Token, parse_token
from sojourn.server.cluster.values import ClusterValues, open_values
from sojourn.server.e2b.ids import load_key
from sojourn.server.listening import listen
from sojourn.server.secret_store import open_secret_store
from sojourn.wire.nodes import JoinRequest

KEY = b"k" * 32


class Place:
    """Where nodes join."""

    def __init__(self, database, values: ClusterValues, url: str) -> None:  # type: ignore[no-untyped-def]
        self.database = database
        self.values = values
        self.url = url
        self.joining = Joining(
            database,
            values,
            database_url="postgresql://db/sojourn",
            store="s3://bucket",
            store_key=b"store key",
            url=url,
        )

    async def join(self, data: Path, token: str, name: str = "one", url: str | None = None):  # type: ignore[no-untyped-def]
        return await asyncio.to_thread(joining.join, data, url or self.url, token, name)

    async def token(self) -> str:
        return (await self.joining.make_token({"zone": "a"})).token


@asynccontextmanager
async def joinable(place: Path) -> AsyncIterator[Place]:
    database = await open_database(place / "x.db")
    try:
        values = await open_values(database, KEY)
        sock, url = listen("127.0.0.1:0")
        found = Place(database, values, url.replace("http://", "https://"))

        class Only:
            """The part of the administration that is asked for here."""

            joining = found.joining

        ready = asyncio.Event()
        context = pki.joining_context(values.authority.server_credentials("srv"))
        app = joining_app(cast(Administration, Only()), Shutdown())
        server = serve_app(app, Shutdown(), ready.set, context=context)
        server.config.timeout_graceful_shutdown = 1
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await ready.wait()
        try:
            yield found
        finally:
            server.should_exit = True
            await task
    finally:
        await database.close()


def run(place: Path, work: Callable[[Place], Awaitable[None]]) -> None:
    async def inner() -> None:
        async with asyncio.timeout(60), joinable(place) as found:
            await work(found)

    asyncio.run(inner())


def test_a_node_gets_all_it_needs_and_keeps_it_to_itself(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def work(found: Place) -> None:
        identity = await found.join(data, await found.token())
        assert read_identity(data) == identity
        assert (identity.database, identity.store) == ("postgresql://db/sojourn", "s3://bucket")
        assert (identity.store_key, identity.labels) == (b"store key", {"zone": "a"})
        node = await found.database.get_node("one")
        assert (node.id, node.labels) == (identity.node, {"zone": "a"})
        # What it seals another node opens, and the server.
        sealed = open_secret_store(data, anything_sealed=True).seal(b"x", "secret", "a")
        assert found.values.secrets.open(sealed, "secret", "a") == b"x"
        assert load_key(data) == found.values.e2b
        for file in (FILE, *KEY_FILES):
            assert stat.S_IMODE((data / file).stat().st_mode) == 0o600, file
        assert "PRIVATE" not in repr(identity)
        pki.node_context(identity.credentials)
        with pytest.raises(HostUnfit):  # it is a node's already
            await found.join(data, await found.token(), "two")

    run(tmp_path, work)


def test_a_token_works_once_and_for_its_cluster_alone(tmp_path: Path) -> None:
    async def work(found: Place) -> None:
        token = await found.token()
        other = pki.ClusterAuthority.make()
        told = parse_token(token)
        strange = str(msgspec.structs.replace(told, fingerprint=other.fingerprint))
        wrong = str(msgspec.structs.replace(told, secret="x" * 43))
        unknown = str(msgspec.structs.replace(told, id="jtk_000000000000000000000000"))
        for given in (strange, wrong, unknown, "", "sojourn-join.a.b", token + ".x"):
            with pytest.raises(Unauthenticated):
                await found.join(tmp_path / "no", given)
        assert not (tmp_path / "no").exists()
        for name in ("no/name", "-rf", ".", "", "a" * 64, "a\nb"):
            with pytest.raises(InvalidRequest):
                await found.join(tmp_path / "no", token, name)
        await found.join(tmp_path / "one", token, "one")
        with pytest.raises(Unauthenticated):
            await found.join(tmp_path / "two", token, "two")
        another = await found.token()
        with pytest.raises(NameTaken):  # which does not use it up
            await found.join(tmp_path / "two", another, "one")
        await found.join(tmp_path / "two", another, "two")
        assert len(await found.database.list_nodes()) == 2

    run(tmp_path, work)


def test_nothing_is_told_to_an_address_that_is_no_servers(tmp_path: Path) -> None:
    async def work(found: Place) -> None:
        token = await found.token()
        with pytest.raises(InvalidRequest):
            await found.join(tmp_path / "a", token, url="http://127.0.0.1:1")
        with pytest.raises(Unreachable):
            await found.join(tmp_path / "a", token, url="https://127.0.0.1:1")
        got: list[bytes] = []

        async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(await reader.read(10_000))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        # A node's certificate does not pass for a server's, and what is asked before is no secret.
        key, request = pki.make_request()
        authority = found.values.authority
        credentials = pki.Credentials(
            key, authority.sign_node(request, "nod_x"), authority.certificate
        )
        context = pki.joining_context(credentials)
        server = await asyncio.start_server(listens, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SojournError):
            await found.join(tmp_path / "a", token, url=f"https://127.0.0.1:{port}")
        server.close()
        assert parse_token(token).secret.encode() not in b"".join(got)

    run(tmp_path, work)


def test_a_node_renews_its_certificate_until_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(found: Place) -> None:
        data = tmp_path / "data"
        identity = await found.join(data, await found.token())
        assert await joining.renewed(data, identity) is identity  # there is time
        monkeypatch.setattr(pki, "RENEW_NODE_DAYS", 10_000)
        fresh = await joining.renewed(data, identity)
        assert fresh.certificate != identity.certificate and fresh.key != identity.key
        assert read_identity(data) == fresh
        await found.database.set_node_state(identity.node, NodeState.REMOVED)
        with pytest.raises(Unauthenticated):
            await joining.renewed(data, fresh)

    run(tmp_path, work)


def test_the_cluster_is_made_once_and_opened_with_its_key_alone(tmp_path: Path) -> None:
    async def work() -> None:
        database = await open_database(tmp_path / "x.db")
        try:
            made = await asyncio.gather(*(open_values(database, KEY) for _ in range(3)))
            assert len({one.authority.fingerprint for one in made}) == 1
            assert all(one.keys == made[0].keys for one in made)
            with pytest.raises(SecretsKeyInvalid):
                await open_values(database, os.urandom(32))
            for name in ("authority", "secrets.key", "e2b.key", "egress"):
                kept = await database.cluster_value(name)
                assert kept is not None and b"PRIVATE" not in kept
                for content in made[0].keys.values():
                    assert content not in kept
        finally:
            await database.close()

    asyncio.run(work())


def test_a_request_that_cannot_be_signed_leaves_the_token_as_it_is(tmp_path: Path) -> None:
    async def work(found: Place) -> None:
        token = await found.token()
        with pytest.raises(InvalidRequest):
            await found.joining.join(JoinRequest(token=token, name="one", request="nothing"))
        await found.join(tmp_path / "data", token)

    run(tmp_path, work)


def test_tokens_show_no_secret() -> None:
    assert "secret" not in repr(Token("jtk", "secret", "f"))
