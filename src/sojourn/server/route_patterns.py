"""Which pattern an address is of, for those who pass requests on without routing them.

Guarantee: what is answered is one of the declared patterns, never the address itself.
"""

from __future__ import annotations

from collections.abc import Iterable


class RoutePatterns:
    """Patterns such as `/v1/sessions/{ref}/exec`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._by_length: dict[int, list[tuple[list[str], str]]] = {}
        for pattern in sorted(set(patterns), key=lambda one: one.count("{")):
            parts = pattern.split("/")
            self._by_length.setdefault(len(parts), []).append((parts, pattern))

    def find(self, path: str) -> str | None:
        """The pattern of a path: the one with the fewest blanks, where several fit."""
        parts = path.split("/")
        for wanted, pattern in self._by_length.get(len(parts), ()):
            if all(
                want == have or want.startswith("{")
                for want, have in zip(wanted, parts, strict=True)
            ):
                return pattern
        return None
