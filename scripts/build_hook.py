"""Put the supervisor's sources into built wheels.

Guarantee: an installed package can build its own supervisor, from exactly the sources it was made
with. An editable install gets no copy: it reads `supervisor/` of the source tree, so that a change
there takes effect, instead of a copy that grows old.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SupervisorSources(BuildHookInterface):  # type: ignore[type-arg]
    """Adds each source file, and nothing that a build left beside them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sources = Path(self.root) / "supervisor"
        for path in sorted(sources.rglob("*")):
            if path.suffix in {".c", ".h", ".S"} or path.name == "Makefile":
                inside = path.relative_to(sources)
                if inside.parts[0] != "build":
                    build_data["force_include"][str(path)] = f"sojourn/_supervisor/{inside}"
