"""The byte frames: what is put in comes out, and garbage is refused within bounds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.wire import frames
from sojourn.wire.frames import FrameError, Reader
from sojourn.wire.guest import ProcessSpec

strings = st.binary(max_size=200).map(lambda data: data.replace(b"\0", b"x"))
u64 = st.integers(0, 2**64 - 1)


@given(st.lists(strings, max_size=20), st.binary(max_size=500), u64)
def test_fields_come_out_as_they_went_in(items: list[bytes], raw: bytes, value: int) -> None:
    reader = Reader(frames.texts(items) + frames.blob(raw) + frames.number(value))
    assert reader.texts() == items
    assert reader.blob() == raw
    assert reader.u64() == value
    reader.end()


@given(u64, st.integers(0, 255), st.binary(max_size=300), u64)
def test_a_frame_has_the_documented_header(number: int, op: int, body: bytes, ack: int) -> None:
    whole = frames.frame(op, number, body, ack=ack)
    assert struct.unpack("<IHHQQ", whole[:24]) == (len(body), op, 0, number, ack)
    assert whole[24:] == body


DECODERS = [
    frames.read_process,
    frames.read_piece,
    frames.read_activity,
    frames.read_unlinked,
    frames.read_events,
    frames.Hello,
    Reader.texts,
    lambda reader: frames.read_stat(reader, b"/x"),
]


@given(st.binary(max_size=400), st.sampled_from(range(len(DECODERS))))
def test_garbage_is_refused_and_nothing_else(data: bytes, which: int) -> None:
    try:
        DECODERS[which](Reader(data))
    except FrameError:
        return


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_cut_field_is_refused(content: bytes, data: st.DataObject) -> None:
    whole = frames.blob(content)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FrameError):
        Reader(whole[:cut]).blob()


@pytest.mark.parametrize("count", [1 << 31, 0xFFFFFFFF, 3])
def test_a_count_beyond_the_frame_allocates_nothing(count: int) -> None:
    with pytest.raises(FrameError):
        Reader(struct.pack("<I", count) + b"\0" * 8).texts()


def test_a_string_without_its_end_is_refused() -> None:
    with pytest.raises(FrameError):
        Reader(struct.pack("<I", 2) + b"ab" + b"x").text()
    with pytest.raises(FrameError):
        Reader(struct.pack("<I", 3) + b"a\0b" + b"\0").text()


def test_zero_bytes_in_arguments_are_refused() -> None:
    with pytest.raises(FrameError):
        frames.start_body(ProcessSpec([b"echo", b"a\0b"]))


@pytest.mark.parametrize("name", [b"", b"A=B"])
def test_a_variable_needs_a_proper_name(name: bytes) -> None:
    with pytest.raises(FrameError):
        frames.start_body(ProcessSpec([b"env"], env={name: b"1"}))


@pytest.mark.parametrize("changes", [{"stdin": "tty"}, {"pty": (70000, 1)}, {"keep": -1}])
def test_fields_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        frames.start_body(ProcessSpec([b"true"], **changes))  # type: ignore[arg-type]


def test_a_body_over_the_limit_is_refused() -> None:
    with pytest.raises(FrameError):
        frames.frame(17, 1, bytes(frames.MAX_BODY + 1))


@given(st.lists(strings, min_size=1, max_size=8), st.dictionaries(strings, strings, max_size=4))
def test_a_command_is_encoded_exactly(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    env = {name.replace(b"=", b"-") or b"A": value for name, value in env.items()}
    reader = Reader(
        frames.start_body(
            ProcessSpec(argv, env=env, cwd=b"/tmp", user="me", stdin="inline", input=b"\0\1")
        )
    )
    flags, stdin, _, _, _, _ = reader.take(struct.Struct("<IBQQHH"))
    assert (flags, stdin) == (4 | 8, 2)
    assert [reader.text() for _ in range(3)] == [b"", b"me", b"/tmp"]
    assert reader.texts() == argv
    assert reader.texts() == [name + b"=" + value for name, value in env.items()]
    assert reader.blob() == b"\0\1"
    reader.end()
