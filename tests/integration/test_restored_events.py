"""After a restore nobody hears of what was closed before it: neither programs nor the supervisor,
which rests when there is nothing to do."""

from __future__ import annotations

import time

import pytest

from sojourn.client import Process, Session
from support.servers import eventually

pytestmark = pytest.mark.privileged

PAIRS = 4
MOST_TICKS = 20  # of a hundred in the second that is looked at

# All wait for the same moment, so that the supervisor hears of several at once.
WAIT = "read line < /tmp/begin; for i in 1 2 3 4 5; do echo $i; done; "
ENDS, STAYS = "read line < /tmp/end", "sleep 1000"


# Two that are found not ready in one look, of which one goes before the freeze.
PROGRAM = """
import os, select
events = select.epoll()
(gone, gone_end), (left, left_end) = os.pipe(), os.pipe()
for end in (gone, left):
    events.register(end, select.EPOLLIN)
for end in (gone_end, left_end):
    os.write(end, b"x")
assert len(events.poll(0)) == 2
for end in (gone, left):
    os.read(end, 1)
assert not events.poll(0)
events.unregister(gone)
os.close(gone)
os.close(gone_end)
print("ready", flush=True)
input()
print(events.poll(0), flush=True)
os.write(left_end, b"x")
print(events.poll(0) == [(left, select.EPOLLIN)], flush=True)
"""


def said(program: Process) -> list[bytes]:
    return b"".join(one.data for one in program.output(follow=False)).splitlines()


def ticks(session: Session) -> int:
    """Processor time of the first process, in hundredths of a second."""
    fields = session.exec("cat /proc/1/stat").stdout.rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_streams_closed_before_a_freeze_trouble_nobody_after_it(session: Session) -> None:
    session.exec("mkfifo /tmp/begin /tmp/end")
    programs = [session.spawn(WAIT + last) for _ in range(PAIRS) for last in (ENDS, STAYS)]
    ending, staying = programs[::2], programs[1::2]

    def said_all() -> bool:
        session.exec(": <> /tmp/begin")  # lets go whoever waits by now
        return all(b"5" in b"".join(o.data for o in one.output(follow=False)) for one in programs)

    def ended() -> bool:
        session.exec(": <> /tmp/end")
        return not any(session.process(one.id).info.running for one in ending)

    time.sleep(0.5)  # for all of them to wait, or they are let go one by one
    eventually(said_all, 60)
    eventually(ended, 60)
    session.suspend()
    session.resume()
    assert all(session.process(one.id).info.running for one in staying)
    before = ticks(session)
    time.sleep(1)
    assert ticks(session) - before < MOST_TICKS


def test_no_program_is_told_of_what_it_had_removed(session: Session) -> None:
    program = session.spawn(["python3", "-c", PROGRAM], stdin="pipe")
    eventually(lambda: said(program) == [b"ready"], 60)
    session.suspend()
    session.resume()
    program.write(b"go\n")
    program.wait()
    assert said(program) == [b"ready", b"[]", b"True"]
