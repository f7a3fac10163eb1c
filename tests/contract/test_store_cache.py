"""The store as a cache: what is not here is brought once and proven; what is given up can go."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_rig import CONFIG, capture, hostile_tree, look, snapshot_of

from sojourn.errors import IntegrityError, StorageFull, StoreUnreachable
from sojourn.model.snapshots import LayerRef, MemoryRef
from sojourn.store.base import Source
from sojourn.store.building import Builder, Shared
from sojourn.store.copying import Copier
from sojourn.store.local import LocalStore
from sojourn.store.manifests import Manifest
from sojourn.store.trees import remove_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")


class Copying(Builder):
    """Makes trees that share nothing."""

    def _share(self, source: Shared, fd: int, name: bytes) -> bool:
        return False


class FarStore:
    """A source that is another store, whose answers can be spoilt."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.fetched: list[str] = []
        self.cached: list[str] = []
        self.error: Exception | None = None
        self.gate: threading.Event | None = None

    def _ready(self) -> None:
        if self.error is not None:
            raise self.error

    def has_layer(self, id: str) -> bool:
        self._ready()
        return self.store._layers.present(id)

    def has_image(self, id: str) -> bool:
        self._ready()
        return self.store._images.present(id)

    def fetch_layer(self, id: str, into: Path) -> Manifest:
        self.fetched.append(id)
        if self.gate is not None:
            self.gate.wait(10)
        manifest = self.store._layers.get(id).manifest
        builder = Copying(into, Copier(), self.store._layers.get, self.store._layers.trust)
        builder.build(manifest.entries, {path: Shared(id, path) for path in manifest.digests})
        self._ready()
        return manifest

    def fetch_image(
        self, id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]
    ) -> MemoryRef:
        self.fetched.append(id)
        self.cached = [ref.id for ref, files in cached if files.is_dir()]
        shutil.copytree(self.store.image_path(id), into, dirs_exist_ok=True)
        self._ready()
        return self.store._images.read(id)


@pytest.fixture
def far(tmp_path: Path) -> FarStore:
    return FarStore(LocalStore(tmp_path / "far", grace=0))


@pytest.fixture
def near(tmp_path: Path, far: FarStore) -> Iterator[LocalStore]:
    source: Source = far
    yield LocalStore(tmp_path / "near", grace=0, source=source)
    # Trees that are closed to pytest's own removal.
    remove_tree(tmp_path / "near")


def put_layer(store: LocalStore, tmp_path: Path, name: str, size: int = 10_000) -> LayerRef:
    upper = tmp_path / f"upper-{name}"
    upper.mkdir()
    (upper / "name").write_text(name)
    (upper / "data").write_bytes(os.urandom(size))
    return capture(store, upper)


def put_image(store: LocalStore, size: int = 100_000) -> MemoryRef:
    staged = store.stage_image()
    (staged / "pages.img").write_bytes(os.urandom(size))
    (staged / "checkpoint.img").write_bytes(os.urandom(500))
    return store.publish_image(staged, "gvisor", "runsc 1", ["sse2"])


def leftovers(store: LocalStore) -> list[str]:
    return [entry.name for entry in store._staging.directory.iterdir()]


def always(_: str) -> bool:
    return True


# -- bringing -------------------------------------------------------------------------------


def test_a_layer_is_brought_exactly_and_only_once(tmp_path, far, near):
    upper = tmp_path / "upper"
    hostile_tree(upper)
    ref = capture(far.store, upper)
    assert look(near.layer_path(ref.id)) == look(upper)
    near.check_layer(ref)
    assert list(near.verify_layer(ref)) == []
    near.layer_path(ref.id)
    assert far.fetched == [ref.id]
    assert leftovers(near) == []
    # It outlives the source.
    far.error = StoreUnreachable("down")
    again = LocalStore(near.root, grace=0, source=far)
    assert look(again.layer_path(ref.id)) == look(upper)


def test_an_image_is_brought_whole_and_only_once(far, near):
    ref = put_image(far.store)
    path = near.image_path(ref.id)
    assert (path / "pages.img").read_bytes() == (
        far.store.image_path(ref.id) / "pages.img"
    ).read_bytes()
    near.verify_image(ref)
    assert far.fetched == [ref.id]
    assert LocalStore(near.root)._images.read(ref.id) == ref
    assert leftovers(near) == []


