"""Suspend and resume with 10 and 210 MB of heap, against runsc checkpoint and restore.

The bare checkpoint does not sync what it wrote; a suspended session is safe on disk. Both
comparisons are given: bare, and bare followed by a sync of the image.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.harness import Row, bare, median, server, session, timed

ROUNDS = 7
HEAPS = (10, 210)

HOLD = (
    "import os, time; heap = os.urandom({size} << 20); open('/tmp/ready', 'w').close();"
    " time.sleep(1e6)"
)


def _sync(image: Path) -> None:
    for file in image.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def measure() -> list[Row]:
    """The rows of this measure."""
    rows = []
    for heap in HEAPS:
        argv = ["/usr/bin/python3", "-c", HOLD.format(size=heap)]
        suspends, resumes, checkpoints, synced, restores = [], [], [], [], []
        with server() as (client, _), bare() as runtime, session(client) as one:
            one.spawn(argv)
            while not one.exec(["test", "-e", "/tmp/ready"]).ok:
                time.sleep(0.1)
            name, upper = runtime.start(argv)
            while runtime.runsc("exec", name, "test", "-e", "/tmp/ready", check=False).returncode:
                time.sleep(0.1)
            for _ in range(ROUNDS):
                suspends.append(timed(one.suspend))
                resumes.append(timed(lambda: one.exec(["/usr/bin/true"])))
                images: list[Path] = []
                took = timed(lambda: images.append(runtime.checkpoint(name)))
                checkpoints.append(took)
                synced.append(took + timed(lambda: _sync(images[0])))
                names: list[str] = []

                def restore() -> None:
                    names.append(runtime.restore(images[0], upper, argv))
                    runtime.exec(names[0], "/usr/bin/true")

                restores.append(timed(restore))
                runtime.end(name)
                name = names[0]
        put, back = median(suspends), median(resumes)
        rows += [
            Row(
                f"suspend, {heap} MB of heap",
                put,
                median(checkpoints),
                "<= 1.25 x runsc checkpoint",
                reached=put <= 1.25 * median(checkpoints),
                note=f"with a sync of the image the bare checkpoint takes {median(synced):.0f} ms",
                samples=suspends,
            ),
            Row(
                f"resume, {heap} MB of heap, to the first command",
                back,
                median(restores),
                "<= 1.25 x runsc restore + exec",
                reached=back <= 1.25 * median(restores),
                samples=resumes,
            ),
        ]
    return rows
