"""Sessions that count, and what must hold of them whatever happens to their nodes.

A counting session appends numbers to a file, one after another, and holds the next one in memory
alone. So its file is a line from 1 without a gap or a repetition as long as files and memory went
together, and as long as nobody else counted on the same files.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from sojourn.client import Session
from sojourn.node.isolation import processes

LOG = "/srv/count"
_PROGRAM = f"""
import time
count = 0
with open("{LOG}", "a", buffering=1) as log:
    while True:
        count += 1
        log.write("%d\\n" % count)
        time.sleep(0.02)
"""
_TICKS = os.sysconf("SC_CLK_TCK")


def start_counting(session: Session) -> None:
    """Start the program; it counts when this returns."""
    session.spawn(["python3", "-c", _PROGRAM])
    until(lambda: read_count(session))


def read_count(session: Session) -> int:
    """How far it has counted. Fails where its line has a gap or a repetition."""
    return check_line(session.files.read(LOG))


def check_line(content: bytes) -> int:
    """The last number of a line from 1."""
    whole = content[: content.rfind(b"\n") + 1]
    numbers = [int(line) for line in whole.split()]
    for place, number in enumerate(numbers, start=1):
        assert number == place, f"number {place} of the line is {number}"
    return len(numbers)


class Watch:
    """Looks, from outside all nodes, whether two sandboxes of one session do something at the same
    time. `twice` tells of each that did.

    What a sandbox does shows in the processor time of its processes. One that ends while another
    begins may show in one look, so only two looks one after the other count.
    """

    def __init__(self, places: Iterable[Path], every: float = 0.5) -> None:
        self._places = list(places)
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.twice: list[str] = []
        self.looks = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        before: dict[str, float] = {}
        suspects: set[tuple[str, frozenset[str]]] = set()
        sessions: dict[str, str] = {}
        while not self._ended.wait(self._every):
            self.looks += 1
            used = self._used(sessions)
            busy: dict[str, set[str]] = {}
            for sandbox, seconds in used.items():
                if seconds > before.get(sandbox, seconds):
                    busy.setdefault(sessions[sandbox], set()).add(sandbox)
            now = {(one, frozenset(many)) for one, many in busy.items() if len(many) > 1}
            for session, many in now & suspects:
                self.twice.append(f"{session} in {', '.join(sorted(many))}")
            before, suspects = used, now

    def _used(self, sessions: dict[str, str]) -> dict[str, float]:
        """Processor seconds of each sandbox's processes so far."""
        for place in self._places:
            for record in (place / "sandboxes").glob("*/record.json"):
                with contextlib.suppress(OSError, ValueError):
                    told = json.loads(record.read_bytes())
                    sessions[told["sandbox"]] = told["session"]
        used: dict[str, float] = {}
        for pid in processes.all_pids():
            words = processes.command_line(pid)
            if "boot" not in words:
                continue
            sandbox = next((one for one in sessions if any(one in word for word in words)), None)
            if sandbox is None:
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                used[sandbox] = used.get(sandbox, 0.0) + ticks / _TICKS
        return used


def until(condition, timeout: float = 90.0, every: float = 0.2):  # type: ignore[no-untyped-def]
    """What a condition gives once it is true; errors of a cluster that is just moving are waited
    out. Fails with the last of them."""
    deadline = time.monotonic() + timeout
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = condition()
            if last:
                return last
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the end
            last = error
        time.sleep(every)
    raise AssertionError(f"not true within {timeout:g} s, at last: {last!r}")
