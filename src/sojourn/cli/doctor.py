"""`sojourn doctor`: what this host can do, what it lacks, and the cure of each lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sojourn.node.doctor import Finding

_MARKS = {"ok": "ok", "failed": "FAILED", "note": "note", "skipped": "-"}


def show(findings: Sequence[Finding], *, as_json: bool, extra: Mapping[str, Any]) -> None:
    """Print findings for a person, or as one JSON object together with `extra`."""
    from sojourn.node.doctor import healthy

    if as_json:
        import msgspec

        body = {**extra, "healthy": healthy(findings), "checks": list(findings)}
        click.echo(msgspec.json.format(msgspec.json.encode(body)).decode())
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{_MARKS[finding.state]:7} {finding.name:{width}}  {finding.detail}")
        if finding.cure:
            click.echo(f"{'':8}{'':{width}} -> {finding.cure}")


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--fast", is_flag=True, help="Skip the check that boots a sandbox.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="The data directory to judge. [SOJOURN_DATA]",
)
def command(as_json: bool, fast: bool, data: Path | None) -> int:
    """Check this host; each lack comes with its cure.

    Exit code 0 when everything that a server needs is there, 117 when not.
    """
    from sojourn.errors import HostUnfit
    from sojourn.model.paths import data_directory
    from sojourn.node import doctor

    findings = doctor.examine(doctor.Host(data or data_directory()), smoke=not fast)
    show(findings, as_json=as_json, extra={})
    return 0 if doctor.healthy(findings) else HostUnfit.exit_code
