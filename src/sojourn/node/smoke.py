"""A sandbox booted, put away and brought back: the proof that this host carries sessions.

Guarantee: it passes only when a process that counts in memory, in a file, in a mapped file and in
a database, and answers on a socket, went on after its files and its memory were parted from the
sandbox they came from, with all of them agreeing; nothing of it is left on the host afterwards,
however it ends. It goes the way of a session: overlay, driver, supervisor, link.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import HostUnfit
from sojourn.model.ids import new_id
from sojourn.model.sessions import Limits
from sojourn.node import mounts, tools
from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.cgroups import CgroupTree
from sojourn.node.isolation.gvisor import GVisorDriver
from sojourn.node.link import GuestLink
from sojourn.wire.guest import ProcessSpec

_ANSWER_SECONDS = 20.0

_PROGRAM = r"""
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


listener = socket.socket()
listener.bind(("127.0.0.1", 7000))
listener.listen()
threading.Thread(target=work, daemon=True).start()
print("listening", flush=True)
while True:
    link, _ = listener.accept()
    link.sendall(json.dumps(state()).encode())
    link.close()
"""

_ASK = """
import socket
with socket.create_connection(("127.0.0.1", 7000)) as link, link.makefile("rb") as answer:
    print(answer.read().decode())
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
                return asyncio.run(_put_away_and_back(driver, work, root))
            finally:
                driver.sweep(keep=set())
                mounts.cleanup_mounts(work)
                CgroupTree(scope).remove()


async def _put_away_and_back(driver: GVisorDriver, work: Path, root: Path) -> str:
    supervisor = tools.supervisor_path()
    image = work / "image"
    image.mkdir()
    took: dict[str, float] = {}

    first = _prepare(work / "first", [root], supervisor)
    async with _linked(first) as guest:
        with _timed(took, "boot"):
            await asyncio.to_thread(driver.start, first)
            await guest.attach(_ANSWER_SECONDS)
            await _start_program(guest)
        before = await _ask(guest)
        with _timed(took, "capture"):
            await guest.detach(_ANSWER_SECONDS)
            driver.freeze(first)
            driver.checkpoint(first, image)
    driver.destroy(first)
    mounts.unmount(first.root)

    second = _prepare(work / "second", [work / "first" / "upper", root], supervisor)
    async with _linked(second) as guest:
        with _timed(took, "restore"):
            await asyncio.to_thread(driver.restore, second, image)
            await guest.attach(_ANSWER_SECONDS)
            after = await _ask(guest)
    judge(before, after, time.time())
    driver.destroy(second)
    mounts.unmount(second.root)
    times = ", ".join(f"{what} {seconds * 1000:.0f} ms" for what, seconds in took.items())
    return f"processes and files went on where they were ({times})"


@contextlib.asynccontextmanager
async def _linked(spec: SandboxSpec) -> AsyncIterator[GuestLink]:
    guest = GuestLink(spec.control)
    try:
        yield guest
    finally:
        await guest.close()


@contextlib.contextmanager
def _timed(took: dict[str, float], what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    took[what] = time.perf_counter() - started


def _prepare(directory: Path, lowers: list[Path], supervisor: Path) -> SandboxSpec:
    for part in ("upper", "work", "root", "control"):
        (directory / part).mkdir(parents=True)
    mounts.mount_overlay(lowers, directory / "upper", directory / "work", directory / "root")
    return SandboxSpec(
        sandbox=new_id("sbx"),
        directory=directory,
        root=directory / "root",
        control=directory / "control",
        supervisor=supervisor,
        argv=[],
        env={"PATH": "/usr/bin:/bin"},
        hostname="smoke",
        limits=Limits(),
    )


async def _start_program(guest: GuestLink) -> None:
    """Start the counting process; gives back once it answers."""
    process = await guest.start(ProcessSpec([b"/usr/bin/python3", b"-c", _PROGRAM.encode()]))
    said = b""
    async with asyncio.timeout(_ANSWER_SECONDS):
        async for output in guest.output(process.id):
            said += output.data
            if b"listening" in said:
                return
    raise HostUnfit(f"a process in the sandbox ended: {said.decode(errors='replace').strip()}")


async def _ask(guest: GuestLink) -> dict[str, Any]:
    """The counting process's own view of its state."""
    spec = ProcessSpec([b"/usr/bin/python3", b"-c", _ASK.encode()], timeout=_ANSWER_SECONDS)
    ended, outputs = await guest.run(spec)
    said = b"".join(output.data for output in outputs)
    if ended.exit_code != 0:
        raise HostUnfit(
            f"the process in the sandbox does not answer: {said.decode(errors='replace').strip()}",
            next_step="Try again on an idle machine; then try a newer runsc (SOJOURN_RUNSC).",
        )
    state: dict[str, Any] = json.loads(said)
    return state


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
