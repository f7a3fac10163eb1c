"""Damaged and missing packs: another copy is used where there is one, else the error says where."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from blake3 import blake3

from contract.store_rig import hostile_tree, look
from sojourn.errors import IntegrityError, SojournError, StorageFull, StoreUnreachable
from sojourn.repository import config
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import INDEXES, PACKS, Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images_in import read_image, restore_image
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.keys import Keyring
from sojourn.repository.layers_in import restore_layer
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.uploads import Upload
from sojourn.store.trees import remove_tree
from support.uploads import SECRET, manifest_at


class Spoilt:
    """A backend whose reads of packs can be made to fail or lie."""

    def __init__(self) -> None:
        self.backend = open_backend("memory:")
        self.before: Callable[[str], None] = lambda key: None
        self.keyring: Keyring | None = None

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.before(key)
        return self.backend.get_ranges(key, ranges)

    def change(self, key: str, change: Callable[[bytearray], None]) -> None:
        """Change an object's bytes as a bad disk would."""
        data = bytearray(self.backend.get(key)[0])
        change(data)
        self.backend.put(key, bytes(data))

    def keys(self, group: str) -> list[str]:
        return [info.key for info in self.backend.list("") if f"/{group}/" in info.key]


def domain_on(backend: Spoilt, secret: bytes | None = None) -> Domain:
    """A domain as a process that has just started sees it; the secret is stretched only once."""
    if backend.keyring is None:
        backend.keyring = config.create(backend, secret)[1]
    return Domain(backend, backend.keyring.domain("ten_1"))


def put(domain: Domain, contents: Sequence[bytes]) -> list[bytes]:
    with Upload(domain) as up:
        for data in contents:
            up.add(CHUNK_DATA, blake3(data).digest(), data)
    return [domain.keys.chunk_name(CHUNK_DATA, blake3(data).digest()) for data in contents]


def chunks_of(seed: int, count: int = 8, size: int = 400_000) -> list[bytes]:
    return [random.Random(seed + n).randbytes(size) for n in range(count)]


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 0x10

    return change


@pytest.fixture(params=[None, SECRET], ids=["open", "encrypted"])
def secret(request) -> bytes | None:
    return request.param


def test_a_flipped_byte_names_pack_and_block(secret):
    backend = Spoilt()
    contents = chunks_of(1)
    names = put(domain_on(backend, secret), contents)
    (key,) = backend.keys(PACKS)
    domain = domain_on(backend, secret)
    (pack,) = domain.index.packs()
    for number in range(pack.block_count):
        block = pack.block(number)
        for at in (block.offset, block.offset + block.stored - 1):
            backend.change(key, flip(at))
            with pytest.raises(IntegrityError) as caught:
                list(Reader(domain).chunks(names, needed_by="layer x"))
            assert caught.value.details["object"] == key
            assert caught.value.details["block"] == number
            assert "layer x" in caught.value.message
            backend.change(key, flip(at))
    assert len(list(Reader(domain).chunks(names))) == len(names)


def test_of_a_pack_that_is_cut_off_the_rest_can_be_read(secret):
    backend = Spoilt()
    contents = chunks_of(2)
    names = put(domain_on(backend, secret), contents)
    (key,) = backend.keys(PACKS)
    domain = domain_on(backend, secret)
    (pack,) = domain.index.packs()
    last = pack.block(pack.block_count - 1)

    def cut(data: bytearray) -> None:
        del data[last.offset + 5 :]

    backend.change(key, cut)
    with pytest.raises(IntegrityError) as caught:
        list(Reader(domain).chunks(names))
    assert caught.value.details["block"] == pack.block_count - 1
    whole = [
        name
        for name in names
        if (place := domain.index.find(name)) and place.block < pack.block_count - 1
    ]
    assert len(whole) >= 4
    assert len(list(Reader(domain).chunks(whole))) == len(whole)


def twice(backend: Spoilt, secret: bytes | None, contents: list[bytes]) -> list[bytes]:
    """The same chunks in two packs, as two nodes write them that do not know of each other."""
    one, other = domain_on(backend, secret), domain_on(backend, secret)
    assert len(one.index) == len(other.index) == 0
    names = put(one, contents)
    assert put(other, contents) == names
    assert len(backend.keys(PACKS)) == 2
    return names


def test_a_damaged_copy_is_replaced_by_the_good_one_and_the_log_says_so(secret, caplog):
    contents = chunks_of(3)
    backend = Spoilt()
    names = twice(backend, secret, contents)
    domain = domain_on(backend, secret)
    place = domain.index.locate(names[0])  # the copy that is looked at first
    assert place is not None
    key = domain.pack_key(place.pack.id)
    backend.change(key, flip(place.pack.block(place.block).offset + 9))
    with caplog.at_level(logging.WARNING):
        found = dict(Reader(domain).chunks(names, needed_by="layer x"))
    assert found == dict(zip(names, contents, strict=True))
    assert key in caplog.text
    assert "layer x" in caplog.text


def test_two_copies_damaged_in_different_blocks_are_one_good_one(secret):
    backend = Spoilt()
    contents = chunks_of(4)
    names = twice(backend, secret, contents)
    domain = domain_on(backend, secret)
    first, second = domain.index.packs()
    backend.change(domain.pack_key(first.id), flip(first.block(0).offset))
    backend.change(domain.pack_key(second.id), flip(second.block(2).offset))
    assert dict(Reader(domain).chunks(names)) == dict(zip(names, contents, strict=True))
    backend.change(domain.pack_key(second.id), flip(second.block(0).offset))
    with pytest.raises(IntegrityError):
        list(Reader(domain).chunks(names))


