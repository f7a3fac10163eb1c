"""Whatever a caller was told of as done is in a snapshot, however it was done.

Group B of the cases (acknowledged state lost): what a session holds when its machine dies is its
last snapshot, so a command whose input was streamed, a process whose end somebody saw, and what
was typed into one must not wait for the next command to be kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from sojourn.client import Session, Sojourn
from support.servers import eventually


@pytest.fixture
def head_has(client: Sojourn, session: Session) -> Iterator[Callable[[str], bytes | None]]:
    """What a file holds in the newest snapshot, whatever the session holds by now."""
    made: list[Session] = []

    def look(path: str) -> bytes | None:
        newest = session.history()[-1]
        fork = session.fork(1, snapshot=newest.id)[0]
        made.append(fork)
        return fork.files.read(path) if fork.files.exists(path) else None

    yield look
    for fork in made:
        fork.delete()


def test_streamed_input_is_in_the_snapshot(
    session: Session, head_has: Callable[[str], bytes | None]
) -> None:
    data = b"z" * 3_000_000
    result = session.exec("sleep 0.3; cat > /root/fed", stdin=data)
    assert result.exit_code == 0
    assert head_has("/root/fed") == data


def test_what_a_process_did_is_kept_once_its_end_was_told(
    session: Session, head_has: Callable[[str], bytes | None]
) -> None:
    session.spawn("sleep 0.3; echo waited > /root/waited").wait()
    assert head_has("/root/waited") == b"waited\n"
    process = session.spawn("sleep 0.3; echo read > /root/read")
    assert list(process.output()) == []
    process.wait()
    assert head_has("/root/read") == b"read\n"


def test_the_end_of_a_process_nobody_waits_for_is_noticed(session: Session) -> None:
    session.spawn("sleep 0.5; echo alone > /root/alone")
    session.history()  # settles the snapshot of its start
    before = session.refresh().head
    eventually(lambda: session.refresh().head != before)
    assert "/root/alone" in {change.path for change in session.diff().changes}


@pytest.mark.parametrize("pty", [None, (24, 80)])
def test_input_to_a_process_is_a_change(session: Session, pty: tuple[int, int] | None) -> None:
    shell = session.spawn("exec sh", stdin=None if pty else "pipe", pty=pty)
    session.history()
    before = session.refresh().head
    shell.write(b"echo typed > /root/typed\n")
    eventually(lambda: session.refresh().head != before)
    eventually(lambda: "/root/typed" in {change.path for change in session.diff().changes})


def test_a_typed_variable_is_in_the_snapshot(session: Session) -> None:
    python = session.spawn(["python3", "-q", "-i"], pty=(24, 80))
    eventually(lambda: b">>>" in b"".join(piece.data for piece in python.output(follow=False)))
    session.history()
    before = session.refresh().head
    python.write(b"kept = 41\n")
    eventually(lambda: session.refresh().head != before)
    fork = session.fork(1, snapshot=session.history()[-1].id)[0]
    try:
        twin = fork.process(python.id)
        twin.write(b"print(kept + 1)\n")
        eventually(lambda: b"\n42" in b"".join(piece.data for piece in twin.output(follow=False)))
    finally:
        fork.delete()


def test_code_that_ran_beside_another_turns_snapshot_is_kept(session: Session) -> None:
    session.run_code("kept = 0")
    long = threading.Thread(
        target=session.run_code,
        args=("open('/tmp/begun', 'w'); import time; time.sleep(1.8); kept = 7",),
    )
    long.start()
    eventually(lambda: session.files.exists("/tmp/begun"))
    session.exec("touch /root/beside")  # its snapshot is taken while the code runs
    long.join()
    fork = session.fork(1, snapshot=session.history()[-1].id)[0]
    try:
        assert fork.run_code("kept").text == "7"
    finally:
        fork.delete()


def test_commands_that_end_beside_a_snapshot_are_kept(
    session: Session, head_has: Callable[[str], bytes | None]
) -> None:
    slow = threading.Thread(target=session.exec, args=("sleep 1.2; echo slow > /root/slow",))
    slow.start()
    for number in range(12):
        session.exec(f"echo {number} > /root/quick{number}")
    slow.join()
    assert head_has("/root/slow") == b"slow\n"
