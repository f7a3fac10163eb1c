"""Stored bytes are taken apart safely: whatever is not what was written is refused by name."""

from __future__ import annotations

import resource

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import IntegrityError
from sojourn.store.envelopes import HEADER_BYTES, read_checked, unwrap, wrap, write_checked
from sojourn.store.fingerprints import image_digest, layer_digest
from sojourn.store.indexes import LinkLedger, read_index, write_index
from sojourn.store.manifests import Entry, Manifest, whiteout

ROOT = Entry(b"", "d", 0o755, 0, 0, 0, 5, 6, b"", b"", 0, 0, None, ())


def entry(path: bytes, type: str = "f", **changes) -> Entry:
    made = Entry(path, type, 0o644, 0, 0, 1, 5, 6, b"", b"", 0, 0, None, ())
    if type == "f":
        changes.setdefault("digest", b"h" * 32)
    if type == "l":
        changes.setdefault("target", b"t")
    return msgspec.structs.replace(made, **changes)


def decode(entries: list) -> Manifest:
    """Decode as a forger would have it: any entries, with the id that fits them."""
    encoded = msgspec.msgpack.encode((1, entries))
    return Manifest.decode(encoded, "layer x", layer_digest(encoded).hex())


@given(st.binary(max_size=300))
def test_a_checked_file_gives_back_its_payload(payload):
    assert unwrap(b"TEST", wrap(b"TEST", payload), "x") == payload


