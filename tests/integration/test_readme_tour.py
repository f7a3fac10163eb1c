"""What README.md shows is what happens: its tour and its Python example are run as they stand.

Compared are all words but those that differ from run to run: ids, times, ports, sizes and counts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.servers import ServerProcess, eventually, host_processes

README = Path(__file__).parents[2] / "README.md"
SCRIPT_SECONDS = 240

_VARYING = (
    (re.compile(r"\b(ses|snp)_[0-9a-z]{24}"), r"\1_ID"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "TIME"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\b\d+(\.\d+)? (B|KiB|MiB|GiB|snapshots|objects)\b"), r"N \2"),
    (re.compile(r" +"), " "),
)


def blocks(language: str, section: str) -> list[str]:
    """The fenced blocks of one language in a section of the README."""
    text = README.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def steady(text: str) -> list[str]:
    """The parts of an output that do not vary."""
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return [line.rstrip() for line in text.splitlines()]


def steps() -> list[tuple[str, str]]:
    """The commands of the tour, each with the output shown under it."""
    found: list[tuple[str, str]] = []
    for block in blocks("console", "Tour"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def script(commands: list[str], directory: Path) -> str:
    """One shell that runs them in order, the output of each in a file of its own."""
    lines = ["set -u"]
    for number, command in enumerate(commands):
        out = directory / f"out.{number}"
        if command.endswith(" &"):
            # Its reader goes on when it has said that it is ready, as a person would.
            lines.append(f"{command[:-2]} >{out} &")
            lines.append(f"until test -s {out} || ! kill -0 $!; do sleep 0.05; done")
        else:
            lines.append(f"{{ {command}\n}} >{out} 2>&1")
    return "\n".join(lines)


@pytest.mark.privileged
@pytest.mark.timeout(300)
def test_the_tour_shows_what_happens(tmp_path: Path) -> None:
    tour = steps()
    assert len(tour) > 20
    data = tmp_path / "data"
    # The tour's own first line puts the tree's programs into the PATH; it is run in a copy.
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    environment = {k: v for k, v in os.environ.items() if k not in ("SOJOURN_URL", "SOJOURN_TOKEN")}
    try:
        done = subprocess.run(
            ["bash", "-c", script([command for command, _ in tour], tmp_path)],
            cwd=tmp_path,
            env=environment | {"SOJOURN_DATA": str(data)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_SECONDS,
        )
        log = (tmp_path / "sojourn.log").read_text(errors="replace")
        for number, (command, shown) in enumerate(tour):
            out = tmp_path / f"out.{number}"
            seen = out.read_text() if out.exists() else "(not run)"
            assert steady(seen) == steady(shown), f"{command}\n{done.stderr}\n{log[-3000:]}"
        assert eventually(lambda: not host_processes(data))
        assert str(data) not in Path("/proc/self/mounts").read_text()
    finally:
        if host_processes(data):
            left = ServerProcess(data)
            for pid in host_processes(data):
                if b"\0up\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, 9)
            eventually(lambda: _takes_over(left))
            left.remove()


def _takes_over(server: ServerProcess) -> bool:
    try:
        server.start()
    except RuntimeError:
        return False  # the one that was killed is not quite gone
    return True


def test_the_python_example_prints_what_is_shown(
    shared_server: ServerProcess, tmp_path: Path
) -> None:
    (example,) = blocks("python", "From Python")
    (shown,) = blocks("text", "From Python")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=os.environ | {"SOJOURN_URL": shared_server.url, "SOJOURN_TOKEN": shared_server.token},
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    assert (done.stdout, done.stderr) == (shown, "")
    assert done.returncode == 0
