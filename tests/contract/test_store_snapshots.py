"""Snapshots, memory images and collection: what is referred to is there, what is there is right."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from store_rig import CONFIG, capture, snapshot_of

from sojourn.errors import (
    CaptureFailed,
    Conflict,
    FileMissing,
    IntegrityError,
    InvalidRequest,
    PathInvalid,
    SnapshotNotFound,
    TooLarge,
)
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store", grace=0)


def make_layer(store: LocalStore, tmp_path: Path, name: str, **files: bytes):
    upper = tmp_path / name
    upper.mkdir()
    for file, content in files.items():
        (upper / file).write_bytes(content)
    return capture(store, upper)


def make_image(store: LocalStore, *contents: bytes):
    staged = store.stage_image()
    for number, content in enumerate(contents):
        (staged / f"pages{number}.img").write_bytes(content)
    return store.publish_image(staged, "gvisor", "runsc 1", ["sse2"])


def leftovers(store: LocalStore) -> list[str]:
    places = (store.root / "staging").iterdir()
    return [entry.name for place in places for entry in place.iterdir()]


# -- images ---------------------------------------------------------------------------------


def test_an_image_is_given_back_byte_for_byte(store):
    ref = make_image(store, os.urandom(3_000_000), b"", b"x" * 65536)
    assert ref.bytes == 3_000_000 + 65536
    assert (ref.driver, ref.runtime, ref.cpu) == ("gvisor", "runsc 1", ["sse2"])
    path = LocalStore(store.root).image_path(ref.id)
    assert sorted(entry.name for entry in path.iterdir()) == sorted(ref.files)
    store.verify_image(ref)
    assert list(store.verify_memory(ref)) == []
    assert leftovers(store) == []


def test_an_image_is_named_by_its_content(store):
    ref = make_image(store, b"a", b"b")
    assert make_image(store, b"a", b"b") == ref
    assert make_image(store, b"b", b"a").id != ref.id
    assert make_image(store, b"a", b"b", b"").id != ref.id
    assert leftovers(store) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove", "manifest"])
def test_a_damaged_image_is_refused_naming_the_file(store, damage):
    ref = make_image(store, os.urandom(200_000), b"meta")
    file = store.image_path(ref.id) / "pages0.img"
    if damage == "flip":
        with file.open("r+b") as opened:
            opened.seek(150_000)
            byte = opened.read(1)[0]
            opened.seek(150_000)
            opened.write(bytes([byte ^ 4]))
    elif damage == "truncate":
        os.truncate(file, 199_999)
    elif damage == "grow":
        with file.open("ab") as opened:
            opened.write(b"\0")
    elif damage == "remove":
        file.unlink()
    else:
        manifest = file.parent.parent / "manifest"
        manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(IntegrityError) as caught:
        store.verify_image(ref)
    assert caught.value.details["object"] == f"memory {ref.id}"
    if damage != "manifest":
        assert caught.value.details["path"] == "pages0.img"
    (fault,) = store.verify_memory(ref)
    assert fault.object == f"memory {ref.id}"
    if damage != "flip":
        with pytest.raises(IntegrityError):
            store.image_path(ref.id)


def test_what_is_no_image_is_refused(store):
    empty = store.stage_image()
    with pytest.raises(CaptureFailed):
        store.publish_image(empty, "d", "r", [])
    odd = store.stage_image()
    (odd / "link").symlink_to("/etc/passwd")
    with pytest.raises(CaptureFailed):
        store.publish_image(odd, "d", "r", [])
    dropped = store.stage_image()
    store.discard_image(dropped)
    store.discard_image(dropped)
    assert leftovers(store) == []
    for name in ("../../etc", "0" * 63, "", "g" * 64):
        with pytest.raises(IntegrityError):
            store.image_path(name)


# -- manifests ------------------------------------------------------------------------------


def test_a_snapshot_is_read_back_by_another_process(store, tmp_path):
    layer = make_layer(store, tmp_path, "u", f=b"1")
    snapshot = snapshot_of([layer], make_image(store, b"memory"))
    store.publish_snapshot(snapshot)
    store.publish_snapshot(snapshot)
    assert LocalStore(store.root).read_snapshot(snapshot.id) == snapshot
    assert list(store.verify(snapshot)) == []
    other = msgspec.structs.replace(snapshot, label="other")
    with pytest.raises(Conflict):
        store.publish_snapshot(other)
    assert store.read_snapshot(snapshot.id) == snapshot
    store.delete_snapshot(snapshot.id)
    store.delete_snapshot(snapshot.id)
    with pytest.raises(SnapshotNotFound):
        store.read_snapshot(snapshot.id)


def test_nothing_is_published_that_refers_to_nothing(store, tmp_path):
    layer = make_layer(store, tmp_path, "u", f=b"1")
    image = make_image(store, b"memory")
    missing = msgspec.structs.replace(layer, id="0" * 64)
    gone = msgspec.structs.replace(image, id="0" * 64)
    for snapshot in (snapshot_of([layer, missing]), snapshot_of([layer], gone)):
        with pytest.raises(IntegrityError):
            store.publish_snapshot(snapshot)
        with pytest.raises(SnapshotNotFound):
            store.read_snapshot(snapshot.id)
    wrong = msgspec.structs.replace(snapshot_of([layer]), fingerprint="0" * 64)
    with pytest.raises(IntegrityError):
        store.publish_snapshot(wrong)
    for name in ("../evil", "a/b", "", ".", ".hidden", "x" * 200, "nul\0"):
        bad = msgspec.structs.replace(snapshot_of([layer]), id=name)
        with pytest.raises(InvalidRequest):
            store.publish_snapshot(bad)
        with pytest.raises(SnapshotNotFound):
            store.read_snapshot(name)


def test_a_sealed_layer_counts_as_there(store, tmp_path):
    upper = tmp_path / "u"
    upper.mkdir()
    (upper / "f").write_bytes(b"1")
    sealed = store.seal_layer(upper, since=None, suspects=set())
    snapshot = snapshot_of([sealed.ref])
    store.publish_snapshot(snapshot)
    store.collect(set())
    again = LocalStore(store.root, grace=0)
    assert again.read_snapshot(snapshot.id) == snapshot
    again.collect(set())
    again.take_layer(sealed.ref, upper)
    assert again.read_file(snapshot, b"/f") == b"1"
    assert list(again.verify(snapshot)) == []
    again.delete_snapshot(snapshot.id)
    assert again.collect(set()) > 0, "nothing of taking it keeps it from being freed"


def test_thinning_drops_the_memory_and_keeps_the_files(store, tmp_path):
    layer = make_layer(store, tmp_path, "u", f=b"1")
    image = make_image(store, b"m" * 100_000)
    snapshot = snapshot_of([layer], image)
    store.publish_snapshot(snapshot)
    thin = store.drop_memory(snapshot.id)
    assert thin.memory is None and thin.layers == snapshot.layers
    assert thin.fingerprint == fingerprint([layer], None, CONFIG) != snapshot.fingerprint
    assert store.drop_memory(snapshot.id) == thin == store.read_snapshot(snapshot.id)
    assert store.collect(set()) >= 100_000
    with pytest.raises(IntegrityError):
        store.image_path(image.id)
    assert list(store.verify(thin)) == []


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "grown", "header", "length"])
def test_a_damaged_manifest_is_refused_and_stops_collection(store, tmp_path, kind):
    layer = make_layer(store, tmp_path, "u", f=b"1")
    orphan = make_layer(store, tmp_path, "o", f=b"2")
    snapshot = snapshot_of([layer])
    store.publish_snapshot(snapshot)
    path = store.root / "snapshots" / snapshot.id
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[-5:]
    elif kind == "flipped":
        data[len(data) - 20] ^= 1
    elif kind == "empty":
        data.clear()
    elif kind == "grown":
        data += b"\0"
    elif kind == "header":
        data[5] ^= 0x80
    else:
        data[16:24] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        store.read_snapshot(snapshot.id)
    assert caught.value.details["object"] == f"snapshot {snapshot.id}"
    with pytest.raises(IntegrityError) as caught:
        store.collect(set())
    assert caught.value.details["object"] == f"snapshot {snapshot.id}"
    for ref in (layer, orphan):
        store.check_layer(ref)
    assert snapshot.id in [fault.object.split()[1] for fault in store.verify(snapshot)]


def test_a_foreign_file_among_manifests_stops_collection(store, tmp_path):
    orphan = make_layer(store, tmp_path, "o", f=b"2")
    (store.root / "snapshots" / "note.txt").write_text("what is this")
    with pytest.raises(IntegrityError):
        store.collect(set())
    store.check_layer(orphan)


# -- collection -----------------------------------------------------------------------------


def test_only_what_nothing_needs_goes(store, tmp_path):
    kept = make_layer(store, tmp_path, "kept", f=b"1")
    live = make_layer(store, tmp_path, "live", f=b"2")
    orphan = make_layer(store, tmp_path, "orphan", f=b"3" * 50_000)
    image, lost = make_image(store, b"kept"), make_image(store, b"l" * 70_000)
    used = make_image(store, b"used")
    snapshot = snapshot_of([kept], image)
    store.publish_snapshot(snapshot)
    assert store.collect({live.id, used.id}) >= 120_000
    for ref in (kept, live):
        store.check_layer(ref)
    for ref in (image, used):
        store.verify_image(ref)
    with pytest.raises(IntegrityError):
        store.layer_path(orphan.id)
    with pytest.raises(IntegrityError):
        store.image_path(lost.id)
    assert leftovers(store) == []
    assert store.collect({live.id, used.id}) == 0


def test_what_was_just_published_is_safe_until_its_snapshot_is(tmp_path):
    store = LocalStore(tmp_path / "store", grace=3600)
    layer = make_layer(store, tmp_path, "u", f=b"1")
    image = make_image(store, b"m")
    assert store.collect(set()) == 0
    snapshot = snapshot_of([layer], image)
    store.publish_snapshot(snapshot)
    assert store.collect(set()) == 0
    store.delete_snapshot(snapshot.id)
    assert store.collect(set()) > 0
    with pytest.raises(IntegrityError):
        store.layer_path(layer.id)


def test_the_layer_a_capture_shares_with_stays_until_it_is_published(store, tmp_path):
    upper = tmp_path / "u"
    upper.mkdir()
    (upper / "f").write_bytes(b"1" * 10_000)
    first = store.capture_layer(upper, since=None, suspects=set())
    one = first.publish()
    second = store.capture_layer(upper, since=(first.scan, one), suspects=set())
    (upper / "later").write_bytes(b"")
    assert store.collect(set()) == 0
    two = second.publish()
    assert two == one
    third = store.capture_layer(upper, since=(first.scan, one), suspects=set())
    store.collect(set())
    three = third.publish()
    store.collect({three.id})
    store.check_layer(three)
    assert list(store.verify_layer(three)) == []


def test_removing_one_of_two_sharing_layers_frees_only_its_own(store, tmp_path):
    upper = tmp_path / "u"
    upper.mkdir()
    (upper / "big").write_bytes(os.urandom(1_000_000))
    first = store.capture_layer(upper, since=None, suspects=set())
    one = first.publish()
    (upper / "small").write_bytes(b"x")
    two = store.capture_layer(upper, since=(first.scan, one), suspects=set()).publish()
    assert store.collect({two.id}) < 100_000
    inode = (store.layer_path(two.id) / "big").stat().st_ino
    index = store.root / "layers" / two.id[:20] / "index"
    before = index.stat().st_ino
    # The store's own unlinking is not taken for a touch, not even by the next process.
    reopened = LocalStore(store.root, grace=0)
    reopened.check_layer(two)
    assert (reopened.layer_path(two.id) / "big").stat().st_ino == inode
    assert index.stat().st_ino != before, "the moved times were noted"
    assert reopened.collect(set()) >= 1_000_000


def test_leftovers_of_a_crash_are_removed_and_those_of_the_living_kept(store, tmp_path):
    old = store.root / "staging" / "00000000-1-1"
    (old / "new-1" / "deep").mkdir(parents=True)
    (old / "new-1" / "deep" / "f").write_bytes(b"x")
    staged = store.stage_image()
    (staged / "f").write_bytes(b"x")
    LocalStore(store.root)
    assert not old.exists()
    assert (staged / "f").exists()


def test_captures_and_collections_at_the_same_time(tmp_path):
    store = LocalStore(tmp_path / "store")
    failures: list[BaseException] = []
    stop = threading.Event()

    def collecting():
        try:
            while not stop.is_set():
                store.collect(set())
        except BaseException as error:  # noqa: BLE001 (shown by the assertion below)
            failures.append(error)

    def capturing(number: int):
        try:
            upper = tmp_path / f"u{number}"
            upper.mkdir()
            since = None
            for turn in range(12):
                (upper / f"f{turn % 4}").write_bytes(b"%d %d" % (number, turn))
                pending = store.capture_layer(upper, since=since, suspects=set())
                layer = pending.publish()
                snapshot = snapshot_of([layer])
                store.publish_snapshot(snapshot)
                assert list(store.verify(snapshot)) == []
                store.delete_snapshot(snapshot.id)
                since = (pending.scan, layer)
        except BaseException as error:  # noqa: BLE001 (shown by the assertion below)
            failures.append(error)

    collector = threading.Thread(target=collecting)
    workers = [threading.Thread(target=capturing, args=(number,)) for number in range(3)]
    for thread in (collector, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    stop.set()
    collector.join()
    assert failures == []


# -- looking --------------------------------------------------------------------------------


def test_diff_and_text_diff(store, tmp_path):
    base = make_layer(
        store, tmp_path, "base", same=b"s", text=b"one\ntwo\n", binary=b"\0\1", gone=b"g"
    )
    upper = tmp_path / "upper"
    store.prepare_upper(upper, [base])
    (upper / "text").write_bytes(b"one\nzwei\n")
    (upper / "binary").write_bytes(b"\0\2")
    (upper / "new").write_bytes(b"no end")
    (upper / "same").write_bytes(b"s")
    os.utime(upper / "same", ns=(1, 1))
    os.mknod(upper / "gone", 0o020000, 0)
    a, b = snapshot_of([base]), snapshot_of([base, capture(store, upper)])
    changes = {change.path: change for change in store.diff(a, b)}
    assert set(changes) == {b"/", b"/binary", b"/gone", b"/new", b"/same", b"/text"}
    assert changes[b"/same"].what == ["mtime"]
    assert changes[b"/text"].what == ["content", "mtime"]
    assert changes[b"/gone"].kind == "removed" and changes[b"/gone"].after is None
    assert changes[b"/new"].kind == "added" and changes[b"/new"].before is None
    assert changes[b"/new"].after.size == 6
    back = {change.path: change.kind for change in store.diff(b, a)}
    assert back[b"/gone"] == "added" and back[b"/new"] == "removed"
    assert list(store.diff(a, a)) == []
    text = store.text_diff(a, b, b"/text")
    assert text == "--- a/text\n+++ b/text\n@@ -1,2 +1,2 @@\n one\n-two\n+zwei\n"
    assert store.text_diff(a, b, b"/binary") is None
    added = store.text_diff(a, b, b"/new")
    assert added.splitlines() == [
        "--- /dev/null",
        "+++ b/new",
        "@@ -0,0 +1 @@",
        "+no end",
        "\\ No newline at end of file",
    ]


def test_reading_a_file_of_a_snapshot(store, tmp_path):
    layer = make_layer(store, tmp_path, "u", f=b"content", big=b"x" * (4 * 1024 * 1024 + 1))
    snapshot = snapshot_of([layer])
    assert store.read_file(snapshot, b"/f") == b"content"
    assert store.read_file(snapshot, b"//./f") == b"content"
    with pytest.raises(TooLarge):
        store.read_file(snapshot, b"/big")
    for path in (b"/missing", b"/f/below", b"/"):
        with pytest.raises(FileMissing):
            store.read_file(snapshot, path)
    for path in (b"f", b"/../etc/passwd", b"", b"/f\0"):
        with pytest.raises(PathInvalid):
            store.read_file(snapshot, path)
    (store.layer_path(layer.id) / "f").write_bytes(b"CONTENT")
    with pytest.raises(IntegrityError):
        store.read_file(snapshot, b"/f")


def test_the_fingerprint_covers_layers_memory_and_config(store, tmp_path):
    one = make_layer(store, tmp_path, "one", f=b"1")
    two = make_layer(store, tmp_path, "two", f=b"2")
    image = make_image(store, b"m")
    other = msgspec.structs.replace(CONFIG, hostname="else")
    prints = {
        fingerprint([one, two], image, CONFIG),
        fingerprint([two, one], image, CONFIG),
        fingerprint([one], image, CONFIG),
        fingerprint([one, two], None, CONFIG),
        fingerprint([one, two], image, other),
        fingerprint([one, two], image, CONFIG, format=2),
    }
    assert len(prints) == 6
    reordered = msgspec.structs.replace(CONFIG, env={"B": "2", "A": "1"})
    ordered = msgspec.structs.replace(CONFIG, env={"A": "1", "B": "2"})
    assert fingerprint([one], None, reordered) == fingerprint([one], None, ordered)
