"""Secrets of tenants and exposed ports of sessions: rows whose values only the server can open.

Guarantee: what is told as done is on disk. A port of a session is exposed once, whoever asks at
the same time, and never one of a session that is deleted.
"""

from __future__ import annotations

import sqlite3

from sojourn.database.records import SecretRecord
from sojourn.database.rows import PORTS, SECRETS
from sojourn.database.sqlite.apply import run
from sojourn.database.sqlite.reader import Reader
from sojourn.database.sqlite.writer import Writer
from sojourn.errors import Conflict, SessionNotFound
from sojourn.model.ports import ExposedPort


class SecretRows:
    """A part of `SqliteDatabase`."""

    _reader: Reader
    _writer: Writer

    # -- secrets ----------------------------------------------------------------------------
    async def put_secret(self, secret: SecretRecord) -> SecretRecord:
        def work(connection: sqlite3.Connection) -> SecretRecord:
            return SECRETS.read(run(connection, "put_secret", SECRETS.write(secret))[0])

        stored: SecretRecord = await self._writer.submit(work, durable=True)
        return stored

    async def list_secrets(self, tenant: str) -> list[SecretRecord]:
        rows = await self._reader.select("list_secrets", {"tenant": tenant})
        return [SECRETS.read(row) for row in rows]

    async def delete_secret(self, tenant: str, name: str) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return bool(run(connection, "delete_secret", {"tenant": tenant, "name": name}))

        return bool(await self._writer.submit(work, durable=True))

    async def anything_sealed(self) -> bool:
        return bool((await self._reader.select("anything_sealed", {}))[0][0])

    # -- exposed ports ----------------------------------------------------------------------
    async def put_port(self, port: ExposedPort) -> ExposedPort:
        def work(connection: sqlite3.Connection) -> ExposedPort:
            if not run(connection, "live_session", {"session": port.session}):
                raise SessionNotFound(f"session {port.session!r} does not exist")
            rows = run(connection, "insert_port", PORTS.write(port))
            if not rows:
                place = {"session": port.session, "port": port.port}
                rows = run(connection, "find_port", place)
            if not rows:
                raise Conflict(f"port {port.listens_at} of the host is another session's")
            return PORTS.read(rows[0])

        stored: ExposedPort = await self._writer.submit(work, durable=True)
        return stored

    async def list_ports(self, session: str | None = None) -> list[ExposedPort]:
        rows = await self._reader.select("list_ports", {"session": session})
        return [PORTS.read(row) for row in rows]

    async def delete_port(self, session: str, port: int) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return bool(run(connection, "delete_port", {"session": session, "port": port}))

        return bool(await self._writer.submit(work, durable=True))
