"""The map of a memory image: what is read back is what was written, and forged ones are refused."""

from __future__ import annotations

import resource

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import IntegrityError
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.images import (
    LARGEST_CHUNK,
    RECORD,
    ImageMap,
    decode_image,
    encode_image,
)
from sojourn.store.fingerprints import image_digest


def reference(files: dict[str, int]) -> MemoryRef:
    listed = {name: (size, "ab" * 32) for name, size in files.items()}
    return MemoryRef(
        id=image_digest(listed),
        bytes=sum(files.values()),
        files=listed,
        driver="gvisor",
        runtime="r",
        cpu=["sse"],
    )


def pieces(*each: tuple[int, int, int]) -> bytes:
    return b"".join(RECORD.pack(*piece) for piece in each)


def image(chunks: int = 2, **files: tuple[int, bytes]) -> ImageMap:
    """A map whose files are given as size and pieces; `_` in a name stands for a point."""
    named = {name.replace("_", "."): value for name, value in files.items()}
    ref = reference({name: size for name, (size, _) in named.items()})
    ids = b"".join(bytes([number]) * 32 for number in range(chunks))
    return ImageMap(ref=ref, chunks=ids, files={n: raw for n, (_, raw) in named.items()})


GOOD = image(
    pages_img=(20480, pieces((4096, 0, 0), (8192, 1, 4096), (8192, 2, 0))),
    checkpoint_img=(100, pieces((100, 2, 8192))),
    empty_img=(0, b""),
)


def test_a_map_is_read_back():
    found = decode_image(encode_image(GOOD), GOOD.ref.id)
    assert found == GOOD
    assert list(found.pieces("pages.img"))[1] == (8192, 1, 4096)
    assert list(found.chunk_ids()) == [b"\0" * 32, b"\1" * 32] == [found.chunk(1), found.chunk(2)]


@pytest.mark.parametrize(
    "raw",
    [
        pieces((20480, 3, 0)),  # a chunk that is not listed
        pieces((20476, 1, 0)),  # too short
        pieces((20484, 1, 0), (4, 2, 0)),  # too long
        pieces((20480, 1, 0), (0, 2, 0)),  # an empty piece
        pieces((20480, 1, 0)),  # a chunk that is not used
        pieces((4096, 0, 4096), (8192, 1, 0), (8192, 2, 0)),  # an offset in zeros
        pieces((12288, 1, 0), (8192, 2, LARGEST_CHUNK)),  # behind any chunk
        pieces((12288, 1, 0), (8192, 2, 0))[:-1],
        b"",
    ],
)
def test_pieces_that_do_not_fit_are_refused(raw):
    bad = image(pages_img=(20480, raw))
    with pytest.raises(IntegrityError) as caught:
        decode_image(encode_image(bad), bad.ref.id)
    assert caught.value.details["object"] == f"memory {bad.ref.id}"


def test_large_runs_of_zeros_are_no_flaw():
    zeros = (1 << 32) - 4096
    large = image(0, pages_img=(3 * zeros, pieces(*[(zeros, 0, 0)] * 3)))
    assert decode_image(encode_image(large), large.ref.id) == large


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "", ".", "..", "a//b", "a/", "a\0b"]
)
def test_names_that_leave_the_directory_are_refused(name):
    ref = reference({name: 0})
    bad = ImageMap(ref=ref, chunks=b"", files={name: b""})
    with pytest.raises(IntegrityError):
        decode_image(encode_image(bad), ref.id)


def test_a_file_that_is_a_directory_of_another_is_refused():
    ref = reference({"a": 0, "a/b": 0})
    bad = ImageMap(ref=ref, chunks=b"", files={"a": b"", "a/b": b""})
    with pytest.raises(IntegrityError):
        decode_image(encode_image(bad), ref.id)


def test_a_map_of_another_image_is_refused():
    with pytest.raises(IntegrityError):
        decode_image(encode_image(GOOD), "0" * 64)
    for changes in ({"bytes": 1}, {"files": {}}, {"id": "0" * 64}):
        ref = msgspec.structs.replace(GOOD.ref, **changes)
        with pytest.raises(IntegrityError):
            decode_image(encode_image(msgspec.structs.replace(GOOD, ref=ref)), ref.id)


@pytest.mark.parametrize("size,digest", [(-1, "ab" * 32), (0, "AB" * 32), (0, "ab"), (0, "")])
def test_sizes_and_digests_of_no_sense_are_refused(size, digest):
    files = {"f": (size, digest)}
    ref = MemoryRef(image_digest(files), size, files, "g", "r", [])
    bad = ImageMap(ref=ref, chunks=b"", files={"f": b""})
    with pytest.raises(IntegrityError):
        decode_image(encode_image(bad), ref.id)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data):
    with pytest.raises(IntegrityError):
        decode_image(data, GOOD.ref.id)


@given(st.data())
def test_damaged_maps_are_refused_or_still_fill_their_files(data):
    whole = bytearray(encode_image(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        found = decode_image(bytes(whole), GOOD.ref.id)
    except IntegrityError:
        return
    for name, (size, _) in found.ref.files.items():
        assert sum(length for length, _, _ in found.pieces(name)) == size


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 2**32 - 1)),
        max_size=6,
    ),
    st.integers(0, 5),
    st.integers(0, 2**34),
)
def test_any_pieces_are_refused_or_right(each, chunks, size):
    raw = pieces(*each)
    made = image(chunks, pages_img=(size, raw))
    try:
        found = decode_image(encode_image(made), made.ref.id)
    except IntegrityError:
        return
    assert sum(length for length, _, _ in each) == size
    assert {source for _, source, _ in each} - {0} == set(range(1, chunks + 1))
    assert found == made


def test_a_forged_length_takes_no_memory():
    whole = encode_image(GOOD)
    at = whole.index(b"\xc4\x40" + GOOD.chunks)  # bin 8: make it a bin 32 of 4 GiB
    forged = whole[:at] + b"\xc6\xff\xff\xff\xff" + whole[at + 2 :]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError):
        decode_image(forged, GOOD.ref.id)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
