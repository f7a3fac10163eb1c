"""Named queries, read once from the .sql files that ship with the package.

Guarantee: every query the code uses is in a file under its name, and a missing or doubled name
fails at import, not in the middle of an operation. Each begins with `-- name: some_name`;
`{session}` stands for all columns of the record and `{:session}` for their parameters, `{clock}`
for the seconds since 1970 by the database's clock, `{held}` for the condition that a session is
the given holder's. What every dialect understands is in `common`; a dialect's own folder has what
must be said in its own way.
"""

from __future__ import annotations

import re
from importlib import resources

from sojourn.database.rows import PLACEHOLDERS

_HELD = "(CAST(:holder AS TEXT) IS NULL OR holder = :holder OR (:holder = '' AND holder IS NULL))"
_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


class Queries:
    """The queries of one dialect: `queries["get_session"]`."""

    def __init__(self, package: str, *, clock: str) -> None:
        self._clock = clock
        self._texts: dict[str, str] = {}
        for folder in (
            resources.files("sojourn.database").joinpath("common"),
            resources.files(package).joinpath("queries"),
        ):
            for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
                if file.name.endswith(".sql"):
                    self._add(file.name, file.read_text(encoding="utf-8"))

    def _add(self, file: str, text: str) -> None:
        parts = _NAME.split(text)
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if name in self._texts:
                raise ValueError(f"query {name} is defined twice, again in {file}")
            for key, rows in PLACEHOLDERS.items():
                body = body.replace(f"{{{key}}}", rows.columns)
                body = body.replace(f"{{:{key}}}", rows.parameters)
            body = body.replace("{clock}", self._clock).replace("{held}", _HELD)
            self._texts[name] = body.strip().rstrip(";")

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def names(self) -> set[str]:
        """All names there are."""
        return set(self._texts)
