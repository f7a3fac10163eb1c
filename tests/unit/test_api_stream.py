"""Frames: exact round trips however the bytes are cut, and garbage refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import SojournError, UnlinkedOpenFile
from sojourn.wire import stream
from sojourn.wire.guest import Output

outputs = st.builds(Output, st.sampled_from([1, 2]), st.integers(0, 2**63), st.binary(max_size=50))
frames = st.one_of(
    outputs,
    st.builds(stream.Started, st.integers(0, 2**31), st.integers(1, 2**22)),
    st.builds(
        stream.Ended,
        st.integers(0, 2**31),
        st.none() | st.integers(0, 255),
        st.none() | st.integers(1, 64),
        st.booleans(),
        st.none() | st.text(max_size=10),
        st.floats(0, 1e6),
        st.booleans(),
    ),
    st.none(),  # a heartbeat
)


def encode(frame: object) -> bytes:
    if isinstance(frame, Output):
        return stream.encode_output(frame)
    if isinstance(frame, stream.Started):
        return stream.encode_started(frame)
    if isinstance(frame, stream.Ended):
        return stream.encode_ended(frame)
    return stream.HEARTBEAT


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_round_trip_however_it_is_cut(
    given_frames: list[stream.Started | stream.Ended | Output | None], cuts: list[int]
) -> None:
    raw = b"".join(encode(frame) for frame in given_frames)
    decoder = stream.FrameDecoder()
    found: list[object] = []
    at = turn = 0
    while at < len(raw):
        size = cuts[turn % len(cuts)]
        found += decoder.feed(raw[at : at + size])
        at, turn = at + size, turn + 1
    assert found == [frame for frame in given_frames if frame is not None]


def test_errors_travel_as_themselves() -> None:
    error = UnlinkedOpenFile("held open", pid=3, path="/x")
    (found,) = stream.FrameDecoder().feed(stream.encode_error(error))
    assert type(found) is UnlinkedOpenFile and found.details == {"pid": 3, "path": "/x"}


def test_layout_is_the_documented_one() -> None:
    assert stream.encode_output(Output(1, 258, b"ab")) == b"\x02\0\0\0\x0a" + b"\0" * 6 + b"\1\2ab"
    assert stream.encode_output(Output(2, 0, b""))[0] == 3
    assert stream.HEARTBEAT == b"\x04\0\0\0\0"


def test_unknown_types_are_skipped() -> None:
    assert stream.FrameDecoder().feed(b"\x63\0\0\0\2zz" + stream.HEARTBEAT) == []


@pytest.mark.parametrize(
    "raw",
    [b"\x02\xff\xff\xff\xff", b"\x02\0\0\0\3abc", b"\x01\0\0\0\2[]", b"\x05\0\0\0\1{"],
)
def test_malformed_frames_are_refused(raw: bytes) -> None:
    with pytest.raises(SojournError):
        stream.FrameDecoder().feed(raw)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(raw: bytes) -> None:
    with contextlib.suppress(SojournError):
        stream.FrameDecoder().feed(raw)
