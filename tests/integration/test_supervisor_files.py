"""Files through the supervisor: raw names, whole replacement, bounded listings and reads."""

from __future__ import annotations

import asyncio
import os
import stat as stats
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sojourn.errors import (
    FileConflict,
    FileMissing,
    Forbidden,
    InvalidRequest,
    PathInvalid,
    StorageFull,
)
from sojourn.node.link import GuestLink
from sojourn.wire.guest import ProcessSpec, WatchEvent
from support.guests import HostedSupervisor, hosted, supervisor_program  # noqa: F401


def raw(path: Path | str) -> bytes:
    return os.fsencode(path)


async def content(
    guest: GuestLink, path: Path, offset: int = 0, length: int | None = None
) -> bytes:
    return b"".join([piece async for piece in guest.read(raw(path), offset, length)])


def leftovers(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir() if entry.name.startswith(".sojourn")]


@hosted()
async def test_status_tells_everything(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    file = base / "file"
    file.write_bytes(b"12345")
    file.chmod(0o751)
    os.chown(file, 12, 34)
    os.utime(file, ns=(1, 1234567890123456789))
    os.link(file, base / "other")
    found = await guest.stat(raw(file))
    assert (found.type, found.mode, found.uid, found.gid) == ("file", 0o751, 12, 34)
    assert (found.size, found.mtime_ns, found.nlink) == (5, 1234567890123456789, 2)
    assert found.inode == file.stat().st_ino
    await guest.symlink(b"to \xff nowhere", raw(base / "link"))
    link = await guest.stat(raw(base / "link"), follow=False)
    assert (link.type, link.target) == ("symlink", b"to \xff nowhere")
    with pytest.raises(FileMissing):
        await guest.stat(raw(base / "link"))
    os.utime(file, ns=(0, -1500000000))
    assert (await guest.stat(raw(file))).mtime_ns == -1500000000
    assert (await guest.stat(b"/dev/null")).rdev == os.makedev(1, 3)


@hosted()
async def test_every_kind_can_be_made(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    for kind, check in (
        ("fifo", stats.S_ISFIFO),
        ("socket", stats.S_ISSOCK),
        ("file", stats.S_ISREG),
    ):
        await guest.mknod(raw(base / kind), kind, 0o620)
        assert check((base / kind).lstat().st_mode)
        assert stats.S_IMODE((base / kind).lstat().st_mode) == 0o620
    await guest.symlink(b"a b\xfe", raw(base / "link"))
    assert raw((base / "link").readlink()) == b"a b\xfe"
    await guest.link(raw(base / "file"), raw(base / "hard"))
    assert (base / "hard").stat().st_ino == (base / "file").stat().st_ino
    await guest.mkdir(raw(base / "a/b/c"), mode=0o710)
    assert stats.S_IMODE((base / "a/b/c").stat().st_mode) == 0o710
    await guest.mkdir(raw(base / "a/b/c/"), mode=0o710)
    with pytest.raises(FileConflict):
        await guest.mkdir(raw(base / "a"), parents=False)
    with pytest.raises(FileConflict):
        await guest.mkdir(raw(base / "file"))
    with pytest.raises(FileMissing):
        await guest.mkdir(raw(base / "x/y"), parents=False)
    with pytest.raises(InvalidRequest):
        await guest.mknod(raw(base / "d"), "dir", 0o700)


@hosted()
async def test_names_are_raw_bytes(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    """C38: what is no UTF-8, has newlines or looks like code is a name like any other."""
    names = [b"\xff\xfe", b"new\nline", b"-rf", b"$(id)", b"a;b", b"\xc3\xa9", b"x" * 255]
    for name in names:
        await guest.write_file(raw(base / "d") + b"/" + name, name)
    listed = await guest.list(raw(base / "d"))
    assert [one.path.rsplit(b"/", 1)[1] for one in listed] == sorted(names)
    assert sorted(raw(entry.name) for entry in (base / "d").iterdir()) == sorted(names)
    for name in names:
        path = raw(base / "d") + b"/" + name
        assert b"".join([piece async for piece in guest.read(path)]) == name
    for bad in (b"", b"relative", b"/a\0b", b"/" + b"y" * 5000):
        with pytest.raises(PathInvalid):
            await guest.stat(bad)
        with pytest.raises(PathInvalid):
            await guest.write_file(bad, b"")
    with pytest.raises(PathInvalid):
        await guest.stat(b"/" + b"y" * 256)


@hosted()
async def test_a_file_is_replaced_whole(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    file = base / "new/file"
    made = await guest.write_file(raw(file), b"one")
    assert (made.size, made.mode) == (3, 0o644)
    os.chown(file, 1000, 100)
    file.chmod(0o2750)
    inode = file.stat().st_ino
    with file.open("rb") as reader:
        await guest.write_file(raw(file), b"two!")
        assert reader.read() == b"one"
    after = file.stat()
    assert after.st_ino != inode
    assert (after.st_uid, after.st_gid, stats.S_IMODE(after.st_mode)) == (1000, 100, 0o2750)
    assert file.read_bytes() == b"two!"
    made = await guest.write_file(raw(file), b"", mode=0o600, user="nobody")
    assert (made.size, made.mode, made.uid) == (0, 0o600, 65534)
    with pytest.raises(FileMissing):
        await guest.write_file(raw(base / "no/such"), b"x", parents=False)
    with pytest.raises(FileConflict):
        await guest.write_file(raw(base), b"x")
    with pytest.raises(FileConflict):
        await guest.write_file(b"/dev/null", b"x")
    with pytest.raises(FileConflict):
        await guest.write_file(raw(file / "below"), b"x")
    assert leftovers(file.parent) == []


@hosted()
async def test_a_link_at_the_path_is_followed(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    (base / "real").mkdir()
    (base / "link").symlink_to("real/file")
    (base / "to_link").symlink_to(base / "link")
    await guest.write_file(raw(base / "to_link"), b"through")
    assert (base / "real/file").read_bytes() == b"through"
    assert (base / "link").is_symlink() and (base / "to_link").is_symlink()
    (base / "loop").symlink_to("loop")
    with pytest.raises(FileConflict):
        await guest.write_file(raw(base / "loop"), b"x")


@hosted()
async def test_large_files_go_in_pieces(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    data = os.urandom(3 * 1024 * 1024 + 17)
    seen: list[bool] = []

    async def source() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_003):
            seen.append((base / "big").exists())
            yield data[at : at + 100_003]

    made = await guest.write_file(raw(base / "big"), source())
    assert made.size == len(data)
    assert not any(seen)
    assert await content(guest, base / "big") == data
    assert await content(guest, base / "big", 100, 1_000_000) == data[100:1_000_100]
    assert await content(guest, base / "big", len(data) - 3) == data[-3:]
    assert await content(guest, base / "big", len(data) + 5) == b""
    assert await content(guest, base / "big", 5, 0) == b""
    await guest.write_file(raw(base / "big"), data, append=True)
    await guest.write_file(raw(base / "big"), b"end", append=True)
    assert (base / "big").read_bytes() == data + data + b"end"
    assert leftovers(base) == []


@hosted()
async def test_a_source_that_fails_leaves_the_old_file(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    (base / "file").write_bytes(b"old")

    async def source() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"n" * 200_000
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        await guest.write_file(raw(base / "file"), source())
    while leftovers(base):
        await asyncio.sleep(0.01)
    assert (base / "file").read_bytes() == b"old"


@hosted()
async def test_a_full_file_system_is_said_so(
    guest: GuestLink, supervisor: HostedSupervisor, base: Path
) -> None:
    """The old file stays, nothing half-written is left."""
    small = base / "small"
    small.mkdir()
    # Inside the supervisor's mount namespace, where it ends with it.
    made, _ = await guest.run(
        ProcessSpec([b"mount", b"-t", b"tmpfs", b"-o", b"size=300k", b"none", raw(small)])
    )
    assert made.exit_code == 0
    await guest.write_file(raw(small / "file"), b"old")
    for size in (310_000, 1_000_000):
        for append in (False, True):
            with pytest.raises(StorageFull):
                await guest.write_file(raw(small / "file"), b"n" * size, append=append)
            with pytest.raises(StorageFull):
                await guest.write_file(raw(small / "new"), b"n" * size, append=append)
    assert await content(guest, small / "file") == b"old"
    assert [one.path for one in await guest.list(raw(small))] == [raw(small / "file")]


@hosted()
async def test_reading_is_of_one_file(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    """C76: a sparse giant is read in pieces; a file replaced in between is a conflict."""
    file = base / "sparse"
    with file.open("wb") as out:
        out.truncate(2 << 30)
    assert await content(guest, file, (2 << 30) - 10) == bytes(10)
    pieces = guest.read(raw(file))
    first = await anext(pieces)
    assert 0 < len(first) <= 1 << 20
    (base / "x").write_bytes(b"other")
    (base / "x").rename(file)
    with pytest.raises(FileConflict):
        await anext(pieces)
    for path in (base, Path("/dev/zero")):
        with pytest.raises(FileConflict):
            await content(guest, path)
    await guest.mknod(raw(base / "fifo"), "fifo", 0o600)
    with pytest.raises(FileConflict):
        await content(guest, base / "fifo")
    with pytest.raises(FileMissing):
        await content(guest, base / "none")
    assert (await content(guest, Path("/proc/self/status"))).startswith(b"Name:")


@hosted()
async def test_listing_and_walking(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    tree = base / "tree"
    for name in ("b/c", "a"):
        (tree / name).mkdir(parents=True)
    (tree / "b/c/file").write_text("x")
    (tree / "a/loop").symlink_to("..")
    walked = [one.path async for one in guest.walk(raw(tree))]
    assert walked == [raw(tree / one) for one in ("a", "a/loop", "b", "b/c", "b/c/file")]
    with pytest.raises(FileMissing):
        await guest.list(raw(base / "none"))
    with pytest.raises(FileConflict):
        await guest.list(raw(tree / "b/c/file"))
    many = base / "many"
    many.mkdir()
    for number in range(4_000):
        (many / f"file-with-a-rather-long-name-{number:06d}").touch()
    listed = await guest.list(raw(many))
    assert len({one.path for one in listed}) == 4_000


@hosted()
async def test_removing_never_follows_links(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    outside = base / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    tree = base / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/link").symlink_to(outside)
    (tree / "sub/file").touch()
    with pytest.raises(FileConflict):
        await guest.remove(raw(tree))
    await guest.remove(raw(tree), recursive=True)
    assert not tree.exists() and (outside / "keep").exists()
    link = base / "link"
    link.symlink_to(outside)
    await guest.remove(raw(link), recursive=True)
    assert not link.is_symlink() and (outside / "keep").exists()
    with pytest.raises(FileMissing):
        await guest.remove(raw(tree), recursive=True)
    with pytest.raises(FileConflict):
        await guest.remove(b"/", recursive=True)


@hosted()
async def test_very_deep_and_wide_trees_go(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    made, _out = await guest.run(
        ProcessSpec(
            [
                b"python3",
                b"-c",
                b"import os\nos.makedirs('deep'); os.chdir('deep')\n"
                b"for i in range(1500):\n  os.mkdir('d'); open('f','w'); os.chdir('d')\n",
            ],
            cwd=raw(base),
        )
    )
    assert made.exit_code == 0
    removing = asyncio.ensure_future(guest.remove(raw(base / "deep"), recursive=True))
    await guest.info()
    await removing
    assert not (base / "deep").exists()


@hosted()
async def test_moving(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    (base / "a").write_text("a")
    (base / "b").write_text("b")
    await guest.move(raw(base / "a"), raw(base / "b"))
    assert (base / "b").read_text() == "a" and not (base / "a").exists()
    with pytest.raises(FileMissing):
        await guest.move(raw(base / "none"), raw(base / "c"))
    # To another file system: everything about the tree arrives.
    other = base / "other"
    other.mkdir()
    await guest.run(ProcessSpec([b"mount", b"-t", b"tmpfs", b"none", raw(other)]))
    tree = base / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_bytes(b"content" * 1000)
    (tree / "sub/file").chmod(0o4755)
    os.chown(tree / "sub", 77, 88)
    (tree / "link").symlink_to("dangling")
    os.mkfifo(tree / "fifo", 0o640)
    os.utime(tree / "sub/file", ns=(5, 1111111111))
    os.utime(tree / "sub", ns=(5, 2222222222))
    await guest.move(raw(tree), raw(other / "moved"))
    assert not tree.exists()
    file = await guest.stat(raw(other / "moved/sub/file"))
    assert (file.mode, file.size, file.mtime_ns) == (0o4755, 7000, 1111111111)
    sub = await guest.stat(raw(other / "moved/sub"))
    assert (sub.uid, sub.gid, sub.mtime_ns) == (77, 88, 2222222222)
    link = await guest.stat(raw(other / "moved/link"), follow=False)
    assert link.target == b"dangling"
    assert (await guest.stat(raw(other / "moved/fifo"))).type == "fifo"


@hosted()
async def test_changing_attributes(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    file = base / "file"
    file.touch()
    (base / "link").symlink_to(file)
    await guest.chmod(raw(file), 0o7641)
    await guest.chown(raw(file), 123, 456)
    await guest.utime(raw(file), 987654321)
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mtime_ns) == (123, 456, 987654321)
    await guest.chown(raw(base / "link"), 9, 9)
    assert (base / "link").lstat().st_uid == 9 and file.stat().st_uid == 123
    await guest.chown(raw(base / "link"), 8, 8, follow=True)
    assert file.stat().st_uid == 8
    with pytest.raises(InvalidRequest):
        await guest.chmod(raw(file), 0o10000)
    with pytest.raises(Forbidden):
        await guest.link(raw(base), raw(base / "hard"))


async def events_until(stream: AsyncIterator[WatchEvent], path: Path) -> list[WatchEvent]:
    seen = []
    async for event in stream:
        seen.append(event)
        if event.path == raw(path):
            break
    return seen


@hosted()
async def test_watching(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    (base / "sub").mkdir()
    stream = guest.watch(raw(base), recursive=True)
    first = asyncio.ensure_future(anext(stream))
    while not (base / "probe").exists():  # until the watch is known to be in place
        await guest.info()
        (base / "probe").touch()
    assert (await first) == WatchEvent("created", raw(base / "probe"), False)
    (base / "sub/deeper").mkdir()
    (base / "sub/deeper/file").write_text("x")
    (base / "sub/deeper/file").rename(base / "moved")
    (base / "moved").unlink()
    (base / "end").touch()
    seen = await asyncio.wait_for(events_until(stream, base / "end"), 20)
    kinds = {(event.kind, event.path) for event in seen}
    assert ("created", raw(base / "sub/deeper")) in kinds
    assert ("created", raw(base / "sub/deeper/file")) in kinds or (
        "renamed_to",
        raw(base / "moved"),
    ) in kinds
    assert ("removed", raw(base / "moved")) in kinds
    await stream.aclose()  # type: ignore[attr-defined]
    with pytest.raises(FileMissing):
        await anext(guest.watch(raw(base / "none")))
    with pytest.raises(FileConflict):
        await anext(guest.watch(raw(base / "end")))


@hosted()
async def test_a_watch_that_lost_events_says_so(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    stream = guest.watch(raw(base))
    first = asyncio.ensure_future(anext(stream))
    await guest.info()
    await guest.info()
    for number in range(4500):
        (base / f"f{number}").touch()
    await first
    await guest.info()
    async for event in stream:
        if event.kind == "overflow":
            break
    await stream.aclose()  # type: ignore[attr-defined]


@hosted()
async def test_a_watch_over_more_directories_than_it_can_see_says_so_and_lives(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for number in range(13000):
            Path(name, f"d{number}").mkdir()
        stream = guest.watch(raw(name), recursive=True)
        async for event in stream:
            if event.kind != "overflow":
                break
            Path(name, "probe").touch()
        await stream.aclose()  # type: ignore[attr-defined]
    assert event.path == raw(name) + b"/probe"


@hosted()
async def test_unlinked_files_are_named(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    script = (
        "import os,sys,time\n"
        "f=open(sys.argv[1]+'/gone','w'); os.unlink(sys.argv[1]+'/gone')\n"
        "m=os.memfd_create('x')\n"
        "print(f.fileno(),flush=True); time.sleep(600)"
    )
    state = await guest.start(ProcessSpec([b"python3", b"-c", script.encode(), raw(base)]))
    piece = await anext(guest.output(state.id))
    found = await guest.unlinked()
    assert [(one.pid, one.fd, one.path) for one in found] == [
        (state.pid, int(piece.data), raw(base / "gone"))
    ]
    assert found[0].command.startswith(b"python3")


@hosted("--user", "nobody")
async def test_new_files_belong_to_the_sessions_user(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    await guest.write_file(raw(base / "d/file"), b"x")
    await guest.mkdir(raw(base / "e/f"))
    await guest.symlink(b"x", raw(base / "link"))
    for name in ("d", "d/file", "e", "e/f", "link"):
        assert (base / name).lstat().st_uid == 65534
