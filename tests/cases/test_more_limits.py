"""A command that the memory limit ended says so.

Group E of the cases (a reason given): where the limit ends one part of a sandbox, the rest may go
on for a moment, in which a plain exit code would hide that the session falls back to its last
snapshot.
"""

from __future__ import annotations

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SandboxLost

GREEDY = "held = []\nwhile True:\n    held.append(b'a' * 10_000_000)"


@pytest.mark.parametrize("how", ["exec", "code"])
def test_the_memory_limit_is_told_by_the_call_that_met_it(client: Sojourn, how: str) -> None:
    session = client.sessions.create(limits={"memory_bytes": 200 * 1024**2})
    try:
        session.files.write("/root/kept", b"kept")
        with pytest.raises(SandboxLost) as lost:
            _take_all(session, how)
        assert "memory limit" in str(lost.value)
        # Told once: the next call meets a session that serves again, and keeps.
        session.exec("echo after > /tmp/after")
        assert session.exec("cat /root/kept /tmp/after").text == "keptafter\n"
    finally:
        session.delete()


def _take_all(session: Session, how: str) -> None:
    if how == "exec":
        session.exec(["python3", "-c", GREEDY], timeout=60)
    else:
        session.run_code(GREEDY, timeout=60)


def test_a_plain_failure_stays_a_plain_failure(session: Session) -> None:
    assert session.exec("exit 3").exit_code == 3
    assert session.exec("kill -9 $$").exit_code == 137
    error = session.run_code("1 / 0").error
    assert error is not None
    assert error.name == "ZeroDivisionError"
