"""The tar codec: exact round trips, read and written alike by the standard library."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import InvalidRequest, PathInvalid, SojournError, TooLarge
from sojourn.wire import tar

parts = (
    st.binary(min_size=1, max_size=60)
    .map(lambda raw: raw.replace(b"/", b"_"))
    .filter(lambda part: b"\0" not in part and part not in (b".", b".."))
)
names = st.lists(parts, min_size=1, max_size=4).map(b"/".join)


@st.composite
def members(draw: st.DrawFn) -> tuple[tar.Entry, bytes]:
    kind = draw(st.sampled_from(["file", "dir", "symlink", "hardlink", "fifo"]))
    content = draw(st.binary(max_size=1500)) if kind == "file" else b""
    target = draw(names) if kind in ("symlink", "hardlink") else b""
    entry = tar.Entry(
        draw(names),
        kind,
        draw(st.integers(0, 0o7777)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        len(content),
        draw(st.integers(-(2**62), 2**62)),
        target,
    )
    return entry, content


def encode(given_members: list[tuple[tar.Entry, bytes]]) -> bytes:
    raw = b"".join(
        tar.encode_entry(entry) + content + tar.padding(len(content))
        for entry, content in given_members
    )
    return raw + tar.END


def decode(raw: bytes, cut: int) -> tuple[list[tuple[tar.Entry, bytes]], bool]:
    decoder = tar.Decoder()
    found: list[tuple[tar.Entry, bytes]] = []
    current: tuple[tar.Entry, bytes] | None = None
    for at in range(0, len(raw), cut):
        for event in decoder.feed(raw[at : at + cut]):
            if isinstance(event, tar.Entry):
                assert current is None
                current = (event, b"")
            elif isinstance(event, bytes):
                assert current is not None
                current = (current[0], current[1] + event)
            else:
                assert current is not None
                found.append(current)
                current = None
    return found, decoder.complete


@given(st.lists(members(), max_size=4), st.sampled_from([1, 7, 512, 513, 100_000]))
def test_round_trip(given_members: list[tuple[tar.Entry, bytes]], cut: int) -> None:
    found, complete = decode(encode(given_members), cut)
    assert complete and found == given_members


@given(st.lists(members(), min_size=1, max_size=3))
def test_the_standard_library_reads_it(given_members: list[tuple[tar.Entry, bytes]]) -> None:
    raw = io.BytesIO(encode(given_members))
    with tarfile.open(fileobj=raw, encoding="utf-8", errors="surrogateescape") as made:
        infos = made.getmembers()
    assert [info.name.encode("utf-8", "surrogateescape") for info in infos] == [
        entry.name for entry, _ in given_members
    ]
    assert [info.size for info in infos] == [entry.size for entry, _ in given_members]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_forms_of_the_standard_library_are_read(form: int) -> None:
    out = io.BytesIO()
    long_name = "d/" + "n" * (90 if form == tarfile.USTAR_FORMAT else 300)
    with tarfile.open(fileobj=out, mode="w", format=form) as made:
        info = tarfile.TarInfo(long_name)
        info.size, info.mtime, info.uid, info.mode = 3, 1_600_000_000, 70_000, 0o755
        made.addfile(info, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "t" * 90
        made.addfile(link)
    found, complete = decode(out.getvalue(), 1000)
    assert complete
    assert found[0][0].name == long_name.encode() and found[0][1] == b"abc"
    assert (found[0][0].uid, found[0][0].mode) == (70_000, 0o755)
    assert found[0][0].mtime_ns == 1_600_000_000_000_000_000
    assert found[1][0].target == b"t" * 90


@pytest.mark.parametrize("name", [b"/a", b"..", b"a/../b", b"a/..", b"../a", b"a\0b", b"x" * 5000])
def test_names_that_lead_outside_are_refused(name: bytes) -> None:
    with pytest.raises(PathInvalid):
        tar.clean_name(name)


@pytest.mark.parametrize(
    ("name", "clean"), [(b"./a//b/", b"a/b"), (b".", b"."), (b"./", b"."), (b"a/./b", b"a/b")]
)
def test_names_are_cleaned(name: bytes, clean: bytes) -> None:
    assert tar.clean_name(name) == clean


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_ENTRIES", 3)
    raw = encode([(tar.Entry(b"x", "dir"), b"")] * 4)
    with pytest.raises(TooLarge):
        list(tar.Decoder().feed(raw))


def extended(kind: bytes, payload: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(payload)
    return info.tobuf(tarfile.USTAR_FORMAT) + payload + tar.padding(len(payload))


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_before_a_member_make_nobody_hold_them(kind: bytes) -> None:
    decoder = tar.Decoder()
    tracemalloc.start()
    try:
        for number in range(100):
            assert not list(decoder.feed(extended(kind, record(b"k%d" % number, b"v" * 100_000))))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000
    (entry, _) = decoder.feed(tar.encode_entry(tar.Entry(b"d", "dir")))
    assert entry.name == b"d"


def test_an_empty_pax_value_takes_the_fact_back() -> None:
    raw = extended(tarfile.XGLTYPE, record(b"path", b"everywhere"))
    raw += extended(tarfile.XHDTYPE, record(b"path", b"")) + tar.encode_entry(
        tar.Entry(b"d", "dir")
    )
    (entry, _) = tar.Decoder().feed(raw)
    assert entry.name == b"d"


def test_a_pax_size_cannot_be_forged_out_of_range() -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"size": "99999999999999999999999"}
    with pytest.raises(InvalidRequest):
        list(tar.Decoder().feed(info.tobuf(tarfile.PAX_FORMAT)))


@given(st.binary(max_size=3000), st.booleans())
def test_garbage_never_raises_anything_else(raw: bytes, valid_head: bool) -> None:
    head = tar.encode_entry(tar.Entry(b"n" * 200, "file", size=10)) if valid_head else b""
    with contextlib.suppress(SojournError):
        list(tar.Decoder().feed(head[:1024] + raw))


@given(st.binary(max_size=600))
def test_garbage_in_a_pax_header(payload: bytes) -> None:
    raw = extended(tarfile.XHDTYPE, payload) + tar.encode_entry(tar.Entry(b"f", "file"))
    with contextlib.suppress(SojournError):
        list(tar.Decoder().feed(raw))