def test_images_that_are_here_are_offered_the_last_used_first(far, near):
    here = [put_image(near) for _ in range(6)]
    for ref in (here[4], here[1]):
        near.image_path(ref.id)
    wanted = put_image(far.store)
    near.image_path(wanted.id)
    assert far.cached[:2] == [here[1].id, here[4].id]
    assert len(far.cached) == 4


def test_many_at_once_fetch_once(tmp_path, far, near):
    ref = put_layer(far.store, tmp_path, "a")
    far.gate = threading.Event()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(near.layer_path(ref.id))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    far.gate.set()
    for thread in threads:
        thread.join()
    assert far.fetched == [ref.id]
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "error", [StoreUnreachable("down"), IntegrityError("bad", object="pack"), StorageFull("full")]
)
def test_a_failed_fetch_raises_the_sources_error_and_leaves_nothing(tmp_path, far, near, error):
    ref, image = put_layer(far.store, tmp_path, "a"), put_image(far.store)

    class Halfway(FarStore):
        def _ready(self) -> None:
            if self.fetched:
                raise error

    failing = Halfway(far.store)
    store = LocalStore(near.root, grace=0, source=failing)
    with pytest.raises(type(error)):
        store.layer_path(ref.id)
    failing.fetched.clear()
    with pytest.raises(type(error)):
        store.image_path(image.id)
    assert leftovers(store) == []
    assert list((store.root / "layers").iterdir()) == []
    assert list((store.root / "images").iterdir()) == []
    assert near.layer_path(ref.id).is_dir()  # a later attempt begins anew


def test_a_disk_that_fills_up_is_named_so(tmp_path, far, near, monkeypatch):
    ref = put_layer(far.store, tmp_path, "a")

    def full(id: str, into: Path) -> Manifest:
        into.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(far, "fetch_layer", full)
    with pytest.raises(StorageFull):
        near.layer_path(ref.id)
    assert leftovers(near) == []


@pytest.mark.parametrize("fault", ["content", "mode", "missing", "more", "attribute", "time"])
def test_a_tree_that_is_not_the_layers_is_refused(tmp_path, far, near, monkeypatch, fault):
    ref = put_layer(far.store, tmp_path, "a")
    honest = far.fetch_layer

    def lie(id: str, into: Path) -> Manifest:
        manifest = honest(id, into)
        if fault == "content":
            (into / "data").write_bytes(b"short")
        elif fault == "mode":
            (into / "name").chmod(0o4755)
        elif fault == "missing":
            (into / "name").unlink()
        elif fault == "more":
            (into / "extra").write_bytes(b"x")
        elif fault == "attribute":
            os.setxattr(into / "name", "user.x", b"y")
        else:
            os.utime(into / "name", ns=(1, 1))
        return manifest

    monkeypatch.setattr(far, "fetch_layer", lie)
    with pytest.raises(IntegrityError) as caught:
        near.layer_path(ref.id)
    assert caught.value.details["object"] == f"layer {ref.id}"
    assert not (near.root / "layers" / ref.id[:20]).exists()


def test_another_layer_or_image_than_asked_for_is_refused(tmp_path, far, near, monkeypatch):
    a, b = put_layer(far.store, tmp_path, "a"), put_layer(far.store, tmp_path, "b")
    layer = far.fetch_layer
    monkeypatch.setattr(far, "fetch_layer", lambda _, into: layer(b.id, into))
    with pytest.raises(IntegrityError):
        near.layer_path(a.id)
    first, second = put_image(far.store), put_image(far.store)
    image = far.fetch_image
    monkeypatch.setattr(far, "fetch_image", lambda _, into, cached: image(second.id, into, cached))
    with pytest.raises(IntegrityError):
        near.image_path(first.id)


def test_an_image_whose_files_are_not_all_there_is_refused(far, near, monkeypatch):
    ref = put_image(far.store)
    honest = far.fetch_image

    def lie(id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]) -> MemoryRef:
        found = honest(id, into, cached)
        (into / "checkpoint.img").unlink()
        return found

    monkeypatch.setattr(far, "fetch_image", lie)
    with pytest.raises(IntegrityError):
        near.image_path(ref.id)
    assert leftovers(near) == []


