"""Restoring layers: the tree is exactly the one that was sealed, and nothing outside is touched."""

from __future__ import annotations

import os
import random
import resource
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.store_rig import hostile_tree, look
from sojourn.errors import HostUnfit, IntegrityError, ObjectMissing
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.cutting import SMALL_FILE, encode_recipe
from sojourn.repository.domains import Domain
from sojourn.repository.layers import encode_layer, layer_object, segments_of
from sojourn.repository.layers_in import flaw_of_tree, read_manifest, restore_layer
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.packs import CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT
from sojourn.repository.sealed import LAYER
from sojourn.repository.uploads import Upload
from sojourn.store.manifests import Entry, Manifest, whiteout
from sojourn.store.trees import remove_tree
from support.uploads import SECRET, Told, domain_on, manifest_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")


def push(domain: Domain, tree: Path) -> Manifest:
    manifest = manifest_at(tree)
    with Upload(domain) as up:
        push_layer(domain, up, manifest, tree)
    publish_layer(domain, manifest)
    return manifest


def entry(path: bytes, type: str = "f", **parts: Any) -> Entry:
    """A manifest's entry with plain properties."""
    content = parts.pop("content", None)
    if content is not None:
        parts.update(size=len(content), digest=blake3(content).digest())
    plain: dict[str, Any] = {
        "mode": {"d": 0o755, "l": 0o777}.get(type, 0o644),
        "uid": 0,
        "gid": 0,
        "size": 0,
        "mtime_s": 5,
        "mtime_ns": 7,
        "digest": blake3(b"").digest() if type == "f" else b"",
        "target": b"t" if type == "l" else b"",
        "major": 0,
        "minor": 0,
        "link": None,
        "xattrs": (),
    }
    return Entry(path=path, type=type, **{**plain, **parts})


ROOT = entry(b"", "d")


def forge(domain: Domain, entries: list[Entry], *contents: bytes) -> str:
    """A layer in the store that no node sealed: any entries, and these chunks."""
    manifest = Manifest(entries)
    segments = list(segments_of(manifest))
    with Upload(domain) as up:
        for data in contents:
            up.add(CHUNK_DATA, blake3(data).digest(), data)
        for content, data in segments:
            up.add(CHUNK_SEGMENT, content, data)
    record = layer_object(manifest, [content for content, _ in segments])
    domain.put_object(LAYER, domain.layer_key(manifest.id), encode_layer(record))
    return manifest.id


# -- exactness ------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "encrypted"])
def test_a_hostile_tree_is_restored_exactly(tmp_path, secret):
    tree, out = tmp_path / "tree", tmp_path / "out"
    hostile_tree(tree)
    backend = open_backend("memory:")
    manifest = push(domain_on(backend, secret), tree)
    made = restore_layer(domain_on(backend, secret), manifest.id, out)
    assert made.id == manifest.id
    assert look(out) == look(tree)
    assert manifest_at(out).id == manifest.id
    assert (out / "a-first").stat().st_ino == (out / "z-last").stat().st_ino
    remove_tree(tree)
    remove_tree(out)


