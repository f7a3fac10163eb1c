"""Runs the measures and writes the results."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.harness import Row
from sojourn.node import tools

MEASURES = (
    "create",
    "exec",
    "pause",
    "suspend",
    "snapshot",
    "fork",
    "density",
    "network",
    "e2b",
    "store",
)
ROOT = Path(__file__).parent.parent


def table(rows: list[Row]) -> str:
    """The rows as Markdown: those with rivals in a table of their own, after the others."""
    plain = [row for row in rows if not row.others]
    rivalled = [row for row in rows if row.others]
    return "\n\n".join(
        ([_table(plain, ["bare"])] if plain else [])
        + ([_table(rivalled, list(rivalled[0].others))] if rivalled else [])
    )


def _table(rows: list[Row], columns: list[str]) -> str:
    lines = [
        f"| measure | Sojourn | {' | '.join(columns)} | ratio | to reach | reached | note |",
        "|---" * (len(columns) + 6) + "|",
    ]
    for row in rows:
        values = row.others if row.others else {"bare": row.bare}
        cells = [_value(values.get(column), row.unit) for column in columns]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        reached = {None: "", True: "yes", False: "**no**"}[row.reached]
        lines.append(
            f"| {row.measure} | {_value(row.ours, row.unit)} | {' | '.join(cells)} | {ratio} |"
            f" {row.target} | {reached} | {row.note} |"
        )
    return "\n".join(lines)


def _value(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.2f} {unit}"


def machine() -> str:
    """What it ran on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python"
        f" {platform.python_version()}, runsc {tools.runsc_version(tools.runsc_path())}"
    )


def main() -> None:
    """Run the named measures, or all and write them down."""
    names = sys.argv[1:] or list(MEASURES)
    rows: list[Row] = []
    for name in names:
        found = importlib.import_module(f"bench.{name}").measure()
        rows += found
        print(table(found), flush=True)
    if sys.argv[1:]:
        return
    when = time.strftime("%Y-%m-%d", time.gmtime())
    results = {"date": when, "machine": machine(), "rows": [asdict(row) for row in rows]}
    latest = ROOT / "bench" / "results" / "latest.json"
    latest.parent.mkdir(exist_ok=True)
    latest.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "docs" / "performance.md"
    before, begin, rest = page.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->\n")
    told = f"\nMeasured {when} on {machine()}.\n\n{table(rows)}\n\n"
    page.write_text(f"{before}{begin}{told}{end}{after}")


if __name__ == "__main__":
    main()