def test_what_nobody_has_is_missing(far, near):
    with pytest.raises(IntegrityError, match="missing"):
        near.layer_path("a" * 64)
    with pytest.raises(IntegrityError, match="missing"):
        near.image_path("b" * 64)
    assert far.fetched == []


# -- what works with what is not here ---------------------------------------------------------


def everything_evicted(near: LocalStore) -> None:
    near.evict(0, keep=set(), durable=always)
    assert list((near.root / "layers").iterdir()) == []
    assert list((near.root / "images").iterdir()) == []


def test_a_snapshot_may_refer_to_what_only_the_source_has(tmp_path, far, near):
    ref, image = put_layer(far.store, tmp_path, "a"), put_image(far.store)
    snapshot = snapshot_of([ref], image)
    near.publish_snapshot(snapshot)
    assert far.fetched == []
    assert near.read_snapshot(snapshot.id) == snapshot
    missing = snapshot_of([LayerRef(id="c" * 64, bytes=1, entries=1)])
    with pytest.raises(IntegrityError):
        near.publish_snapshot(missing)
    assert near.snapshot_ids() == [snapshot.id]


def test_a_source_that_is_down_stops_no_snapshot_of_what_is_here(tmp_path, far, near):
    ref, image = put_layer(near, tmp_path, "a"), put_image(near)
    upper = tmp_path / "sealed-upper"
    upper.mkdir()
    (upper / "f").write_bytes(b"x")
    sealed = near.seal_layer(upper, since=None, suspects=set())
    far.error = StoreUnreachable("down")
    near.publish_snapshot(snapshot_of([ref, sealed.ref], image))
    sealed.take()
    near.check_layer(ref)
    assert near.collect(set()) >= 0


def test_looking_verifying_merging_thinning_and_collecting_work_with_evicted_objects(
    tmp_path, far, near
):
    # The same content goes to both, as an upload would have it.
    def both(name: str) -> LayerRef:
        ref = put_layer(near, tmp_path, name)
        upper = tmp_path / f"upper-{name}"
        assert capture(far.store, upper) == ref
        return ref

    base, top = both("base"), both("top")
    image = put_image(near)
    staged = far.store.stage_image()
    shutil.copytree(near.image_path(image.id), staged, dirs_exist_ok=True)
    assert far.store.publish_image(staged, "gvisor", "runsc 1", ["sse2"]) == image
    old, new = snapshot_of([base]), snapshot_of([base, top], image)
    for snapshot in (old, new):
        near.publish_snapshot(snapshot)

    everything_evicted(near)
    assert b"/name" in {change.path for change in near.diff(old, new)}
    everything_evicted(near)
    assert near.read_file(new, b"/name") == b"top"
    everything_evicted(near)
    assert list(near.verify(new)) == []
    everything_evicted(near)
    near.check_layer(top)
    near.verify_image(image)
    everything_evicted(near)
    merged = near.squash([base, top], [])
    assert near.read_file(snapshot_of([merged]), b"/name") == b"top"
    everything_evicted(near)
    upper = tmp_path / "next"
    near.prepare_upper(upper, [base, top])
    thinned = near.drop_memory(new.id)
    assert thinned.memory is None
    assert near.read_snapshot(new.id) == thinned
    near.collect(set())
    assert near.read_file(thinned, b"/name") == b"top"
    near.delete_snapshot(new.id)
    near.delete_snapshot(old.id)
    near.collect(set())
    assert list((near.root / "layers").iterdir()) == []


def test_verifying_what_the_source_cannot_give_now_says_so_and_blames_no_object(
    tmp_path, far, near
):
    ref, image = put_layer(far.store, tmp_path, "a"), put_image(far.store)
    far.error = StoreUnreachable("down")
    with pytest.raises(StoreUnreachable):
        list(near.verify_layer(ref))
    with pytest.raises(StoreUnreachable):
        list(near.verify_memory(image))


