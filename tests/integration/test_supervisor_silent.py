"""A supervisor that root inside has stopped with a debugger: every verb converges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sojourn.client import Session
from sojourn.errors import SandboxLost
from support import servers
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged

# The same server, which waits for a second or two instead of many.
_IMPATIENT = """
from sojourn.node import link_connection, sandboxes
link_connection.PROBE_SECONDS, link_connection.SILENT_SECONDS = 0.2, 2.0
link_connection.Connection.__init__.__kwdefaults__["reconnect_within"] = 1.0
sandboxes.DETACH_SECONDS = 1.0
from sojourn.cli.main import main
main()
"""
# What a debugger does; it stays, for its end would let go of the supervisor.
_DEBUGGER = """
import ctypes, time
open("/root/attached", "w").write(str(ctypes.CDLL(None).ptrace(16, 1, None, None)))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("silent") / "data", whole=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "UP", (sys.executable, "-c", _IMPATIENT, "up"))
        server.start()
        yield server
        server.remove()


def _attached(server: ServerProcess) -> bool:
    """Seen from outside: nothing can be asked inside."""
    marks = list(server.data.glob("sandboxes/*/upper/root/attached"))
    return bool(marks) and marks[0].read_text() == "0"


@pytest.mark.parametrize(
    "verb",
    [
        lambda session: session.snapshot(),
        lambda session: session.pause(),
        lambda session: session.suspend(),
    ],
    ids=["snapshot", "pause", "suspend"],
)
def test_every_verb_converges_with_a_stopped_supervisor(
    impatient: ServerProcess, verb: Callable[[Session], object]
) -> None:
    """The command that stopped it, the verb and the command after it all end; the session is what
    its last snapshot says, the files of since are beside it."""
    session = impatient.client().sessions.create(policy={"auto_snapshot": "off"})
    try:
        session.files.write("/root/work", b"at the snapshot")
        session.snapshot(label="good")
        session.files.write("/root/work", b"written since")
        with ThreadPoolExecutor() as threads:
            stopping = threads.submit(session.exec, ["python3", "-c", _DEBUGGER], timeout=5)
            eventually(lambda: _attached(impatient))
            second = impatient.client().sessions.get(session.id)
            after = threads.submit(verb, second)
            beside = threads.submit(session.exec, "echo up", timeout=5)
            stopped, *others = [one.exception(60) for one in (stopping, after, beside)]
        assert isinstance(stopped, SandboxLost), stopped
        assert all(one is None or isinstance(one, SandboxLost) for one in others), others
        # What is asked next resumes it: nothing is in the way.
        assert session.files.read("/root/work") == b"at the snapshot"
        (lost,) = [event for event in session.events() if event.kind == "sandbox.lost"]
        assert "supervisor" in lost.details["cause"]
        session.rollback(lost.details["salvaged"])
        assert session.files.read("/root/work") == b"written since"
    finally:
        session.delete()
