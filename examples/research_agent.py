"""A research agent that outlives its machine: it plans, works in steps, sleeps between them, and
goes on after its server was killed in the middle of one.

The agent keeps nothing in this process: its plan, notes and half-done calculation are in the
session. So each step may run in another process, and `work` is all there is to recovery: it looks
what is done and does the next thing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError

PLAN = "/agent/plan.json"
NOTES = "/agent/notes.md"


def think(question: str, done: list[str]) -> dict[str, str] | None:
    """Where a model would be asked for the next step; None when it is content."""
    script = {
        "collect": "data = [n for n in range(2, 4000) if all(n % d for d in range(2, n))]",
        "measure": "gaps = [b - a for a, b in zip(data, data[1:])]",
        "conclude": "f'{len(data)} primes, the widest gap is {max(gaps)}'",
    }
    left = [step for step in script if step not in done]
    return {"step": left[0], "code": script[left[0]]} if left else None


def work(session: Session, question: str) -> str | None:
    """Do the next step; its result, or None when all is done. Safe to call again at any time."""
    if not session.files.exists(PLAN):
        session.files.write(PLAN, json.dumps({"question": question, "done": []}))
    plan = json.loads(session.files.read(PLAN))
    step = think(question, plan["done"])
    if step is None:
        return None
    # A step and the note that it is done are one turn: a snapshot holds both or neither.
    with session.turn(step["step"]):
        result = session.run_code(step["code"])
        if result.error is not None:
            raise RuntimeError(result.error)
        plan["done"].append(step["step"])
        session.files.write(PLAN, json.dumps(plan))
        session.files.write(NOTES, f"- {step['step']}: {result.text or 'done'}\n", append=True)
    return f"{step['step']}: {result.text or 'done'}"


class Server:
    """A server of our own, so that we may kill it."""

    def __init__(self, data: Path) -> None:
        self._command = [sys.executable, "-m", "sojourn.cli.main", "up", "--listen", "127.0.0.1:0"]
        self._command += ["--data", str(data)]
        self._data = data
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Sojourn:
        log = self._data.parent / "server.log"
        with log.open("a") as file:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
        return Sojourn(line.split()[1], (self._data / "token").read_text().strip())

    def end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def main() -> None:
    question = "How far apart are primes?"
    with tempfile.TemporaryDirectory(prefix="research-") as place:
        server = Server(Path(place) / "data")
        try:
            client = server.start()
            session = client.sessions.create(name="research")
            print("1 ", work(session, question))
            session.suspend()  # the night: nothing runs, nothing is paid for
            print("   suspended; state", session.refresh().state)

            print("2 ", work(session, question))  # woken by its first call
            # In the middle of the next step the machine goes away.
            with contextlib.suppress(SojournError), session.turn("cut off"):
                session.run_code("half_done = True")
                server.end(signal.SIGKILL)
            client.close()
            print("   the server was killed")

            begin = time.monotonic()
            client = server.start()
            session = client.sessions.get("research")
            while (told := work(session, question)) is not None:
                print("3 ", told)
            print(f"   back and done in {time.monotonic() - begin:.1f} s")
            print(session.files.read_text(NOTES), end="")
            turns = [one.details["label"] for one in session.events() if one.details.get("label")]
            print("in the log:", turns)
            session.delete()
            client.close()
        except SojournError as error:
            raise SystemExit(str(error)) from error
        finally:
            server.end(signal.SIGTERM)


if __name__ == "__main__":
    if os.geteuid() != 0:
        raise SystemExit("this starts a server: run it as root")
    main()
