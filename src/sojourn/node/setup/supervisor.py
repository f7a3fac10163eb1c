"""Building the supervisor, PID 1 of every sandbox.

Guarantee: the program published is built from exactly the sources at hand (its directory is named
by their digest) and is static, because no library of a template may be needed to run it.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

from sojourn.errors import HostUnfit
from sojourn.node import tools
from sojourn.node.setup.commands import run_command
from sojourn.node.setup.publish import Progress, publish

PROGRAM = "sojourn-supervisor"

_PT_INTERP = 3


def is_static(program: Path) -> bool:
    """Whether an ELF program needs no loader: it has no PT_INTERP entry."""
    content = program.read_bytes()
    if content[:5] != b"\x7fELF\x02" or content[5] != 1:
        return False
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    kinds = (struct.unpack_from("<I", content, offset + i * size)[0] for i in range(count))
    return _PT_INTERP not in kinds


def ensure_supervisor(progress: Progress) -> Path:
    """Have the supervisor of the present sources; SOJOURN_SUPERVISOR is only checked."""
    if os.environ.get("SOJOURN_SUPERVISOR"):
        return tools.supervisor_path()
    sources = tools.supervisor_sources()
    digest = tools.supervisor_digest(sources)
    target = tools.tools_directory() / f"supervisor-{digest}"

    def build(staging: Path) -> None:
        progress("supervisor: compiling")
        work = staging / "build"
        work.mkdir()
        run_command(
            ["make", "--no-print-directory", "-C", str(sources), f"BUILD={work}"],
            what="building the supervisor",
            next_step="Install gcc, make and libc6-dev, then run `sojourn setup` again.",
        )
        program = work / PROGRAM
        if not is_static(program):
            raise HostUnfit("the supervisor came out linked to shared libraries")
        if tools.supervisor_digest(sources) != digest:
            raise HostUnfit(
                "the supervisor's sources were changed while it was built",
                next_step="Run `sojourn setup` again.",
            )
        shutil.move(program, staging / PROGRAM)
        shutil.rmtree(work)

    if publish(target, build, progress):
        progress("supervisor: ready")
    return tools.supervisor_path()
