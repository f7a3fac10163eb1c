"""What is neither file nor directory in a local store: one verdict, whoever comes to it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.backends.local import LocalBackend

KEY = "dom/packs/ab/key"


def link(path: Path) -> None:
    """The object or directory itself, moved away and linked to: its bytes are all there."""
    away = path.parents[len(path.parts) - 1 - path.parts.index("store")] / "away"
    path.rename(away)
    path.symlink_to(away)


def dangling(path: Path) -> None:
    remove(path)
    path.symlink_to("nowhere")


def circle(path: Path) -> None:
    remove(path)
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def listening(path: Path) -> None:
    remove(path)
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("stranger", [link, dangling, circle, pipe, listening])
@pytest.mark.parametrize("name", [KEY, "dom/packs/ab", "dom/packs", "dom"])
def test_every_operation_gives_the_same_verdict(
    tmp_path: Path, name: str, stranger: Callable[[Path], None]
) -> None:
    root = tmp_path / "store"
    backend = LocalBackend(root)
    backend.put(KEY, b"content")
    backend.put("other/key", b"other")
    stranger(root / name)
    verdicts: list[Callable[[], object]] = [
        lambda: backend.get(KEY),
        lambda: backend.get_ranges(KEY, [(0, 1)]),
        lambda: backend.get_tail(KEY, 1),
        lambda: backend.head(KEY),
        lambda: backend.put(KEY, b"new"),
        lambda: backend.put(KEY, b"content", create=True),
        lambda: backend.delete([KEY]),
        lambda: list(backend.list("")),
        lambda: list(backend.list("dom/")),
        lambda: list(backend.list("dom/packs/ab/")),
    ]
    for verdict in verdicts:
        with pytest.raises(IntegrityError) as told:
            verdict()
        assert told.value.details["object"] == name and name in told.value.message
    # Whoever does not come to it is not affected.
    assert backend.get("other/key")[0] == b"other"
    assert [one.key for one in backend.list("other/")] == ["other/key"]
    assert (root / name).is_symlink() or (root / name).exists()


def test_a_directory_is_no_object_and_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to("real")
    backend = LocalBackend(tmp_path / "store")
    backend.put(KEY, b"content")
    assert [one.key for one in backend.list("")] == [KEY]
    for key in ("dom/packs", KEY + "/below"):
        with pytest.raises(ObjectMissing):
            backend.get(key)
    assert backend.get(KEY)[0] == b"content"
