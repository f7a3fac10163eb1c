"""The rivals of the store, restic and borg, and the store itself, each as one process per step.

A step is timed from before its process starts to after it ended, start-up included. Every tool
keeps its repository, its cache and its keys in a directory of its own below the scratch directory.
What each syncs by itself: restic every pack, borg every segment, Sojourn the sealed tree and every
object with its directory; nobody syncs what it restores, so the file system is synced after each
restore, outside of the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sojourn.errors import HostUnfit
from sojourn.node.setup.commands import run_command

SECRET = "a secret for measuring"
PACKAGES = {"restic": "restic", "borg": "borgbackup"}
_NICE = ("nice", "-n", "5")


def ensure_rivals() -> None:
    """Install restic and borg where they are missing. Raises HostUnfit."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise HostUnfit(
            f"missing on this host: {names}", next_step=f"As root: apt-get install {names}"
        )
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=600"]
    install = [*apt, "--no-install-recommends", "install", *missing]
    try:
        run_command(install, what="installing the rivals")
    except HostUnfit:  # no index of packages yet, or one that is out of date
        run_command([*apt, "update"], what="apt-get update")
        run_command(install, what="installing the rivals")


@dataclass
class Took:
    """What a step cost: seconds by the clock, and seconds of the processor in all its threads."""

    seconds: float
    processor: float


def run(argv: list[str], environment: dict[str, str], log: Path, cwd: Path | None = None) -> Took:
    """Run one step in a fresh process; its output goes to `log`, and into the error on failure."""
    with log.open("wb") as out:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*_NICE, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            cwd=cwd,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}:\n{tail}")
    return Took(seconds, usage.ru_utime + usage.ru_stime)


class Tool:
    """A tool with a repository of its own in `place`."""

    name = ""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.repository = place / "repository"
        self.log = place / "log"
        self.count = 0
        place.mkdir()
        self.start()

    def start(self) -> None:
        """Make the repository."""
        raise NotImplementedError

    def capture(self, tree: Path) -> Took:
        """Store the tree as it is."""
        raise NotImplementedError

    def restore(self, target: Path) -> tuple[Took, Path]:
        """Bring the newest capture back below `target`; where its tree lies then."""
        raise NotImplementedError

    def check(self, *, data: bool) -> Took:
        """Check the repository: its structure, or every byte."""
        raise NotImplementedError

    def before(self, tree: Path) -> None:
        """What a capture of the tree needs done that is not part of it."""

    def stored(self) -> int:
        """Bytes of all files of the repository."""
        return sum(p.lstat().st_size for p in self.repository.rglob("*") if p.is_file())


class Restic(Tool):
    """restic: always encrypted, repository version 2, compression auto."""

    name = "restic"

    def _run(self, *arguments: str) -> Took:
        environment = {
            "RESTIC_PASSWORD": SECRET,
            "RESTIC_REPOSITORY": str(self.repository),
            "RESTIC_CACHE_DIR": str(self.place / "cache"),
        }
        return run(["restic", "--quiet", *arguments], environment, self.log)

    def start(self) -> None:
        """Make the repository."""
        self._run("init", "--repository-version", "2")

    def capture(self, tree: Path) -> Took:
        """Store the tree as it is."""
        self._tree = tree
        return self._run("backup", str(tree))

    def restore(self, target: Path) -> tuple[Took, Path]:
        """Bring the newest capture back."""
        took = self._run("restore", "latest", "--target", str(target))
        return took, target / self._tree.relative_to("/")

    def check(self, *, data: bool) -> Took:
        """Check the repository."""
        return self._run("check", *(["--read-data"] if data else []))


class Borg(Tool):
    """borg: encrypted (repokey-blake2), with its default compression, lz4."""

    name = "borg lz4"
    compression = "lz4"

    def _run(self, *arguments: str, cwd: Path | None = None) -> Took:
        environment = {
            "BORG_PASSPHRASE": SECRET,
            "BORG_BASE_DIR": str(self.place / "base"),
            "BORG_REPO": str(self.repository),
        }
        return run(["borg", *arguments], environment, self.log, cwd)

    def start(self) -> None:
        """Make the repository."""
        self._run("init", "--encryption", "repokey-blake2")

    def capture(self, tree: Path) -> Took:
        """Store the tree as it is."""
        self.count += 1
        return self._run(
            "create", "--compression", self.compression, f"::capture{self.count}", tree.name,
            cwd=tree.parent,
        )  # fmt: skip

    def restore(self, target: Path) -> tuple[Took, Path]:
        """Bring the newest capture back."""
        took = self._run("extract", f"::capture{self.count}", cwd=target)
        return took, next(target.iterdir())

    def check(self, *, data: bool) -> Took:
        """Check the repository. Its check of the segments reads all of them, so the structure is
        that of the archives alone."""
        return self._run("check", "--verify-data" if data else "--archives-only")


class BorgZstd(Borg):
    """borg with zstd,3."""

    name = "borg zstd"
    compression = "zstd,3"


class Ours(Tool):
    """Sojourn, encrypted: the upper sealed in the node's store and pushed into a repository."""

    name = "Sojourn"
    secret = SECRET
    kind = "layer"

    def _run(self, step: str, *arguments: str) -> Took:
        argv = [sys.executable, "-m", "bench.store_ours", step, self.kind, str(self.place)]
        environment = {"SOJOURN_BENCH_SECRET": self.secret}
        root = Path(__file__).parent.parent
        return run([*argv, *arguments], environment, self.log, root)

    def start(self) -> None:
        """Make the repository."""
        self._run("start")

    def before(self, tree: Path) -> None:
        """Bring the node's store into the state that a session's would be in."""
        if self.kind == "image" or self.count:
            self._run("settle", str(tree))
        self.count += 1

    def capture(self, tree: Path) -> Took:
        """Seal the tree and push it."""
        return self._run("capture", str(tree))

    def restore(self, target: Path) -> tuple[Took, Path]:
        """Bring the newest capture back."""
        return self._run("restore", str(target / "tree")), target / "tree"

    def check(self, *, data: bool) -> Took:
        """Check the repository."""
        return self._run("check", *(["data"] if data else []))


class OursPlain(Ours):
    """Sojourn without encryption."""

    name = "Sojourn, no key"
    secret = ""


class OursImages(Ours):
    """Sojourn, of memory images."""

    kind = "image"


class OursPlainImages(OursPlain):
    """Sojourn without encryption, of memory images."""

    kind = "image"


RIVALS = (Restic, Borg, BorgZstd)
OURS = (Ours, OursPlain)
