"""Names are answered inside, whatever bytes a question is made of."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
SOURCES = HERE.parent / "supervisor"
MOST = 131_000


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The supervisor's answers as a program of its own, watched for wrong accesses."""
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    program = tmp_path_factory.mktemp("names") / "names"
    sources = [HERE / "support" / "names_harness.c", SOURCES / "names.c", SOURCES / "bytes.c"]
    options = ["-D_GNU_SOURCE", "-std=gnu11", "-O1", "-fsanitize=address,undefined"]
    subprocess.run(["cc", *options, "-fno-sanitize-recover", "-o", program, *sources], check=True)
    return program


def asked(harness: Path, questions: list[bytes], *addresses: str) -> tuple[list[bytes], list[str]]:
    """The answers, and the names that the addresses stand for in the end."""
    told = b"".join(struct.pack("<H", len(one)) + one for one in questions)
    done = subprocess.run([harness, *addresses], input=told, capture_output=True, check=True)
    answers, at = [], 0
    for _ in questions:
        (length,) = struct.unpack_from("<H", done.stdout, at)
        answers.append(done.stdout[at + 2 : at + 2 + length])
        at += 2 + length
    assert at == len(done.stdout)
    return answers, done.stderr.decode().split()


def question(name: bytes, kind: int = 1, *, flags: int = 0x0100, klass: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".") if label)
    head = struct.pack(">HHHHHH", 0xABCD, flags, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack(">HH", kind, klass)


def address(answer: bytes) -> str:
    """The one address of an answer that is right in every field."""
    head = struct.unpack_from(">HHHHHH", answer)
    assert (head[0], head[1] & 0x800F, head[2:]) == (0xABCD, 0x8000, (1, 1, 0, 0))
    pointer, kind, klass, ttl, size = struct.unpack(">HHHIH", answer[-16:-4])
    assert (pointer, kind, klass, ttl, size) == (0xC00C, 1, 1, 1, 4)
    return socket.inet_ntoa(answer[-4:])


def test_each_name_has_an_address_of_its_own_and_back(harness: Path) -> None:
    names = [b"a.test", b"b.test", b"A.Test", b"_x-1.a.test", b"l" * 63 + b".test"]
    answers, back = asked(
        harness, [question(name) for name in names], "198.18.0.1", "198.18.0.4", "198.18.0.5"
    )
    given = [address(answer) for answer in answers]
    assert given == ["198.18.0.1", "198.18.0.2", "198.18.0.1", "198.18.0.3", "198.18.0.4"]
    assert back == ["a.test", "l" * 63 + ".test", "-"]


@pytest.mark.parametrize(
    ("asks", "code", "answers"),
    [
        (question(b"a.test", 28), 0, 0),  # there are no IPv6 addresses
        (question(b"a.test", 255), 0, 0),
        (question(b"1.0.0.127.in-addr.arpa", 12), 0, 0),
        (question(b""), 0, 0),
        (question(b"single"), 3, 0),
        (question(b"sp ace.test"), 3, 0),
        (question(b"ze\0ro.test"), 3, 0),
        (question(b"a.test", klass=3), 4, 0),
        (question(b"a.test", flags=0x2900), 4, 0),
        (question(b"a.test")[:-3], 1, 0),
        (question(b"a.test").replace(b"\4test", b"\x40test"), 1, 0),
        (question(b"a.test").replace(b"\4test", b"\xc0\x0ctest"), 1, 0),
        (question(b".".join([b"x" * 60] * 5)), 1, 0),
        (question(b"a.test")[:5] + b"\2" + question(b"a.test")[6:], 1, 0),
    ],
)
def test_other_questions_get_an_answer_without_an_address(
    harness: Path, asks: bytes, code: int, answers: int
) -> None:
    (answer,), _ = asked(harness, [asks])
    assert answer[:2] == asks[:2] and answer[2] & 0x80
    assert (answer[3] & 15, struct.unpack_from(">H", answer, 6)[0]) == (code, answers)


def test_what_is_no_question_is_not_answered(harness: Path) -> None:
    """An answer to an answer could go round for ever."""
    answers, _ = asked(harness, [b"", b"x" * 11, question(b"a.test", flags=0x8180)])
    assert answers == [b"", b"", b""]


def test_any_bytes_are_survived(harness: Path) -> None:
    choose = random.Random(7)
    asks = []
    for _ in range(20_000):
        data = bytearray(question(b"x%d.y.test" % choose.randrange(99)))
        data += choose.randbytes(choose.randrange(30))
        for _ in range(choose.randrange(8)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        asks.append(bytes(data[: choose.randrange(len(data) + 1)]))
    asks.append(question(b"after.test"))
    answers, _ = asked(harness, asks)
    assert all(len(answer) <= 512 for answer in answers)
    assert address(answers[-1]).startswith("198.1")


def test_the_least_recently_used_gives_up_its_address(harness: Path) -> None:
    asks = [question(b"n%d.test" % n) for n in range(MOST)]
    asks += [question(b"n0.test"), question(b"new.test"), question(b"n1.test")]
    answers, back = asked(harness, asks, "198.18.0.1", "198.18.0.2", "198.18.0.3")
    assert [address(one) for one in answers[-3:]] == ["198.18.0.1", "198.18.0.2", "198.18.0.3"]
    assert back == ["n0.test", "new.test", "n1.test"]
    assert max(int(socket.inet_aton(address(one)).hex(), 16) for one in answers) < 0xC613FFFE
