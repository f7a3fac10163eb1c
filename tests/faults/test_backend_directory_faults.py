"""A store in a directory beside crashes, other processes, full and vanished file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import (
    Conflict,
    IntegrityError,
    InvalidRequest,
    ObjectMissing,
    StorageFull,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.repository.backends.directories import LOCK, STAGING
from sojourn.repository.backends.local import LocalBackend

PRIVILEGED = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def keys(backend: LocalBackend, prefix: str = "") -> list[str]:
    return [info.key for info in backend.list(prefix)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def staged(root: Path) -> list[str]:
    return names(root / STAGING)


# -- crashes -----------------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
from sojourn.repository.backends.local import LocalBackend
backend = LocalBackend(Path(sys.argv[1]))
number = 0
while True:
    content = b"%d " % number + os.urandom(300_000)
    backend.put(f"a/{number % 5}/{number}", content, create=True)
    backend.put("a/last", b"%d" % number)
    print(number, flush=True)
    number += 1
"""


def test_what_a_killed_writer_acknowledged_is_whole_and_its_leftovers_go(root: Path) -> None:
    acknowledged = -1
    for _ in range(4):
        for info in list(LocalBackend(root).list("a/")):
            LocalBackend(root).delete([info.key])
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                acknowledged = int(line)
                if acknowledged == 6:
                    writer.send_signal(signal.SIGKILL)
        backend = LocalBackend(root)
        assert staged(root) == []
        there = [key for key in keys(backend) if key != "a/last"]
        assert acknowledged >= 6 and len(there) in {acknowledged + 1, acknowledged + 2}
        for key in there:
            content = backend.get(key)[0]
            number = key.rsplit("/", 1)[1].encode()
            assert content.startswith(number + b" ") and len(content) == 300_001 + len(number)
        assert int(backend.get("a/last")[0]) in {acknowledged, acknowledged + 1}


def test_leftovers_are_not_listed_and_are_removed_when_the_store_is_opened(root: Path) -> None:
    backend = LocalBackend(root)
    (root / STAGING / "0123").write_bytes(b"half an obj")
    assert keys(backend) == []
    LocalBackend(root)
    assert staged(root) == []


def test_opening_leaves_the_temporaries_of_living_writers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(root)
    reached, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "writer" and not go_on.is_set():
            reached.set()
            go_on.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    writer = threading.Thread(target=lambda: backend.put("a/b", b"content"), name="writer")
    writer.start()
    try:
        assert reached.wait(30)
        other = subprocess.run(
            [sys.executable, "-c", "import sys; from pathlib import Path; from"
             " sojourn.repository.backends.local import LocalBackend;"
             " print(list(LocalBackend(Path(sys.argv[1])).list('')))", str(root)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert other.stdout == "[]\n"
        assert len(staged(root)) == 1
    finally:
        go_on.set()
        writer.join()
    assert backend.get("a/b")[0] == b"content"
    assert staged(root) == []


def test_a_temporary_swept_before_it_was_locked_is_made_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    backend = LocalBackend(root)
    real, swept = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not swept and staged(root):
            swept.extend(staged(root))
            LocalBackend(root)  # sweeps: nobody has locked it yet
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    backend.put("key", b"content")
    assert swept
    assert backend.get("key")[0] == b"content"


def test_everything_is_synced_before_it_is_acknowledged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(root)
    events: list[tuple[str, str]] = []
    real_fsync, real_link, real_rename = os.fsync, os.link, Path.rename

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        what = "content" if path.parent.name == STAGING else str(path.relative_to(root))
        events.append(("sync", what))
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        events.append(("name", str(target.relative_to(root))))
        real_link(source, target)

    def rename(source: Path, target: Path) -> Path:
        events.append(("name", str(target.relative_to(root))))
        return real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(Path, "rename", rename)
    for turn, create in ((0, False), (1, True)):
        events.clear()
        backend.put(f"a{turn}/b/key", b"x", create=create)
        named = events.index(("name", f"a{turn}/b/key"))
        assert ("sync", "content") in events[:named]
        assert ("sync", ".") in events[:named] and ("sync", f"a{turn}") in events[:named]
        assert events[named + 1 :] == [("sync", f"a{turn}/b")]
    events.clear()
    backend.put("a1/b/key", b"x", create=True)  # another one's, who may not have come to it
    assert ("sync", "a1/b") in events
    events.clear()
    backend.delete(["a1/b/key", "a1/b/none"])
    assert events == [("sync", "a1/b")]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EIO, StoreUnreachable),
        (errno.EROFS, StoreRefused),
        (errno.EACCES, StoreRefused),
    ],
)
@pytest.mark.parametrize("place", ["open", "write", "fsync", "link", "mkdir"])
def test_a_write_that_fails_leaves_the_old_objects_and_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, kind: type[Exception]
) -> None:
    backend = LocalBackend(root)
    version = backend.put("old", b"content")
    holder = Path if place == "mkdir" else os
    real = getattr(holder, place)

    def fail(*args, **kwargs):
        if place == "open" and not str(args[0]).startswith(str(root / STAGING)):
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(holder, place, fail)
        with pytest.raises(kind):
            backend.put("dom/new", b"content", create=True)
    assert staged(root) == []
    assert keys(backend) == ["old"]
    assert backend.get("old") == (b"content", version)
    backend.put("dom/new", b"content", create=True)