def test_holes_stay_holes(tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    for name, size, islands in (
        ("large", 40 << 20, (0, 11 << 20, (40 << 20) - 3)),
        ("nothing", 9 << 20, ()),
        ("unaligned", 5_000_001, (2_500_000,)),
        ("small", 500_000, (300_000,)),
        ("end", 100_000, (0,)),
    ):
        with (tree / name).open("wb") as file:
            file.truncate(size)
            for at in islands:
                os.pwrite(file.fileno(), b"abc", at)
    backend = open_backend("memory:")
    manifest = push(domain_on(backend), tree)
    restore_layer(domain_on(backend), manifest.id, out)
    assert manifest_at(out).id == manifest.id
    for file in out.iterdir():
        assert file.stat().st_blocks * 512 <= 64 << 10, file.name
        assert file.stat().st_size == (tree / file.name).stat().st_size


def test_files_around_every_limit_of_size(tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    choose = random.Random(3)
    for size in (0, 1, 4095, 4096, 4097, 8192, SMALL_FILE - 1, SMALL_FILE, SMALL_FILE + 1, 9 << 20):
        (tree / f"random-{size}").write_bytes(choose.randbytes(size))
        (tree / f"zeros-{size}").write_bytes(bytes(size))
    (tree / "mixed").write_bytes(b"".join(choose.randbytes(5000) + bytes(9000) for _ in range(400)))
    backend = open_backend("memory:")
    manifest = push(domain_on(backend), tree)
    restore_layer(domain_on(backend), manifest.id, out)
    assert look(out) == look(tree)


def test_the_process_mask_and_the_place_do_not_show(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"x")
    (tree / "file").chmod(0o666)
    (tree / "dir").mkdir()
    (tree / "dir").chmod(0o777)
    (tree / "dir" / "tool").write_bytes(b"y")
    (tree / "dir" / "tool").chmod(0o2777)
    (tree / "large").write_bytes(random.Random(1).randbytes(2 << 20))
    (tree / "large").chmod(0o6111)
    backend = open_backend("memory:")
    manifest = push(domain_on(backend), tree)
    # A parent that hands on its group and an access list.
    parent = tmp_path / "parent"
    parent.mkdir()
    os.chown(parent, 0, 77)
    parent.chmod(0o2777)
    acl = bytes.fromhex(
        "0200000001000700ffffffff02000400e803000004000400ffffffff10000700ffffffff20000000ffffffff"
    )
    os.setxattr(parent, "system.posix_acl_default", acl)
    for mask in (0o077, 0o000):
        before = os.umask(mask)
        try:
            restore_layer(domain_on(backend), manifest.id, parent / f"out-{mask}")
        finally:
            os.umask(before)
        assert manifest_at(parent / f"out-{mask}").id == manifest.id


def test_equal_contents_are_fetched_once(tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    data, large = random.Random(5).randbytes(900_000), random.Random(6).randbytes(3 << 20)
    for number in range(20):
        (tree / f"same-{number}").write_bytes(data)
        (tree / f"large-{number}").write_bytes(large)
    backend = Told()
    manifest = push(domain_on(backend), tree)
    domain = domain_on(backend)
    read = 0
    honest = backend.backend.get_ranges

    class Metered:
        def __getattr__(self, name: str):
            return getattr(backend, name)

        def get_ranges(self, key, ranges):
            nonlocal read
            read += sum(length for _, length in ranges)
            return honest(key, ranges)

    domain.backend = Metered()
    restore_layer(domain, manifest.id, out)
    assert manifest_at(out).id == manifest.id
    assert read < 4_300_000


def test_chunks_that_repeat_and_come_in_any_order_make_the_file(tmp_path):
    """Files that share chunks are put together out of order and hashed right."""
    choose = random.Random(8)
    parts = [choose.randbytes(1 << 20) for _ in range(6)]
    orders = [(0, 1, 2, 3), (3, 2, 1, 0, 0), (5, 5, 5), (4, 0, 5, 1, 4)]
    domain = domain_on(open_backend("memory:"))
    entries = [ROOT]
    with Upload(domain) as up:
        for part in parts:
            up.add(CHUNK_DATA, blake3(part).digest(), part)
        for number, order in enumerate(orders):
            content = b"".join(parts[n] for n in order)
            digest = blake3(content).digest()
            recipe = encode_recipe((blake3(parts[n]).digest(), len(parts[n])) for n in order)
            up.add(CHUNK_RECIPE, digest, recipe)
            entries.append(entry(b"file-%d" % number, content=content))
    layer = forge(domain, entries)
    restore_layer(domain, layer, tmp_path / "out")
    assert manifest_at(tmp_path / "out").id == layer


def test_more_large_files_than_may_be_open(tmp_path):
    domain = domain_on(open_backend("memory:"))
    choose = random.Random(4)
    shared, own = choose.randbytes(1 << 20), [choose.randbytes(1000 + n) for n in range(150)]
    entries = [ROOT]
    with Upload(domain) as up:
        # Every file begins with one chunk, which comes first, and ends with one of its own.
        up.add(CHUNK_DATA, blake3(shared).digest(), shared)
        for number, tail in enumerate(own):
            up.add(CHUNK_DATA, blake3(tail).digest(), tail)
            content = shared + tail
            recipe = encode_recipe((blake3(p).digest(), len(p)) for p in (shared, tail))
            up.add(CHUNK_RECIPE, blake3(content).digest(), recipe)
            entries.append(entry(b"file-%03d" % number, content=content))
    layer = forge(domain, entries)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 100, hard))
    try:
        restore_layer(domain, layer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert manifest_at(tmp_path / "out").id == layer
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


def test_an_empty_layer(tmp_path):
    (tmp_path / "tree").mkdir()
    backend = open_backend("memory:")
    manifest = push(domain_on(backend), tmp_path / "tree")
    restore_layer(domain_on(backend), manifest.id, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert manifest_at(tmp_path / "out").id == manifest.id


def test_the_manifest_alone(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(900):
        (tree / f"{number:05}").touch()
    backend = Told()
    manifest = push(domain_on(backend), tree)
    assert read_manifest(domain_on(backend), manifest.id).encoded == manifest.encoded
    with pytest.raises(ObjectMissing):
        read_manifest(domain_on(backend), "a" * 64)


def test_a_root_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "tree").mkdir()
    domain = domain_on(open_backend("memory:"))
    manifest = push(domain, tmp_path / "tree")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        restore_layer(domain, manifest.id, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_bytes() == b"x"


# -- hostile layers -------------------------------------------------------------------------


def replaced(of: Entry, **parts: Any) -> Entry:
    return msgspec.structs.replace(of, **parts)


BAD = {
    "a name that is too long": entry(b"n" * 256),
    "an owner nobody has": entry(b"f", uid=(1 << 32) - 1),
    "a negative group": entry(b"f", gid=-1),
    "a time beyond all clocks": entry(b"f", mtime_s=1 << 63),
    "a size beyond all disks": entry(b"f", size=1 << 63),
    "a pipe with a size": entry(b"p", "p", size=5),
    "a link with a mode": entry(b"l", "l", mode=0o644),
    "a target with a zero": entry(b"l", "l", target=b"a\0b"),
    "a target that is too long": entry(b"l", "l", target=b"t" * 4096),
    "a device that is a whiteout": entry(b"c", "c"),
    "a device beyond all numbers": entry(b"c", "c", major=1 << 12, minor=1),
    "a file with a device": entry(b"f", major=1),
    "a whiteout with an owner": replaced(whiteout(b"w"), uid=1),
    "an attribute of no kind": entry(b"f", xattrs=((b"note", b""),)),
    "an attribute with a zero": entry(b"f", xattrs=((b"user.a\0", b""),)),
    "an attribute twice": entry(b"f", xattrs=((b"user.a", b""), (b"user.a", b"x"))),
    "an attribute that is too large": entry(b"f", xattrs=((b"user.a", bytes(65537)),)),
    "an attribute whose name is too long": entry(b"f", xattrs=((b"user." + b"a" * 255, b""),)),
    "a redirect": entry(b"d", "d", xattrs=((b"trusted.overlay.redirect", b"/etc"),)),
    "data elsewhere": entry(b"f", xattrs=((b"trusted.overlay.metacopy", b""),)),
    "an origin": entry(b"d", "d", xattrs=((b"trusted.overlay.origin", b"x"),)),
}


@pytest.mark.parametrize("what", BAD)
def test_what_no_tree_can_have_is_refused_before_anything_is_made(tmp_path, what):
    domain = domain_on(open_backend("memory:"))
    layer = forge(domain, [ROOT, BAD[what]])
    with pytest.raises(IntegrityError) as caught:
        restore_layer(domain, layer, tmp_path / "out")
    assert caught.value.details["object"] == f"layer {layer}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "root",
    [replaced(ROOT, mode=0o70000), replaced(ROOT, mtime_ns=-1), replaced(ROOT, size=3)],
    ids=["mode", "time", "size"],
)
def test_a_root_that_cannot_be_is_refused(root):
    assert flaw_of_tree(Manifest([root])) is not None
    assert flaw_of_tree(Manifest([ROOT])) is None


ESCAPES = [
    [ROOT, entry(b"../out-of-it", content=b"x")],
    [ROOT, entry(b"/etc/x", content=b"x")],
    [ROOT, entry(b"a", "l", target=b"/tmp"), entry(b"a/x", content=b"x")],
    [ROOT, entry(b"a", "f"), entry(b"a/x", content=b"x")],
    [ROOT, entry(b"a", "d"), entry(b"a/..", "d"), entry(b"a/../x", content=b"x")],
    [ROOT, entry(b"a", "l", target=b"/tmp"), entry(b"a", content=b"x")],
    [ROOT, entry(b"b", "d"), entry(b"a", content=b"x")],
    [ROOT, entry(b"h", content=b"x", link=b"/etc/passwd")],
]


@pytest.mark.parametrize("entries", ESCAPES, ids=range(len(ESCAPES)))
def test_no_manifest_leads_out_of_the_root(tmp_path, entries):
    domain = domain_on(open_backend("memory:"))
    layer = forge(domain, entries, b"x")
    with pytest.raises(IntegrityError):
        restore_layer(domain, layer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1000, SMALL_FILE + 1000], ids=["small", "large"])
def test_a_chunk_of_other_bytes_than_the_digest_is_refused(tmp_path, size):
    """The right name over wrong bytes: only the file's digest can tell."""
    domain = domain_on(open_backend("memory:"))
    right, wrong = b"r" * size, b"w" * size
    digest = blake3(right).digest()
    with Upload(domain) as up:
        if size <= SMALL_FILE:
            up.put(CHUNK_DATA, domain.keys.chunk_name(CHUNK_DATA, digest), wrong)
        else:
            up.add(CHUNK_DATA, blake3(wrong).digest(), wrong)
            up.add(CHUNK_RECIPE, digest, encode_recipe([(blake3(wrong).digest(), size)]))
    layer = forge(domain, [ROOT, entry(b"d", "d"), entry(b"d/file", content=right)])
    with pytest.raises(IntegrityError) as caught:
        restore_layer(domain, layer, tmp_path / "out")
    assert caught.value.details["path"] == "/d/file"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "recipe",
    [b"", b"x" * 35, encode_recipe([(b"c" * 32, 5)]), encode_recipe([(b"c" * 32, 3 << 20)])],
    ids=["none", "cut", "short", "missing chunk"],
)
def test_a_forged_recipe_is_refused(tmp_path, recipe):
    domain = domain_on(open_backend("memory:"))
    content = bytes([1]) * (3 << 20)
    with Upload(domain) as up:
        if recipe:
            up.add(CHUNK_RECIPE, blake3(content).digest(), recipe)
    layer = forge(domain, [ROOT, entry(b"file", content=content)])
    with pytest.raises(IntegrityError):
        restore_layer(domain, layer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chunk_shorter_than_its_recipe_says_is_refused(tmp_path):
    domain = domain_on(open_backend("memory:"))
    content = random.Random(2).randbytes(3 << 20)
    chunk = content[: 1 << 20]
    with Upload(domain) as up:
        up.add(CHUNK_DATA, blake3(chunk).digest(), chunk)
        recipe = encode_recipe([(blake3(chunk).digest(), 3 << 20)])
        up.add(CHUNK_RECIPE, blake3(content).digest(), recipe)
    layer = forge(domain, [ROOT, entry(b"file", content=content)])
    with pytest.raises(IntegrityError) as caught:
        restore_layer(domain, layer, tmp_path / "out")
    assert caught.value.details["path"] == "/file"


def test_an_empty_file_with_the_digest_of_another_is_refused(tmp_path):
    domain = domain_on(open_backend("memory:"))
    layer = forge(domain, [ROOT, entry(b"file", digest=b"d" * 32)])
    with pytest.raises(IntegrityError):
        restore_layer(domain, layer, tmp_path / "out")


# Mostly what can be, so that many are restored; and some of everything else.
GOOD_NAMES = st.sampled_from([b"a", b"b", b"a.b", b"\xff", b"c\n", b"n" * 255])
BAD_NAMES = st.sampled_from([b"..", b".", b"", b"n" * 256])
NAMES = st.integers(0, 19).flatmap(lambda n: GOOD_NAMES if n else BAD_NAMES)
NUMBERS = st.sampled_from([0, 1, 7, 1000, (1 << 32) - 1, -1, 1 << 70])
XATTRS = [(), (), (), ((b"trusted.a", b"v"),), ((b"trusted.b", b""), (b"trusted.c", b"\0"))]


@st.composite
def any_entry(draw: st.DrawFn) -> Entry:
    path = b"/".join(draw(st.lists(NAMES, min_size=1, max_size=3)))
    kind = draw(st.sampled_from("fdlpscbw"))
    content = draw(st.sampled_from([b"", b"x", b"other"]))
    fields: dict[str, Any] = {
        "mode": draw(st.sampled_from([0o644, 0o4755, 0, 0o7777, 0o2700])),
        "size": len(content) if kind == "f" else 0,
        "digest": blake3(content).digest() if kind == "f" else b"",
        "target": b"t" if kind == "l" else b"",
        "xattrs": draw(st.sampled_from(XATTRS)),
    }
    if kind == "w":
        return whiteout(path)
    if kind == "l":
        fields["mode"] = 0o777
        fields["xattrs"] = ()
    if kind in "cb":
        fields.update(major=1, minor=3)
    wild = draw(st.integers(0, 30))
    if wild == 0:
        what = draw(st.sampled_from(["uid", "gid", "size", "mtime_s", "mtime_ns", "mode", "major"]))
        fields[what] = draw(NUMBERS)
    elif wild == 1:
        fields["xattrs"] = draw(st.sampled_from([((b"x", b""),), ((b"user.a", bytes(70000)),)]))
    elif wild == 2:
        fields["link"] = draw(st.sampled_from([b"a", b"b"]))
    return entry(path, kind, **fields)


@settings(max_examples=150, deadline=None)
@given(st.lists(any_entry(), max_size=6))
def test_any_manifest_is_restored_exactly_or_refused(entries):
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "place" / "out"
        out.parent.mkdir()
        domain = domain_on(open_backend("memory:"))
        unique = {each.path: each for each in entries}
        for path in list(unique):
            while b"/" in path:
                path = path.rpartition(b"/")[0]
                unique.setdefault(path, entry(path, "d"))
        try:
            layer = forge(
                domain, [ROOT, *(unique[path] for path in sorted(unique))], b"x", b"other"
            )
        except (OverflowError, msgspec.MsgspecError):
            return  # what cannot even be written
        try:
            restore_layer(domain, layer, out)
        except (IntegrityError, HostUnfit):
            assert list(out.parent.iterdir()) == []
        else:
            assert manifest_at(out).id == layer
            remove_tree(out)
        assert [path.name for path in Path(directory).iterdir()] == ["place"]


def test_a_disk_that_cannot_hold_it_is_named(tmp_path, monkeypatch):
    def refuse(*args: object, **more: object) -> None:
        raise OSError(95, "Operation not supported")

    domain = domain_on(open_backend("memory:"))
    layer = forge(domain, [ROOT, entry(b"f", xattrs=((b"user.a", b"x"),))])
    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(HostUnfit, match="not supported"):
        restore_layer(domain, layer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_while_it_is_made_the_root_is_closed(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    tree.chmod(0o777)
    (tree / "setuid").write_bytes(b"x" * 100)
    (tree / "setuid").chmod(0o4755)
    domain = domain_on(open_backend("memory:"))
    manifest = push(domain, tree)
    seen: list[int] = []
    honest = os.write

    def watch(fd: int, data: bytes) -> int:
        seen.append(stat.S_IMODE((tmp_path / "out").stat().st_mode))
        return honest(fd, data)

    monkeypatch.setattr(os, "write", watch)
    restore_layer(domain, manifest.id, tmp_path / "out")
    assert seen
    assert set(seen) == {0o700}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777
