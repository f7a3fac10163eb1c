"""Sealed objects: given back as they were, for their place and kind alone, or refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.errors import IntegrityError, TooLarge
from sojourn.repository.keys import PLAIN, Keyring
from sojourn.repository.sealed import (
    COMPRESSED,
    CONFIG,
    HEADER,
    LIMITS,
    SNAPSHOT,
    TENANT,
    largest,
    seal,
    unseal,
)
from support.packs import CLOSED, OPEN, ROOT

BOTH = pytest.mark.parametrize("keys", [OPEN, CLOSED], ids=["open", "encrypted"])
PLACE = b"ten_1/tenant"


def flags_of(data: bytes) -> int:
    return HEADER.unpack_from(data)[3]


@BOTH
@pytest.mark.parametrize("payload", [b"", b"x", b"abc" * 1000, os.urandom(1000), bytes(64 << 10)])
def test_a_payload_comes_back(keys, payload):
    sealed = seal(TENANT, payload, keys, PLACE)
    assert len(sealed) <= largest(TENANT)
    assert unseal(TENANT, sealed, keys, PLACE, name="x") == payload
    assert sealed != seal(TENANT, payload, keys, PLACE)


@BOTH
def test_what_shrinks_is_compressed_and_what_does_not_stays(keys):
    assert flags_of(seal(TENANT, b"abc" * 1000, keys, PLACE)) & COMPRESSED
    assert not flags_of(seal(TENANT, os.urandom(1000), keys, PLACE)) & COMPRESSED


def test_an_encrypted_object_shows_nothing_of_its_payload():
    payload = os.urandom(5000)
    sealed = seal(TENANT, payload, CLOSED, PLACE)
    assert not any(payload[at : at + 8] in sealed for at in range(0, 5000, 8))


@BOTH
def test_an_object_stands_for_no_other(keys):
    sealed = seal(TENANT, b"payload", keys, PLACE)
    ring = Keyring(ROOT, keys.encrypted)
    refused = [
        (SNAPSHOT, sealed, keys, PLACE),
        (TENANT, sealed, keys, PLACE + b"2"),
        (TENANT, sealed, keys, PLACE[:-1]),
        (TENANT, sealed, ring.domain("ten_2"), PLACE),
        (TENANT, sealed, Keyring(bytes(32), keys.encrypted).domain("ten_1"), PLACE),
        (TENANT, sealed, PLAIN, PLACE),
    ]
    for kind, data, others, place in refused:
        with pytest.raises(IntegrityError) as caught:
            unseal(kind, data, others, place, name="ten_1/tenant")
        assert caught.value.details["object"] == "ten_1/tenant"


def test_the_border_of_place_and_body_cannot_be_moved():
    sealed = seal(TENANT, b"TAIL-body", OPEN, b"place/")
    with pytest.raises(IntegrityError):
        unseal(TENANT, sealed, OPEN, b"place/TAIL", name="x")


def test_an_encrypted_repository_takes_nothing_that_is_not():
    with pytest.raises(IntegrityError, match="not encrypted"):
        unseal(TENANT, seal(TENANT, b"forged", OPEN, PLACE), CLOSED, PLACE, name="x")
    with pytest.raises(IntegrityError, match="is encrypted"):
        unseal(TENANT, seal(TENANT, b"sealed", CLOSED, PLACE), OPEN, PLACE, name="x")


@BOTH
def test_every_single_flip_and_cut_is_refused(keys):
    sealed = seal(TENANT, b"abc" * 40, keys, PLACE)
    bad = [sealed[:end] for end in range(len(sealed))] + [sealed + b"\0"]
    for at in range(len(sealed)):
        for bit in (1, 128):
            bad.append(sealed[:at] + bytes([sealed[at] ^ bit]) + sealed[at + 1 :])
    for data in bad:
        with pytest.raises(IntegrityError) as caught:
            unseal(TENANT, data, keys, PLACE, name="thing 1")
        assert caught.value.details["object"] == "thing 1"


@BOTH
def test_limits_hold_on_both_sides(keys):
    limit = LIMITS[TENANT]
    with pytest.raises(TooLarge):
        seal(TENANT, bytes(limit + 1), keys, PLACE)
    # A longer kind's bytes relabelled would be told by the seal; before that, by the length.
    longer = bytearray(seal(SNAPSHOT, bytes(limit + 1), keys, PLACE))
    longer[4:8] = TENANT
    with pytest.raises(IntegrityError, match="length"):
        unseal(TENANT, bytes(longer), keys, PLACE, name="x")


def test_a_newer_format_is_told_apart_from_damage():
    sealed = bytearray(seal(CONFIG, b"payload", PLAIN, b"config"))
    sealed[8] = 2
    with pytest.raises(IntegrityError, match="format 2") as caught:
        unseal(CONFIG, bytes(sealed), PLAIN, b"config", name="config")
    assert "version" in caught.value.next_step


@settings(deadline=None)
@given(st.binary(max_size=400), st.binary(max_size=40), st.sampled_from([OPEN, CLOSED]))
def test_any_payload_at_any_place(payload, place, keys):
    assert unseal(SNAPSHOT, seal(SNAPSHOT, payload, keys, place), keys, place, name="x") == payload


def test_the_limits_are_those_the_format_names():
    text = (Path(__file__).parents[2] / "docs" / "formats" / "repository.md").read_text()
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    named = {}
    for kinds, count, unit in re.findall(r"^\| ([`A-Z, ]+) \| (\d+) (KiB|MiB) \|$", text, re.M):
        for kind in re.findall(r"`([A-Z]{4})`", kinds):
            named[kind.encode()] = int(count) * units[unit]
    assert named == LIMITS