@given(st.binary(max_size=60), st.data())
def test_any_change_of_a_checked_file_is_refused(payload, data):
    whole = wrap(b"TEST", payload)
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "garbage"]))
    if how == "flip":
        at = data.draw(st.integers(0, len(whole) - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        bad = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
    elif how == "cut":
        bad = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif how == "grow":
        bad = whole + data.draw(st.binary(min_size=1, max_size=9))
    else:
        bad = data.draw(st.binary(max_size=200))
    with pytest.raises(IntegrityError) as caught:
        unwrap(b"TEST", bad, "thing 1")
    assert caught.value.details["object"] == "thing 1"


def test_other_kinds_and_formats_are_refused():
    with pytest.raises(IntegrityError):
        unwrap(b"TEST", wrap(b"ELSE", b"x"), "x")
    with pytest.raises(IntegrityError) as caught:
        unwrap(b"TEST", wrap(b"TEST", b"x", version=2), "x")
    assert "format 2" in caught.value.message


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "f"
    write_checked(b"TEST", path, b"payload")
    assert read_checked(b"TEST", path, "x") == b"payload"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it would take a terabyte of memory
    with pytest.raises(IntegrityError):
        read_checked(b"TEST", path, "x")
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES - 1)
    with pytest.raises(IntegrityError):
        read_checked(b"TEST", path, "x")


def test_a_manifest_is_read_back():
    entries = [
        ROOT,
        entry(b"a", "d"),
        entry(b"a-b"),
        entry(b"a/b", link=b"a-b"),
        entry(b"a/\xff", "l"),
        whiteout(b"gone"),
        entry(b"p", "p", size=0),
    ]
    made = Manifest(entries)
    found = Manifest.decode(made.encoded, "layer x", made.id)
    assert found.entries == entries
    assert found.ref == made.ref
    assert (made.ref.entries, made.ref.bytes) == (6, 1)
    assert list(found.below(b"a")) == [b"a/b", b"a/\xff"]


FORGED = {
    "empty": [],
    "no root": [entry(b"a")],
    "root is a file": [entry(b"")],
    "two roots": [ROOT, ROOT],
    "order": [ROOT, entry(b"b"), entry(b"a")],
    "twice": [ROOT, entry(b"a"), entry(b"a")],
    "no parent": [ROOT, entry(b"a/b")],
    "parent is a file": [ROOT, entry(b"a"), entry(b"a/b")],
    "parent is a link": [ROOT, entry(b"a", "l"), entry(b"a/b")],
    "absolute": [ROOT, entry(b"/etc")],
    "dot": [ROOT, entry(b".")],
    "up": [ROOT, entry(b"..")],
    "up below": [ROOT, entry(b"a", "d"), entry(b"a/..")],
    "empty name": [ROOT, entry(b"a", "d"), entry(b"a/")],
    "nul": [ROOT, entry(b"a\0b")],
    "unknown type": [ROOT, entry(b"a", "q")],
    "mode": [ROOT, entry(b"a", mode=0o10000)],
    "negative mode": [ROOT, entry(b"a", mode=-1)],
    "negative size": [ROOT, entry(b"a", size=-1)],
    "nanoseconds": [ROOT, entry(b"a", mtime_ns=1_000_000_000)],
    "short digest": [ROOT, entry(b"a", digest=b"x")],
    "digest on a link": [ROOT, entry(b"a", "l", digest=b"h" * 32)],
    "link without target": [ROOT, entry(b"a", "l", target=b"")],
    "target on a file": [ROOT, entry(b"a", target=b"x")],
    "link to nothing": [ROOT, entry(b"a", link=b"b")],
    "link forward": [ROOT, entry(b"a", link=b"b"), entry(b"b")],
    "link to a directory": [ROOT, entry(b"a", "d"), entry(b"b", link=b"a")],
    "link to other content": [ROOT, entry(b"a"), entry(b"b", digest=b"i" * 32, link=b"a")],
    "linked names that differ": [ROOT, entry(b"a"), entry(b"b", mode=0o600, link=b"a")],
    "link to itself": [ROOT, entry(b"a", link=b"a")],
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(name):
    with pytest.raises(IntegrityError):
        decode(FORGED[name])


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x92\x01\xdd\xff\xff\xff\xff", b"\x91\x01"],
)
def test_malformed_payloads_are_refused(payload):
    with pytest.raises(IntegrityError):
        Manifest.decode(payload, "layer x", layer_digest(payload).hex())


@given(st.binary(max_size=400))
def test_arbitrary_payloads_never_crash(payload):
    with pytest.raises(IntegrityError):
        Manifest.decode(payload, "layer x", layer_digest(payload).hex())


def test_a_manifest_of_another_layer_is_refused():
    made = Manifest([ROOT])
    with pytest.raises(IntegrityError):
        Manifest.decode(made.encoded, "layer x", "0" * 64)
    with pytest.raises(IntegrityError):
        decode([[b"", "d", 1]])


def test_the_encoding_of_ids_stays_as_documented():
    """Stored layers are found by these ids: a change of encoding must not go unnoticed."""
    entries = [
        ROOT,
        entry(b"f", xattrs=((b"user.a", b"1"),)),
        entry(b"g", link=b"f"),
        entry(b"l", "l", size=0),
        whiteout(b"w"),
    ]
    made = Manifest(entries)
    assert msgspec.msgpack.decode(made.encoded)[0] == 1
    assert msgspec.msgpack.decode(made.encoded)[1][4] == [
        b"w", "w", 0, 0, 0, 0, 0, 0, b"", b"", 0, 0, None, [],
    ]  # fmt: skip
    assert made.id == LAYER_ID
    assert image_digest({"a": (1, "00"), "b": (2, "11")}) == IMAGE_ID


LAYER_ID = "455397d296a564aad48f70a7bb69a358bda9c57ed2f7243bcbb9532c4e3a0c30"
IMAGE_ID = "94586145fd53486b2a6d2944607b426a2b6b2aa7ae611d97859ab6400af5f7bc"


rows = st.lists(
    st.tuples(*[st.integers(-(1 << 70), 1 << 70)] * 7),
    min_size=1,
    max_size=5,
)


@given(rows)
def test_an_index_is_read_back_with_times_clamped(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("index") / "index"
    write_index(path, values, sync=False)
    low, high = -(1 << 63), (1 << 63) - 1
    expected = [tuple(min(max(v, low), high) for v in row) for row in values]
    assert read_index(path, len(values), "x") == expected
    assert read_index(path, len(values) + 1, "x") is None
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert read_index(path, len(values), "x") is None


def test_the_ledger_survives_reopening_and_forgets_damage(tmp_path):
    path = tmp_path / "links"
    ledger = LinkLedger(path)
    ledger.record({1: 10, 2: 20})
    whole = path.stat().st_size
    ledger.record({2: 21, 3: -5})
    again = LinkLedger(path)
    assert [again.get(inode) for inode in (1, 2, 3, 4)] == [10, 21, -5, None]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    cut = LinkLedger(path)
    assert [cut.get(inode) for inode in (1, 2, 3)] == [10, 20, None]
    assert path.stat().st_size == whole, "the damaged tail is gone"
    cut.record({4: 4})
    assert LinkLedger(path).get(4) == 4
    path.write_bytes(b"\xff" * 5000)
    assert LinkLedger(path).get(1) is None


def test_the_ledger_is_kept_small(tmp_path):
    path = tmp_path / "links"
    ledger = LinkLedger(path)
    for number in range(400):
        ledger.record(dict.fromkeys(range(100), number))
    assert path.stat().st_size < 300_000
    assert LinkLedger(path).get(5) == 399


def test_a_disk_that_refuses_costs_the_ledger_only_what_it_refused(tmp_path):
    path = tmp_path / "links"
    ledger = LinkLedger(path)
    ledger.record({1: 10})
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        ledger.record({2: 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size, "no torn batch"
    assert ledger.get(2) == 20
    ledger.record({3: 30})
    again = LinkLedger(path)
    assert [again.get(inode) for inode in (1, 2, 3)] == [10, None, 30]


def test_a_ledger_that_cannot_be_rewritten_is_still_a_ledger(tmp_path):
    path = tmp_path / "links"
    ledger = LinkLedger(path)
    (tmp_path / "links.new").mkdir()
    for number in range(200):
        ledger.record(dict.fromkeys(range(100), number))
    assert ledger.get(5) == 199
    (tmp_path / "links.new").rmdir()
    ledger.record({5: 200})
    assert LinkLedger(path).get(5) == 200
