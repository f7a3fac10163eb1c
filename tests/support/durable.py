"""A server's object store as tests look at it, and nodes that are lost.

place = copy of the `stocked` object store (see tests/conftest.py)
server = ServerProcess(tmp_path / "data", store=place.as_uri())
...
other = moved(server, tmp_path / "other")    # the first node is gone, store and name stay
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

from sojourn.client import Sojourn
from sojourn.node.isolation import processes
from support import prefork
from support.servers import ServerProcess, eventually

# Every point of `sojourn.faultpoints` that the copying to the object store has.
REPLICATION_POINTS = (
    "replicate.push",
    "replicate.mark",
    "replicate.record",
    "replicate.remove",
)


def sojourn(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command line, in a process of its own."""
    return prefork.run(*words, environment=os.environ | environment)


def stock(root: Path, **environment: str) -> Path:
    """A new object store that has the template and nothing else."""
    server = ServerProcess(root / "data", store=(root / "objects").as_uri())
    try:
        session = server.start(**environment).sessions.create()
        session.suspend(wait="durable")
    finally:
        server.remove(**environment)
    for tenant in (root / "objects").glob("ten_*"):
        shutil.rmtree(tenant)
    for tenant in (root / "objects" / "tenants").iterdir():
        tenant.unlink()
    return root / "objects"


def lose(server: ServerProcess) -> None:
    """The node is gone: its processes, its mounts, its data directory."""
    server.kill()
    for pid in server.left():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not server.left())
    server.unmount()
    shutil.rmtree(server.data)


def moved(server: ServerProcess, data: Path, **environment: str) -> ServerProcess:
    """Another node that has nothing but the object store of the lost one, started."""
    lose(server)
    return recovered(server.store, data, **environment)


def recovered(store: str, data: Path, **environment: str) -> ServerProcess:
    """A new node, started, with what `sojourn recover` finds in an object store."""
    done = sojourn("recover", "--store", store, "--data", str(data), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    server = ServerProcess(data, store=store)
    server.start(**environment)
    return server


def settled(client: Sojourn) -> bool:
    """Whether the object store has all there is."""
    objects = client.status().objects
    return objects is not None and objects.waiting == 0


def objects(place: Path, kind: str, domain: str = "ten_*") -> list[Path]:
    """The objects of a kind (`packs`, `layers`, `sessions` ...) in a local object store."""
    return sorted(path for path in place.glob(f"{domain}/{kind}/**/*") if path.is_file())


def stored_bytes(place: Path) -> Counter[str]:
    """Bytes of the objects of each kind, of tenants and templates together."""
    found: Counter[str] = Counter()
    for path in place.rglob("*"):
        parts = path.relative_to(place).parts
        if path.is_file() and len(parts) > 2 and not parts[0].startswith("#"):
            found[parts[1]] += path.stat().st_size
    return found


def workers(store: str) -> list[int]:
    """The processes that send to an object store, also those whose server is gone."""
    return [
        pid
        for pid in processes.all_pids()
        if "sojourn.repository.worker" in processes.command_line(pid)
        and f"SOJOURN_STORE={store}" in environment(pid)
    ]


def environment(pid: int) -> list[str]:
    """The variables a process was started with; none when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [os.fsdecode(one) for one in raw.split(b"\0")]
