"""A sandbox booted, put away and brought back: the proof that this host carries sessions.

Guarantee: it passes only when a process that counts in memory, in a file, in a mapped file and in
a database went on after its files and its memory were parted from the sandbox they came from, with
all of them agreeing; nothing of it is left on the host afterwards, however it ends.

The process is its own tiny PID 1, so that a fault of the supervisor is not taken for one of the
host; it speaks the same way, by connecting out to the node's socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import HostUnfit
from sojourn.model.ids import new_id
from sojourn.model.sessions import Limits
from sojourn.node import mounts, tools
from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.cgroups import CgroupTree
from sojourn.node.isolation.gvisor import GVisorDriver

_ANSWER_SECONDS = 20.0

_PROGRAM = r"""#!/usr/bin/python3
import json, mmap, os, socket, sqlite3, threading, time

os.makedirs("/root", exist_ok=True)
log = open("/root/log", "ab", 0)
with open("/root/map", "wb") as file:
    file.write(bytes(4096))
table = mmap.mmap(os.open("/root/map", os.O_RDWR), 4096)
db = sqlite3.connect("/root/db", isolation_level=None, check_same_thread=False)
db.execute("pragma journal_mode=wal")
db.execute("create table t(n)")
lock = threading.Lock()
count = 0


def work():
    global count
    while True:
        with lock:
            count += 1
            log.write(b"%d\n" % count)
            table[0:8] = count.to_bytes(8, "little")
            db.execute("insert into t values(?)", (count,))
        time.sleep(0.005)


def state():
    with lock:
        lines = [int(line) for line in open("/root/log")]
        return {
            "count": count,
            "linear": lines == list(range(1, count + 1)),
            "mapped": int.from_bytes(open("/root/map", "rb").read(8), "little"),
            "rows": db.execute("select count(*) from t").fetchone()[0],
            "integrity": db.execute("pragma integrity_check").fetchone()[0],
            "clock": time.time(),
        }


threading.Thread(target=work, daemon=True).start()
while True:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect("/run/sojourn/node/node.sock")
        if link.recv(1):
            link.sendall(json.dumps(state()).encode())
    except OSError:
        time.sleep(0.002)
    link.close()
"""


def run(directory: Path, template: str = "debian") -> str:
    """Do it in a temporary directory below `directory`; tells what it took.

    Raises HostUnfit with what differed, or the driver's own error.
    """
    root = tools.template_root(template)
    with tempfile.TemporaryDirectory(prefix=".smoke-", dir=directory) as name:
        work = Path(name)
        scope = f"smoke-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        # The state goes to /run: its socket's path must be short wherever `directory` lies.
        with tempfile.TemporaryDirectory(prefix="sojourn-smoke-", dir="/run") as state:
            driver = GVisorDriver(tools.runsc_path(), Path(state), scope)
            try:
                return _put_away_and_back(driver, work, root)
            finally:
                driver.sweep(keep=set())
                mounts.cleanup_mounts(work)
                CgroupTree(scope).remove()


def _put_away_and_back(driver: GVisorDriver, work: Path, root: Path) -> str:
    program = work / "program"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    image = work / "image"
    image.mkdir()
    took: dict[str, float] = {}

    first = _prepare(work / "first", [root], program)
    with _timed(took, "boot"):
        driver.start(first)
        before = _ask(first)
    with _timed(took, "capture"):
        driver.freeze(first)
        driver.checkpoint(first, image)
    driver.destroy(first)
    mounts.unmount(first.root)

    second = _prepare(work / "second", [work / "first" / "upper", root], program)
    with _timed(took, "restore"):
        driver.restore(second, image)
        after = _ask(second)
    judge(before, after, time.time())
    driver.destroy(second)
    mounts.unmount(second.root)
    times = ", ".join(f"{what} {seconds * 1000:.0f} ms" for what, seconds in took.items())
    return f"processes and files went on where they were ({times})"


@contextlib.contextmanager
def _timed(took: dict[str, float], what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    took[what] = time.perf_counter() - started


def _prepare(directory: Path, lowers: list[Path], program: Path) -> SandboxSpec:
    for part in ("upper", "work", "root", "control"):
        (directory / part).mkdir(parents=True)
    mounts.mount_overlay(lowers, directory / "upper", directory / "work", directory / "root")
    return SandboxSpec(
        sandbox=new_id("sbx"),
        directory=directory,
        root=directory / "root",
        control=directory / "control",
        supervisor=program,
        argv=[],
        env={"PATH": "/usr/bin:/bin"},
        hostname="smoke",
        limits=Limits(),
    )


def _ask(spec: SandboxSpec) -> dict[str, Any]:
    """Take the sandbox's connection, ask for its state, and leave nothing attached."""
    path = spec.control / "node.sock"
    # Reached through a descriptor, since the directory's own path may be too long for a socket.
    directory = os.open(spec.control, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_ANSWER_SECONDS)
            listener.bind(f"/proc/self/fd/{directory}/node.sock")
            listener.listen()
            connection, _ = listener.accept()
        with connection, connection.makefile("rb") as answer:
            # First the name goes, then the sandbox hangs up by itself: so it cannot come back
            # and be attached at the freeze.
            path.unlink()
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(b"?")
            state: dict[str, Any] = json.loads(answer.read())
            return state
    except TimeoutError as error:
        raise HostUnfit(
            f"the sandbox did not answer within {_ANSWER_SECONDS:g} s",
            next_step="Try again on an idle machine; then try a newer runsc (SOJOURN_RUNSC).",
        ) from error
    finally:
        path.unlink(missing_ok=True)
        os.close(directory)


def judge(before: dict[str, Any], after: dict[str, Any], now: float) -> None:
    """Raise HostUnfit unless the later state is a continuation of the earlier one."""
    wrong: list[str] = []
    for which, state in (("before", before), ("after", after)):
        if not state["linear"]:
            wrong.append(f"{which}: the log has a gap or a repetition")
        for what in ("mapped", "rows"):
            if state[what] != state["count"]:
                wrong.append(f"{which}: {what} is {state[what]}, memory has {state['count']}")
        if state["integrity"] != "ok":
            wrong.append(f"{which}: the database says {state['integrity']}")
    if after["count"] < before["count"]:
        wrong.append(f"the count went back from {before['count']} to {after['count']}")
    if abs(after["clock"] - now) > 1.0:
        wrong.append(f"its clock is off by {after['clock'] - now:+.1f} s")
    if wrong:
        raise HostUnfit(
            "; ".join(wrong),
            next_step="Do not run sessions with memory here; try a newer runsc (SOJOURN_RUNSC).",
        )
