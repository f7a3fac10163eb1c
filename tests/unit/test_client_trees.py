"""Trees on the caller's machine: nothing is written outside, whatever the tar says."""

from __future__ import annotations

import os
import resource
import stat as modes
import sys
from pathlib import Path

import pytest

from sojourn.client.trees import Saving, Unpacker, pack
from sojourn.errors import FileConflict, InvalidRequest, PathInvalid, SojournError
from sojourn.store.trees import remove_tree
from sojourn.wire import tar


def tar_of(*members: tuple[tar.Entry, bytes]) -> bytes:
    raw = b"".join(
        tar.encode_entry(entry) + content + tar.padding(len(content)) for entry, content in members
    )
    return raw + tar.END


def file(name: bytes, content: bytes = b"new", mode: int = 0o644) -> tuple[tar.Entry, bytes]:
    return tar.Entry(name, "file", mode, size=len(content)), content


def link(name: bytes, target: bytes) -> tuple[tar.Entry, bytes]:
    return tar.Entry(name, "symlink", 0o777, target=target), b""


def unpack(directory: Path, raw: bytes, *, owners: bool = False) -> None:
    with Unpacker(directory, owners=owners) as unpacker:
        for at in range(0, len(raw), 700):
            unpacker.feed(raw[at : at + 700])
        unpacker.finish()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    made = tmp_path / "outside"
    made.mkdir()
    (made / "kept").write_bytes(b"old")
    return made


@pytest.mark.parametrize(
    "attack",
    [
        [link(b"l", b"../outside"), file(b"l/kept")],
        [link(b"l", b"../outside"), file(b"l/fresh")],
        [link(b"l", b"../outside"), (tar.Entry(b"l", "dir", 0o700), b"")],
        [link(b"l", b"../outside"), (tar.Entry(b"l/sub", "dir", 0o700), b"")],
        [link(b"l", b"../outside"), (tar.Entry(b"l/f", "fifo"), b"")],
        [link(b"l", b"../outside"), link(b"l/m", b"x")],
        [link(b"l", b"../outside"), (tar.Entry(b"h", "hardlink", target=b"l/kept"), b"")],
        [link(b"a", b"."), link(b"a/b", b"../outside"), file(b"b/kept")],
        [file(b"../outside/kept")],
        [file(b"/tmp/sojourn-evil")],
        [file(b"x/../../outside/kept")],
        [file(b"f"), file(b"f/below")],
    ],
)
def test_attacks_are_refused(
    tmp_path: Path, outside: Path, attack: list[tuple[tar.Entry, bytes]]
) -> None:
    mode = outside.stat().st_mode
    with pytest.raises(SojournError):
        unpack(tmp_path / "in", tar_of(*attack))
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_bytes() == b"old" and outside.stat().st_mode == mode
    assert not Path("/tmp/sojourn-evil").exists()


def test_files_over_links_replace_them(tmp_path: Path, outside: Path) -> None:
    raw = tar_of(link(b"l", b"../outside/kept"), file(b"l"))
    unpack(tmp_path / "in", raw)
    assert not (tmp_path / "in" / "l").is_symlink()
    assert (tmp_path / "in" / "l").read_bytes() == b"new"
    assert (outside / "kept").read_bytes() == b"old"


def test_a_hardlink_to_a_link_links_the_link(tmp_path: Path, outside: Path) -> None:
    raw = tar_of(link(b"l", b"../outside/kept"), (tar.Entry(b"h", "hardlink", target=b"l"), b""))
    unpack(tmp_path / "in", raw)
    assert (tmp_path / "in" / "h").is_symlink() and (outside / "kept").stat().st_nlink == 1


def test_privileges_are_not_taken_over(tmp_path: Path) -> None:
    entries = [
        (tar.Entry(b"tool", "file", 0o6755, 12345, 12345, 1), b"x"),
        (tar.Entry(b"null", "char", 0o666, major=1, minor=3), b""),
    ]
    with Unpacker(tmp_path / "in") as unpacker:
        unpacker.feed(tar_of(*entries))
        assert unpacker.finish().skipped == ["null"]
    found = (tmp_path / "in" / "tool").stat()
    assert modes.S_IMODE(found.st_mode) == 0o755 and found.st_uid == os.geteuid()
    assert not (tmp_path / "in" / "null").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_owners_when_asked_for(tmp_path: Path) -> None:
    raw = tar_of((tar.Entry(b"tool", "file", 0o4755, 12345, 54321, 1), b"x"))
    unpack(tmp_path / "in", raw, owners=True)
    found = (tmp_path / "in" / "tool").stat()
    assert (found.st_uid, found.st_gid, modes.S_IMODE(found.st_mode)) == (12345, 54321, 0o4755)


def test_a_cut_off_tree_is_told(tmp_path: Path) -> None:
    raw = tar_of(file(b"f", b"x" * 2000))
    with Unpacker(tmp_path / "in") as unpacker:
        unpacker.feed(raw[:1500])
        with pytest.raises(InvalidRequest, match="cut off"):
            unpacker.finish()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for raw in (tar_of(file(b"a/b/c")), tar_of(link(b"l", b"/"), file(b"l/x"))):
        try:
            unpack(tmp_path / "in", raw)
        except PathInvalid:
            continue
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_directories_get_their_facts_last(tmp_path: Path) -> None:
    raw = tar_of(
        (tar.Entry(b"d", "dir", 0o500, mtime_ns=1_500_000_000_000_000_001), b""),
        file(b"d/f"),
        (tar.Entry(b".", "dir", 0o711, mtime_ns=1_400_000_000_000_000_000), b""),
    )
    unpack(tmp_path / "in", raw)
    found = (tmp_path / "in" / "d").stat()
    assert (modes.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o500, 1_500_000_000_000_000_001)
    assert modes.S_IMODE((tmp_path / "in").stat().st_mode) == 0o711
    (tmp_path / "in" / "d").chmod(0o700)


def test_a_file_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")
    with Saving(target, 0o600) as saving:
        saving.feed(b"half")
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
    with Saving(target, 0o4755) as saving:
        saving.feed(b"whole")
        assert saving.finish().bytes == 5
    assert target.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [target]
    assert modes.S_IMODE(target.stat().st_mode) == 0o755
    with pytest.raises(FileConflict):
        Saving(tmp_path / "none" / "f", 0o644)
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileConflict), Saving(tmp_path / "taken", 0o644) as saving:
        saving.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "taken"]


def test_a_local_disk_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(FileConflict), Saving(tmp_path / "f", 0o644) as saving:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            saving.feed(b"x" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_tree_deeper_than_the_stack_is_packed(tmp_path: Path) -> None:
    depth = sys.getrecursionlimit() + 100
    made = tmp_path
    for _ in range(depth):
        made /= "d"
        made.mkdir()
    try:
        raw = b"".join(pack(tmp_path / "d"))
    finally:
        remove_tree(tmp_path / "d")  # deeper than the usual tools go
    names = [event.name for event in tar.Decoder().feed(raw) if isinstance(event, tar.Entry)]
    assert len(names) == depth
    assert names[:3] == [b".", b"d", b"d/d"]


def test_packing_a_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(pack(tmp_path / "none"))
