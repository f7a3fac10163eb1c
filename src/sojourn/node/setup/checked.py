"""Whether the sandbox check has passed with just these tools on just this kernel.

Guarantee: a set-up that repeats skips the check only when nothing it depends on has changed since
it passed. An unreadable or torn note counts as none, since making the check again costs a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sojourn.node import tools


class Passed(msgspec.Struct, frozen=True):
    """What the check depends on. `runsc_mtime_ns` tells a replaced runsc under an old name."""

    kernel: str
    runsc: str
    runsc_mtime_ns: int
    template: str

    @classmethod
    def of(cls, kernel: str, paths: Mapping[str, str]) -> Passed:
        """The facts of a host whose tools are at `paths`."""
        mtime_ns = Path(paths["runsc"]).stat().st_mtime_ns
        return cls(kernel, paths["runsc"], mtime_ns, paths["template"])


def _note_path() -> Path:
    return tools.home() / "checked.json"


def holds(now: Passed) -> bool:
    """Whether the check has passed under these facts before."""
    try:
        return msgspec.json.decode(_note_path().read_bytes(), type=Passed) == now
    except (OSError, msgspec.DecodeError):
        return False


def note(now: Passed) -> None:
    """Remember that the check has passed."""
    path = _note_path()
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(now))
    fresh.replace(path)
