"""The table of errors in docs/api.md, made from the classes themselves.

`python -m sojourn.server.error_list` prints it; a test compares it with the document.
"""

from __future__ import annotations

from sojourn.errors import all_errors

BEGIN = "<!-- errors: made by python -m sojourn.server.error_list -->"
END = "<!-- end of errors -->"


def error_table() -> str:
    """All errors as a Markdown table, in the order of the tree."""
    rows = ["| code | HTTP | exit code | meaning | next step |", "|---|---|---|---|---|"]
    for code, kind in all_errors().items():
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        rows.append(
            f"| `{code}` | {kind.status} | {kind.exit_code} | {meaning} |"
            f" {kind.default_next_step} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(error_table())
