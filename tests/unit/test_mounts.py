"""Overlay mounts: many layers, odd names, and what is unmounted stays unmounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit
from sojourn.node import mounts

privileged = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    mounts.cleanup_mounts(tmp_path)


@pytest.fixture(params=["one by one", "one call"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of mounting, whichever the kernel would get by itself."""
    if request.param == "one call":
        monkeypatch.setattr(mounts, "_layers_one_by_one", lambda: False)
    elif not mounts._layers_one_by_one():
        pytest.skip("this kernel takes all layers in one call only")
    return str(request.param)


def _directories(place: Path, count: int, name: str = "layer") -> list[Path]:
    made = [place / f"{name}-{number}" for number in range(count)]
    for number, directory in enumerate(made):
        directory.mkdir(parents=True)
        (directory / f"only-{number}").write_text(str(number))
        (directory / "every").write_text(str(number))
    for part in ("upper", "work", "root"):
        (place / part).mkdir()
    return made


def _mount(place: Path, lowers: list[Path]) -> Path:
    mounts.mount_overlay(lowers, place / "upper", place / "work", place / "root")
    return place / "root"


class TestOverlay:
    pytestmark = privileged

    def test_first_layer_is_the_highest(self, place: Path, way: str) -> None:
        root = _mount(place, _directories(place, 3))
        assert (root / "every").read_text() == "0"
        assert sorted(path.name for path in root.iterdir()) == [
            "every",
            "only-0",
            "only-1",
            "only-2",
        ]
        (root / "new").write_text("x")
        assert (place / "upper" / "new").exists()

    def test_many_layers_with_long_names(self, place: Path, way: str) -> None:
        deep = place / ("a" * 100) / ("b" * 100)
        lowers = _directories(place, 0) or _layers_below(deep, 250)
        root = _mount(place, lowers)
        assert (root / "every").read_text() == "0"
        assert (root / "only-249").read_text() == "249"

    def test_paths_longer_than_one_option(self, place: Path, way: str) -> None:
        deep = place / ("a" * 200) / ("b" * 200)
        lowers = _directories(place, 0) or _layers_below(deep, 3)
        assert (_mount(place, lowers) / "only-2").read_text() == "2"

    def test_names_with_separators(self, place: Path, way: str) -> None:
        lowers = _directories(place, 2, name="a:b,c\\d e")
        assert (_mount(place, lowers) / "only-1").read_text() == "1"

    def test_layers_stay_self_contained(self, place: Path, way: str) -> None:
        lowers = _directories(place, 1)
        (lowers[0] / "dir").mkdir()
        (lowers[0] / "dir" / "file").write_text("x")
        root = _mount(place, lowers)
        # A directory of a lower layer cannot be renamed without a redirect; tools copy then.
        with pytest.raises(OSError, match="cross-device"):
            (root / "dir").rename(root / "moved")
        (root / "every").chmod(0o600)
        assert (place / "upper" / "every").read_text() == "0"
        names = {
            name
            for path in (place / "upper", *(place / "upper").rglob("*"))
            for name in os.listxattr(path, follow_symlinks=False)
        }
        # What is left are hints: a copied-up file's origin, and that a directory holds such files.
        assert names <= {"trusted.overlay.origin", "trusted.overlay.impure"}

    def test_volatile_uppers_are_ordinary_layers(self, place: Path, way: str) -> None:
        lowers = _directories(place, 1)
        mounts.mount_overlay(lowers, place / "upper", place / "work", place / "root", volatile=True)
        (place / "root" / "new").write_text("x")
        shown = next(m for m in mounts.read_mounts() if m.target == place / "root")
        assert shown.super_options.endswith("volatile")  # newer kernels say fsync=volatile
        mounts.unmount(place / "root")
        for part in ("upper2", "work2"):
            (place / part).mkdir()
        mounts.mount_overlay(
            [place / "upper", *lowers], place / "upper2", place / "work2", place / "root"
        )
        assert (place / "root" / "new").read_text() == "x"

    def test_missing_layer_is_named(self, place: Path, way: str) -> None:
        lowers = _directories(place, 1)
        with pytest.raises(FileNotFoundError, match="missing"):
            _mount(place, [*lowers, place / "missing"])
        assert mounts.mounts_under(place) == []

    def test_kernel_refusal_is_told(self, place: Path, way: str) -> None:
        lowers = _directories(place, 1)
        with pytest.raises((HostUnfit, OSError)):
            mounts.mount_overlay(lowers, place / "upper", place / "upper", place / "root")
        assert mounts.mounts_under(place) == []

    def test_no_descriptor_is_left(self, place: Path, way: str) -> None:
        lowers = _layers_below(place / "below", 30)
        _directories(place, 0)
        before = len(list(Path("/proc/self/fd").iterdir()))
        _mount(place, lowers)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert Path.cwd() != Path("/proc/self/fd")


def _layers_below(directory: Path, count: int) -> list[Path]:
    made = [directory / f"layer-{number}" for number in range(count)]
    for number, layer in enumerate(made):
        layer.mkdir(parents=True)
        (layer / f"only-{number}").write_text(str(number))
        (layer / "every").write_text(str(number))
    return made


class TestUnmount:
    pytestmark = privileged

    def test_is_idempotent(self, place: Path) -> None:
        root = _mount(place, _directories(place, 1))
        mounts.unmount(root)
        mounts.unmount(root)
        mounts.unmount(place / "never-there")
        assert mounts.mounts_under(root) == []

    def test_removes_every_mount_at_the_place(self, place: Path) -> None:
        lowers = _directories(place, 1)
        root = _mount(place, lowers)
        subprocess.run(["mount", "-t", "tmpfs", "none", root], check=True)
        mounts.unmount(root)
        assert list(root.iterdir()) == []

    def test_busy_one_is_detached(self, place: Path) -> None:
        root = _mount(place, _directories(place, 1))
        with (root / "every").open():
            mounts.unmount(root, timeout=0.05)
            assert mounts.mounts_under(root) == []

    def test_cleanup_takes_nested_mounts_and_odd_names(self, place: Path) -> None:
        odd = place / "with space\tand\\back\nline"
        odd.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", odd], check=True)
        inner = odd / "inner"
        inner.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", inner], check=True)
        beside = place.parent / f"{place.name}-beside"
        assert mounts.mounts_under(place) == [inner, odd]
        assert mounts.mounts_under(beside) == []
        assert mounts.cleanup_mounts(place) == [inner, odd]
        assert mounts.cleanup_mounts(place) == []


def test_mountinfo_is_decoded(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"36 35 98:0 /mnt1 /a\\040b\\134c rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors\n"
        b"37 35 0:5 / /proc rw - proc proc rw\n"
    )
    first, second = mounts.read_mounts(table)
    assert first.target == Path("/a b\\c")
    assert (first.type, first.source, first.super_options) == ("ext3", "/dev/root", "rw,errors")
    assert second.target == Path("/proc")
