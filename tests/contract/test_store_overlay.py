"""The store's idea of layers is the kernel's: random histories through real overlay mounts."""

# Raw byte names: pathlib does not take them.
# ruff: noqa: PTH101, PTH102, PTH104, PTH108, PTH112, PTH114, PTH118
# ruff: noqa: PTH211

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from store_rig import capture, look, seen_by_model, snapshot_of

from sojourn.node.mounts import mount_overlay, unmount
from sojourn.store.local import LocalStore

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

# Hundreds of small trees are made; on a disk most of the time would go into syncing them.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

NAMES = [b"a", b"b", b"a-b", b"\xff"]
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(b"/".join)
contents = st.binary(min_size=0, max_size=6)
operations = st.one_of(
    st.tuples(st.just("write"), paths, contents),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("remove"), paths),
    st.tuples(st.just("renew"), paths, contents),
    st.tuples(st.just("move"), paths, paths),
    st.tuples(st.just("symlink"), paths, st.sampled_from([b"a", b"../x", b"\xfe"])),
    st.tuples(st.just("link"), paths, paths),
    st.tuples(st.just("chmod"), paths, st.sampled_from([0o600, 0o755, 0o4711])),
    st.tuples(st.just("fifo"), paths),
    st.tuples(st.just("xattr"), paths, contents),
    st.tuples(st.just("utime"), paths, st.integers(-(10**18), 4 * 10**18)),
)
histories = st.lists(st.lists(operations, max_size=8), min_size=1, max_size=4)


def apply(root: Path, operation: tuple) -> None:
    """Do one step as a session might; steps that cannot be done are left out."""
    kind, path, *rest = operation
    at = os.path.join(os.fsencode(root), path)
    with contextlib.suppress(OSError):
        if kind == "write":
            fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
            os.write(fd, rest[0])
            os.close(fd)
        elif kind == "mkdir":
            os.mkdir(at)
        elif kind == "remove":
            if os.path.isdir(at) and not os.path.islink(at):
                shutil.rmtree(at)
            else:
                os.unlink(at)
        elif kind == "renew":  # a directory in place of an old one: the kernel marks it opaque
            if not os.path.isdir(at) or os.path.islink(at):
                return  # rmtree would open it, and wait if it is a FIFO
            shutil.rmtree(at)
            os.mkdir(at)
            Path(os.fsdecode(at), "fresh").write_bytes(rest[0])
        elif kind == "move":
            os.rename(at, os.path.join(os.fsencode(root), rest[0]))
        elif kind == "symlink":
            os.symlink(rest[0], at)
        elif kind == "link":
            os.link(at, os.path.join(os.fsencode(root), rest[0]), follow_symlinks=False)
        elif kind == "chmod" and not os.path.islink(at):
            os.chmod(at, rest[0])
        elif kind == "fifo":
            os.mkfifo(at)
        elif kind == "xattr":
            os.setxattr(at, "user.mark", rest[0], follow_symlinks=False)
        elif kind == "utime":
            os.utime(at, ns=(0, rest[0]), follow_symlinks=False)


class History:
    """Plays a history: one overlay mount and one layer per round."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = LocalStore(directory / "store")
        base = directory / "base"
        for name in ("a/b/a", "a/b/b", "a/a", "b/a/b", "b/b", "a-b/a"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_bytes(name.encode())
        os.symlink("a", base / "a/a-b")
        self.layers = [self.store.adopt_template(base, "base")]
        self.views = [look(base)]

    def play(self, round: list[tuple], number: int) -> None:
        upper = self.directory / f"upper{number}"
        self.store.prepare_upper(upper, self.layers)
        with self.mounted(upper) as root:
            for operation in round:
                apply(root, operation)
            view = look(root)
            copied = capture(self.store, upper)
        if not any(upper.iterdir()):
            assert copied.entries == 0
            return  # adds nothing; the kernel refuses one directory twice in a mount
        assume(copied not in self.layers)
        sealed = self.store.seal_layer(upper, since=None, suspects=set())
        assert sealed.ref == copied, "a copy and the sealed original are the same layer"
        self.layers = [*self.layers, sealed.take()]
        self.views.append(view)

    @contextlib.contextmanager
    def mounted(self, upper: Path, layers=None):
        root, work = self.directory / "root", self.directory / "work"
        shutil.rmtree(work, ignore_errors=True)
        root.mkdir(exist_ok=True)
        work.mkdir()
        lowers = [self.store.layer_path(ref.id) for ref in reversed(layers or self.layers)]
        mount_overlay(lowers, upper, work, root)
        try:
            yield root
        finally:
            unmount(root)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(histories)
@example([[("remove", b"a")], [("mkdir", b"a")], [("write", b"a/new", b"x")]])
@example([[("renew", b"a", b"1")], [("write", b"a/b", b"2")], [("chmod", b"a", 0o700)]])
@example([[("write", b"a/new", b"x")], [("renew", b"a", b"1")], [("remove", b"a/fresh")]])
@example([[("remove", b"a"), ("write", b"a", b"file")], [("remove", b"a"), ("mkdir", b"a")]])
@example([[("link", b"a/a", b"l1"), ("link", b"a/a", b"l2")], [("remove", b"a/a")]])
@example([[("renew", b"a/b", b"1")], [("remove", b"a/b/fresh")], [("remove", b"a/a")]])
@example([[("mkdir", b"new"), ("write", b"new/a", b"1")], [("remove", b"new/a")]])
@example([[("remove", b"a")], [("mkdir", b"a"), ("write", b"a/a", b"")], [("remove", b"a/a")]])
def test_merged_diff_and_squash_agree_with_the_kernel(history):
    with tempfile.TemporaryDirectory(prefix="store-overlay-", dir=MEMORY) as name:
        played = History(Path(name))
        store = played.store
        for number, round in enumerate(history):
            played.play(round, number)
        snapshots = [snapshot_of(played.layers[: count + 1]) for count in range(len(played.layers))]
        for snapshot, view in zip(snapshots, played.views, strict=True):
            assert seen_by_model(store, snapshot) == view
        for older in range(len(snapshots)):
            for newer in range(len(snapshots)):
                check_diff(played, snapshots[older], snapshots[newer], older, newer)
        if len(played.layers) == 1:
            return
        squashed = store.squash(played.layers[1:], played.layers[:1])
        store.check_layer(squashed)
        assert seen_by_model(store, snapshot_of([played.layers[0], squashed])) == played.views[-1]
        upper = played.directory / "last"
        chain = [played.layers[0], squashed]
        store.prepare_upper(upper, chain)
        with played.mounted(upper, chain) as root:
            assert look(root) == played.views[-1]


def check_diff(played: History, a, b, older: int, newer: int) -> None:
    """`diff` is exactly the difference of the two views the kernel showed."""
    before, after = played.views[older], played.views[newer]
    changes = list(played.store.diff(a, b))
    assert [c.path for c in changes] == sorted(c.path for c in changes)
    told = {change.path[1:]: change.kind for change in changes}
    expected = {}
    for path in before.keys() | after.keys():
        if path not in after:
            expected[path] = "removed"
        elif path not in before:
            expected[path] = "added"
        elif before[path] != after[path]:
            expected[path] = "changed"
    assert told == expected
    for change in changes:
        if change.kind == "changed":
            old, new = before[change.path[1:]], after[change.path[1:]]
            assert ("mtime" in change.what) == (old[3] != new[3])
            assert ("xattrs" in change.what) == (old[5] != new[5])
            assert ("mode" in change.what) == (old[0] & 0o7777 != new[0] & 0o7777)
