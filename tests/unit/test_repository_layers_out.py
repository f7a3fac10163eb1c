"""What is sent of a layer: each content once, unread where it is known, and never what changed."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing, StorageFull
from sojourn.repository.cutting import LARGEST, SMALL_FILE, decode_recipe, zeros_id
from sojourn.repository.domains import Domain
from sojourn.repository.layers import decode_layer, join_segments
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.packs import CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT
from sojourn.repository.sealed import LAYER
from sojourn.repository.uploads import Upload
from sojourn.store.manifests import FILE, Manifest
from support.uploads import SECRET, Told, data_of, domain_on, fetch, manifest_at

R = random.Random(2)
LARGE = R.randbytes(9 << 20)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all sizes, with links, holes and the same content twice."""
    top = tmp_path / "tree"
    (top / "a" / "b").mkdir(parents=True)
    (top / "empty").write_bytes(b"")
    (top / "one").write_bytes(b"x")
    (top / "a" / "text.py").write_bytes(b"import this\n" * 300)
    (top / "a" / "b" / "text.py").write_bytes(b"import this\n" * 301)
    (top / "a" / "same.py").write_bytes(b"import this\n" * 300)
    (top / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"\xff")
    (top / "limit").write_bytes(LARGE[:SMALL_FILE])
    (top / "over").write_bytes(LARGE[: SMALL_FILE + 1])
    (top / "large").write_bytes(LARGE)
    (top / "large-again").write_bytes(LARGE)
    with (top / "sparse").open("wb") as file:
        file.truncate(24 << 20)
        file.seek(10 << 20)
        file.write(b"in the middle")
    os.link(top / "one", top / "hard")
    (top / "link").symlink_to("one")
    os.mkfifo(top / "fifo")
    # A path longer than the kernel takes in one call.
    here = os.open(top, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("d" * 120, dir_fd=here)
        below = os.open("d" * 120, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    bottom = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(bottom, b"reached")
    os.close(bottom)
    os.close(here)
    return top


def push(domain: Domain, manifest: Manifest, tree: Path) -> tuple[Upload, int]:
    with Upload(domain) as up:
        read = push_layer(domain, up, manifest, tree)
        up.flush()
    publish_layer(domain, manifest)
    return up, read


def content(domain: Domain, digest: bytes, size: int) -> bytes:
    """A file's content from the store alone."""
    if size <= SMALL_FILE:
        return data_of(domain, digest) if size else b""
    recipe = decode_recipe(fetch(domain, CHUNK_RECIPE, digest), size, "x")
    return b"".join(data_of(domain, part) for part, _ in recipe)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_store_has_all_of_a_layer(tree, secret):
    told = Told()
    manifest = manifest_at(tree)
    up, read = push(domain_on(told, secret), manifest, tree)
    fresh = domain_on(told, secret)
    assert fresh.has_layer(manifest.id)
    layer = decode_layer(fresh.get_object(LAYER, fresh.layer_key(manifest.id)), manifest.id)
    segments = [fetch(fresh, CHUNK_SEGMENT, segment) for segment in layer.segments]
    found = join_segments(layer, segments)
    assert found.encoded == manifest.encoded
    for entry in found.entries:
        if entry.type == FILE:
            data = content(fresh, entry.digest, entry.size)
            assert blake3(data).digest() == entry.digest
    # The same content, hard links, empty files and holes are not read.
    whole = len(LARGE) + SMALL_FILE * 2 + 1 + 12 * 601 + 9 + (24 << 20)
    assert whole - (24 << 20) < read < whole - (20 << 20)
    assert up.stored_bytes < len(LARGE) * 1.4


def test_a_second_push_reads_and_sends_nothing(tree):
    told = Told()
    manifest = manifest_at(tree)
    push(domain_on(told), manifest, tree)
    puts = len(told.puts)
    up, read = push(domain_on(told), manifest, tree)
    assert (read, up.sent_bytes) == (0, 0)
    assert len(told.puts) == puts + 1  # the root object
    assert up.relied


def test_what_changed_is_sent_and_nothing_else(tree):
    told = Told()
    push(domain_on(told), manifest_at(tree), tree)
    (tree / "a" / "text.py").write_bytes(b"import that\n")
    with (tree / "large").open("r+b") as file:
        file.seek(4 << 20)
        file.write(b"changed")
    up, read = push(domain_on(told), manifest_at(tree), tree)
    assert read == len(LARGE) + 12
    assert up.sent_bytes <= 2 * LARGEST + 40_000


@pytest.mark.parametrize("name", ["a/b/text.py", "large", "sparse", "over"])
@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "gone", "fifo", "link", "dir"])
def test_a_file_that_is_not_what_was_sealed_is_named_and_nothing_published(tree, name, how):
    told = Told()
    manifest = manifest_at(tree)
    domain = domain_on(told)
    path = tree / name
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "shorter":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + b"x")
    else:
        path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("/etc/passwd")
    elif how == "dir":
        path.mkdir()
    with pytest.raises(IntegrityError) as caught:
        push(domain, manifest, tree)
    assert caught.value.details["path"] == "/" + name
    assert caught.value.details["object"] == f"layer {manifest.id}"
    assert not domain_on(told).has_layer(manifest.id)


