"""Output of background processes and terminals survives suspend and fork, by offset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sojourn.client import Process, Session
from sojourn.errors import Interrupted, OutputTruncated, ProcessNotFound, SojournError
from support.servers import eventually


def read(process: Process, offset: int, wanted: bytes) -> bytes:
    """Output from `offset` on until it ends with `wanted`."""
    got = b""
    while not got.endswith(wanted):
        with contextlib.suppress(Interrupted):
            for piece in process.output((offset + len(got), 0)):
                assert piece.offset == offset + len(got)
                got += piece.data
                if got.endswith(wanted):
                    break
            else:
                break
    return got


def test_output_goes_on_by_offset_through_suspend_and_fork(session: Session) -> None:
    process = session.spawn("i=0; while read x; do i=$((i+1)); echo got $i $x; done", stdin="pipe")
    process.write("a\n")
    assert read(process, 0, b"got 1 a\n") == b"got 1 a\n"
    session.suspend()
    process.write("b\n")
    assert read(process, 0, b"got 2 b\n") == b"got 1 a\ngot 2 b\n"
    assert read(process, 8, b"got 2 b\n") == b"got 2 b\n"
    [fork] = session.fork(1)
    ours, theirs = process, fork.process(process.id)
    ours.write("ours\n")
    theirs.write("theirs\n")
    assert read(ours, 16, b"ours\n") == b"got 3 ours\n"
    assert read(theirs, 16, b"theirs\n") == b"got 3 theirs\n"
    theirs.write("end\n", eof=True)
    assert theirs.wait(30).exit_code == 0
    fork.suspend()
    # Ended processes keep their output and exit code too.
    assert fork.process(process.id).exit_code == 0
    assert b"".join(piece.data for piece in theirs.output()).endswith(b"got 4 end\n")
    fork.delete()
    session.pause()
    ours.write("paused\n")
    assert read(ours, 27, b"paused\n") == b"got 4 paused\n"


def test_a_rollback_takes_output_and_processes_back(session: Session) -> None:
    process = session.spawn("while read x; do echo got $x; done", stdin="pipe")
    process.write("one\n")
    assert read(process, 0, b"one\n") == b"got one\n"
    before = session.snapshot("before")
    process.write("two\n")
    assert read(process, 0, b"two\n") == b"got one\ngot two\n"
    later = session.spawn("sleep 1000")
    session.rollback(before)
    assert process.refresh().info.stdout == (0, 8)
    process.write("other\n")
    assert read(process, 0, b"other\n") == b"got one\ngot other\n"
    with pytest.raises(ProcessNotFound):
        later.refresh()


def test_a_terminal_survives_suspend_and_fork(session: Session) -> None:
    shell = session.spawn(["sh", "-i"], pty=(24, 80), stdin="pipe")
    shell.write("PS1='> '; X=kept; echo rea''dy\n")
    size = len(read(shell, 0, b"ready\r\n> "))
    session.suspend()
    shell.write("echo $X-$((40+2)); tty; stty size\n")
    got = read(shell, size, b"24 80\r\n> ")
    assert b"kept-42\r\n/dev/pts/" in got
    shell.resize(50, 132)
    shell.write("stty size\n")
    assert read(shell, size + len(got), b"50 132\r\n> ")
    [fork] = session.fork(1)
    twin = fork.process(shell.id)
    start = twin.info.stdout[1]
    twin.write("echo $X again\n")
    assert b"kept again\r\n" in read(twin, start, b"again\r\n> ")
    twin.write("exit 9\n")
    assert twin.wait(30).exit_code == 9
    fork.delete()


def test_output_beyond_what_is_kept_is_said_not_missing(session: Session) -> None:
    process = session.spawn("seq 1 200000; sleep 1000", keep=65536)
    assert eventually(lambda: process.refresh().info.stdout[1] == 1288895)
    first, following = process.info.stdout
    assert first > 0
    assert following - first <= 2 * 65536
    with pytest.raises(OutputTruncated) as raised:
        list(process.output(0, follow=False))
    assert raised.value.details["first_offset"] == first
    kept = b"".join(piece.data for piece in process.output((first, 0), follow=False))
    assert kept == b"".join(b"%d\n" % n for n in range(1, 200001))[first:]
    session.suspend()
    assert process.refresh().info.stdout == (first, following)
    process.kill()


def test_lossless_output_is_held_back_for_its_reader(session: Session) -> None:
    process = session.spawn("seq 1 400000", keep=65536, lossless=True)
    session.suspend()
    got = b""
    while True:
        try:
            for piece in process.output((len(got), 0)):
                assert piece.offset == len(got)
                got += piece.data
            break
        except Interrupted:
            continue
    assert got == b"".join(b"%d\n" % n for n in range(1, 400001))
    assert process.wait(30).exit_code == 0


def test_signals_reach_what_they_name(session: Session) -> None:
    for name, code in (("TERM", 143), ("KILL", 137), (2, 130)):
        process = session.spawn("exec sleep 1000")
        process.signal(name)
        assert process.wait(30).exit_code == code
    with pytest.raises(SojournError) as raised:
        session.spawn("sleep 1000").signal("NONSENSE")
    assert raised.value.code == "invalid_request"
    with pytest.raises(ProcessNotFound):
        session.process(987654)


@pytest.fixture(autouse=True)
def _usable(session: Session) -> Iterator[None]:
    yield
    assert session.exec("echo usable").text == "usable\n"
