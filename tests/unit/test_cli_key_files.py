"""Files with secrets: which are read, how much of them, and what is said of the others."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from sojourn.cli.stores import MAX_SECRET, read_secret
from sojourn.errors import InvalidRequest
from sojourn.repository.keys import SECRET_MINIMUM, clean_secret


def read(path: Path) -> bytes | None:
    return read_secret(path, "SOME_FILE", "SOME_KEY", field="key_file")


@pytest.fixture(params=["given", "variable"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Reads a file that is given or named by a variable."""

    def by(path: Path) -> bytes | None:
        if request.param == "given":
            return read(path)
        monkeypatch.setenv("SOME_FILE", str(path))
        return read_secret(None, "SOME_FILE", "SOME_KEY", field="key_file")

    return by


def test_files_and_links_to_them_are_read_whole(tmp_path: Path, named) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "link").symlink_to("key")
    for secret in (b"", b"s" * 16, os.urandom(MAX_SECRET)):
        (tmp_path / "key").write_bytes(secret)
        assert named(tmp_path / "key") == secret
        assert named(tmp_path / "link") == secret


def test_a_pipe_is_read_to_its_end(tmp_path: Path, named) -> None:  # type: ignore[no-untyped-def]
    reading, writing = os.pipe()
    try:
        os.write(writing, b"first half, ")
        rest = threading.Thread(
            target=lambda: (os.write(writing, b"second half"), os.close(writing)), daemon=True
        )
        rest.start()
        assert named(Path(f"/proc/self/fd/{reading}")) == b"first half, second half"
        rest.join(20)
    finally:
        os.close(reading)


def test_what_is_too_large_is_refused_and_not_read_on(tmp_path: Path, named) -> None:  # type: ignore[no-untyped-def]
    with (tmp_path / "key").open("wb") as file:
        file.truncate(1 << 40)  # would not fit into memory
    with pytest.raises(InvalidRequest) as refused:
        named(tmp_path / "key")
    assert str(MAX_SECRET) in refused.value.message
    assert refused.value.details["field"] == "key_file"
    (tmp_path / "key").write_bytes(bytes(MAX_SECRET + 1))
    with pytest.raises(InvalidRequest):
        named(tmp_path / "key")


def test_a_pipe_that_does_not_end_is_refused(tmp_path: Path, named) -> None:  # type: ignore[no-untyped-def]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def pour() -> None:
        with pipe.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except BrokenPipeError:
                return

    pouring = threading.Thread(target=pour, daemon=True)
    pouring.start()
    with pytest.raises(InvalidRequest):
        named(pipe)
    pouring.join(20)
    assert not pouring.is_alive()


def test_devices_sockets_and_directories_are_refused(tmp_path: Path, named) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "dir").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("sock")
    finally:
        os.chdir(before)
    refused = ["dir", "sock"]
    try:
        os.mknod(tmp_path / "zeros", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        refused.append("zeros")
    except PermissionError:
        pass  # needs rights; the others are tried all the same
    for name in refused:
        with pytest.raises(InvalidRequest) as told:
            named(tmp_path / name)
        assert name in told.value.message and "neither a file nor a pipe" in told.value.message
    with pytest.raises(InvalidRequest, match="cannot be read"):
        named(tmp_path / "absent")


def test_a_short_key_is_not_called_the_stores(tmp_path: Path) -> None:
    """An archive has a key too."""
    with pytest.raises(InvalidRequest) as refused:
        clean_secret(b"s" * (SECRET_MINIMUM - 1) + b"\n")
    told = f"{refused.value.message} {refused.value.next_step}".lower()
    assert "store" not in told and str(SECRET_MINIMUM) in told
