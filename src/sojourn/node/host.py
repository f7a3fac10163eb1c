"""Facts of this machine that a memory image depends on."""

from __future__ import annotations

import functools
from pathlib import Path

from sojourn.errors import ResumeFailed
from sojourn.model import MemoryRef


@functools.cache
def cpu_features() -> list[str]:
    """The processor's feature names, sorted, as the kernel lists them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return sorted(value.split())
    return []


def check_image_fits(memory: MemoryRef, runtime: str, features: list[str]) -> None:
    """Refuse, before anything starts, an image this host cannot run on.

    A restored process may already have chosen code paths by the features it saw, so a missing one
    would crash it later, somewhere else.
    """
    if memory.runtime != runtime:
        raise ResumeFailed(
            f"the memory image was written by {memory.runtime}, this node has {runtime}",
            next_step="Use that runtime (SOJOURN_RUNSC), or start from the files alone (`sojourn"
            " session resume --files-only`).",
            object=f"memory {memory.id}",
        )
    missing = sorted(set(memory.cpu) - set(features))
    if missing:
        raise ResumeFailed(
            f"this processor lacks features the memory image may use: {', '.join(missing[:8])}",
            next_step="Resume on a node that has them, or start from the files alone (`sojourn"
            " session resume --files-only`).",
            object=f"memory {memory.id}",
            missing=missing,
        )
