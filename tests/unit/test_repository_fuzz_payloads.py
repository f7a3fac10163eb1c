"""Payloads behind a good seal, as anyone can forge in a repository that is not encrypted: whatever
stands in them, and wherever, a reader answers or raises SojournError."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.errors import SojournError
from sojourn.model.sessions import Limits, Policy, Session, SessionState
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.repository import cutting, damages, images, layers, session_records, tombstones
from sojourn.store.fingerprints import fingerprint, image_digest
from sojourn.store.manifests import Manifest
from support.stored_bytes import PARSERS, samples

LAYER = "ab" * 32
DIGEST = "cd" * 32
FILES = {"pages.img": (8192, DIGEST), "sub/kernel.img": (10, DIGEST)}
IMAGE = image_digest(FILES)
MEMORY = MemoryRef(IMAGE, 8202, FILES, "gvisor", "1", ["sse"])
CONFIG = SnapshotConfig(template="t", env={"A": "b"}, user="root", cwd="/", hostname="h")
REFS = [LayerRef(id=LAYER, bytes=10, entries=3)]
SNAPSHOT = Snapshot(
    id="snp_1",
    session="ses_1",
    parent=None,
    kind=SnapshotKind.EXPLICIT,
    label="x",
    created_at=1.0,
    layers=REFS,
    memory=MEMORY,
    config=CONFIG,
    fingerprint=fingerprint(REFS, MEMORY, CONFIG),
)
SESSION = Session(
    id="ses_1",
    tenant="ten_1",
    name="n",
    labels={"a": "b"},
    template="t",
    env={},
    limits=Limits(),
    policy=Policy(),
    driver="gvisor",
    state=SessionState.SUSPENDED,
    epoch=3,
    head=None,
    parent_session=None,
    forked_from=None,
    sandbox=None,
    node=None,
    idle_deadline=None,
    lifetime_deadline=2.0,
    cause=None,
    created_at=1.0,
    updated_at=1.0,
)
ENTRIES: list[object] = [
    [b"", "d", 0o755, 0, 0, 0, 5, 6, b"", b"", 0, 0, None, []],
    [b"a", "f", 0o644, 0, 0, 1, 5, 6, bytes(32), b"", 0, 0, None, [[b"user.x", b"1"]]],
    [b"b", "l", 0o777, 0, 0, 0, 5, 6, b"", b"a", 0, 0, None, []],
]


def manifest(data: bytes) -> object:
    """A layer's manifest whose id is right."""
    from sojourn.store.fingerprints import layer_digest

    return Manifest.decode(data, "layer x", layer_digest(data).hex())


DECODERS: dict[str, Callable[[bytes], object]] = {
    "layer": lambda data: layers.decode_layer(data, LAYER),
    "manifest": manifest,
    "image": lambda data: images.decode_image(data, IMAGE),
    "recipe": lambda data: cutting.decode_recipe(data, 100, "x"),
    "snapshot": lambda data: session_records.decode_snapshot(data, "snp_1"),
    "session": lambda data: session_records.decode_session(data, "ses_1"),
    "tenant": lambda data: session_records.decode_tenant(data, "ten_1"),
    "tombstone": lambda data: tombstones.decode_tombstone(data, "ten_1/tombstones/1"),
    "damage": lambda data: damages.decode_damage(data, "ten_1/damaged/snp_1"),
    "configuration": PARSERS["forged_configuration"],
    "wrapped key": PARSERS["forged_wrapped_key"],
    "index": PARSERS["forged_index"],
}


@functools.cache
def whole(name: str) -> object:
    """A payload the decoder takes, as plain values."""
    return msgspec.msgpack.decode(encoded()[name])


@functools.cache
def encoded() -> dict[str, bytes]:
    encode = msgspec.msgpack.encode
    piece = cutting.RECIPE.pack(bytes(32), 100)
    pages = (1).to_bytes(4, "little")
    record = (8192).to_bytes(4, "little") + pages + bytes(4)
    rest = (10).to_bytes(4, "little") + bytes(8)
    files = {"pages.img": record, "sub/kernel.img": rest}
    return {
        "layer": encode(layers.LayerObject(LAYER, 10, 3, [bytes(32)])),
        "manifest": encode([1, ENTRIES]),
        "image": encode(images.ImageMap(MEMORY, bytes(32), files)),
        "recipe": piece,
        "snapshot": encode(SNAPSHOT),
        "session": encode(session_records.SessionRecord(SESSION, [], 1.0, "server")),
        "tenant": encode(session_records.TenantRecord("ten_1", "name", 1.0)),
        "damage": encode(damages.Damage("snp_1", "ses_1", 1.0, ["layer x"], bytes(32))),
        "tombstone": tombstones.encode_tombstone(
            tombstones.tombstone("named", [bytes(32)], [f"ten_1/layers/{LAYER}"])
        ),
        "configuration": samples()["forged_configuration"][0],
        "wrapped key": samples()["forged_wrapped_key"][0],
        "index": samples()["forged_index"][0],
    }


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1]),
    st.sampled_from([float("nan"), float("inf"), -0.0, 1e308, 0.5]),
    st.sampled_from(["", "/", "..", "../x", "/etc/passwd", "a/../b", "\0", "a" * 5000, "\ud7ff"]),
    st.sampled_from([b"", b"\xff", b"..", b"/x", bytes(12), bytes(31), bytes(33), b"\xff" * 64]),
    st.text(max_size=5),
    st.binary(max_size=40),
    st.sampled_from([[], {}, [[]], [{}], {"": None}, {1: 2}, {b"k": []}, [None] * 20]),
)


def changed(value: object, draw: Callable) -> object:
    """The value with one part anywhere in it replaced, dropped, doubled or nested."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 9)) < 8:
        how = draw(st.sampled_from(["within", "within", "within", "drop", "double", "add"]))
        if isinstance(value, dict):
            made = dict(value)
            key = draw(st.sampled_from(list(made)))
            if how == "within":
                made[key] = changed(made[key], draw)
            elif how == "drop":
                del made[key]
            else:
                made[draw(st.text(max_size=3) | st.sampled_from(["..", "/", "a"]))] = made[key]
            return made
        items = list(value)
        at = draw(st.integers(0, len(items) - 1))
        if how == "within":
            items[at] = changed(items[at], draw)
        elif how == "drop":
            del items[at]
        elif how == "double":
            items.insert(at, items[at])
        else:
            items.append(draw(HOSTILE))
        return items
    if isinstance(value, bytes | str) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value)))
        return value[:at] + value[draw(st.integers(0, len(value))) :]
    if isinstance(value, bytes) and value:
        made = bytearray(value)
        made[draw(st.integers(0, len(made) - 1))] = draw(st.integers(0, 255))
        return bytes(made)
    return draw(HOSTILE)


def attempt(name: str, data: bytes) -> None:
    try:
        DECODERS[name](data)
    except SojournError as error:
        assert error.code in {"integrity_error", "unsupported"}, error.code


@pytest.mark.parametrize("name", DECODERS)
def test_what_was_written_is_taken(name):
    assert DECODERS[name](encoded()[name]) is not None


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "recipe"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_one_part_that_is_not_what_it_should_be(name, data):
    value = whole(name)
    for _ in range(data.draw(st.integers(1, 3))):
        value = changed(value, data.draw)
    attempt(name, msgspec.msgpack.encode(value))


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(name, data):
    attempt(name, data)


@pytest.mark.parametrize("name", DECODERS)
def test_every_cut_and_flip(name):
    data = encoded()[name]
    for at in range(len(data)):
        attempt(name, data[:at])
        for bit in (1, 128):
            attempt(name, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
