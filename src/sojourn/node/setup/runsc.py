"""Bringing runsc, the program that runs sandboxes.

Guarantee: the runsc published is the one of a signed Debian package, new enough, and answers; a
runsc named by SOJOURN_RUNSC is only checked. Debian 12's own package is too old, while Debian 13's
is one static program that runs on both, so that one is fetched, whatever the host's release.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sojourn.errors import HostUnfit
from sojourn.node import tools
from sojourn.node.setup.apt import Mirror, PrivateApt, mirrors_of_host, source_paragraph
from sojourn.node.setup.commands import run_command
from sojourn.node.setup.publish import Progress, publish, remove_tree

PACKAGE = "runsc"
SUITE = "trixie"


def ensure_runsc(progress: Progress, *, refresh: bool = False) -> Path:
    """Have a fitting runsc; `refresh` looks for a newer package even when one is there."""
    if os.environ.get("SOJOURN_RUNSC"):
        return tools.runsc_path()
    if not refresh and tools.installed_runscs():
        return tools.runsc_path()
    mirrors = mirrors_of_host()
    for number, mirror in enumerate(mirrors, 1):
        try:
            _fetch_from(mirror, progress)
            break
        except HostUnfit as error:
            if number == len(mirrors):
                raise
            progress(f"runsc: {mirror.uri} does not serve ({error.message.splitlines()[0]})")
    return tools.runsc_path()


def _fetch_from(mirror: Mirror, progress: Progress) -> None:
    directory = tools.tools_directory()
    directory.mkdir(parents=True, exist_ok=True)
    # Not under /tmp: that may be a small memory file system.
    work = Path(tempfile.mkdtemp(prefix=".apt-", dir=directory))
    try:
        apt = PrivateApt(work, source_paragraph(mirror, [SUITE]))
        progress(f"runsc: reading the index of Debian {SUITE} at {mirror.uri}")
        apt.update()
        progress("runsc: fetching the package")
        publish_package(apt.download(PACKAGE), progress)
    finally:
        remove_tree(work)


def publish_package(package: Path, progress: Progress) -> Path:
    """Unpack a runsc package, check the program, and publish it under the package's version."""
    version = run_command(
        ["dpkg-deb", "--field", str(package), "Version"], what="reading the package"
    ).strip()
    if tools.parse_runsc_version(version) is None:
        raise HostUnfit(f"the runsc package has a version of an unknown form: {version}")

    def build(staging: Path) -> None:
        tree = staging / "package"
        run_command(["dpkg-deb", "--extract", str(package), str(tree)], what="unpacking runsc")
        shutil.move(tree / "usr" / "bin" / "runsc", staging / "runsc")
        shutil.copy(tree / "usr" / "share" / "doc" / "runsc" / "copyright", staging / "copyright")
        shutil.rmtree(tree)
        tools.check_runsc(staging / "runsc")

    # A ':' (an epoch) would split a list of overlay directories or a PATH.
    target = tools.tools_directory() / f"runsc-{version.replace(':', '_')}"
    if publish(target, build, progress):
        progress(f"runsc: {version} is ready")
    return target / "runsc"
