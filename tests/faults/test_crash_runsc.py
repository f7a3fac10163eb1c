"""Commands of the sandbox runtime, or parts of a sandbox, are killed in the middle of a verb: the
caller gets a typed error or the result, the session rests, and the verb repeated works."""

from __future__ import annotations

import itertools
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError
from sojourn.node import tools
from sojourn.node.sandboxes import ATTACH_SECONDS
from support.histories_machine import Machine, await_true
from support.servers import ServerProcess

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(120)]

# Does what the file beside it says to one command, then is runsc itself again.
WRAPPER = """#!/bin/sh
order={order}
case "$*" in *--version*) exec {runsc} "$@";; esac
[ -f "$order" ] || exec {runsc} "$@"
read -r what < "$order"
rm -f "$order"
[ "$what" = early ] && exit 3
{runsc} "$@" &
child=$!
sleep "$what"
kill -9 $child 2>/dev/null
wait $child
"""
MOMENTS = ["early", "0", "0.02", "0.05", "0.1", "0.2"]


class Rig:
    """A server whose runsc can be told to fail."""

    def __init__(self, directory: Path) -> None:
        self.order = directory / "order"
        wrapper = directory / "runsc"
        quoted = {
            "order": shlex.quote(str(self.order)),
            "runsc": shlex.quote(str(tools.runsc_path())),
        }
        wrapper.write_text(WRAPPER.format(**quoted))
        wrapper.chmod(0o755)
        self.server = ServerProcess(directory / "data")
        self.client: Sojourn = self.server.start(SOJOURN_RUNSC=str(wrapper))
        self.machine = Machine(self.server)
        self.kept: Session | None = None

    def session(self) -> Session:
        """A session with a file and a variable: that of the last test, unless that failed."""
        kept, self.kept = self.kept, None
        if kept is not None:
            return kept
        self.clear()
        session = self.client.sessions.create()
        assert session.exec("echo kept > /root/file").exit_code == 0
        assert session.run_code("value = 41; value").text == "41"
        session.history()  # waits for the snapshot of the last turn
        return session

    def keep(self, session: Session) -> None:
        """It is whole after a test: nothing but it is left, for the next one."""
        self.clear(session)
        session.exec("rm -f /root/later")
        session.history()
        self.kept = session

    def clear(self, but: Session | None = None) -> None:
        for left in self.client.sessions.list():
            if but is None or left.id != but.id:
                left.delete()
        sandbox = self.machine.sandbox_of(but.id) if but is not None else None
        self.machine.check_empty(but=None if but is None else [sandbox] if sandbox else [])

    def break_next(self, moment: str) -> None:
        self.order.write_text(moment + "\n")

    def mend(self) -> None:
        self.order.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("runsc"))
    yield rig
    rig.mend()
    rig.clear()
    rig.client.close()
    rig.server.remove()


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    rig.mend()
    session = rig.session()
    yield session
    rig.mend()
    if session.id in [found.id for found in rig.client.sessions.list()] and whole(session):
        rig.keep(session)


def attempt(call: Callable[[], object]) -> SojournError | None:
    """What a call raised: only errors of the tree that name their cause."""
    try:
        call()
    except SojournError as error:
        assert error.code != "internal", error
        assert error.message
        return error
    return None


def whole(session: Session) -> bool:
    try:
        check(session)
    except (AssertionError, SojournError):
        return False
    return True


def check(session: Session) -> None:
    assert session.files.read("/root/file") == b"kept\n"
    assert session.run_code("value").text == "41"


def rests(rig: Rig) -> None:
    for session in rig.client.sessions.list():
        assert session.info.operation is None, session.info
        assert session.state in ("running", "paused", "suspended", "failed"), session.info


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_that_breaks_leaves_nothing(rig: Rig, moment: str) -> None:
    rig.clear()
    rig.kept = None
    rig.break_next(moment)
    error = attempt(lambda: rig.client.sessions.create(name="broken"))
    rig.mend()
    rests(rig)
    for session in rig.client.sessions.list():
        assert session.state == ("failed" if error else "running")
        session.delete()
    rig.machine.check_empty()
    again = rig.client.sessions.create(name="broken")
    assert again.exec("echo here").text == "here\n"
    again.delete()
    rig.machine.check_empty()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restore_that_breaks_can_be_repeated(rig: Rig, session: Session, moment: str) -> None:
    session.suspend()
    rig.break_next(moment)
    error = attempt(session.resume)
    rig.mend()
    rests(rig)
    assert session.refresh().state == ("suspended" if error else "running")
    session.resume()
    check(session)


@pytest.mark.parametrize("moment", MOMENTS[:4])
def test_a_rollback_that_breaks_leaves_the_session(rig: Rig, session: Session, moment: str) -> None:
    point = session.snapshot()
    session.exec("echo later > /root/later")
    rig.break_next(moment)
    error = attempt(lambda: session.rollback(point))
    rig.mend()
    rests(rig)
    assert session.refresh().state == "running"
    assert session.files.exists("/root/later") == (error is not None)
    check(session)
    session.rollback(point)
    assert not session.files.exists("/root/later")
    check(session)


@pytest.mark.parametrize("moment", MOMENTS[:4])
def test_a_fork_that_breaks_is_no_fork(rig: Rig, session: Session, moment: str) -> None:
    rig.break_next(moment)
    made: list[Session] = []
    error = attempt(lambda: made.extend(session.fork(2)))
    rig.mend()
    rests(rig)
    assert len(rig.client.sessions.list()) == (1 if error else 3)  # it and its children
    check(session)
    for child in made or session.fork(2):
        check(child)


def test_a_restored_sandbox_without_its_file_server_keeps_nobody_waiting(
    rig: Rig, session: Session
) -> None:
    """Its kernel lives on, unlike that of one that was started, and the turn's snapshot freezes
    it: what waits for the supervisor then does not wait for all of its time."""
    session.suspend()
    session.resume()
    sandbox = rig.machine.sandbox_of(session.id)
    assert sandbox is not None
    session.run_code("value")
    assert rig.machine.kill(sandbox, "gofer") > 0
    begun = time.monotonic()
    attempt(lambda: session.run_code("value"))
    session.resume()
    check(session)
    assert time.monotonic() - begun < ATTACH_SECONDS


VERBS: dict[str, Callable[[Session], object]] = {
    "pause": lambda session: session.pause(),
    "suspend": lambda session: session.suspend(),
    "snapshot": lambda session: session.snapshot(),
    "fork": lambda session: session.fork(1),
    "rollback": lambda session: session.rollback(str(session.refresh().head)),
    "exec": lambda session: session.exec("sleep 0.1"),
    "code": lambda session: session.run_code("import time; time.sleep(0.1)"),
}
_moment = itertools.cycle((0.0, 0.01, 0.03, 0.06, 0.1))


@pytest.mark.parametrize("part", ["boot", "gofer"])
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_sandbox_killed_in_a_verb(rig: Rig, session: Session, verb: str, part: str) -> None:
    sandbox = rig.machine.sandbox_of(session.id)
    assert sandbox is not None
    delay = next(_moment)

    def strike() -> None:
        time.sleep(delay)
        rig.machine.kill(sandbox, part)

    thread = threading.Thread(target=strike)
    thread.start()
    attempt(lambda: VERBS[verb](session))
    thread.join()
    await_true(lambda: rests(rig), 20)
    assert session.refresh().state != "failed", session.info
    session.resume()
    check(session)
    VERBS[verb](session)
    check(session)
