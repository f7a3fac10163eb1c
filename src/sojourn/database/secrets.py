"""Secrets of tenants and exposed ports of sessions: rows whose values only the server can open.

Guarantee: what is told as done is on disk. A port of a session is exposed once, whoever asks at
the same time, and never one of a session that is deleted.
"""

from __future__ import annotations

from sojourn.database.engine import Reader, Statements, Writer, touched
from sojourn.database.records import SecretRecord
from sojourn.database.rows import PORTS, SECRETS
from sojourn.errors import Conflict, SessionNotFound
from sojourn.model.ports import ExposedPort


class SecretRows:
    """A part of `SqlDatabase`."""

    _reader: Reader
    _writer: Writer

    # -- secrets ----------------------------------------------------------------------------
    async def put_secret(self, secret: SecretRecord) -> SecretRecord:
        def work(statements: Statements) -> SecretRecord:
            return SECRETS.read(statements.run("put_secret", SECRETS.write(secret))[0])

        return await self._writer.submit(work, durable=True)

    async def list_secrets(self, tenant: str) -> list[SecretRecord]:
        rows = await self._reader.select("list_secrets", {"tenant": tenant})
        return [SECRETS.read(row) for row in rows]

    async def delete_secret(self, tenant: str, name: str) -> bool:
        def work(statements: Statements) -> bool:
            return bool(statements.run("delete_secret", {"tenant": tenant, "name": name}))

        return bool(await self._writer.submit(work, durable=True))

    async def anything_sealed(self) -> bool:
        return bool((await self._reader.select("anything_sealed", {}))[0][0])

    # -- exposed ports ----------------------------------------------------------------------
    async def put_port(self, port: ExposedPort) -> ExposedPort:
        def work(statements: Statements) -> ExposedPort:
            if not statements.run("live_session", {"session": port.session}):
                raise SessionNotFound(f"session {port.session!r} does not exist")
            rows = statements.run("insert_port", PORTS.write(port))
            if not rows:
                place = {"session": port.session, "port": port.port}
                rows = statements.run("find_port", place)
            if not rows:
                raise Conflict(f"port {port.listens_at} of the host is another session's")
            return PORTS.read(rows[0])

        touches = touched((), sessions=[port.session])
        stored = await self._writer.submit(work, durable=True, touches=touches)
        return stored

    async def list_ports(
        self, session: str | None = None, *, holder: str | None = None
    ) -> list[ExposedPort]:
        rows = await self._reader.select(
            "list_ports" if holder is None else "ports_held",
            {"session": session, "holder": holder},
        )
        return [PORTS.read(row) for row in rows]

    async def delete_port(self, session: str, port: int) -> bool:
        def work(statements: Statements) -> bool:
            return bool(statements.run("delete_port", {"session": session, "port": port}))

        touches = touched((), sessions=[session])
        return bool(await self._writer.submit(work, durable=True, touches=touches))