def test_a_missing_pack_whose_chunks_moved_is_no_fault(secret):
    backend = Spoilt()
    contents = chunks_of(5)
    names = put(domain_on(backend, secret), contents)
    domain = domain_on(backend, secret)
    (old,) = domain.index.packs()
    old_indexes = backend.keys(INDEXES)

    moved = False

    def move(key: str) -> None:
        nonlocal moved
        if moved:
            return
        moved = True
        # What a collection does: the chunks go into a new pack and index, the old ones vanish.
        other = domain_on(backend, secret)
        other.index.refresh()
        other.index.remove([old.id])
        put(other, contents)
        backend.delete([*old_indexes, other.pack_key(old.id)])

    backend.before = move
    assert dict(Reader(domain).chunks(names)) == dict(zip(names, contents, strict=True))
    assert moved


def test_a_missing_pack_is_named(secret):
    backend = Spoilt()
    names = put(domain_on(backend, secret), chunks_of(6))
    (key,) = backend.keys(PACKS)
    backend.delete([key])
    with pytest.raises(IntegrityError, match="missing") as caught:
        list(Reader(domain_on(backend, secret)).chunks(names, needed_by="layer x"))
    assert caught.value.details["object"] == key


def test_a_store_that_goes_away_half_way_is_said_to(secret):
    backend = Spoilt()
    names = put(domain_on(backend, secret), chunks_of(7, 60, 1 << 20))
    domain = domain_on(backend, secret)
    calls = 0

    def fail(key: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise StoreUnreachable("the store does not answer")

    backend.before = fail
    with pytest.raises(StoreUnreachable):
        list(Reader(domain).chunks(names))


# -- layers and images ----------------------------------------------------------------------


def push(domain: Domain, tree: Path) -> str:
    manifest = manifest_at(tree)
    with Upload(domain) as up:
        push_layer(domain, up, manifest, tree)
    publish_layer(domain, manifest)
    return manifest.id


@pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")
def test_any_damaged_object_fails_a_restore_typed_or_leaves_it_right(tmp_path, secret):
    backend = Spoilt()
    tree = tmp_path / "tree"
    hostile_tree(tree)
    layer = push(domain_on(backend, secret), tree)
    wanted = look(tree)
    choose = random.Random(9)
    root = tmp_path / "out"
    keys = [info.key for info in backend.backend.list("ten_1/")]
    failed = 0
    for _ in range(14):
        key = choose.choice(keys)
        whole, _ = backend.backend.get(key)
        damaged = bytearray(whole)
        how = choose.randrange(4)
        if how == 0:
            del damaged[choose.randrange(len(damaged)) :]
        elif how == 1:
            damaged += b"more"
        else:
            damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        backend.backend.put(key, bytes(damaged))
        try:
            restore_layer(domain_on(backend, secret), layer, root)
        except SojournError as error:
            assert error.code == "integrity_error"
            assert not root.exists()
            failed += 1
        else:
            assert look(root) == wanted
            remove_tree(root)
        backend.backend.put(key, whole)
    assert failed > 3
    restore_layer(domain_on(backend, secret), layer, root)
    assert look(root) == wanted
    remove_tree(root)
    remove_tree(tree)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    backend = Spoilt()
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(20):
        (tree / f"f{number}").write_bytes(random.Random(number).randbytes(10_000))
    (tree / "d").mkdir()
    layer = push(domain_on(backend), tree)
    for call, allowed in (("open", 5), ("mkdir", 0), ("mkdir", 1), ("pwrite", 5), ("utime", 3)):
        left = allowed
        honest = getattr(os, call)

        def full(*args, honest=honest, call=call, **more):
            nonlocal left
            if call != "open" or args[1] & os.O_CREAT:
                left -= 1
                if left < 0:
                    raise OSError(28, "No space left on device")
            return honest(*args, **more)

        domain = domain_on(backend)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageFull):
                restore_layer(domain, layer, tmp_path / "out")
        assert left < 0
        assert not (tmp_path / "out").exists()


def test_a_short_write_is_carried_on(tmp_path, monkeypatch):
    backend = Spoilt()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "small").write_bytes(b"abcdef" * 100)
    (tree / "medium").write_bytes(random.Random(1).randbytes(70_000))
    (tree / "large").write_bytes(random.Random(2).randbytes(3_000_000))
    layer = push(domain_on(backend), tree)
    honest = {name: getattr(os, name) for name in ("write", "pwrite")}
    monkeypatch.setattr(os, "write", lambda fd, data: honest["write"](fd, data[:7]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: honest["pwrite"](fd, data[:30_001], at))
    restore_layer(domain_on(backend), layer, tmp_path / "out")
    monkeypatch.undo()
    assert look(tmp_path / "out") == look(tree)


def test_an_image_from_damaged_packs_is_refused_and_leaves_nothing(tmp_path, secret):
    from support.repositories import node

    backend = Spoilt()
    maker = node(tmp_path / "node", backend, secret)
    ref = maker.image({"pages.img": random.Random(3).randbytes(3 << 20), "small.img": b"x" * 999})
    domain = maker.domain()
    with Upload(domain) as up:
        image = push_image(domain, up, ref, maker.images[ref.id][1])
    publish_image(domain, image)
    into = tmp_path / "into"
    into.mkdir()
    pack = backend.keys(PACKS)[0]
    backend.change(pack, flip(1000))
    with pytest.raises(IntegrityError):
        restore_image(domain_on(backend, secret), ref.id, into)
    assert list(into.iterdir()) == []
    # What is cached locally can stand in for what the store has lost.
    files = maker.images[ref.id][1]
    known = read_image(domain_on(backend, secret), ref.id)
    restore_image(domain_on(backend, secret), ref.id, into, [(known, files)])
    assert (into / "pages.img").read_bytes() == (files / "pages.img").read_bytes()
