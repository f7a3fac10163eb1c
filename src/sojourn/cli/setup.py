"""`sojourn setup`: bring this host what Sojourn needs, then look whether all is well.

Guarantee: repeating it is safe and quick; it ends with exit code 0 only when every check that a
running server relies on has passed.
"""

from __future__ import annotations

import time
from typing import Any

import click


@click.command("setup")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--refresh", is_flag=True, help="Fetch runsc and build the template anew.")
@click.option("--fast", is_flag=True, help="Skip the check that boots a sandbox.")
@click.option("--if-needed", is_flag=True, help="Be quick and quiet when all was well before.")
def command(as_json: bool, refresh: bool, fast: bool, if_needed: bool) -> int:
    """Fetch runsc, build the supervisor and the template, check the host.

    Everything goes below SOJOURN_HOME (/var/lib/sojourn for root). A tool named by SOJOURN_RUNSC,
    SOJOURN_SUPERVISOR or SOJOURN_TEMPLATE_DIR is only checked.
    """
    from sojourn.cli.doctor import show
    from sojourn.errors import HostUnfit
    from sojourn.model.paths import data_directory
    from sojourn.node import doctor, tools
    from sojourn.node.setup import checked
    from sojourn.node.setup.host_packages import ensure_host_packages
    from sojourn.node.setup.runsc import ensure_runsc
    from sojourn.node.setup.supervisor import ensure_supervisor
    from sojourn.node.setup.template import ensure_debian_template

    started = time.monotonic()

    def progress(line: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {line}", err=as_json)

    result: dict[str, Any] = {
        "home": str(tools.home()),
        "host_packages_installed": ensure_host_packages(progress),
        "runsc": str(ensure_runsc(progress, refresh=refresh)),
        "supervisor": str(ensure_supervisor(progress)),
        "template": str(ensure_debian_template(progress, refresh=refresh)),
    }
    host = doctor.Host(data_directory())
    passed = checked.Passed.of(host.kernel(), result)
    boot = not fast and not (if_needed and checked.holds(passed))
    if boot:
        progress("checking the host (boots a sandbox)")
    findings = doctor.examine(host, smoke=boot)
    healthy = doctor.healthy(findings)
    if boot and healthy:
        checked.note(passed)
    if as_json or boot or not healthy or not if_needed:
        show(findings, as_json=as_json, extra=result)
    if not healthy:
        return HostUnfit.exit_code
    progress(f"ready: tools and templates are in {tools.home()}")
    return 0
