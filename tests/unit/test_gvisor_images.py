"""Of a memory image nothing comes back that a program had removed; the image stays as it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.node.isolation.gvisor_images import (
    STATE,
    Findings,
    image_to_restore,
    removed_registrations,
)

UINT, NIL, REF, STRING, MAP, STRUCT, FIELDS, TYPE = 2, 5, 6, 7, 10, 11, 13, 17
OBJECTS = 1 << 63
REGISTRATION, KEY, OTHER = 1, 2, 3
TYPES = [
    ("pkg/sentry/vfs.epollInterest", ["key", "mask", "userData"]),
    ("pkg/sentry/vfs.epollInterestKey", ["file", "num"]),
    ("pkg/sentry/vfs.Else", ["mask"]),
]


def number(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def text(value: str) -> bytes:
    return number(len(value)) + value.encode()


def uint(value: int) -> bytes:
    return number(UINT) + number(value)


def struct(kind: int, *fields: bytes) -> bytes:
    return number(STRUCT) + number(kind) + number(FIELDS) + number(len(fields)) + b"".join(fields)


def key(descriptor: int) -> bytes:
    return struct(KEY, number(REF) + number(50) + number(1) + number(9) + b"vfsfd" + b"\0\5",
                  uint(descriptor))  # fmt: skip


def registration(descriptor: int, events: int) -> bytes:
    mask = uint(events) if events else number(NIL)
    return struct(REGISTRATION, key(descriptor), mask, number(STRING) + text("data"))


def interest(kept: dict[int, int]) -> bytes:
    """Descriptors and the numbers of their registrations, as a set knows them."""
    body = b""
    for index, (descriptor, target) in enumerate(kept.items()):
        one, reference = key(descriptor), number(REF)
        body += one if not index else one.removeprefix(number(STRUCT))
        body += (b"" if index else reference) + number(target) + number(0)
    return number(MAP) + number(len(kept)) + body


def graph(*objects: tuple[int, bytes]) -> bytes:
    types = b"".join(
        number(TYPE) + text(name) + number(len(fields)) + b"".join(map(text, fields))
        for name, fields in TYPES
    )
    return number(OBJECTS | len(objects)) + types + b"".join(uint(n) + one for n, one in objects)


def file(stream: bytes, sizes: Callable[[], int]) -> bytes:
    """As the runtime writes it: in pieces, nearly all of one byte."""
    description = b'{"compression":"none"}'
    out = b"gVisorSF" + len(description).to_bytes(8, "big") + description + bytes(32)
    while stream:
        piece, stream = stream[: (size := sizes())], stream[size:]
        out += len(piece).to_bytes(4, "big") + piece
        assert len(piece) <= size
    return out


EVENTS = 0x80002001  # five bytes of its own
STREAM = graph((1, struct(OTHER, uint(25)))) + graph(
    (1, registration(3, 25)),
    (2, interest({3: 1, 7: 4})),
    (3, registration(5, EVENTS)),
    (4, registration(7, 25)),
    (5, registration(9, 0)),
    (6, registration(11, 25)),
    (7, struct(OTHER, uint(25))),
)


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_removed_registrations_are_muted_and_nothing_else(tmp_path: Path, most: int) -> None:
    chance = random.Random(7)
    raw = file(STREAM, lambda: chance.randint(1, most))
    places = removed_registrations(raw)
    assert [len(one) for one in places] == [5, 1]
    assert [bytes(raw[at] for at in one) for one in places] == [number(EVENTS), number(25)]
    image = tmp_path / "image"
    image.mkdir()
    (image / STATE).write_bytes(raw)
    (image / "pages.img").write_bytes(b"pages")
    source = image_to_restore(image, tmp_path / "room", Findings())
    assert source == tmp_path / "room" and (image / STATE).read_bytes() == raw
    assert (source / "pages.img").read_bytes() == b"pages"
    changed = (source / STATE).read_bytes()
    touched = {at for one in places for at in one}
    assert len(changed) == len(raw)
    assert all(a == b for at, (a, b) in enumerate(zip(raw, changed, strict=True))
               if at not in touched)  # fmt: skip
    # The same structure with no events to wait for, in as many bytes.
    assert [bytes(changed[at] for at in one) for one in places] == [b"\x80\x80\x80\x80\0", b"\0"]


def test_an_image_with_none_is_restored_as_it_is(tmp_path: Path) -> None:
    stream = graph((1, registration(3, 25)), (2, interest({3: 1})))
    (tmp_path / STATE).write_bytes(file(stream, lambda: 1))
    assert image_to_restore(tmp_path, tmp_path / "room", Findings()) == tmp_path
    assert not (tmp_path / "room").exists()


def test_what_is_not_as_expected_is_restored_as_it_is_and_keeps_nobody_busy(tmp_path: Path) -> None:
    chance = random.Random(11)
    raw = file(STREAM, lambda: 1)
    forged = [
        b"",
        b"gVisorSF" + b"\xff" * 100,
        file(number(OBJECTS | 1) + uint(1) + number(9) + number(1 << 62) + number(NIL), lambda: 1),
        file(number(OBJECTS | 1) + b"\xff" * 100_000, lambda: 50_000),
        file(number(OBJECTS | 1) + uint(1) + number(STRUCT) * 50_000, lambda: 1),
        # Parts that take no room would take memory, and there are as many as it says.
        file(number(OBJECTS | 1) + uint(1) + number(MAP) + number(1 << 24) + b"\5\5", lambda: 9),
        *(raw[: chance.randrange(len(raw))] for _ in range(200)),
    ]
    for _ in range(1000):
        damaged = bytearray(raw)
        damaged[chance.randrange(len(raw))] = chance.randrange(256)
        forged.append(bytes(damaged))
    for index, one in enumerate(forged):
        (tmp_path / STATE).write_bytes(one)
        source = image_to_restore(tmp_path, tmp_path / str(index), Findings())
        assert source == tmp_path or len((source / STATE).read_bytes()) == len(one)


def test_a_large_part_is_not_read_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / STATE).open("wb") as sparse:
        sparse.truncate(1 << 40)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read"))
    assert image_to_restore(tmp_path, tmp_path / "room", Findings()) == tmp_path


def test_an_image_is_read_once_however_many_restore_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read(raw: bytes) -> list[list[int]]:
        reads.append(len(raw))
        return removed_registrations(raw)

    monkeypatch.setattr("sojourn.node.isolation.gvisor_images.removed_registrations", read)
    (tmp_path / STATE).write_bytes(file(STREAM, lambda: 1))
    findings = Findings()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: findings.of(tmp_path / STATE), range(32)))
    assert all(one == found[0] for one in found) and len(found[0]) == 2
    assert len(reads) == 1
    # Another file in its place is another image; what cannot be read is not remembered.
    (tmp_path / "other").write_bytes(b"gVisorSF")
    (tmp_path / "other").replace(tmp_path / STATE)
    for _ in range(2):
        with pytest.raises((LookupError, ValueError)):
            findings.of(tmp_path / STATE)
    assert len(reads) == 3
