"""A layer's manifest in segments: joined it is what was cut, and nothing forged gets through."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import IntegrityError, SojournError
from sojourn.repository.layers import (
    SEGMENT_ATTRIBUTES,
    SEGMENT_ENTRIES,
    LayerObject,
    decode_layer,
    encode_layer,
    join_segments,
    layer_object,
    segments_of,
)
from sojourn.store.manifests import Entry, Manifest

ROOT = Entry(b"", "d", 0o755, 0, 0, 0, 5, 6, b"", b"", 0, 0, None, ())


def file(path: bytes, content: bytes = b"x", xattrs: tuple = ()) -> Entry:
    digest = blake3(content).digest()
    return Entry(path, "f", 0o644, 0, 0, len(content), 5, 6, digest, b"", 0, 0, None, xattrs)


def manifest(count: int, changed: int | None = None) -> Manifest:
    entries = [ROOT]
    for number in range(count):
        content = b"changed" if number == changed else b"x"
        entries.append(file(b"f%06d" % number, content))
    return Manifest(entries)


def cut(manifest: Manifest) -> tuple[LayerObject, list[bytes]]:
    segments = list(segments_of(manifest))
    return layer_object(manifest, [content for content, _ in segments]), [d for _, d in segments]


@pytest.mark.parametrize("count", [0, 1, 14, 15, 16, 2000, 70_000])
def test_segments_joined_are_the_manifest(count):
    original = manifest(count)
    layer, segments = cut(original)
    found = join_segments(decode_layer(encode_layer(layer), original.id), segments)
    assert found.encoded == original.encoded
    assert found.ref == original.ref


def test_segments_are_named_by_their_bytes():
    for content, data in segments_of(manifest(3000)):
        assert blake3(data).digest() == content


def test_a_changed_entry_changes_one_segment():
    before = dict(segments_of(manifest(20_000)))
    after = dict(segments_of(manifest(20_000, changed=9_000)))
    assert len(before) > 40
    assert len(after.keys() - before.keys()) == 1


def test_an_entry_more_changes_few_segments():
    entries = manifest(20_000).entries
    more = Manifest([*entries[:8000], file(entries[7999].path + b"a"), *entries[8000:]])
    before = dict(segments_of(Manifest(entries)))
    assert len(dict(segments_of(more)).keys() - before.keys()) <= 2


def test_a_segment_is_bounded_in_entries_and_attributes():
    flat = Manifest([ROOT, *(file(b"a" * (n + 1)) for n in range(3))])
    assert len(list(segments_of(flat))) <= 4
    large = (b"user.large", b"v" * 60_000)
    heavy = Manifest([ROOT, *(file(b"f%06d" % n, xattrs=(large,)) for n in range(200))])
    segments = [data for _, data in segments_of(heavy)]
    assert max(map(len, segments)) < SEGMENT_ATTRIBUTES + 2 * 60_200
    layer, data = cut(heavy)
    assert join_segments(layer, data).encoded == heavy.encoded
    for content in (data for _, data in segments_of(manifest(70_000))):
        assert len(msgspec.msgpack.decode(content)) <= SEGMENT_ENTRIES


def test_other_segments_are_refused():
    original = manifest(3000)
    layer, segments = cut(original)
    assert len(segments) > 3
    others = cut(manifest(3000, changed=7))[1]
    for wrong in (
        segments[1:],
        segments[:-1],
        [*segments, segments[-1]],
        [segments[1], segments[0], *segments[2:]],
        [*others],
        [b"", *segments[1:]],
        [b"\xdd\xff\xff\xff\xff", *segments[1:]],
        [segments[0][:-1], *segments[1:]],
    ):
        with pytest.raises(IntegrityError) as caught:
            join_segments(layer, wrong)
        assert caught.value.details["object"] == f"layer {original.id}"


def test_a_record_that_tells_another_size_is_refused():
    layer, segments = cut(manifest(50))
    lying = msgspec.structs.replace(layer, bytes=layer.bytes + 1)
    with pytest.raises(IntegrityError, match="size"):
        join_segments(lying, segments)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "0" * 64},
        {"id": "x"},
        {"bytes": -1},
        {"entries": -1},
        {"segments": []},
        {"segments": [b"short"]},
        {"segments": [b"s" * 32] * 99},
        {"more": 1},
    ],
)
def test_an_inconsistent_record_is_refused(changes):
    layer, _ = cut(manifest(5))
    fields = msgspec.structs.asdict(layer) | changes
    with pytest.raises(IntegrityError) as caught:
        decode_layer(msgspec.msgpack.encode(fields), layer.id)
    assert caught.value.details["object"] == f"layer {layer.id}"


@given(st.binary(max_size=300))
def test_any_bytes_as_a_record_are_refused(data):
    with pytest.raises(IntegrityError):
        decode_layer(data, "0" * 64)


@given(st.data())
def test_any_damage_of_a_segment_is_refused(data):
    layer, segments = cut(manifest(40))
    joined = b"".join(segments)
    at = data.draw(st.integers(0, len(joined) - 1))
    for number, segment in enumerate(segments):
        if at < len(segment):
            bad = segment[:at] + data.draw(st.binary(max_size=8)) + segment[at + 1 :]
            if bad == segment:
                return
            with pytest.raises(SojournError):
                join_segments(layer, [*segments[:number], bad, *segments[number + 1 :]])
            return
        at -= len(segment)
