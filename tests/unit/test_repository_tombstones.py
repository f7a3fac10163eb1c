"""Tombstones and marks of damage: their forms, their changes, and bytes that are none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.errors import IntegrityError
from sojourn.repository.damages import Damage, decode_damage, read_damage, write_damage
from sojourn.repository.needs import decode_segment
from sojourn.repository.session_records import decode_snapshot
from sojourn.repository.tombstones import (
    DONE,
    NAMED,
    REMOVING,
    Tombstones,
    decode_tombstone,
    encode_tombstone,
    names,
    swap,
    tombstone,
    write_tombstone,
)
from support.dictionaries import DictBackend
from support.repositories import TENANT, Node

KEY = f"{TENANT}/tombstones/1"
LAYER = f"{TENANT}/layers/{'0' * 64}"


@pytest.fixture
def domain(tmp_path):
    return Node(DictBackend(), tmp_path).domain()


def test_what_is_written_is_read(domain):
    made = tombstone(NAMED, [b"2" * 32, b"1" * 32], [LAYER])
    key = write_tombstone(domain, made)
    [found] = Tombstones(domain).look()
    assert (found.key, found.tombstone) == (key, made)
    assert list(found.tombstone.pack_ids()) == [b"1" * 32, b"2" * 32]


def test_of_two_changes_one_wins(domain):
    write_tombstone(domain, tombstone(NAMED, [b"1" * 32], []))
    [one] = Tombstones(domain).look()
    [other] = Tombstones(domain).look()
    won = swap(domain, one, tombstone(REMOVING, [], []))
    assert won is not None and won.tombstone.state == REMOVING
    assert swap(domain, other, tombstone(REMOVING, [b"1" * 32], [])) is None
    assert swap(domain, won, tombstone(DONE, [], [])) is not None
    domain.backend.delete([won.key])
    assert swap(domain, won, tombstone(DONE, [], [])) is None
    assert Tombstones(domain).look() == []


def test_a_change_whose_answer_was_lost_is_known_again(domain):
    write_tombstone(domain, tombstone(NAMED, [], []))
    [found] = Tombstones(domain).look()
    new = tombstone(REMOVING, [], [])
    assert swap(domain, found, new) is not None
    assert swap(domain, found, new) is not None  # sent once more by a retry: Conflict, but ours


def test_only_what_is_new_is_read_again(domain):
    for _ in range(3):
        write_tombstone(domain, tombstone(NAMED, [], []))
    known = Tombstones(domain)
    assert len(known.look()) == 3
    get, read = domain.backend.get, []
    domain.backend.get = lambda key, **limits: read.append(key) or get(key, **limits)
    known.look()
    assert read == []
    key = write_tombstone(domain, tombstone(NAMED, [], []))
    known.look()
    assert read == [key]


def test_what_is_named_is_not_found_any_more(domain):
    write_tombstone(domain, tombstone(NAMED, [b"1" * 32], [LAYER]))
    found = Tombstones(domain).look()
    assert b"1" * 32 in domain.index.excluded
    assert names(found) == ({LAYER}, {b"1" * 32})


@pytest.mark.parametrize(
    "root",
    ["config", "keys/1", f"{TENANT}/snapshots/x", "other/layers/x", f"{TENANT}/layers/../x", ""],
)
def test_a_tombstone_names_nothing_but_layers_images_and_copies_of_its_domain(root):
    payload = encode_tombstone(tombstone(NAMED, [], [LAYER, root]))
    with pytest.raises(IntegrityError):
        decode_tombstone(payload, KEY)


def test_marks_are_of_the_snapshot_in_their_key(domain):
    write_damage(domain, Damage("snp_1", "ses_1", 1.0, ["a file"], b"1" * 32))
    assert read_damage(domain, "snp_2") is None
    found = read_damage(domain, "snp_1")
    assert found is not None and list(found.chunk_names()) == [b"1" * 32]
    payload = msgspec.msgpack.encode(found)
    with pytest.raises(IntegrityError):
        decode_damage(payload, f"{TENANT}/damaged/snp_2")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
FIELDS = """state packs roots writer snapshot session found_at objects chunks id layers memory
    config fingerprint format kind"""
fields = st.dictionaries(
    st.sampled_from(FIELDS.split()),
    anything | st.sampled_from(["named", "done", b"", [], [LAYER], 0, 1.5, "snp_1"]),
)


@settings(deadline=None)
@given(st.binary(max_size=200) | (anything | fields).map(msgspec.msgpack.encode))
def test_bytes_that_are_nothing_raise_integrity_errors_alone(payload):
    for decode in (
        lambda: decode_tombstone(payload, KEY),
        lambda: decode_damage(payload, f"{TENANT}/damaged/snp_1"),
        lambda: decode_snapshot(payload, "snp_1"),
        lambda: decode_segment(payload, b"1" * 32),
    ):
        try:
            decode()
        except IntegrityError as error:
            assert error.details["object"]


@settings(deadline=None)
@given(st.data())
def test_flipped_and_cut_bytes_are_refused_or_read_as_a_whole_form(data):
    payload = bytearray(encode_tombstone(tombstone(NAMED, [b"1" * 32, b"2" * 32], [LAYER])))
    at = data.draw(st.integers(0, len(payload) - 1))
    if data.draw(st.booleans()):
        payload[at] ^= data.draw(st.integers(1, 255))
    else:
        del payload[at:]
    try:
        found = decode_tombstone(bytes(payload), KEY)
    except IntegrityError:
        return
    assert found.roots == [LAYER] or all(root.startswith(TENANT) for root in found.roots)