def test_a_capture_after_an_evicted_one_takes_all_anew_and_fetches_nothing(tmp_path, far, near):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "kept").write_bytes(b"k" * 5000)
    first = near.capture_layer(upper, since=None, suspects=set())
    ref = first.publish()
    assert capture(far.store, upper) == ref
    everything_evicted(near)
    (upper / "new").write_bytes(b"n")
    second = near.capture_layer(upper, since=(first.scan, ref), suspects=set())
    assert second.copied_bytes == 5001
    layer = second.publish()
    assert far.fetched == []
    assert list(near.verify_layer(layer)) == []


# -- templates ------------------------------------------------------------------------------


def make_template(tmp_path: Path, text: str) -> Path:
    tree = tmp_path / "template"
    tree.mkdir(exist_ok=True)
    (tree / "release").write_text(text)
    os.utime(tree / "release", ns=(5, 7_000_000_001))
    os.utime(tree, ns=(5, 7_000_000_002))
    return tree


def test_another_build_of_the_template_brings_the_old_one_as_an_ordinary_layer(tmp_path, far, near):
    tree = make_template(tmp_path, "one")
    old = near.adopt_template(tree, "base")
    assert capture(far.store, tree) == old
    snapshot = snapshot_of([old])
    near.publish_snapshot(snapshot)

    make_template(tmp_path, "two")
    new = near.adopt_template(tree, "base")
    assert new.id != old.id
    path = near.layer_path(old.id)
    assert path != tree
    assert (path / "release").read_text() == "one"
    assert not (path.parent / "source").exists()
    near.check_layer(old)
    assert near.layer_path(new.id) == tree
    assert list(near.verify(snapshot)) == []
    # As a layer like others it can be given up; the template in use cannot.
    near.evict(0, keep=set(), durable=always)
    assert not path.exists()
    assert near.layer_path(new.id) == tree


def test_a_template_whose_tree_is_gone_is_brought(tmp_path, far, near):
    tree = make_template(tmp_path, "one")
    ref = near.adopt_template(tree, "base")
    assert capture(far.store, tree) == ref
    (tree / "release").unlink()
    tree.rmdir()
    for store in (near, LocalStore(near.root, grace=0, source=far)):
        assert (store.layer_path(ref.id) / "release").read_text() == "one"
    assert far.fetched == [ref.id]


def test_a_template_the_source_does_not_have_keeps_its_record(tmp_path, far, near):
    tree = make_template(tmp_path, "one")
    old = near.adopt_template(tree, "base")
    make_template(tmp_path, "two")
    far.error = StoreUnreachable("down")
    near.adopt_template(tree, "base")
    far.error = None
    with pytest.raises(IntegrityError, match="differs"):
        near.check_layer(old)


# -- giving up ------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_until_it_fits(tmp_path, far, near):
    layers = [put_layer(near, tmp_path, str(number), 100_000) for number in range(4)]
    image = put_image(near, 100_000)
    for id in (layers[2].id, layers[0].id):
        near.layer_path(id)
    near.image_path(image.id)
    near.layer_path(layers[3].id)
    before = near.usage()
    freed = near.evict(before - 150_000, keep=set(), durable=always)
    left = {place.name for place in (near.root / "layers").iterdir()}
    assert left == {layers[0].id[:20], layers[3].id[:20]}
    assert (near.root / "images" / image.id[:20]).exists()
    assert near.usage() == before - freed <= before - 150_000
    assert near.evict(before, keep=set(), durable=always) == 0


def test_last_use_outlives_the_process(tmp_path, far, near):
    first, second = (put_layer(near, tmp_path, name, 100_000) for name in "ab")
    near.layer_path(second.id)
    near.layer_path(first.id)
    for ref, seconds in ((first, 2_000_000_000), (second, 1_000_000_000)):
        os.utime(near.root / "layers" / ref.id[:20] / "used", (seconds, seconds))
    again = LocalStore(near.root, grace=0, source=far)
    again.evict(again.usage() - 1, keep=set(), durable=always)
    assert [place.name for place in (near.root / "layers").iterdir()] == [first.id[:20]]


def test_use_is_marked_at_most_once_a_minute(tmp_path, far, near):
    ref = put_layer(near, tmp_path, "a")
    near.layer_path(ref.id)
    mark = near.root / "layers" / ref.id[:20] / "used"
    os.utime(mark, (5, 5))
    for _ in range(50):
        near.layer_path(ref.id)
    assert mark.stat().st_mtime == 5


