"""Where the tools and templates of this host are: runsc, the supervisor, root trees.

Guarantee: a path given out here exists and fits this version of Sojourn, or the call raises
HostUnfit with the command that cures it. Everything under `home()` is immutable once it is there
(`sojourn.node.setup` publishes it by an atomic rename), so a path stays good for as long as a
sandbox uses it, even while another set-up runs.

    <home>/tools/runsc-<version>/runsc
    <home>/tools/supervisor-<digest of its sources>/sojourn-supervisor
    <home>/templates/<name>/<digest of its recipe>/root      the root tree
    <home>/templates/<name>/<digest of its recipe>/manifest.json
    <home>/templates/<name>/current                          link to the digest in use
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

from sojourn.errors import HostUnfit, UnknownTemplate
from sojourn.model.paths import home

__all__ = [
    "MINIMUM_RUNSC",
    "SETUP_CURE",
    "check_runsc",
    "home",
    "installed_runscs",
    "parse_runsc_version",
    "runsc_path",
    "runsc_version",
    "source_files",
    "supervisor_digest",
    "supervisor_path",
    "supervisor_sources",
    "template_names",
    "template_root",
    "template_version",
    "templates_directory",
    "tools_directory",
]

MINIMUM_RUNSC = (20240729, 0)
"""The oldest runsc release whose checkpoints hold all that a session needs."""

SETUP_CURE = "Run `sojourn setup` (or `make setup` in a source tree) as root."

_RELEASE = re.compile(r"(?<!\d)(20\d{6})(?:\.(\d+))?")
_TEMPLATE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def tools_directory() -> Path:
    """Where runsc and the supervisor are published."""
    return home() / "tools"


def templates_directory() -> Path:
    """Where templates are published; SOJOURN_TEMPLATE_DIR overrides it."""
    given = os.environ.get("SOJOURN_TEMPLATE_DIR")
    return Path(given).absolute() if given else home() / "templates"


# -- runsc ----------------------------------------------------------------------------------


def parse_runsc_version(text: str) -> tuple[int, int] | None:
    """The release named in `runsc --version` or in a package version, as (date, number).

    Both forms are read: `release-20240729.0` of the makers and `0.0~20240729.0-4+b7` of Debian.
    """
    found = _RELEASE.search(text)
    return (int(found[1]), int(found[2] or 0)) if found else None


@lru_cache(maxsize=16)
def _runsc_version(path: str, mtime_ns: int, size: int) -> tuple[int, int]:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostUnfit(f"runsc at {path} does not run: {error}", path=path) from error
    version = parse_runsc_version(done.stdout) if done.returncode == 0 else None
    if version is None:
        said = (done.stderr or done.stdout).strip()
        raise HostUnfit(f"{path} does not answer as runsc: {said}", path=path)
    return version


def runsc_version(path: Path) -> tuple[int, int]:
    """The release of a runsc program; asked once per file. Raises HostUnfit when it is none."""
    try:
        facts = path.stat()
    except OSError as error:
        raise HostUnfit(
            f"no runsc at {path}: {error.strerror}", next_step=SETUP_CURE, path=str(path)
        ) from error
    return _runsc_version(str(path), facts.st_mtime_ns, facts.st_size)


def check_runsc(path: Path) -> tuple[int, int]:
    """The release of a runsc that is new enough. Raises HostUnfit."""
    version = runsc_version(path)
    if version < MINIMUM_RUNSC:
        raise HostUnfit(
            f"runsc at {path} is of {version[0]}, too old: {MINIMUM_RUNSC[0]} or newer is needed",
            next_step="Unset SOJOURN_RUNSC and run `sojourn setup`, or point it to a newer runsc.",
            path=str(path),
        )
    return version


def installed_runscs() -> list[Path]:
    """Every published runsc, the newest release first."""
    found: list[tuple[tuple[int, int], str, Path]] = []
    for program in tools_directory().glob("runsc-*/runsc"):
        version = parse_runsc_version(program.parent.name)
        if version is not None:
            found.append((version, program.parent.name, program))
    return [program for *_, program in sorted(found, reverse=True)]


def runsc_path() -> Path:
    """The runsc to use: SOJOURN_RUNSC, else the newest one that set-up brought."""
    given = os.environ.get("SOJOURN_RUNSC")
    if given:
        path = Path(given).absolute()
    else:
        installed = installed_runscs()
        if not installed:
            raise HostUnfit(f"no runsc under {tools_directory()}", next_step=SETUP_CURE)
        path = installed[0]
    check_runsc(path)
    return path


# -- supervisor -----------------------------------------------------------------------------


def supervisor_sources() -> Path:
    """The directory of the supervisor's sources: in the package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_supervisor", package.parents[1] / "supervisor"):
        if (place / "Makefile").is_file():
            return place
    raise HostUnfit(
        f"the supervisor's sources are neither in {package} nor beside it",
        next_step="Install Sojourn again from a complete package or source tree.",
    )


def source_files(sources: Path) -> list[Path]:
    """The files a build of the supervisor reads, in a stable order."""
    suffixes = {".c", ".h", ".S"}
    return sorted(
        path
        for path in sources.rglob("*")
        if path.is_file()
        and (path.suffix in suffixes or path.name == "Makefile")
        and not any(
            part.startswith(".") or part == "build" for part in path.relative_to(sources).parts
        )
    )


def supervisor_digest(sources: Path) -> str:
    """A name for what a build of these sources gives on this kind of machine."""
    state = hashlib.sha256(os.uname().machine.encode())
    for path in source_files(sources):
        content = path.read_bytes()
        state.update(f"\0{path.relative_to(sources)}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()[:16]


def supervisor_path() -> Path:
    """The supervisor built from exactly the sources at hand; SOJOURN_SUPERVISOR overrides it."""
    given = os.environ.get("SOJOURN_SUPERVISOR")
    if given:
        path = Path(given).absolute()
        if not os.access(path, os.X_OK):
            raise HostUnfit(
                f"SOJOURN_SUPERVISOR names {path}, which is not a program", path=str(path)
            )
        return path
    digest = supervisor_digest(supervisor_sources())
    path = tools_directory() / f"supervisor-{digest}" / "sojourn-supervisor"
    if not path.is_file():
        raise HostUnfit(
            f"the supervisor is not built from the present sources ({path} is missing)",
            next_step=SETUP_CURE,
            path=str(path),
        )
    return path


# -- templates ------------------------------------------------------------------------------


def template_names() -> list[str]:
    """The names of all templates on this host."""
    directory = templates_directory()
    if not directory.is_dir():
        return []
    return sorted(
        entry.name
        for entry in directory.iterdir()
        if _TEMPLATE_NAME.fullmatch(entry.name) and _version_of(entry) is not None
    )


def _version_of(template: Path) -> Path | None:
    """The version directory in use; a tree put there by hand has `root` and no `current`."""
    for version in (template / "current", template):
        if (version / "root").is_dir():
            return version.resolve()
    return None


def template_version(name: str) -> Path:
    """The directory of a template's version in use, all links resolved, so that it stays the same
    when a later set-up switches `current`. Raises UnknownTemplate, or HostUnfit when this host
    has no template at all."""
    version = None
    if _TEMPLATE_NAME.fullmatch(name):
        version = _version_of(templates_directory() / name)
    if version is not None:
        return version
    if not template_names():
        raise HostUnfit(f"no template under {templates_directory()}", next_step=SETUP_CURE)
    raise UnknownTemplate(f"no template is named {name!r}", template=name)


def template_root(name: str) -> Path:
    """The root tree of a template: immutable, to be used as the lowest overlay layer."""
    return (template_version(name) / "root").resolve()
