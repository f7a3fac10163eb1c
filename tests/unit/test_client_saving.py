"""Where a downloaded file goes."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from sojourn.client.trees import Saving
from sojourn.errors import FileConflict


def save(target: Path, content: bytes) -> None:
    with Saving(target, 0o640) as saving:
        saving.feed(content)
        assert saving.finish().bytes == len(content)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with Saving(target, 0o640) as saving:
        saving.feed(b"half")
    assert target.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == [
        "file"
    ]
    save(target, b"new")
    assert target.read_bytes() == b"new" and stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    save(pipe, b"through")
    reader.join(10)
    assert seen == [b"through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileConflict):
        Saving(tmp_path, 0o600)
