"""What is deeper than any path: found by inode, counted, and complained of once a minute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sojourn.lifecycle import SessionState
from sojourn.node.isolation import gvisor_descriptors
from sojourn.node.isolation.long_paths import find, inode_of, is_removed, target_of
from sojourn.server import timers
from sojourn.server.quotas import allocated_bytes
from sojourn.server.timers import Timers
from sojourn.store.trees import open_below, open_directory, remove_tree

NAMES = [f"{level:03}" + "d" * 197 for level in range(30)]
BELOW = "/".join(NAMES)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A tree with a directory that no path leads to."""
    tree = tmp_path / "tree"
    tree.mkdir()
    current = open_directory(tree)
    for name in NAMES:
        os.mkdir(name, dir_fd=current)
        following = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
        os.close(current)
        current = following
    os.close(current)
    yield tree
    remove_tree(tree)


@contextlib.contextmanager
def bottom(root: Path) -> Iterator[int]:
    base = open_directory(root)
    directory = open_below(base, BELOW.encode())
    try:
        yield directory
    finally:
        os.close(directory)
        os.close(base)


@contextlib.contextmanager
def opened(directory: int, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_RDWR | os.O_CREAT, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def test_all_of_a_deep_tree_is_counted(root: Path) -> None:
    empty = allocated_bytes(root)
    with bottom(root) as directory, opened(directory, "file") as fd:
        os.write(fd, os.urandom(1 << 20))
        os.fsync(fd)
    assert allocated_bytes(root) >= empty + (1 << 20)
    assert allocated_bytes(root / "missing") == 0


def test_files_are_found_by_inode_under_all_their_long_names(root: Path) -> None:
    with bottom(root) as directory, opened(directory, "file") as fd:
        entry = Path(f"/proc/self/fd/{fd}")
        assert target_of(entry) is None
        os.link("file", "other", src_dir_fd=directory, dst_dir_fd=directory)
        inode = inode_of(entry.stat())
        assert sorted(find(root, [inode])[inode]) == [f"{BELOW}/file", f"{BELOW}/other"]
        link = root.parent / "link"
        link.symlink_to(root)
        assert len(find(link, [inode])[inode]) == 2
        short = inode_of(root.stat())
        assert find(root, [short]) == {short: []}


def test_descriptors_without_a_path_are_judged(root: Path) -> None:
    me = [os.getpid()]
    others = set(gvisor_descriptors.writable(me, root))  # standard output may be a file

    def writable() -> list[str]:
        return [path for path in gvisor_descriptors.writable(me, root) if path not in others]

    with bottom(root) as directory, opened(directory, "file") as fd:
        assert gvisor_descriptors.unlinked(me, root) == []
        assert writable() == [f"{BELOW}/file"]
        # The name it was opened by is what counts.
        os.link("file", root / "short", src_dir_fd=directory)
        os.unlink("file", dir_fd=directory)
        number = os.fstat(fd).st_ino
        lost = [f"(a path longer than 4096 bytes, inode {number})"]
        assert gvisor_descriptors.unlinked(me, root) == lost
        (root / "short").unlink()
        assert gvisor_descriptors.unlinked(me, root) == lost
        assert writable() == []


def test_a_removed_directory_is_known_without_its_path(root: Path) -> None:
    with bottom(root) as directory:
        os.mkdir("inner", dir_fd=directory)
        inner = os.open("inner", os.O_PATH | os.O_DIRECTORY, dir_fd=directory)
        try:
            assert not is_removed(Path(f"/proc/self/fd/{inner}"))
            os.rmdir("inner", dir_fd=directory)
            assert is_removed(Path(f"/proc/self/fd/{inner}"))
        finally:
            os.close(inner)


def test_the_same_failure_of_a_session_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    actives = [
        SimpleNamespace(
            id=id,
            session=SimpleNamespace(live=True),
            gate=SimpleNamespace(is_open=True),
            state=SessionState.RUNNING,
        )
        for id in ("ses_1", "ses_2")
    ]
    sandbox = SimpleNamespace(status=lambda: SimpleNamespace(alive=True, pids=[1]))

    class Failing:
        cause = "no luck"

        async def check(self, active: Any, sandbox: Any) -> None:
            raise OSError(self.cause)

    failing = Failing()
    context = SimpleNamespace(
        registry=SimpleNamespace(all=lambda: actives), sandbox=lambda active: sandbox
    )
    watching = Timers(*(cast(Any, one) for one in (context, None, None, None, failing)))

    def logged() -> list[str]:
        caplog.clear()
        asyncio.run(watching.watch())
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.ERROR):
        assert len(logged()) == 2
        now[0] += 30
        assert logged() == []
        failing.cause = "another"
        assert len(logged()) == 2
        now[0] += 31
        failing.cause = "no luck"
        assert len(logged()) == 2
        assert logged() == []