def test_what_is_kept_pinned_not_durable_or_a_template_stays(tmp_path, far, near):
    kept, pinned, unsafe, free = (put_layer(near, tmp_path, name) for name in "abcd")
    image = put_image(near)
    template = near.adopt_template(make_template(tmp_path, "t"), "base")
    near._pins.hold(pinned.id)
    asked: list[str] = []

    def durable(id: str) -> bool:
        asked.append(id)
        return id not in (unsafe.id, image.id)

    near.evict(0, keep={kept.id}, durable=durable)
    left = {place.name for place in (near.root / "layers").iterdir()}
    assert left == {ref.id[:20] for ref in (kept, pinned, unsafe, template)}
    assert near.image_path(image.id).is_dir()
    assert free.id in asked
    assert template.id not in asked
    near._pins.release(pinned.id)


def test_what_was_just_handed_out_stays(tmp_path, far):
    store = LocalStore(tmp_path / "careful", grace=900, source=far)
    ref = put_layer(store, tmp_path, "a")
    store.publish_snapshot(snapshot_of([ref]))
    path = store.layer_path(ref.id)
    assert store.evict(0, keep=set(), durable=always) == 0
    assert path.is_dir()


def test_without_a_source_nothing_is_given_up(tmp_path):
    store = LocalStore(tmp_path / "alone", grace=0)
    ref = put_layer(store, tmp_path, "a")
    assert store.evict(0, keep=set(), durable=always) == 0
    assert store.layer_path(ref.id).is_dir()
    assert store.usage() > 10_000


def test_durability_that_cannot_be_told_stops_the_eviction(tmp_path, far, near):
    put_layer(near, tmp_path, "a")
    second = put_layer(near, tmp_path, "b")

    def durable(id: str) -> bool:
        if id == second.id:
            raise StoreUnreachable("down")
        return True

    with pytest.raises(StoreUnreachable):
        near.evict(0, keep=set(), durable=durable)
    assert second.id[:20] in {place.name for place in (near.root / "layers").iterdir()}


def test_shared_files_count_once_and_go_with_their_last_name(tmp_path, far, near):
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "big").write_bytes(os.urandom(1_000_000))
    first = near.capture_layer(upper, since=None, suspects=set())
    one = first.publish()
    alone = near.usage()  # looked at before anything is shared
    (upper / "small").write_bytes(b"x")
    second = near.capture_layer(upper, since=(first.scan, one), suspects=set())
    two = second.publish()
    both = near.usage()
    assert alone > 1_000_000
    assert both < alone + 500_000
    assert both == LocalStore(near.root, grace=0, source=far).usage()
    # Giving up one of two names frees next to nothing.
    near.layer_path(two.id)
    freed = near.evict(both - 1, keep={two.id}, durable=always)
    assert freed < 500_000
    assert near.usage() == both - freed > 1_000_000
    assert list(near.verify_layer(two)) == []
    freed = near.evict(0, keep=set(), durable=always)
    assert freed > 1_000_000
    assert near.usage() == 0


def test_an_evicted_object_of_a_snapshot_is_collected_like_any_other(tmp_path, far, near):
    ref = put_layer(far.store, tmp_path, "a")
    snapshot = snapshot_of([ref])
    near.publish_snapshot(snapshot)
    near.layer_path(ref.id)
    near.collect(set())
    assert (near.root / "layers" / ref.id[:20]).exists()
    near.evict(0, keep=set(), durable=always)
    near.collect(set())
    assert near.read_file(snapshot, b"/name") == b"a"
    assert snapshot.config == CONFIG


def test_eviction_beside_readers_never_shows_half_an_object(tmp_path, far, near):
    refs = [put_layer(far.store, tmp_path, name, 3000) for name in "abc"]
    snapshot = snapshot_of(refs)
    near.publish_snapshot(snapshot)
    stop = threading.Event()

    def read() -> int:
        rounds = 0
        while not stop.is_set():
            assert near.read_file(snapshot, b"/name") == b"c"
            for ref in refs:
                near.check_layer(ref)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for _ in range(40):
            near.evict(0, keep=set(), durable=always)
            near.collect(set())
        stop.set()
        assert sum(reader.result() for reader in readers) > 0
