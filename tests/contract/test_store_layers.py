"""A layer is given back exactly as it was put away, or refused by name."""

# Raw byte names: pathlib does not take them.
# ruff: noqa: PTH101, PTH108, PTH116
# ruff: noqa: PTH211

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from store_rig import capture, hostile_tree, look, snapshot_of

from sojourn.errors import CaptureFailed, IntegrityError
from sojourn.store.local import LocalStore
from sojourn.store.trees import remove_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def upper(tmp_path):
    path = tmp_path / "upper"
    hostile_tree(path)
    yield path
    if path.exists():
        remove_tree(path)  # deeper than the usual tools go


def names_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def staged(store: LocalStore) -> list[str]:
    return [name for place in (store.root / "staging").iterdir() for name in names_of(place)]


def test_everything_survives_a_copy(store, upper):
    before = look(upper)
    ref = capture(store, upper)
    tree = store.layer_path(ref.id)
    assert look(tree) == before
    assert os.stat(tree / "sparse").st_blocks * 512 < 1024 * 1024
    assert os.getxattr(tree / "whole", "trusted.overlay.opaque") == b"y"
    first = os.stat(tree / "a-first")
    assert first.st_nlink == 3
    assert os.stat(tree / "links/third").st_ino == os.stat(tree / "z-last").st_ino == first.st_ino
    assert os.lstat(tree / "links/sym").st_ino == os.lstat(tree / "links/sym2").st_ino
    store.check_layer(ref)
    assert list(store.verify(snapshot_of([ref]))) != []  # the manifest is not published
    assert [f for f in store.verify_layer(ref)] == []
    assert staged(store) == []