def test_a_recipe_whose_chunks_are_gone_is_filled_up(tree):
    told = Told()
    manifest = manifest_at(tree)
    push(domain_on(told), manifest, tree)
    domain = domain_on(told)
    entry = manifest.by_path[b"large"]
    recipe = decode_recipe(fetch(domain, CHUNK_RECIPE, entry.digest), entry.size, "x")
    name = domain.keys.chunk_name(CHUNK_DATA, recipe[2][0])
    lost = domain.index.find(name)
    assert lost is not None
    # A collection marks the data pack; the recipe's pack lives on.
    domain.index.exclude([lost.pack.id])
    up, _ = push(domain, manifest, tree)
    assert up.sent_bytes >= len(lost.pack.chunks) > 0
    told.backend.delete([domain.pack_key(lost.pack.id)])
    domain.index.remove([lost.pack.id])
    for path, digest in manifest.digests.items():
        size = manifest.by_path[path].size
        assert blake3(content(domain, digest, size)).digest() == digest


def test_a_recipe_whose_pack_is_gone_is_made_again(tree):
    told = Told()
    manifest = manifest_at(tree)
    push(domain_on(told), manifest, tree)
    domain = domain_on(told)
    entry = manifest.by_path[b"large"]
    place = domain.index.find(domain.keys.chunk_name(CHUNK_RECIPE, entry.digest))
    assert place is not None
    told.backend.delete([domain.pack_key(place.pack.id)])
    _, read = push(domain, manifest, tree)
    assert read >= entry.size
    assert decode_recipe(fetch(domain, CHUNK_RECIPE, entry.digest), entry.size, "x")


def test_a_damaged_recipe_is_an_error_not_a_layer(tree):
    told = Told()
    manifest = manifest_at(tree)
    push(domain_on(told), manifest, tree)
    domain = domain_on(told)
    entry = manifest.by_path[b"large"]
    place = domain.index.find(domain.keys.chunk_name(CHUNK_RECIPE, entry.digest))
    assert place is not None
    key = domain.pack_key(place.pack.id)
    whole = bytearray(told.backend.get(key)[0])
    whole[place.pack.block(place.block).offset + 3] ^= 1
    told.backend.put(key, bytes(whole))
    with pytest.raises(IntegrityError):
        push(domain, manifest, tree)


def test_recipes_in_one_block_are_fetched_once(tree):
    told = Told()
    manifest = manifest_at(tree)
    push(domain_on(told), manifest, tree)
    told.gets.clear()
    push(domain_on(told), manifest, tree)
    assert len(told.gets) == 1


def test_holes_become_chunks_of_zeros(tree):
    told = Told()
    manifest = manifest_at(tree)
    domain = domain_on(told)
    push(domain, manifest, tree)
    entry = manifest.by_path[b"sparse"]
    recipe = decode_recipe(fetch(domain, CHUNK_RECIPE, entry.digest), entry.size, "x")
    zeros = [length for part, length in recipe if part == zeros_id(length)]
    assert sum(zeros) > 20 << 20
    assert recipe[0] == (zeros_id(LARGEST), LARGEST)


def test_a_layer_that_was_never_published_is_not_there(tree):
    told = Told()
    manifest = manifest_at(tree)
    domain = domain_on(told)
    with Upload(domain) as up:
        push_layer(domain, up, manifest, tree)
    with pytest.raises(ObjectMissing):
        domain.get_object(LAYER, domain.layer_key(manifest.id))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """More small files than are read in one go."""
    top = tmp_path / "many"
    for directory in range(10):
        (top / str(directory)).mkdir(parents=True)
        for number in range(200):
            (top / str(directory) / f"f{number}").write_bytes(R.randbytes(R.randrange(1, 4000)))
    return top


def test_many_small_files_are_read_ahead_and_all_sent(many):
    told = Told()
    manifest = manifest_at(many)
    up, read = push(domain_on(told), manifest, many)
    assert read == manifest.ref.bytes
    fresh = domain_on(told)
    for path, digest in manifest.digests.items():
        assert data_of(fresh, digest) == (many / os.fsdecode(path)).read_bytes()
    assert up.sent_bytes > read


def test_a_changed_file_among_many_stops_the_reading(many):
    told = Told()
    manifest = manifest_at(many)
    (many / "5" / "f77").write_bytes(b"changed")
    with pytest.raises(IntegrityError) as caught:
        push(domain_on(told), manifest, many)
    assert caught.value.details["path"] == "/5/f77"
    assert not any(thread.name.startswith("read files") for thread in threading.enumerate())


def test_a_store_that_fails_stops_the_reading(many):
    told = Told()
    domain = domain_on(told)
    manifest = manifest_at(many)

    def fail(key: str, number: int) -> None:
        raise StorageFull("full")

    told.before = fail
    with pytest.raises(StorageFull):
        push(domain, manifest, many)
    assert not any(thread.name.startswith("read files") for thread in threading.enumerate())
