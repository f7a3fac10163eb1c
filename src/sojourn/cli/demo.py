"""The demo agent: one session through everything that must not lose it, each check printed.

Guarantee: every line marked `ok` was checked against the running session just then; the first
check that fails ends the demo with exit code 1. It uses a directory and a port of its own and
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError
from sojourn.node.isolation import processes

UP = (sys.executable, "-m", "sojourn.cli.main", "up")
RECOVER = (sys.executable, "-m", "sojourn.cli.main", "recover")

COUNTER = b"""\
import sqlite3, time
database = sqlite3.connect("/root/work/counter.db", isolation_level=None)
database.execute("pragma journal_mode=wal")
database.execute("create table if not exists ticks(n integer)")
log = open("/root/work/ticks.log", "a", buffering=1)
n = 0
while True:
    n += 1
    log.write(f"{n}\\n")
    database.execute("insert into ticks values (?)", (n,))
    time.sleep(0.02)
"""

INSPECT = """\
import json, sqlite3
rows = [r[0] for r in sqlite3.connect("/root/work/counter.db").execute("select n from ticks")]
ok = sqlite3.connect("/root/work/counter.db").execute("pragma integrity_check").fetchone()[0]
log = [int(line) for line in open("/root/work/ticks.log").read().split()]
print(json.dumps({"integrity": ok, "rows": len(rows), "last": log[-1],
  "linear": rows == list(range(1, len(rows) + 1)) and log == list(range(1, len(log) + 1))}))
