"""Where a received archive goes: files past links, pipes, devices, and nothing left behind."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from sojourn.client.core_archives import Receiving
from sojourn.errors import ArchiveInvalid, FileConflict
from sojourn.wire.api import ARCHIVE_HEADER, ArchiveInfo

BODY = os.urandom(1000)
DIGEST = blake3(BODY).digest()
WHOLE = BODY + DIGEST


def headers(size: int = len(WHOLE)) -> dict[str, str]:
    info = ArchiveInfo(
        bytes=size,
        digest=DIGEST.hex(),
        fingerprint="f",
        session="ses_x",
        snapshot="snp_x",
        snapshots=1,
        encrypted=False,
    )
    return {ARCHIVE_HEADER.lower(): msgspec.json.encode(info).decode()}


def receive(target: str | Path, size: int = len(WHOLE)) -> None:
    with Receiving(target, None) as receiving:
        receiving.begin(headers(size))
        receiving.feed(WHOLE)
        receiving.finish()


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def test_what_a_link_names_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "old").write_bytes(b"old")
    held = (real / "old").open("rb")
    (tmp_path / "link").symlink_to("second")
    (tmp_path / "second").symlink_to(real / "old")
    receive(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "second").is_symlink()
    assert (real / "old").read_bytes() == WHOLE
    assert held.read() == b"old"  # replaced, not overwritten
    held.close()
    assert names(real) == ["old"] and names(tmp_path) == ["elsewhere", "link", "second"]


def test_a_link_to_nothing_yet_makes_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new")
    receive(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").read_bytes() == WHOLE


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileConflict):
        receive(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"] and (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_to_and_stays(tmp_path: Path, linked: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    target = pipe
    if linked:
        target = tmp_path / "link"
        target.symlink_to(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    receive(target)
    reader.join(20)
    assert read == [WHOLE]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert names(tmp_path) == (["link", "pipe"] if linked else ["pipe"])


def test_an_open_pipe_is_reached_by_the_name_of_its_descriptor(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        receive(f"/proc/self/fd/{writing}")
        assert os.read(reading, 1 << 16) == WHOLE
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("minor", [3, 7])  # takes everything; has never room
def test_a_device_is_written_to_and_stays(tmp_path: Path, minor: int) -> None:
    node = tmp_path / "node"
    try:
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, minor))
        os.close(os.open(node, os.O_WRONLY))
    except PermissionError:
        pytest.skip("device nodes cannot be made and opened here")
    if minor == 3:
        receive(node)
    else:
        with pytest.raises(FileConflict):
            receive(node)
    assert stat.S_ISCHR(node.lstat().st_mode)
    assert names(tmp_path) == ["node"]


def test_directories_and_sockets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("dir")
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(tmp_path)  # a socket's path is short
        try:
            listening.bind("sock")
        finally:
            os.chdir(before)
        for name in ("dir", "link", "sock"):
            with pytest.raises(FileConflict) as refused:
                receive(tmp_path / name)
            assert name in refused.value.message
    assert names(tmp_path) == ["dir", "link", "sock"] and names(tmp_path / "dir") == []


def test_a_removed_file_is_not_made_again_by_its_old_name(tmp_path: Path) -> None:
    with (tmp_path / "gone").open("wb") as file:
        (tmp_path / "gone").unlink()
        with pytest.raises(FileConflict):
            receive(f"/proc/self/fd/{file.fileno()}")
    assert names(tmp_path) == []


def test_two_at_once_do_not_write_into_each_other(tmp_path: Path) -> None:
    target = tmp_path / "archive"
    with Receiving(target, None) as one, Receiving(target, None) as other:
        for receiving in (one, other):
            receiving.begin(headers())
            receiving.feed(WHOLE[:500])
        for receiving in (one, other):
            receiving.feed(WHOLE[500:])
            receiving.finish()
            assert target.read_bytes() == WHOLE
    assert names(tmp_path) == ["archive"]


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    target = tmp_path / "archive"
    target.write_bytes(b"old")
    with pytest.raises(ArchiveInvalid):
        receive(target, size=1)
    receiving = Receiving(target, None)
    os.close(receiving._file.fileno())  # closing fails
    with pytest.raises(OSError):
        receiving.__exit__()
    assert names(tmp_path) == ["archive"] and target.read_bytes() == b"old"


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    receive(tmp_path / ("n" * 255))
    assert (tmp_path / ("n" * 255)).read_bytes() == WHOLE
