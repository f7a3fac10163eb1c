"""Restoring memory images: from the store, from cached images, from both, never a wrong byte."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing, StorageFull
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.images import PAGE, RECORD, ImageMap, encode_image
from sojourn.repository.images_in import read_image, restore_image
from sojourn.repository.images_out import PageMemory, publish_image, push_image
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.sealed import IMAGE
from sojourn.repository.uploads import Upload
from sojourn.store.fingerprints import image_digest
from support.uploads import SECRET, domain_on

PAGES = 600


class Metered:
    """A backend that counts the bytes read of packs."""

    def __init__(self) -> None:
        self.backend = open_backend("memory:")
        self.read = 0

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def get_ranges(self, key, ranges):
        self.read += sum(length for _, length in ranges)
        return self.backend.get_ranges(key, ranges)


def page(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE)


def pages_file(numbers: list[int]) -> bytes:
    """A file of pages; 0 is a page of zeros."""
    return b"".join(page(number) if number else bytes(PAGE) for number in numbers)


def make_image(place: Path, files: dict[str, bytes]) -> MemoryRef:
    """An image's files on disk, and its reference."""
    place.mkdir()
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    listed = {name: (len(data), blake3(data).hexdigest()) for name, data in files.items()}
    total = sum(map(len, files.values()))
    return MemoryRef(image_digest(listed), total, listed, "gvisor", "runsc 1", ["sse2"])


def push(
    domain: Domain, ref: MemoryRef, files: Path, parent: tuple[MemoryRef, Path] | None = None
) -> ImageMap:
    with Upload(domain) as up:
        image = push_image(domain, up, ref, files, parent, memory=PageMemory())
    publish_image(domain, image)
    return image


