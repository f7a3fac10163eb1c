"""Keys: apart for every domain and use, never shown, and wrapped under the operator's secret."""

from __future__ import annotations

import copy
import logging
import pickle
import traceback

import msgspec
import pytest

from sojourn.errors import IntegrityError, InvalidRequest, StoreKeyInvalid
from sojourn.repository.keys import (
    DomainKeys,
    Keyring,
    clean_secret,
    read_wrapped,
    unwrap_root,
    wrap_root,
)
from support.packs import CLOSED, OPEN, ROOT

SECRET = b"a secret of the operator"
NAMING = "cf6c687421c3fd71986d91f2ddce6e0a38e69fbe20f68babb68ac49fa29672a0"
SEALING = "d31973feed16a00793cec956ab187dc1304b476ffc4717e10ecf744271770651"
CUTTING = 1550703163464569628
RECIPE_NAME = "d1b7825930d1cd5203395eaa8971d724e4fad5718d35edf1ed33e3830a7063cc"
WRAPPED = (
    "93d9203030303030303030303030303030303030303030303030303030303030303030c410982f89"
    "dafd37a2ab8d1bb4edd9133f20c430289d957c965c0cc11c3f9c381efec0019951fe86ba772ef299"
    "868abbc81b32bbfe2fbc80eace709cc3625c69c8549e27"
)
LAYER_NAME = "452a382120d1ec62c0ac45de58ae3681725a5df7e8f03839b7e4bcb083f5284f"


def material(keys: DomainKeys) -> list[bytes]:
    parts = [ROOT, keys.naming, keys.sealing or keys.naming]
    return parts + [part.hex().encode() for part in parts]


def test_keys_differ_by_domain_use_and_root():
    ring = Keyring(ROOT, True)
    other = Keyring(bytes(32), True)
    found = [ring.domain("ten_1"), ring.domain("ten_2"), ring.domain("shared")]
    found.append(other.domain("ten_1"))
    seen = {key for keys in found for key in (keys.naming, keys.sealing)}
    assert len(seen) == 8
    assert len({keys.cutting for keys in found}) == 4
    assert len({keys.chunk_name(0, bytes(32)) for keys in found}) == 4
    assert len({keys.object_name("layers", "x") for keys in found}) == 4


def test_keys_are_the_same_each_time_whatever_the_repository_is_opened_for():
    again = Keyring(ROOT, True)
    assert again.domain("ten_1").naming == CLOSED.naming == OPEN.naming
    assert again.domain("ten_1") is again.domain("ten_1")
    assert OPEN.sealing is None and not OPEN.encrypted
    # Written down, because every stored name depends on them.
    assert CLOSED.naming.hex() == NAMING
    assert CLOSED.sealing is not None and CLOSED.sealing.hex() == SEALING
    assert CLOSED.cutting == CUTTING
    assert CLOSED.chunk_name(1, bytes(32)).hex() == RECIPE_NAME
    assert CLOSED.object_name("layers", "abc") == LAYER_NAME


def test_names_of_kinds_never_meet():
    content = bytes(32)
    assert len({OPEN.chunk_name(kind, content) for kind in range(3)}) == 3
    assert OPEN.object_name("layers", "x") != OPEN.object_name("images", "x")
    assert CLOSED.object_key(bytes(32)) != CLOSED.pack_key(bytes(32))
    with pytest.raises(ValueError):
        OPEN.pack_key(bytes(32))


@pytest.mark.parametrize("holder", [CLOSED, Keyring(ROOT, True)], ids=["domain", "ring"])
def test_nothing_shows_key_material(holder, caplog):
    logging.getLogger("test").error("%s %r %a", holder, holder, [holder])
    try:
        raise IntegrityError("bad", object=repr(holder))
    except IntegrityError as error:
        told = "".join(traceback.format_exception(error)) + str(error.details)
    shown = (caplog.text + told + f"{holder}" + format(holder)).encode()
    for secret in material(CLOSED):
        assert secret not in shown
        assert repr(secret).encode() not in shown
    for write in (pickle.dumps, copy.deepcopy, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError) as caught:
            write(holder)
        assert not any(secret in str(caught.value).encode() for secret in material(CLOSED))


@pytest.mark.parametrize(
    "name", ["", "keys", "config", "../x", "a/b", "a..b", ".a", "a\n", "ä", "a" * 129, "-a"]
)
def test_a_domain_that_would_leave_its_place_is_refused(name):
    with pytest.raises(InvalidRequest):
        Keyring(ROOT, False).domain(name)


def test_one_newline_at_the_end_is_no_part_of_a_secret():
    assert clean_secret(SECRET + b"\n") == clean_secret(SECRET + b"\r\n") == SECRET
    assert clean_secret(SECRET + b"\n\n") == SECRET + b"\n"
    assert clean_secret(b" " + SECRET + b" ") == b" " + SECRET + b" "


@pytest.mark.parametrize("secret", [b"", b"\n", b"x" * 15, b"x" * 15 + b"\n"])
def test_a_short_secret_is_refused_without_showing_it(secret):
    with pytest.raises(InvalidRequest) as caught:
        clean_secret(secret)
    assert "xxx" not in f"{caught.value} {caught.value.details}"


def test_a_wrapped_key_opens_with_its_secret_alone():
    payload = wrap_root(ROOT, SECRET, "repo")
    assert ROOT not in payload and SECRET not in payload
    assert payload != wrap_root(ROOT, SECRET, "repo")
    found = read_wrapped(payload, name="keys/1")
    assert unwrap_root(found, SECRET + b"\n", name="keys/1") == ROOT
    with pytest.raises(StoreKeyInvalid) as caught:
        unwrap_root(found, SECRET + b"x", name="keys/1")
    assert SECRET.decode() not in f"{caught.value} {caught.value.details}"
    moved = msgspec.structs.replace(found, repository="other")
    with pytest.raises(StoreKeyInvalid):
        unwrap_root(moved, SECRET, name="keys/1")


def test_a_key_that_was_wrapped_by_this_format_opens():
    # Written down, because the cost of guessing a secret must not change unseen.
    found = read_wrapped(bytes.fromhex(WRAPPED), name="keys/1")
    assert unwrap_root(found, SECRET, name="keys/1") == ROOT


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode(["r", bytes(15), bytes(48)]),
        msgspec.msgpack.encode(["r", bytes(16), bytes(47)]),
        msgspec.msgpack.encode(["r", bytes(16)]),
        msgspec.msgpack.encode(["r", bytes(16), bytes(48), 1]),
        msgspec.msgpack.encode({"repository": "r"}),
    ],
)
def test_a_malformed_wrapped_key_is_damage(payload):
    with pytest.raises(IntegrityError) as caught:
        read_wrapped(payload, name="keys/1")
    assert caught.value.details["object"] == "keys/1"
