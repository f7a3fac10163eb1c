"""Building templates: the root trees that sessions start from.

Guarantee: a template's tree is complete, checked and never written again once published (many
sandboxes use it as their lowest overlay layer), and holds nothing of the host it was built on: no
host name, resolver, machine id or bound directory. It is named by the digest of its recipe, so the
same recipe is built once.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit
from sojourn.node import tools
from sojourn.node.setup.apt import (
    AptSource,
    Mirror,
    debian_mirrors,
    default_keyring,
    host_codename,
    host_sources,
    security_archives,
    source_paragraph,
)
from sojourn.node.setup.commands import run_command
from sojourn.node.setup.publish import Progress, exclusive, point, publish, remove_tree

DEBIAN = "debian"

PACKAGES = (
    "ca-certificates",
    "curl",
    "git",
    "less",
    "passwd",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sqlite3",
)

USER = "agent"
USER_ID = 1000

# The tree's scripts (password ages, caches) take this as the time of the build.
SOURCE_DATE = 1704067200

# Anything that changes the result without changing another field of the recipe raises this.
REVISION = 1

_HOOKS = (
    f'chroot "$1" groupadd --gid {USER_ID} {USER}',
    f'chroot "$1" useradd --uid {USER_ID} --gid {USER_ID} --create-home --shell /bin/bash {USER}',
    # Written over, not removed: packages and runtimes expect them as plain files.
    'rm -f "$1/etc/resolv.conf" && : > "$1/etc/resolv.conf"',
    'echo sojourn > "$1/etc/hostname"',
    "printf '127.0.0.1 localhost\\n::1 localhost ip6-localhost ip6-loopback\\n' > \"$1/etc/hosts\"",
    'echo LANG=C.UTF-8 > "$1/etc/default/locale"',
    ': > "$1/etc/machine-id" && rm -f "$1/var/lib/dbus/machine-id"',
    'rm -rf "$1"/var/log/* "$1"/var/cache/apt/* "$1"/var/cache/debconf/*-old '
    '"$1"/var/cache/ldconfig/aux-cache "$1"/var/lib/dpkg/*-old "$1"/tmp/* "$1"/run/*',
    'mkdir -p "$1/var/cache/apt/archives/partial" "$1/var/log/apt"',
)

_LEFT_OUT = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)


class Recipe(msgspec.Struct, frozen=True):
    """All that decides what a built tree holds, apart from the archive's state that day."""

    suite: str
    architecture: str
    packages: tuple[str, ...] = PACKAGES
    hooks: tuple[str, ...] = _HOOKS
    left_out: tuple[str, ...] = _LEFT_OUT
    source_date: int = SOURCE_DATE
    revision: int = REVISION

    def digest(self) -> str:
        """A name for the recipe."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Manifest(msgspec.Struct, frozen=True):
    """What stands beside a template's tree in `manifest.json`."""

    name: str
    digest: str
    recipe: Recipe
    user: str
    uid: int
    gid: int
    working_directory: str
    environment: dict[str, str]
    packages: dict[str, str]
    built_at: float


def read_manifest(name: str) -> Manifest:
    """The manifest of a template's version in use."""
    path = tools.template_version(name) / "manifest.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise HostUnfit(
            f"the template's manifest {path} cannot be read: {error}", next_step=tools.SETUP_CURE
        ) from error


def debian_recipe() -> Recipe:
    """The recipe of the template `debian` on this host."""
    architecture = run_command(["dpkg", "--print-architecture"], what="asking dpkg").strip()
    return Recipe(suite=host_codename(), architecture=architecture)


def ensure_debian_template(progress: Progress, *, refresh: bool = False) -> Path:
    """Have the template `debian`; gives back the directory of its version in use.

    `refresh` builds it anew from today's archive; sessions on the older tree keep that one.
    """
    if os.environ.get("SOJOURN_TEMPLATE_DIR"):
        return tools.template_version(DEBIAN)
    if os.geteuid() != 0:
        raise HostUnfit(
            "building a template needs root: its files belong to several users",
            next_step="Run `sojourn setup` as root.",
        )
    recipe = debian_recipe()
    directory = tools.templates_directory() / DEBIAN
    directory.mkdir(parents=True, exist_ok=True)
    # The trees hold set-uid programs that this host does not keep up to date: no user of the host
    # may reach them.
    directory.parent.chmod(0o700)
    with exclusive(directory / ".template.lock", progress):
        version = recipe.digest()
        if refresh:
            version += time.strftime("-%Y%m%dT%H%M%S", time.gmtime())
        else:
            present = sorted(p.name for p in directory.glob(f"{version}*") if p.is_dir())
            version = present[-1] if present else version
        publish(directory / version, lambda staging: _build(recipe, staging, progress), progress)
        point(directory / "current", version)
    return tools.template_version(DEBIAN)