"""


class DemoFailed(Exception):
    """A check did not hold."""


class Demo:
    """Runs the steps against a server of its own."""

    def __init__(self, data: Path, say: Callable[[str], None]) -> None:
        self._data = data
        self._objects = data.parent / "objects"
        self._say = say
        self._server: subprocess.Popen[str] | None = None
        self.checks = 0

    # -- the server -------------------------------------------------------------------------

    def start_server(self) -> Sojourn:
        """Start (or start again) the server on the demo's directory."""
        with (self._data.parent / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *UP,
                    *("--data", str(self._data), "--listen", "127.0.0.1:0"),
                    *("--store", str(self._objects)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith("ready "):
            raise DemoFailed(f"the server did not start: {self.log_tail()}")
        token = (self._data / "token").read_text().strip()
        self.client = Sojourn(url=line.split()[1], token=token)
        return self.client

    def log_tail(self) -> str:
        """The end of the server's log."""
        return (self._data.parent / "server.log").read_text(errors="replace")[-3000:]

    def kill_server(self) -> None:
        """As a crash would: no chance to clean up."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()
        self._server = None

    def clear(self) -> None:
        """After a failure: end every session, so that nothing of the demo stays on the machine."""
        if self._server is None:
            self.start_server()
        for session in self.client.sessions.list():
            session.delete()

    def stop_server(self) -> None:
        """Stop it in order."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            self._server.wait(timeout=60)
            self._server = None

    # -- checks -----------------------------------------------------------------------------

    def check(self, what: str, holds: bool, seen: object = None) -> None:
        """Print a check that holds; raise for one that does not."""
        if not holds:
            raise DemoFailed(f"{what}: saw {seen!r}")
        self.checks += 1
        shown = "" if seen is None else f"  ({seen})"
        self._say(f"  ok  {what}{shown}")

    def processes_on_host(self) -> list[int]:
        """Host processes of sandboxes of this demo's server."""
        own = {os.getpid(), self._server.pid if self._server is not None else 0}
        return [
            pid
            for pid in processes.all_pids()
            if pid not in own
            and any(str(self._data) in word for word in processes.command_line(pid))
        ]

    def inspect(self, session: Session) -> dict[str, object]:
        """What the counter has written, read inside the session."""
        result = session.exec(["python3", "-c", INSPECT])
        if not result.ok:
            raise DemoFailed(f"the counter's files cannot be read: {result.stderr!r}")
        seen = json.loads(result.stdout)
        assert isinstance(seen, dict)
        return seen

    # -- the story --------------------------------------------------------------------------

    def run(self) -> None:
        """All of it."""
        self._say("A session that works")
        session = self.start_server().sessions.create(name="demo")
        self.check("created and running", session.state == "running", session.id)
        self._work(session)
        self._put_away(session)
        forks = self._fork(session)
        self._back(session)
        client = self._crash(session)
        session = client.sessions.get("demo")
        self._promote(client, session, [fork.id for fork in forks])
        client = self._lose(session)
        self._end(client)

    def _work(self, session: Session) -> None:
        session.files.write("/root/greeting-1.0-py3-none-any.whl", _wheel())
        installed = session.exec(
            "python3 -m venv /opt/agent && /opt/agent/bin/pip install --quiet --no-index"
            " /root/greeting-1.0-py3-none-any.whl && /opt/agent/bin/python -m greeting",
            timeout=120,
        )
        self.check(
            "a package is installed and runs",
            installed.ok and installed.text.strip() == "hello from a package",
            installed.text.strip() or installed.stderr.decode(errors="replace"),
        )
        session.files.write("/root/work/notes.md", b"# plan\n1. count\n")
        session.files.write("/root/work/counter.py", COUNTER)
        edited = session.exec("sed -i 's/1. count/1. count well/' /root/work/notes.md")
        self.check("files are edited", edited.ok, session.files.read("/root/work/notes.md"))
        process = session.spawn(["python3", "/root/work/counter.py"])
        session.run_code("total = sum(range(1_000_000)); import os; me = os.getpid()")
        time.sleep(0.5)
        seen = self.inspect(session)
        self.check("a counter runs beside an open SQLite database", bool(seen["linear"]), seen)
        self._pid = process.pid

    def _put_away(self, session: Session) -> None:
        self._say("Suspended and resumed")
        before = self.inspect(session)
        started = time.perf_counter()
        session.suspend()
        took = (time.perf_counter() - started) * 1000
        self.check("suspended", session.state == "suspended", f"{took:.0f} ms")
        left = self.processes_on_host()
        self.check("no process of it is left on the machine", not left, left or None)
        report = session.verify()
        self.check("every stored byte is as it was put away", report.ok, f"{report.bytes} bytes")
        time.sleep(1)
        started = time.perf_counter()
        after = self.inspect(session)
        took = (time.perf_counter() - started) * 1000
        self.check(
            "the next command resumed it", session.refresh().state == "running", f"{took:.0f} ms"
        )
        time.sleep(0.3)
        after = self.inspect(session)
        self.check("the database is intact", after["integrity"] == "ok", after["integrity"])
        self.check(
            "the counter went on without a gap",
            bool(after["linear"]) and _int(after["last"]) > _int(before["last"]),
            f"{before['last']} -> {after['last']}",
        )
        listed = session.exec(["kill", "-0", str(self._pid)])
        self.check("it is the same process", listed.ok, f"pid {self._pid}")
        total = session.run_code("total").text
        self.check("the interpreter still holds its variables", total == "499999500000", total)

    def _fork(self, session: Session) -> list[Session]:
        self._say("Forked three ways")
        session.snapshot(label="before-forks")
        started = time.perf_counter()
        forks = session.fork(n=3)
        took = (time.perf_counter() - started) * 1000
        self.check("three forks run", len(forks) == 3, f"{took:.0f} ms")
        for number, fork in enumerate(forks):
            fork.files.write("/root/work/answer", f"fork {number}".encode())
            fork.run_code(f"total = {number}")
        time.sleep(0.3)
        for number, fork in enumerate(forks):
            seen = self.inspect(fork)
            mine = fork.files.read("/root/work/answer")
            self.check(
                f"fork {number} has its own files, memory and counter",
                bool(seen["linear"])
                and mine == f"fork {number}".encode()
                and fork.run_code("total").text == str(number),
                f"counter at {seen['last']}",
            )
        self.check("the source saw none of it", not session.files.exists("/root/work/answer"))
        self.check("the source ran on", bool(self.inspect(session)["linear"]))
        self._promoted = forks[1].id
        return forks

    def _back(self, session: Session) -> None:
        self._say("Rolled back")
        session.exec("rm -rf /root/work/notes.md /opt/agent")
        session.run_code("total = 'ruined'")
        ruined = session.refresh().head
        session.rollback("before-forks")
        notes = session.files.read("/root/work/notes.md")
        self.check("the files are back", b"count well" in notes, notes)
        self.check("so is memory", session.run_code("total").text == "499999500000")
        self.check("and the process runs on", bool(self.inspect(session)["linear"]))
        tree = {snapshot.id for snapshot in session.history()}
        self.check(
            "the abandoned state stays in the tree", ruined in tree, f"{len(tree)} snapshots"
        )

    def _crash(self, session: Session) -> Sojourn:
        self._say("The server is killed")
        before = self.inspect(session)
        session.files.write("/root/work/acknowledged", b"written just before the crash")
        self.kill_server()
        time.sleep(0.5)
        started = time.perf_counter()
        client = self.start_server()
        took = (time.perf_counter() - started) * 1000
        session = client.sessions.get("demo")
        self.check(
            "a new server took the session over", session.state == "running", f"{took:.0f} ms"
        )
        kept = session.files.read("/root/work/acknowledged")
        self.check("the last acknowledged write is there", kept.startswith(b"written"), kept)
        after = self.inspect(session)
        self.check(
            "the process never stopped",
            bool(after["linear"]) and session.exec(["kill", "-0", str(self._pid)]).ok,
            f"{before['last']} -> {after['last']}",
        )
        self.check("memory is untouched", session.run_code("total").text == "499999500000")
        return client

    def _promote(self, client: Sojourn, session: Session, forks: list[str]) -> None:
        self._say("The best fork is promoted")
        client.sessions.get(self._promoted).promote()
        answer = session.files.read("/root/work/answer")
        self.check("its state is the session's now", answer == b"fork 1", answer)
        for fork in forks:
            client.sessions.get(fork).delete()
        self.check("the session outlives its forks", bool(self.inspect(session)["linear"]))
        report = session.verify()
        self.check("all of the tree is sound", report.ok, f"{report.snapshots} snapshots")

    def _lose(self, session: Session) -> Sojourn:
        self._say("The machine's disk is lost")
        before = self.inspect(session)
        started = time.perf_counter()
        session.suspend(wait="durable")
        took = (time.perf_counter() - started) * 1000
        self.check("suspended, and safe in the object store", True, f"{took:.0f} ms")
        tree = [snapshot.id for snapshot in session.history()]
        self.kill_server()
        shutil.rmtree(self._data)
        done = subprocess.run(
            [*RECOVER, "--store", str(self._objects), "--data", str(self._data)],
            capture_output=True,
            text=True,
        )
        said = None if done.returncode == 0 else done.stderr
        # A database that is elsewhere (SOJOURN_DATABASE) was not lost; the rest is brought back.
        what = "all it knew" if os.environ.get("SOJOURN_DATABASE") else "the database"
        self.check(f"{what} is made anew from the object store", not said, said)
        client = self.start_server()
        session = client.sessions.get("demo")
        kept = {snapshot.id for snapshot in session.history()}
        self.check(
            "the session is back with its tree",
            session.state == "suspended" and str(session.head) in kept & set(tree),
            f"{len(kept)} snapshots",
        )
        started = time.perf_counter()
        after = self.inspect(session)
        took = (time.perf_counter() - started) * 1000
        self.check(
            "it resumes from the object store alone", bool(after["linear"]), f"{took:.0f} ms"
        )
        time.sleep(0.3)
        after = self.inspect(session)
        self.check(
            "the counter goes on without a gap",
            bool(after["linear"]) and _int(after["last"]) > _int(before["last"]),
            f"{before['last']} -> {after['last']}",
        )
        return client

    def _end(self, client: Sojourn) -> None:
        self._say("Nothing stays behind")
        client.sessions.get("demo").delete()
        remaining = [session.id for session in client.sessions.list()]
        self.check("all sessions are deleted", not remaining, remaining or None)
        self.stop_server()
        left = self.processes_on_host()
        self.check("no process is left", not left, left or None)
        mounts = Path("/proc/self/mounts").read_text()
        self.check("no mount is left", str(self._data) not in mounts)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _wheel() -> bytes:
    """A small real wheel, since a session has no network by default."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("greeting/__init__.py", "")
        archive.writestr("greeting/__main__.py", 'print("hello from a package")\n')
        info = "greeting-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: demo\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            f"{info}/RECORD",
            f"greeting/__init__.py,,\ngreeting/__main__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n"
            f"{info}/RECORD,,\n",
        )
    return content.getvalue()


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sojourn-demo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@click.command()
def demo() -> None:
    """Run the demo agent to its end, printing each check."""
    with _directory() as directory:
        story = Demo(directory / "data", click.echo)
        started = time.perf_counter()
        try:
            story.run()
        except (DemoFailed, SojournError) as failure:
            click.echo(f"  FAILED  {failure}", err=True)
            click.echo(story.log_tail(), err=True)
            story.clear()
            raise SystemExit(1) from failure
        finally:
            story.stop_server()
        took = time.perf_counter() - started
        click.echo(f"All {story.checks} checks passed in {took:.1f} s.")
