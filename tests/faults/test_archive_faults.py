"""What goes wrong while a session leaves or enters by a file: the server is killed, the client
goes, the disk is full. Nothing is left, everything older is intact, and it can be done again."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import StorageFull
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose data directory lies on a file system of 640 MiB of its own."""
    image, mount = tmp_path / "disk", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(640 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    server = ServerProcess(mount / "data")
    try:
        server.start().close()
        yield server
        (mount / "ballast").unlink(missing_ok=True)
        server.remove()
    finally:
        server.kill()
        subprocess.run(["umount", "-l", str(mount)], check=True)


def free(server: ServerProcess) -> int:
    found = os.statvfs(server.data)
    return found.f_bavail * found.f_frsize


def fill(server: ServerProcess, leave: int) -> Path:
    """Take the disk's room but for about `leave` bytes."""
    ballast = server.data.parent / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(free(server) - leave, 4096))
    return ballast


def begun(server: ServerProcess, data: bytes) -> http.client.HTTPConnection:
    """An import of which only the first half is sent."""
    address = urllib.parse.urlsplit(server.url)
    line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    line.putrequest("POST", "/v1/import")
    line.putheader("authorization", f"Bearer {server.token}")
    line.putheader("content-length", str(len(data)))
    line.endheaders()
    line.send(data[: len(data) // 2])
    return line


def names(server: ServerProcess) -> set[str]:
    """Everything below the store but what is being thrown away."""
    store = server.data / "store"
    kinds = ("layers", "images", "snapshots", "sealed")
    found = {f"{kind}/{one.name}" for kind in kinds for one in (store / kind).iterdir()}
    return found | {one.name for one in store.iterdir()}


def test_killed_or_left_while_it_comes(small: ServerProcess) -> None:
    known, room = names(small), free(small)
    with small.client() as client:
        session = client.sessions.create(name="box")
        session.exec("head -c 60000000 /dev/urandom > /srv/noise; sha256sum /srv/noise > /srv/sum")
        archive = io.BytesIO()
        session.export(archive)
        session.delete()
        data = archive.getvalue()
    eventually(lambda: names(small) == known and free(small) > room - (4 << 20))
    # The client goes.
    line = begun(small, data)
    eventually(lambda: free(small) < room - (30 << 20))
    line.close()
    eventually(lambda: free(small) > room - (8 << 20))
    # The server goes.
    line = begun(small, data)
    eventually(lambda: free(small) < room - (30 << 20))
    small.restart()
    line.close()
    assert free(small) > room - (8 << 20)
    assert names(small) == known
    with small.client() as client:
        assert client.sessions.list() == []
        made = client.sessions.import_(data)
        assert made.name == "box"
        assert made.exec("sha256sum -c /srv/sum").exit_code == 0


def test_a_full_disk_refuses_and_leaves_nothing(small: ServerProcess) -> None:
    with small.client() as client:
        session = client.sessions.create(name="box", policy={"auto_snapshot": "off"})
        session.exec("head -c 60000000 /dev/urandom > /srv/noise; sha256sum /srv/noise > /srv/sum")
        session.suspend()
        known, room = names(small), free(small)
        ballast = fill(small, 20 << 20)
        full = free(small)
        out = io.BytesIO()
        with pytest.raises(StorageFull):
            session.export(out)
        assert not out.getvalue() and free(small) >= full - (1 << 20)
        ballast.unlink()
        session.export(out)
        data = out.getvalue()
        eventually(lambda: free(small) >= room - (1 << 20))
        # Not even the archive has room; then it has, but not what is in it.
        for leave in (20 << 20, len(data) + (10 << 20)):
            for one in client.sessions.list():
                one.delete()
            eventually(lambda: free(small) >= room + (50 << 20))
            ballast = fill(small, leave)
            before, full = names(small), free(small)
            with pytest.raises(StorageFull):
                client.sessions.import_(data)
            assert client.sessions.list() == []
            eventually(lambda: free(small) >= full - (1 << 20))  # noqa: B023
            assert names(small) == before <= known
            ballast.unlink()
        made = client.sessions.import_(data)
        assert made.exec("sha256sum -c /srv/sum").exit_code == 0


def test_a_client_that_leaves_ends_the_export(small: ServerProcess) -> None:
    with small.client() as client:
        session = client.sessions.create()
        session.suspend()
        room = free(small)
        address = urllib.parse.urlsplit(small.url)
        line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        headers = {"authorization": f"Bearer {small.token}"}
        line.request("GET", f"/v1/sessions/{session.id}/export", headers=headers)
        eventually(lambda: workers(small))
        line.close()
        eventually(lambda: not workers(small))
        eventually(lambda: free(small) >= room - (1 << 20))
        # A kill of the server takes its worker along.
        line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        line.request("GET", f"/v1/sessions/{session.id}/export", headers=headers)
        found = eventually(lambda: workers(small))
        small.restart()
        line.close()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found))
        assert free(small) >= room - (4 << 20)


def workers(server: ServerProcess) -> list[int]:
    """The processes that write archives for a server."""
    found = []
    for line in Path(f"/proc/{server.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in map(int, (line / "children").read_text().split()):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"archive_worker" in command:
                    found.append(pid)
    return found
