"""The trees of the store's measure are the same every time, and its rows name what was missed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The measure, which is not part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    import bench.__main__
    import bench.store

    monkeypatch.setattr(bench.store_trees, "_LINES", 7_000)  # making all of them takes seconds
    bench.store_trees._vocabulary.cache_clear()
    return bench


def digest(tree: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        total.update(str(path.relative_to(tree)).encode())
        if path.is_symlink():
            total.update(os.fsencode(path.readlink()))
        elif path.is_file():
            total.update(path.read_bytes() + b"%d" % path.stat().st_nlink)
    return total.hexdigest()


def test_trees_and_their_changes_are_the_same_every_time(bench: ModuleType, tmp_path: Path) -> None:
    trees = bench.store_trees
    for what, make, change in (
        ("files", lambda root: trees.source_tree(root, 300), trees.change_source),
        ("mix", lambda root: trees.mixed_tree(root, 1), trees.change_mixed),
        ("memory", lambda root: trees.memory_image(root, 1 << 20), trees.change_image),
    ):
        seen = []
        for turn in "ab":
            root = tmp_path / f"{what}-{turn}"
            make(root)
            made = digest(root)
            change(root, 0.01, 5)
            seen.append((made, digest(root)))
        assert seen[0] == seen[1]
        assert seen[0][0] != seen[0][1]


def test_small_files_are_text_of_some_variety_with_links(bench: ModuleType, tmp_path: Path) -> None:
    bench.store_trees.source_tree(tmp_path / "tree", 3000)
    files = [p for p in (tmp_path / "tree").rglob("*.py") if not p.is_symlink()]
    inodes = {p.stat().st_ino for p in files}
    contents = {p.read_bytes() for p in files}
    total = sum(map(len, contents))
    assert 2_000 < total / len(inodes) < 10_000
    assert len(inodes) < len(files)  # hard links
    assert len(files) < 3000  # symbolic links
    assert len(contents) > 0.98 * len(inodes)


def test_a_row_is_reached_only_where_it_beats_every_rival(bench: ModuleType) -> None:
    store = bench.store
    figures = store.Figures()
    for name, first, unchanged in (
        ("Sojourn", 5.0, 4.0),
        ("Sojourn, no key", 4.0, 4.0),
        ("restic", 6.0, 3.5),
        ("borg lz4", 7.0, 9.0),
        ("borg zstd", 9.0, 9.0),
    ):
        for step, seconds in (("first capture", first), ("unchanged capture", unchanged)):
            figures.seconds[step][name].append(seconds)
            figures.processor[step][name].append(seconds)
        figures.megabytes["stored in all"][name].append(first)
    rows = {row.measure: row for row in store._rows("files", figures)}
    assert rows["files: first capture"].reached is True
    assert rows["files: unchanged capture"].reached is False
    assert rows["files: bytes, stored in all"].reached is True
    assert rows["files: first capture"].ratio == pytest.approx(5 / 6)
    table = bench.__main__.table(list(rows.values()))
    assert "| Sojourn, no key | restic | borg lz4 | borg zstd |" in table.splitlines()[0]
    assert "**no**" in table