# -- full, vanished and read-only file systems -------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=400", "none", str(place)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(12 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-N", "400", image], check=True)
        command = ["mount", "-o", "loop", str(image), str(place)]
    subprocess.run(command, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


class TestFullDisk:
    pytestmark = PRIVILEGED

    @pytest.mark.parametrize("size", [600_000, 10])
    def test_it_is_said_and_nothing_of_it_stays(self, disk: Path, size: int) -> None:
        """Out of blocks with large objects, out of inodes with small ones."""
        backend = LocalBackend(disk / "store")
        put: list[str] = []
        with pytest.raises(StorageFull):
            for number in range(1000):
                backend.put(f"dom/{number % 3}/{number}", os.urandom(size), create=True)
                put.append(f"dom/{number % 3}/{number}")
        assert put
        assert staged(disk / "store") == []
        assert keys(backend) == sorted(put)
        assert all(len(backend.get(key)[0]) == size for key in put)
        version = backend.head(put[0]).version
        with pytest.raises(StorageFull):
            backend.put(put[0], os.urandom(9 << 20), replaces=version)
        assert backend.head(put[0]).version == version
        backend.delete(put[:3])  # a full store can be made emptier
        backend.put("dom/0/again", os.urandom(size))
        assert keys(LocalBackend(disk / "store")) == sorted([*put[3:], "dom/0/again"])

    def test_a_store_that_may_only_be_read_is_read(self, disk: Path) -> None:
        LocalBackend(disk / "store").put("a/b", b"content")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        backend = LocalBackend(disk / "store")
        assert backend.get("a/b")[0] == b"content"
        assert keys(backend) == ["a/b"]
        for write in (
            lambda: backend.put("a/c", b""),
            lambda: backend.put("a/b", b"other"),
            lambda: backend.delete(["a/b"]),
        ):
            with pytest.raises(StoreRefused):
                write()
        assert backend.get("a/b")[0] == b"content"

    def test_a_file_system_that_is_gone_does_not_look_like_an_empty_store(self, disk: Path) -> None:
        (disk / "store").mkdir()
        backend = LocalBackend(disk)
        backend.put("a/b", b"content")
        subprocess.run(["umount", disk], check=True)
        try:
            assert_unreachable(backend)
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
        assert_unreachable(backend)  # another file system at its place


def assert_unreachable(backend: LocalBackend) -> None:
    for use in (
        lambda: backend.get("a/b"),
        lambda: backend.head("a/b"),
        lambda: backend.get_tail("a/b", 1),
        lambda: backend.get_ranges("a/b", [(0, 1)]),
        lambda: keys(backend),
        lambda: keys(backend, "a/"),
        lambda: backend.put("a/b", b"x"),
        lambda: backend.put("a/c", b"x", create=True),
        lambda: backend.put("new/c", b"x"),
        lambda: backend.delete(["a/b"]),
    ):
        with pytest.raises(StoreUnreachable):
            use()


def test_a_directory_that_is_gone_is_unreachable_and_not_made_anew(root: Path) -> None:
    backend = LocalBackend(root)
    version = backend.put("a/b", b"content")
    root.rename(root.with_name("elsewhere"))
    assert_unreachable(backend)
    assert not root.exists()
    root.with_name("elsewhere").rename(root)
    assert backend.get("a/b") == (b"content", version)


def test_directories_that_were_removed_are_made_again(root: Path) -> None:
    backend = LocalBackend(root)
    backend.put("a/b/c", b"content")
    backend.delete(["a/b/c"])
    (root / "a" / "b").rmdir()
    (root / "a").rmdir()
    (root / STAGING).rmdir()
    backend.put("a/b/c", b"content", create=True)
    assert backend.get("a/b/c")[0] == b"content"


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EIO, StoreUnreachable), (errno.EACCES, StoreRefused)]
)
def test_a_directory_that_cannot_be_read_ends_the_listing(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    backend = LocalBackend(root)
    for key in ("a/1", "b/1", "c/1"):
        backend.put(key, b"")
    real = os.scandir

    def scandir(path):
        if Path(path).name == "b":
            raise OSError(code, os.strerror(code))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(kind):
        keys(backend)
    assert keys(backend, "c/") == ["c/1"]


# -- several processes -------------------------------------------------------------------------

COUNTER = """
import sys
from pathlib import Path
from sojourn.errors import Conflict
from sojourn.repository.backends.local import LocalBackend
backend = LocalBackend(Path(sys.argv[1]))
done = 0
while done < 60:
    value, version = backend.get("count")
    try:
        backend.put("count", b"%d" % (int(value) + 1), replaces=version)
        done += 1
    except Conflict:
        pass
won = []
for number in range(60):
    try:
        backend.put(f"made/{number}", sys.argv[2].encode(), create=True)
        won.append(number)
    except Conflict:
        pass
print(*won)
"""


def test_conditions_hold_between_processes(root: Path) -> None:
    backend = LocalBackend(root)
    backend.put("count", b"0")
    counters = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTER, str(root), f"writer {number}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    won = [set(counter.communicate(timeout=60)[0].split()) for counter in counters]
    assert [counter.returncode for counter in counters] == [0, 0, 0]
    assert backend.get("count")[0] == b"180"
    assert sum(len(numbers) for numbers in won) == 60
    for writer, numbers in enumerate(won):
        for number in numbers:
            assert backend.get(f"made/{number}")[0] == b"writer %d" % writer


def test_a_killed_process_gives_the_lock_back(root: Path) -> None:
    backend = LocalBackend(root)
    holder = (
        "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR);"
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(root / LOCK)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        killer = threading.Timer(0.3, process.kill)
        killer.start()
        backend.put("key", b"content")  # waits until then
        killer.join()
    assert backend.get("key")[0] == b"content"


def test_a_lock_that_is_never_given_back_is_unreachability(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr("sojourn.repository.backends.directories._LOCK_WAIT", 0.05)
    backend = LocalBackend(root)
    version = backend.put("key", b"content")
    with (root / LOCK).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreUnreachable):
            backend.put("key", b"other")
    assert backend.get("key") == (b"content", version)
    assert staged(root) == []


# -- the files themselves ----------------------------------------------------------------------


def test_versions_differ_though_the_clock_is_set_back(root: Path) -> None:
    backend = LocalBackend(root)
    versions = [backend.put("key", b"0")]
    later = 4_000_000_000_000_000_000
    os.utime(root / "key", ns=(later, later))
    versions.append(backend.head("key").version)
    for number in range(20):
        versions.append(backend.put("key", b"%d" % (number % 2)))
        assert backend.head("key").version == versions[-1]
    assert len(set(versions)) == len(versions)
    assert (root / "key").stat().st_mtime_ns >= later + 20


def test_nobody_else_may_read(root: Path) -> None:
    before = os.umask(0)
    try:
        LocalBackend(root).put("a/b/c", b"content")
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_links_do_not_lead_out_of_the_store(root: Path, tmp_path: Path) -> None:
    backend = LocalBackend(root)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    for key in ("dir/new", "dir/secret", "file"):
        for options in ({}, {"create": True}):
            with pytest.raises(IntegrityError):
                backend.put(key, b"x", **options)
        with pytest.raises(IntegrityError):
            backend.delete([key])
    assert names(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert (root / "file").is_symlink()


def test_a_key_that_is_the_beginning_of_another_is_a_conflict(root: Path) -> None:
    backend = LocalBackend(root)
    backend.put("a", b"")
    backend.put("b/c", b"")
    for key in ("a/b", "b"):
        for options in ({}, {"create": True}):
            with pytest.raises(Conflict):
                backend.put(key, b"x", **options)
    assert keys(backend) == ["a", "b/c"]
    assert staged(root) == []


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((InvalidRequest, StoreRefused)):
            LocalBackend(place)


def test_other_files_in_the_directory_are_left_alone(root: Path) -> None:
    root.mkdir()
    (root / "lost+found").mkdir(mode=0o000)
    os.mkfifo(root / "a pipe")
    backend = LocalBackend(root)
    backend.put("key", b"")
    assert keys(backend) == ["key"]
    with contextlib.suppress(ObjectMissing):
        backend.delete(["lost"])
    assert names(root) == ["#lock", "#staging", "a pipe", "key", "lost+found"]
