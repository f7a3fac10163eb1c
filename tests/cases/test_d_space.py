"""C45 and limits.disk_bytes: a full disk is told before anything is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError
from support.servers import ServerProcess, eventually


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose data directory lies on a file system of 384 MiB of its own."""
    image = tmp_path / "disk"
    mount = tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(384 << 20)
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


def fill(server: ServerProcess, leave: int) -> Path:
    """Take the disk's room but for about `leave` bytes."""
    ballast = server.data.parent / "ballast"
    left = os.statvfs(server.data)
    room = left.f_bavail * left.f_frsize - leave
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # full
        os.posix_fallocate(file.fileno(), 0, max(room - (1 << 20), 4096))
        file.seek(0, os.SEEK_END)
        for _ in range(256):
            file.write(bytes(4096))
    return ballast


@pytest.mark.privileged
def test_c45_a_full_disk_is_an_error_first_and_loses_nothing(small: ServerProcess) -> None:
    with small.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        session.exec("head -c 5000000 /dev/urandom > /srv/kept; sha256sum /srv/kept > /srv/sum")
        process = session.spawn("exec sleep 1000")
        good = session.snapshot("good")
        ballast = fill(small, 1 << 20)
        before = [one.id for one in session.history()]
        for take in (lambda: session.snapshot("no room"), session.suspend, lambda: session.fork(1)):
            with pytest.raises(SojournError) as raised:
                take()
            assert raised.value.code == "storage_full", raised.value
            assert session.refresh().state == "running"
            assert process.refresh().running
        assert [one.id for one in session.history()] == before
        # The old snapshot is whole, and the session goes on.
        assert session.verify(good).ok
        assert session.exec("sha256sum -c /srv/sum").exit_code == 0
        ballast.unlink()
        session.suspend()
        assert session.exec("sha256sum -c /srv/sum").exit_code == 0
        assert process.refresh().running
        assert session.verify().ok


@pytest.mark.privileged
def test_c45_a_server_starts_and_deletes_on_a_full_disk(small: ServerProcess) -> None:
    with small.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        session.exec("head -c 5000000 /dev/urandom > /srv/kept; sha256sum /srv/kept > /srv/sum")
        session.suspend()
        other = client.sessions.create()
    fill(small, 0)
    with small.restart() as client:
        assert {one.id for one in client.sessions.list()} == {session.id, other.id}
        assert client.sessions.get(session.id).verify().ok
        # Deleting is how room is made: it works without any.
        client.sessions.get(other.id).delete()
        (small.data.parent / "ballast").unlink()
        assert client.sessions.get(session.id).exec("sha256sum -c /srv/sum").exit_code == 0


@pytest.fixture
def limited(client: Sojourn) -> Iterator[Session]:
    session = client.sessions.create(limits={"disk_bytes": 32 << 20})
    yield session
    session.delete()


@pytest.mark.parametrize(
    "command",
    [
        "dd if=/dev/zero of=/srv/big bs=1M count=200",
        "i=0; while :; do head -c 1000000 /dev/zero > /srv/part$i || exit 1; i=$((i+1)); done",
    ],
    ids=["one file", "many files"],
)
def test_the_disk_limit_ends_what_fills_it_and_the_session_stays_usable(
    limited: Session, command: str
) -> None:
    limited.files.write("/srv/kept", b"kept")
    try:
        done = limited.exec(command, timeout=60)
    except SojournError as error:
        assert error.code == "disk_quota_exceeded", error
    else:
        assert done.exit_code != 0
        assert not done.timed_out

    def freed() -> bool:
        try:
            limited.files.remove("/srv/big") if limited.files.exists("/srv/big") else None
            for one in limited.files.list("/srv"):
                if one.path.startswith("/srv/part"):
                    limited.files.remove(one.path)
            return limited.exec("echo usable").text == "usable\n"
        except SojournError as error:
            assert error.code in ("disk_quota_exceeded", "file_not_found"), error
            return False

    assert eventually(freed, timeout=60)
    assert limited.files.read("/srv/kept") == b"kept"
    limited.suspend()
    assert limited.files.read("/srv/kept") == b"kept"
    assert limited.verify().ok


def test_an_upload_over_the_disk_limit_is_refused(limited: Session) -> None:
    piece = b"x" * (1 << 20)
    with pytest.raises(SojournError) as raised:
        limited.files.write("/srv/big", (piece for _ in range(100)))
    assert raised.value.code in ("disk_quota_exceeded", "storage_full", "too_large"), raised.value
    assert not limited.files.exists("/srv/big")
    assert limited.exec("echo usable").text == "usable\n"
