"""C65 and its kin: a session that takes all it can get hurts nobody but itself, and says why."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from sojourn.client import Sojourn
from sojourn.errors import ProcessNotFound, SandboxLost, SojournError
from support.servers import eventually

BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.parametrize("user", ["root", "agent"])
def test_c65_a_fork_bomb_stays_in_its_session(client: Sojourn, user: str) -> None:
    victim = client.sessions.create(limits={"pids": 64})
    neighbour = client.sessions.create()
    try:
        victim.exec("id agent || useradd -m agent")
        victim.files.write("/srv/kept", b"kept")
        told = None
        try:
            done = victim.exec(["python3", "-c", BOMB], timeout=3, user=user)
        except SojournError as error:
            told = error
        else:
            assert done.timed_out or done.reason or done.exit_code != 0
        if told is not None:
            assert told.code in ("sandbox_lost", "command_not_started", "quota_exceeded"), told
        # The neighbour and the server serve on.
        assert neighbour.exec("echo fine").text == "fine\n"
        assert client.health().status == "ok"

        # The session itself serves again, by itself.
        def usable() -> bool:
            try:
                return victim.exec("cat /srv/kept", timeout=20).text == "kept"
            except SojournError:
                return False

        assert eventually(usable, timeout=60)
        assert int(victim.exec("ls /proc | grep -c '^[0-9]'").text) < 64
    finally:
        victim.delete()
        neighbour.delete()


def test_c65_a_bomb_left_behind_can_be_suspended_or_deleted(client: Sojourn) -> None:
    session = client.sessions.create(limits={"pids": 48})
    session.spawn(["python3", "-c", BOMB])
    try:
        session.suspend()
        assert session.refresh().state in ("suspended", "running")
    except SojournError as error:
        assert error.code != "internal", error
    finally:
        session.delete()
    with pytest.raises(SojournError) as raised:
        session.refresh()
    assert raised.value.code == "session_not_found"


def test_c65_processes_beyond_the_limit_are_ended_with_the_reason(client: Sojourn) -> None:
    session = client.sessions.create(limits={"pids": 32}, policy={"auto_snapshot": "off"})
    try:
        refused = 0
        for _ in range(60):
            try:
                session.spawn("exec sleep 1000")
            except SojournError as error:
                assert error.code in ("command_not_started", "quota_exceeded"), error
                refused += 1

        def bounded() -> bool:
            return len([one for one in session.processes() if one.running]) <= 32

        assert eventually(bounded)
        ended = [one for one in session.processes() if not one.running]
        assert len(ended) + refused >= 28
        assert {one.info.reason for one in ended} <= {"process limit exceeded"}
        for process in session.processes():
            with contextlib.suppress(ProcessNotFound):  # it has ended
                process.kill()
        assert eventually(lambda: session.exec("echo free").text == "free\n")
    finally:
        session.delete()


HOG = "data = []\nwhile True: data.append(bytearray(8 << 20))"


def test_c65_a_memory_hog_ends_with_its_cause(client: Sojourn) -> None:
    session = client.sessions.create(limits={"memory_bytes": 256 << 20})
    neighbour = client.sessions.create()
    try:
        session.files.write("/srv/kept", b"kept")
        session.snapshot("good")
        try:
            done = session.exec(["python3", "-c", HOG], timeout=60)
        except SandboxLost as error:
            assert "memory" in str(error)
        else:
            # The runtime refused the memory, or ended the one process.
            assert done.exit_code != 0
            assert not done.timed_out
        assert neighbour.exec("echo fine").text == "fine\n"
        # It goes on from its last snapshot by itself.
        assert eventually(lambda: session.refresh().state != "creating")
        assert session.exec("cat /srv/kept").text == "kept"
        lost = [event for event in session.events() if event.kind == "sandbox.lost"]
        if lost:
            assert "memory" in lost[-1].details["cause"]
    finally:
        session.delete()
        neighbour.delete()


def test_c65_endless_output_is_bounded(client: Sojourn) -> None:
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    try:
        process = session.spawn("yes", keep=1 << 20)
        assert eventually(lambda: process.refresh().info.stdout[1] > 50 << 20)
        first, following = process.info.stdout
        assert following - first <= 4 << 20
        session.suspend()
        image = session.history()[-1]
        assert image.memory_bytes < 200 << 20
        process.kill()
    finally:
        session.delete()


def test_c65_many_sessions_work_at_once(client: Sojourn) -> None:
    def one(number: int) -> str:
        session = client.sessions.create()
        try:
            session.files.write("/srv/me", str(number))
            session.suspend()
            return session.exec("cat /srv/me").text
        finally:
            session.delete()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [str(number) for number in range(8)]
