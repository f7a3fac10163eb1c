"""The persistent interpreter across a pause, which ends the streams it is read by."""

from __future__ import annotations

from sojourn.client import Session


def test_code_runs_at_once_after_a_pause(session: Session) -> None:
    assert session.run_code("kept = 1").error is None
    for _ in range(3):
        session.pause()
        session.resume()
        result = session.run_code("kept = kept + 1; kept")
        assert result.error is None and not result.restarted
    assert result.text == "4"


def test_a_paused_session_is_woken_by_code(session: Session) -> None:
    session.run_code("kept = 'here'")
    session.pause()
    assert session.run_code("kept").text == "'here'"
    assert session.refresh().state == "running"