def content(place: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


class Pair:
    """A parent and a child that differs in some pages, both in a store."""

    def __init__(self, directory: Path, secret: bytes | None = None) -> None:
        self.backend = Metered()
        self.secret = secret
        before = [n % 7 and n for n in range(PAGES)]
        after = [9000, *before[: PAGES // 2], 9001, 9002, *before[PAGES // 2 :]]
        after[100:110] = range(9100, 9110)
        self.parent_files = {"pages.img": pages_file(before), "checkpoint.img": b"c" * 5000}
        self.child_files = {
            "pages.img": pages_file(after),
            "checkpoint.img": random.Random(1).randbytes(70_000),
            "empty.img": b"",
            "sub/deep/other.img": b"below",
        }
        self.parent_at, self.child_at = directory / "parent", directory / "child"
        self.parent = make_image(self.parent_at, self.parent_files)
        self.child = make_image(self.child_at, self.child_files)
        domain = self.domain()
        self.parent_map = push(domain, self.parent, self.parent_at)
        self.child_map = push(domain, self.child, self.child_at, (self.parent, self.parent_at))
        self.backend.read = 0

    def domain(self) -> Domain:
        return domain_on(self.backend, self.secret)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "encrypted"])
def test_an_image_comes_back_byte_for_byte(tmp_path, into, secret):
    pair = Pair(tmp_path, secret)
    assert restore_image(pair.domain(), pair.child.id, into) == pair.child
    assert content(into) == pair.child_files
    assert read_image(pair.domain(), pair.child.id) == pair.child_map


def test_what_a_cached_image_has_is_not_fetched(pair, into):
    known = read_image(pair.domain(), pair.parent.id)
    pair.backend.read = 0
    restore_image(pair.domain(), pair.child.id, into, [(known, pair.parent_at)])
    assert content(into) == pair.child_files
    # Thirteen new pages and the small files, and no more than the chunks they lie in.
    assert pair.backend.read < 300_000
    assert len(pair.parent_files["pages.img"]) > 2_000_000


def test_with_the_whole_image_cached_nothing_is_fetched(pair, into):
    known = read_image(pair.domain(), pair.child.id)
    pair.backend.read = 0
    restore_image(pair.domain(), pair.child.id, into, [(known, pair.child_at)])
    assert content(into) == pair.child_files
    assert pair.backend.read == 0


def test_several_cached_images_complete_one_another(tmp_path, pair, into):
    third = make_image(tmp_path / "third", {"pages.img": pages_file([*range(9000, 9120), 1])})
    pushed = push(pair.domain(), third, tmp_path / "third")
    maps = [(pair.parent_map, pair.parent_at), (pushed, tmp_path / "third")]
    restore_image(pair.domain(), pair.child.id, into, maps)
    assert content(into) == pair.child_files


def test_zero_pages_are_holes(tmp_path, into):
    data = bytearray(8 << 20)
    data[5 << 20 : (5 << 20) + PAGE] = page(1)
    backend = Metered()
    ref = make_image(tmp_path / "a", {"pages.img": bytes(data)})
    image = push(domain_on(backend), ref, tmp_path / "a")
    restore_image(domain_on(backend), ref.id, into)
    assert (into / "pages.img").read_bytes() == data
    assert (into / "pages.img").stat().st_blocks * 512 <= 64 << 10
    other = tmp_path / "other"
    other.mkdir()
    restore_image(domain_on(backend), ref.id, other, [(image, into)])
    assert (other / "pages.img").stat().st_blocks * 512 <= 64 << 10


@pytest.mark.parametrize("fault", ["flipped", "zeroed", "cut", "gone", "other", "link", "shut"])
def test_a_cached_image_that_is_damaged_does_not_poison(tmp_path, pair, into, fault, caplog):
    cached = pair.parent_at / "pages.img"
    data = bytearray(cached.read_bytes())
    if fault == "flipped":
        data[200 * PAGE + 17] ^= 1
        cached.write_bytes(data)
    elif fault == "zeroed":
        cached.write_bytes(bytes(len(data)))
    elif fault == "cut":
        cached.write_bytes(data[: 100 * PAGE + 5])
    elif fault == "other":
        cached.write_bytes(random.Random(77).randbytes(len(data)))
    else:
        cached.unlink()
        if fault == "link":
            cached.symlink_to("/etc/passwd")
        elif fault == "shut":
            os.mkfifo(cached)
    restore_image(pair.domain(), pair.child.id, into, [(pair.parent_map, pair.parent_at)])
    assert content(into) == pair.child_files
    if fault in ("flipped", "zeroed", "other"):
        assert "are fetched" in caplog.text


def test_a_cached_map_that_lies_does_not_poison(pair, into):
    """A map that says its chunks lie elsewhere than they do."""
    pieces = list(RECORD.iter_unpack(pair.parent_map.files["pages.img"]))
    moved = b"".join(RECORD.pack(*piece) for piece in reversed(pieces))
    lying = ImageMap(
        pair.parent_map.ref,
        pair.parent_map.chunks,
        {**pair.parent_map.files, "pages.img": moved},
    )
    restore_image(pair.domain(), pair.child.id, into, [(lying, pair.parent_at)])
    assert content(into) == pair.child_files


def test_zeros_replace_what_a_bad_copy_put_there(tmp_path, into):
    """A chunk with a page of zeros in it, which a store's copy leaves out where nothing stands."""
    body = page(1) + bytes(PAGE * 3) + page(2)
    backend = Metered()
    ref = make_image(tmp_path / "a", {"state.img": body})
    image = push(domain_on(backend), ref, tmp_path / "a")
    (tmp_path / "a" / "state.img").write_bytes(b"x" * len(body))
    restore_image(domain_on(backend), ref.id, into, [(image, tmp_path / "a")])
    assert content(into) == {"state.img": body}


def forge(domain: Domain, ref: MemoryRef, chunks: list[bytes], pieces: dict[str, bytes]) -> None:
    with Upload(domain) as up:
        for data in chunks:
            up.add(CHUNK_DATA, blake3(data).digest(), data)
    ids = b"".join(blake3(data).digest() for data in chunks)
    domain.put_object(
        IMAGE, domain.image_key(ref.id), encode_image(ImageMap(ref=ref, chunks=ids, files=pieces))
    )


def test_pieces_that_make_another_file_are_refused_and_leave_nothing(tmp_path, into):
    domain = domain_on(Metered())
    ref = make_image(tmp_path / "a", {"pages.img": b"right" * 100})
    wrong = b"wrong" * 100
    forge(domain, ref, [wrong], {"pages.img": RECORD.pack(500, 1, 0)})
    with pytest.raises(IntegrityError) as caught:
        restore_image(domain, ref.id, into)
    assert caught.value.details["object"] == f"memory {ref.id}"
    assert caught.value.details["path"] == "pages.img"
    assert list(into.iterdir()) == []


def test_a_piece_beyond_its_chunk_is_refused(tmp_path, into):
    domain = domain_on(Metered())
    ref = make_image(tmp_path / "a", {"pages.img": b"right" * 100})
    forge(domain, ref, [b"right" * 99], {"pages.img": RECORD.pack(500, 1, 0)})
    with pytest.raises(IntegrityError):
        restore_image(domain, ref.id, into)
    assert list(into.iterdir()) == []


def test_a_chunk_under_a_wrong_name_is_refused(tmp_path, into):
    domain = domain_on(Metered())
    data = b"right" * 100
    ref = make_image(tmp_path / "a", {"pages.img": data})
    digest = blake3(data).digest()
    with Upload(domain) as up:
        up.put(CHUNK_DATA, domain.keys.chunk_name(CHUNK_DATA, digest), b"wrong" * 100)
    image = ImageMap(ref=ref, chunks=digest, files={"pages.img": RECORD.pack(500, 1, 0)})
    domain.put_object(IMAGE, domain.image_key(ref.id), encode_image(image))
    with pytest.raises(IntegrityError):
        restore_image(domain, ref.id, into)
    # With the right pages cached the image is whole again, though the store's chunk is bad.
    restore_image(domain, ref.id, into, [(image, tmp_path / "a")])
    assert content(into) == {"pages.img": data}


def test_an_image_the_store_does_not_have(pair, into):
    with pytest.raises(ObjectMissing):
        restore_image(pair.domain(), "a" * 64, into)
    assert list(into.iterdir()) == []


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "copy_file_range"])
def test_a_disk_that_fills_up_leaves_nothing(pair, into, monkeypatch, call):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageFull):
        restore_image(pair.domain(), pair.child.id, into, [(pair.parent_map, pair.parent_at)])
    assert list(into.iterdir()) == []


def test_where_ranges_cannot_be_copied_bytes_are(pair, into, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    pair.backend.read = 0
    restore_image(pair.domain(), pair.child.id, into, [(pair.parent_map, pair.parent_at)])
    assert content(into) == pair.child_files
    assert pair.backend.read < 300_000


def test_no_descriptor_is_left_open(pair, into):
    before = len(list(Path("/proc/self/fd").iterdir()))
    restore_image(pair.domain(), pair.child.id, into, [(pair.parent_map, pair.parent_at)])
    with pytest.raises(ObjectMissing):
        restore_image(pair.domain(), "b" * 64, into)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