def _build(recipe: Recipe, staging: Path, progress: Progress) -> None:
    sources = host_sources()
    mirrors = debian_mirrors(sources, recipe.suite)
    if not mirrors:
        raise HostUnfit(
            "no Debian mirror in the host's package sources",
            next_step="Add the Debian archive to /etc/apt/sources.list.d.",
        )
    for number, mirror in enumerate(mirrors, 1):
        try:
            _debootstrap(recipe, mirror, sources, staging / "root", progress)
            break
        except HostUnfit as error:
            if number == len(mirrors):
                raise
            progress(f"template: {mirror.uri} does not serve ({error.message.splitlines()[0]})")
    check_tree(staging / "root")
    manifest = Manifest(
        name=DEBIAN,
        digest=recipe.digest(),
        recipe=recipe,
        user=USER,
        uid=USER_ID,
        gid=USER_ID,
        working_directory=f"/home/{USER}",
        environment={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
        },
        packages=installed_packages(staging / "root"),
        built_at=time.time(),
    )
    (staging / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _debootstrap(
    recipe: Recipe, mirror: Mirror, sources: list[AptSource], tree: Path, progress: Progress
) -> None:
    progress(f"template: building Debian {recipe.suite} from {mirror.uri}")
    list_file = tree.parent / "debian.sources"
    paragraphs = [source_paragraph(mirror, [recipe.suite])]
    updates = f"{recipe.suite}-updates"
    if any(updates in source.suites for source in sources):
        paragraphs[0] = source_paragraph(mirror, [recipe.suite, updates])
    for archive in security_archives(sources, recipe.suite):
        paragraphs.append(source_paragraph(archive, [f"{recipe.suite}-security"]))
    list_file.write_text("\n".join(paragraphs), encoding="utf-8")
    keyring = default_keyring()
    command = [
        "mmdebstrap",
        "--mode=root",
        "--format=directory",
        "--variant=minbase",
        f"--architectures={recipe.architecture}",
        f"--include={','.join(recipe.packages)}",
        *(f"--dpkgopt={option}" for option in recipe.left_out),
        *(f"--customize-hook={hook}" for hook in recipe.hooks),
        *([f"--keyring={keyring}"] if keyring else []),
        '--aptopt=APT::Sandbox::User "root"',
        recipe.suite,
        str(tree),
        str(list_file),
    ]
    # Namespaces of its own: whatever happens, no mount and no process of the build remains.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *command]

    def on_line(line: str) -> None:
        if line.startswith("I: ") and "hook" not in line:
            progress(f"template: {line[3:]}")

    try:
        run_command(
            isolated,
            what="building the template",
            next_step="Check that `apt-get update` works on this host, then run set-up again.",
            # dpkg need not sync each file: the whole tree is synced before it is published.
            environment={
                "SOURCE_DATE_EPOCH": str(recipe.source_date),
                "DPKG_FORCE": "unsafe-io",
            },
            on_line=on_line,
        )
    finally:
        list_file.unlink()
    # The runtime brings devices of its own; device nodes have no place in a shared layer.
    for entry in (tree / "dev").iterdir():
        remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def check_tree(tree: Path) -> None:
    """Refuse a tree that lacks what sessions rely on, or holds what it must not."""
    wrong: list[str] = []
    wrong += [
        f"{path} is missing"
        for path in ("usr/bin/python3", "usr/bin/git", "bin/sh", "bin/bash", f"home/{USER}")
        if not os.path.lexists(tree / path)
    ]
    passwd = (tree / "etc/passwd").read_text(encoding="utf-8")
    if not re.search(rf"^{USER}:[^:]*:{USER_ID}:{USER_ID}:", passwd, re.MULTILINE):
        wrong.append(f"user {USER} is missing")
    for path in ("etc/resolv.conf", "etc/machine-id"):
        if (tree / path).exists() and (tree / path).stat().st_size:
            wrong.append(f"{path} is not empty")
    if any((tree / "dev").iterdir()):
        wrong.append("dev is not empty")
    mode = stat.S_IMODE(tree.stat().st_mode)
    if mode != 0o755:
        wrong.append(f"the root has mode {mode:o}")
    if wrong:
        raise HostUnfit(
            f"the built template is not sound: {'; '.join(wrong)}",
            next_step="Run `sojourn setup` again; report it when it happens again.",
        )


def installed_packages(tree: Path) -> dict[str, str]:
    """Names and versions of the packages in a tree, as its dpkg records them."""
    packages: dict[str, str] = {}
    name = ""
    for line in (tree / "var/lib/dpkg/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Version: ") and name:
            packages[name] = line[9:]
    return packages
