"""Logs: each line says what it is about, in both forms."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sojourn.telemetry import logs

log = logging.getLogger("sojourn.tests.telemetry")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    variable = os.environ.get(logs.VARIABLE)
    stream = io.StringIO()
    logs.set_up("info", logs.JSON, stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    os.environ.pop(logs.VARIABLE, None)
    if variable is not None:
        os.environ[logs.VARIABLE] = variable


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_whatever_it_holds(written: io.StringIO) -> None:
    log.info("two\nlines and a %r", b"\xff")
    log.debug("too quiet")
    try:
        raise ValueError("what\nfailed")
    except ValueError:
        with logs.about(session="ses_1", odd={1, "set"}):
            log.exception("caught \ud800")
    first, second = _lines(written)
    assert first["message"] == "two\nlines and a b'\\xff'"
    assert first["level"] == "info" and first["logger"] == log.name
    assert str(first["time"]).endswith("Z")
    assert "session" not in first
    assert second["session"] == "ses_1" and second["level"] == "error"
    assert str(second["exception"]).endswith("ValueError: what\nfailed")


def test_what_is_done_at_once_is_told_apart(written: io.StringIO) -> None:
    async def work(session: str) -> None:
        logs.note(tenant="ten", session=session)
        await asyncio.sleep(0)
        await asyncio.create_task(deeper(session))
        log.info("%s", session)

    async def deeper(session: str) -> None:
        logs.note(operation=f"op of {session}")
        await asyncio.to_thread(log.info, "%s", session)

    async def main() -> None:
        await asyncio.gather(*(work(f"ses_{number}") for number in range(5)))
        log.info("nothing")

    asyncio.run(main())
    *lines, last = _lines(written)
    assert len(lines) == 10 and "session" not in last
    for line in lines:
        assert line["session"] == line["message"] and line["tenant"] == "ten"
        assert line.get("operation") in (None, f"op of {line['session']}")
    assert sum("operation" in line for line in lines) == 5


def test_the_form_for_people_tells_the_same(written: io.StringIO) -> None:
    stream = io.StringIO()
    logs.set_up("warning", logs.TEXT, stream)
    log.warning("plain")
    with logs.about(session="ses_1", epoch=3):
        try:
            raise ValueError("failed")
        except ValueError:
            log.exception("with")
    plain, told, *trace = stream.getvalue().splitlines()
    assert plain.endswith(f"WARNING {log.name}: plain")
    assert told.endswith(f"ERROR {log.name}: with [session=ses_1 epoch=3]")
    assert trace[-1] == "ValueError: failed"


def test_processes_that_a_server_begins_write_in_its_form() -> None:
    program = """
import logging, sys
from sojourn.telemetry import logs
logs.set_up_helper("warning")
logging.getLogger("sojourn.x").info("quiet")
logging.getLogger("sojourn.x").warning("said")
"""
    for form in (logs.JSON, logs.TEXT):
        told = subprocess.run(
            [sys.executable, "-c", program],
            env={"PATH": "/usr/bin", logs.VARIABLE: form},
            capture_output=True,
            text=True,
            check=True,
        )
        [line] = told.stderr.splitlines()
        assert (json.loads(line)["message"] if form == logs.JSON else line[-4:]) == "said"