def test_a_tree_deeper_than_any_recursion(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    fd = os.open(upper, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir(b"deep", dir_fd=fd)
        below = os.open(b"deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open(b"bottom", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    try:
        ref = capture(store, upper)
        assert ref.entries == 1501
        store.check_layer(ref)
        assert list(store.verify_layer(ref)) == []
        assert store.seal_layer(upper, since=None, suspects=set()).take() == ref
        assert not upper.exists()
        assert store.collect({ref.id}) > 0
    finally:
        for place in (upper, store.root):
            remove_tree(place)


def test_sealing_moves_the_same_layer_in_without_a_copy(store, upper):
    before, copied = look(upper), capture(store, upper)
    inode = os.stat(upper / "dense").st_ino
    sealed = store.seal_layer(upper, since=None, suspects=set())
    assert sealed.ref == copied
    assert upper.exists()
    os.setxattr(upper / "plain", "user.more", b"1")  # else the copy stands for it
    os.utime(upper / "plain", ns=(5, 77))
    sealed = store.seal_layer(upper, since=None, suspects=set())
    assert sealed.ref != copied
    taken = sealed.take()
    assert not upper.exists()
    tree = store.layer_path(taken.id)
    assert os.stat(tree / "dense").st_ino == inode
    after = look(tree)
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {b"plain"}
    store.check_layer(taken)
    assert list(store.verify_layer(taken)) == []
    assert sealed.take() == taken
    assert store.take_layer(taken, upper) == taken


def test_the_id_depends_on_what_a_session_sees_and_on_nothing_else(store, tmp_path):
    def tree(name):
        path = tmp_path / name
        path.mkdir()
        (path / "d").mkdir()
        (path / "d/f").write_bytes(b"content")
        os.link(path / "d/f", path / "g")
        os.symlink("t", path / "s")
        for part in ("d/f", "s", "d", "."):
            os.utime(path / part, ns=(9, 1_000_000_007), follow_symlinks=False)
        return path

    first = capture(store, tree("one"))
    # Other inodes, change times, a name outside the tree and overlay's notes make no difference.
    other = tree("two")
    os.link(other / "g", tmp_path / "outside")
    os.setxattr(other / "d", "trusted.overlay.origin", b"handle")
    os.setxattr(other / "d", "trusted.overlay.impure", b"y")
    assert capture(store, other).id == first.id

    def differs(change, name):
        path = tree(name)
        change(path)
        return capture(store, path).id != first.id

    def keep_time(path, change):
        s = os.stat(path)
        change()
        os.utime(path, ns=(s.st_mtime_ns, s.st_mtime_ns))

    def relink(path):
        os.unlink(path / "g")
        shutil.copy2(path / "d/f", path / "g")
        os.utime(path / "g", ns=(9, 1_000_000_007))
        os.utime(path, ns=(9, 1_000_000_007))

    changes = {
        "mode": lambda p: os.chmod(p / "g", 0o600),
        "owner": lambda p: os.chown(p / "g", 1, 0),
        "group": lambda p: os.chown(p / "g", 0, 1),
        "mtime": lambda p: os.utime(p / "g", ns=(9, 1_000_000_008)),
        "dirtime": lambda p: os.utime(p / "d", ns=(9, 1_000_000_008)),
        "roottime": lambda p: os.utime(p, ns=(9, 1_000_000_008)),
        "rootmode": lambda p: os.chmod(p, 0o711),
        "content": lambda p: keep_time(p / "g", lambda: (p / "g").write_bytes(b"c0ntent")),
        "xattr": lambda p: os.setxattr(p / "g", "user.a", b""),
        "link": relink,
    }
    for name, change in changes.items():
        assert differs(change, name), name


def test_a_second_capture_copies_only_what_changed_and_shares_the_rest(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    for number in range(50):
        (upper / f"f{number}").write_bytes(b"x" * 1000)
    os.link(upper / "f0", upper / "g0")
    first = store.capture_layer(upper, since=None, suspects=set())
    one = first.publish()
    assert first.copied_bytes == 50_000
    since = (first.scan, one)
    (upper / "f7").write_bytes(b"y" * 123)
    (upper / "f8").unlink()
    os.chmod(upper / "f9", 0o600)
    second = store.capture_layer(upper, since=since, suspects=set())
    two = second.publish()
    assert second.copied_bytes == 1123
    a, b = store.layer_path(one.id), store.layer_path(two.id)
    assert os.stat(a / "f1").st_ino == os.stat(b / "f1").st_ino
    assert os.stat(a / "f7").st_ino != os.stat(b / "f7").st_ino
    assert (a / "f7").read_bytes() == b"x" * 1000 and (a / "f8").exists()
    assert os.stat(a / "f9").st_mode & 0o777 == 0o644
    assert look(b) == look(upper)
    # Sharing is no hard link that a session could see, though the link count says two and more.
    fresh = capture(LocalStore(tmp_path / "other"), upper)
    assert fresh == two
    # And it is not taken for tampering: nothing but the index is looked at.
    for ref in (one, two):
        store.check_layer(ref)
        assert list(store.verify_layer(ref)) == []


def test_shared_files_that_are_removed_are_forgotten(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "kept").write_bytes(b"x" * 1000)
    first = store.capture_layer(upper, since=None, suspects=set())
    since = (first.scan, first.publish())
    (upper / "new").write_bytes(b"y")
    second = store.capture_layer(upper, since=since, suspects=set()).publish()
    inode = os.stat(store.layer_path(second.id) / "kept").st_ino
    assert store._ledger.get(inode) is not None
    store._pins._until.clear()  # the grace of what was published is over
    assert store.collect({second.id}) > 0
    store.check_layer(second)
    assert store._ledger.get(inode) is not None
    store.collect(set())
    assert store._ledger.get(inode) is None


@pytest.mark.parametrize("take", ["capture", "seal"])
def test_a_scan_vouches_only_for_the_layer_that_was_made_of_it(store, tmp_path, take):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"one")
    one = store.capture_layer(upper, since=None, suspects=set()).publish()
    (upper / "f").write_bytes(b"two")
    second = store.capture_layer(upper, since=None, suspects=set())
    two = second.publish()
    wrong = (second.scan, one)
    if take == "capture":
        ref = store.capture_layer(upper, since=wrong, suspects=set()).publish()
    else:
        ref = store.seal_layer(upper, since=wrong, suspects=set()).ref
    assert ref == two


def test_a_suspect_is_taken_anew_whatever_its_times_say(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "mapped").write_bytes(b"old!")
    os.link(upper / "mapped", upper / "same")
    pending = store.capture_layer(upper, since=None, suspects=set())
    since = (pending.scan, pending.publish())
    again = store.capture_layer(upper, since=since, suspects={b"/same"})
    assert again.copied_bytes == 4, "every name of the suspect file counts"
    again.discard()
    sealed = store.seal_layer(upper, since=since, suspects={b"mapped"})
    assert sealed.ref == since[1]


def test_a_write_through_a_mapping_shows_after_a_capture(store, tmp_path):
    """Without the flush a page that was dirty at the capture would take further writes unseen."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, check=True)
    if kind.stdout.strip() == b"tmpfs":
        pytest.skip("a memory file system does not write pages out")
    upper = tmp_path / "upper"
    upper.mkdir()
    with (upper / "mapped").open("w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as mapped:
            mapped[0] = 1
            pending = store.capture_layer(upper, since=None, suspects={b"mapped"})
            pending.publish()
            assert store.unchanged(upper, pending.scan)
            mapped[0] = 2
            assert not store.unchanged(upper, pending.scan)


def test_discarding_leaves_nothing(store, upper):
    pending = store.capture_layer(upper, since=None, suspects=set())
    pending.discard()
    pending.discard()
    with pytest.raises(CaptureFailed):
        pending.publish()
    assert staged(store) == []
    assert names_of(store.root / "layers") == []
    sealed = store.seal_layer(upper, since=None, suspects=set())
    sealed.discard()
    sealed.discard()
    assert names_of(store.root / "sealed") == []
    assert sealed.take() == sealed.ref, "the upper is still what was hashed"


def test_an_empty_upper(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    sealed = store.seal_layer(upper, since=None, suspects=set())
    assert sealed.ref.entries == 0 and sealed.ref.bytes == 0
    assert sealed.take().entries == 0
    upper.mkdir()
    (upper / "x").mkdir()
    assert store.seal_layer(upper, since=None, suspects=set()).ref.entries == 1


def test_a_new_upper_has_the_root_of_the_layers_below(store, tmp_path):
    below = tmp_path / "below"
    below.mkdir()
    os.chown(below, 7, 8)
    os.chmod(below, 0o2751)
    os.setxattr(below, "user.kept", b"1")
    os.utime(below, ns=(3, 123_456_789_012_345_678))
    wanted = look(below)[b""]
    ref = capture(store, below)
    store.prepare_upper(tmp_path / "new", [ref])
    assert look(tmp_path / "new")[b""] == wanted
    assert names_of(tmp_path / "new") == []


def test_a_mount_inside_or_a_reference_to_another_layer_is_refused(store, tmp_path):
    upper = tmp_path / "upper"
    (upper / "d").mkdir(parents=True)
    os.setxattr(upper / "d", "trusted.overlay.redirect", b"/elsewhere")
    with pytest.raises(CaptureFailed):
        store.capture_layer(upper, since=None, suspects=set())
    os.removexattr(upper / "d", "trusted.overlay.redirect")
    subprocess.run(["mount", "-t", "tmpfs", "none", upper / "d"], check=True)
    try:
        with pytest.raises(CaptureFailed) as caught:
            store.seal_layer(upper, since=None, suspects=set())
        assert caught.value.details["path"] == "d"
    finally:
        subprocess.run(["umount", upper / "d"], check=True)
    assert staged(store) == []


# -- what was touched afterwards ------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "content": (lambda t: flip(t / "dense"), "/dense"),
    "content with its times put back": (
        lambda t: (
            (s := os.stat(t / "dense"))
            and (flip(t / "dense"), os.utime(t / "dense", ns=(s.st_mtime_ns, s.st_mtime_ns)))
        ),
        "/dense",
    ),
    "size": (lambda t: os.truncate(t / "dense", 17), "/dense"),
    "missing": (lambda t: os.unlink(t / "links/sym"), "/links/sym"),
    "extra": (lambda t: (t / "links/new").write_bytes(b""), "/links/new"),
    "mode": (lambda t: os.chmod(t / "setuid", 0o755), "/setuid"),
    "owner": (lambda t: os.lchown(t / "broken", 0, 0), "/broken"),
    "mtime": (lambda t: os.utime(t / "links", ns=(1, 1)), "/links"),
    "root": (lambda t: os.chmod(t, 0o777), "/"),
    "xattr": (lambda t: os.setxattr(t / "attributes", "user.note", b"?"), "/attributes"),
    "opaque": (lambda t: os.removexattr(t / "whole", "trusted.overlay.opaque"), "/whole"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_the_quick_check_and_by_verify(store, upper, name):
    damage, path = DAMAGE[name]
    ref = capture(store, upper)
    store.check_layer(ref)
    damage(store.layer_path(ref.id))
    for opened in (store, LocalStore(store.root)):
        with pytest.raises(IntegrityError) as caught:
            opened.check_layer(ref)
        assert caught.value.details["object"] == f"layer {ref.id}"
        assert caught.value.details["path"] == path
        faults = list(opened.verify_layer(ref))
        assert [os.fsdecode(fault.path) for fault in faults if fault.path].count(path) == 1
    with pytest.raises(IntegrityError):
        capture(store, upper)  # the same content again must not be answered with a damaged layer


def test_a_replaced_type_link_and_device_are_found(store, upper):
    ref = capture(store, upper)
    tree = store.layer_path(ref.id)
    os.unlink(tree / "z-last")
    shutil.copy2(tree / "a-first", tree / "z-last")
    s = os.stat(upper)
    os.utime(tree, ns=(s.st_mtime_ns, s.st_mtime_ns))
    with pytest.raises(IntegrityError) as caught:
        store.check_layer(ref)
    assert "link" in caught.value.message
    os.unlink(tree / "null")
    os.symlink("x", tree / "null")
    found = {fault.path for fault in store.verify_layer(ref)}
    assert {b"/null", b"/z-last"} <= found


def test_a_touched_but_equal_file_is_read_once_and_then_trusted(store, upper):
    ref = capture(store, upper)
    tree = store.layer_path(ref.id)
    os.chmod(tree / "dense", os.stat(tree / "dense").st_mode)  # moves the change time only
    index = store.root / "layers" / ref.id[:20] / "index"
    before = index.read_bytes()
    store.check_layer(ref)
    assert index.read_bytes() != before
    after = index.read_bytes()
    store.check_layer(ref)
    LocalStore(store.root).check_layer(ref)
    assert index.read_bytes() == after
    index.unlink()  # only a cache
    LocalStore(store.root).check_layer(ref)
    index.write_bytes(b"garbage")
    LocalStore(store.root).check_layer(ref)


def test_damage_of_a_shared_file_is_not_spread(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"shared content")
    pending = store.capture_layer(upper, since=None, suspects=set())
    ref = pending.publish()
    flip(store.layer_path(ref.id) / "f")
    (upper / "g").write_bytes(b"new")
    second = store.capture_layer(upper, since=(pending.scan, ref), suspects=set())
    with pytest.raises(IntegrityError) as caught:
        second.publish()
    assert caught.value.details["path"] == "/f"
    assert staged(store) == []


# -- taking after a crash -------------------------------------------------------------------


def test_take_after_a_restart(tmp_path, upper):
    store = LocalStore(tmp_path / "store")
    before = look(upper)
    ref = store.seal_layer(upper, since=None, suspects=set()).ref
    again = LocalStore(tmp_path / "store")
    with pytest.raises(IntegrityError):
        again.layer_path(ref.id)
    assert again.take_layer(ref, upper) == ref
    assert look(again.layer_path(ref.id)) == before
    assert again.take_layer(ref, upper) == ref


def test_take_with_the_record_lost(tmp_path, upper):
    store = LocalStore(tmp_path / "store")
    ref = store.seal_layer(upper, since=None, suspects=set()).ref
    remove_tree(store.root / "sealed" / ref.id[:20])
    again = LocalStore(tmp_path / "store")
    assert again.take_layer(ref, upper) == ref
    again.check_layer(ref)


@pytest.mark.parametrize("lost", [False, True])
def test_take_refuses_what_was_not_hashed(tmp_path, upper, lost):
    store = LocalStore(tmp_path / "store")
    ref = store.seal_layer(upper, since=None, suspects=set()).ref
    flip(upper / "dense")
    if lost:
        remove_tree(store.root / "sealed" / ref.id[:20])
    with pytest.raises(IntegrityError):
        store.take_layer(ref, upper)
    assert upper.exists()
    assert names_of(store.root / "layers") == []


def test_take_of_nothing(store, tmp_path, upper):
    ref = capture(LocalStore(tmp_path / "elsewhere"), upper)
    with pytest.raises(IntegrityError):
        store.take_layer(ref, tmp_path / "nowhere")


def test_a_half_done_take_is_finished_at_opening(tmp_path, upper):
    store = LocalStore(tmp_path / "store")
    before = look(upper)
    ref = store.seal_layer(upper, since=None, suspects=set()).ref
    upper.rename(store.root / "sealed" / ref.id[:20] / "fs")  # and then the power went
    again = LocalStore(tmp_path / "store")
    assert look(again.layer_path(ref.id)) == before
    again.check_layer(ref)
    assert again.take_layer(ref, upper) == ref


def test_take_leaves_the_next_upper_alone(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"1")
    ref = store.seal_layer(upper, since=None, suspects=set()).take()
    upper.mkdir()
    (upper / "f").write_bytes(b"2")
    assert store.take_layer(ref, upper) == ref
    assert (upper / "f").read_bytes() == b"2"


def test_equal_uppers_are_one_layer(store, tmp_path):
    refs = []
    uppers = []
    for name in ("one", "two"):
        upper = tmp_path / name
        upper.mkdir()
        (upper / "f").write_bytes(b"1")
        for part in ("f", "."):
            os.utime(upper / part, ns=(1, 1))
        uppers.append(upper)
    sealed = [store.seal_layer(upper, since=None, suspects=set()) for upper in uppers]
    refs = [one.take() for one in sealed]
    assert refs[0] == refs[1]
    assert not uppers[0].exists() and not uppers[1].exists()
    store.check_layer(refs[0])
    assert names_of(store.root / "sealed") == []


# -- templates ------------------------------------------------------------------------------


def test_a_template_is_registered_without_a_copy(store, tmp_path, upper):
    ref = store.adopt_template(upper, "base")
    assert store.layer_path(ref.id) == upper
    assert store.adopt_template(upper, "base") == ref
    store.check_layer(ref)
    snapshot = snapshot_of([ref])
    store.publish_snapshot(snapshot)
    store.delete_snapshot(snapshot.id)
    store.collect(set())
    assert store.layer_path(ref.id) == upper
    assert LocalStore(store.root).adopt_template(upper, "base") == ref
    (upper / "plain").write_bytes(b"upgraded")
    with pytest.raises(IntegrityError):
        store.check_layer(ref)
    newer = store.adopt_template(upper, "base")
    assert newer != ref
    store.check_layer(newer)


def test_a_template_that_moved_is_found_at_its_new_place(store, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "f").write_bytes(b"x")
    ref = store.adopt_template(old, "base")
    old.rename(new)
    fresh = LocalStore(store.root)
    with pytest.raises(IntegrityError):
        fresh.layer_path(ref.id)
    assert fresh.adopt_template(new, "base") == ref
    assert fresh.layer_path(ref.id) == new
    fresh.check_layer(ref)


# -- the empty turn -------------------------------------------------------------------------

CHANGES = {
    "nothing": (lambda u: None, True),
    "write": (lambda u: (u / "d/f").write_bytes(b"other"), False),
    "same bytes": (lambda u: (u / "d/f").write_bytes(b"12345"), False),
    "create": (lambda u: (u / "d/new").write_bytes(b""), False),
    "remove": (lambda u: (u / "d/f").unlink(), False),
    "replace": (lambda u: (os.unlink(u / "d/f"), (u / "d/f").write_bytes(b"12345")), False),
    "rename": (lambda u: (u / "d/f").rename(u / "d/g"), False),
    "rename directory": (lambda u: (u / "d").rename(u / "e"), False),
    "directory to link": (lambda u: (shutil.rmtree(u / "d"), os.symlink("/etc", u / "d")), False),
    "mode": (lambda u: os.chmod(u / "d/f", 0o600), False),
    "owner": (lambda u: os.chown(u / "d", 1, 1), False),
    "utime": (lambda u: os.utime(u / "d/f", ns=(1, 1)), False),
    "xattr": (lambda u: os.setxattr(u / "d/f", "user.x", b"1"), False),
    "link": (lambda u: os.link(u / "d/f", u / "g"), False),
    "root": (lambda u: os.chmod(u, 0o700), False),
    "gone": (lambda u: shutil.rmtree(u), False),
    "read": (lambda u: (u / "d/f").read_bytes(), True),
}


@pytest.mark.parametrize("window_ns", [None, 20_000_000])
@pytest.mark.parametrize("name", CHANGES)
def test_unchanged_tells_every_change(tmp_path, name, window_ns):
    store = LocalStore(tmp_path / "store", timestamp_window_ns=window_ns)
    upper = tmp_path / "upper"
    (upper / "d").mkdir(parents=True)
    (upper / "d/f").write_bytes(b"12345")
    change, same = CHANGES[name]
    pending = store.capture_layer(upper, since=None, suspects=set())
    pending.publish()
    change(upper)
    assert store.unchanged(upper, pending.scan) is same
    assert store.unchanged(upper, pending.scan) is same


def put_back(path: Path, data: bytes, ns: int) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(ns, ns))


def test_a_write_in_the_same_tick_of_a_coarse_clock_is_not_missed(tmp_path, monkeypatch):
    """A change time that did not move proves nothing within the window: content decides."""
    store = LocalStore(tmp_path / "store", timestamp_window_ns=20_000_000)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"old")
    pending = store.capture_layer(upper, since=None, suspects=set())
    ref = pending.publish()
    assert b"f" in pending.scan.recent
    facts = dict(pending.scan.entries)
    (upper / "f").write_bytes(b"new")
    # As a coarse clock would have it: the scan's facts are those of the file now.
    probe = store.scan(upper)
    pending.scan.entries.update(probe.entries)
    assert pending.scan.entries != facts
    assert store.unchanged(upper, pending.scan) is False
    second = store.capture_layer(upper, since=(pending.scan, ref), suspects=set())
    assert second.copied_bytes == 3
    again = second.publish()
    assert (store.layer_path(again.id) / "f").read_bytes() == b"new"


def test_a_plain_scan_within_the_window_never_vouches_for_content(tmp_path):
    store = LocalStore(tmp_path / "store", timestamp_window_ns=20_000_000)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"old")
    scan = store.scan(upper)
    assert store.unchanged(upper, scan) is False
    os.utime(upper / "f", ns=(1, 1))
    time.sleep(0.05)
    later = store.scan(upper)
    assert store.unchanged(upper, later) is True


def test_content_settles_recent_entries(tmp_path):
    store = LocalStore(tmp_path / "store", timestamp_window_ns=20_000_000)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"old")
    pending = store.capture_layer(upper, since=None, suspects=set())
    pending.publish()
    time.sleep(0.05)
    assert store.unchanged(upper, pending.scan) is True
    assert pending.scan.recent == set(), "read once, from then on the times do"


def test_scan_counts_allocated_bytes(store, tmp_path):
    upper = tmp_path / "upper"
    upper.mkdir()
    with (upper / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (upper / "dense").write_bytes(b"x" * 100_000)
    os.link(upper / "dense", upper / "again")
    assert 100_000 <= store.scan(upper).bytes < 200_000
