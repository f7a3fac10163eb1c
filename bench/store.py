"""The store against restic and borg: the same trees, in turns, every step a fresh process.

Three trees (`store_trees`): many small source files; large files with duplicates, also shifted
ones; a memory image with successors of which one page in a hundred changed. The tools take turns
step by step, the first one changing from round to round, so that all see the same machine.

SOJOURN_BENCH_SCALE makes the trees smaller (1 is 120,000 files, 3 GB, 210 MB), SOJOURN_BENCH_ROUNDS
repeats the tree of files (the rest is measured once), SOJOURN_BENCH_TREES picks of
`files,mix,memory`, SOJOURN_BENCH_DIR says where the trees and repositories are put meanwhile (some
25 GB at scale 1).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import store_trees as trees
from bench.harness import Row, median
from bench.store_tools import (
    RIVALS,
    Borg,
    BorgZstd,
    Ours,
    OursImages,
    OursPlain,
    OursPlainImages,
    Restic,
    Took,
    Tool,
    ensure_rivals,
)

SCALE = float(os.environ.get("SOJOURN_BENCH_SCALE", "1"))
ROUNDS = int(os.environ.get("SOJOURN_BENCH_ROUNDS", "1"))
TREES = os.environ.get("SOJOURN_BENCH_TREES", "files,mix,memory").split(",")
DIRECTORY = os.environ.get("SOJOURN_BENCH_DIR")
FILES, MIXED, IMAGE = int(120_000 * SCALE), int(3e9 * SCALE), int(210e6 * SCALE)
SHARE, SUCCESSORS = 0.01, 5
UNCHANGED_LIMIT = 3.0 * max(SCALE, 0.2)  # seconds, for the small files
PAGES_LIMIT = 1.3  # stored bytes of the successors by the bytes of their changed pages
BYTES_LIMIT = 1.1

MB = 1e6


@dataclass
class Figures:
    """Samples by step and tool."""

    seconds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    processor: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    megabytes: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    changed: float = 0.0

    def take(self, step: str, tool: Tool, took: Took) -> None:
        """Note what a step cost."""
        self.seconds[step][tool.name].append(took.seconds)
        self.processor[step][tool.name].append(took.processor)


def measure() -> list[Row]:
    """The rows of this measure."""
    ensure_rivals()
    rows: list[Row] = []
    if "files" in TREES:
        files = Figures()
        for number in range(ROUNDS):
            with _scratch() as scratch:
                trees.source_tree(scratch / "tree", FILES)
                tools = _tools(_LAYERS, scratch, number)
                _captures(files, tools, scratch / "tree", trees.change_source)
        rows += _rows("files", files)
    if "mix" in TREES:
        mix = Figures()
        with _scratch() as scratch:
            trees.mixed_tree(scratch / "tree", MIXED)
            _captures(mix, _tools(_LAYERS, scratch, 0), scratch / "tree", trees.change_mixed)
        rows += _rows("mix", mix)
    if "memory" in TREES:
        memory = Figures()
        with _scratch() as scratch:
            trees.memory_image(scratch / "tree", IMAGE)
            _series(memory, _tools(_IMAGES, scratch, 0), scratch / "tree")
        rows += _rows("memory", memory)
    return rows


_LAYERS: tuple[type[Tool], ...] = (Ours, OursPlain, *RIVALS)
_IMAGES: tuple[type[Tool], ...] = (OursImages, OursPlainImages, *RIVALS)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory that is removed."""
    made = Path(tempfile.mkdtemp(prefix="sojourn-bench-store-", dir=DIRECTORY))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def _tools(kinds: tuple[type[Tool], ...], scratch: Path, number: int) -> list[Tool]:
    tools = [kind(scratch / kind.__name__) for kind in kinds]
    return [*tools[number % len(tools) :], *tools[: number % len(tools)]]


def _settle() -> None:
    """Write out what earlier steps left dirty: nobody pays for another one's writing."""
    os.sync()


def _forget() -> None:
    """Drop what the kernel holds of files, so that the next step begins cold."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def _capture(
    figures: Figures, step: str, tools: list[Tool], tree: Path, *, prepared: bool = False
) -> None:
    """One capture by each tool, of the same state; the tree is in the page cache for all."""
    _read(tree)
    for tool in tools:
        if not prepared:
            tool.before(tree)
        _settle()
        before = tool.stored()
        figures.take(step, tool, tool.capture(tree))
        figures.megabytes[step][tool.name].append((tool.stored() - before) / MB)


def _captures(
    figures: Figures, tools: list[Tool], tree: Path, change: Callable[[Path, float, int], int]
) -> None:
    _capture(figures, "first capture", tools, tree)
    _capture(figures, "unchanged capture", tools, tree)
    for tool in tools:  # the same with nothing in the page cache
        tool.before(tree)
        _forget()
        figures.take("unchanged capture, cold", tool, tool.capture(tree))
    # What a server knows of a tree it knows from before the change.
    for tool in tools:
        tool.before(tree)
    figures.changed = change(tree, SHARE, 11) / MB
    _capture(figures, "1 % changed capture", tools, tree, prepared=True)
    _ends(figures, tools, tree, modes=True)


def _series(figures: Figures, tools: list[Tool], tree: Path) -> None:
    _capture(figures, "first capture", tools, tree)
    for number in range(SUCCESSORS):
        figures.changed += trees.change_image(tree, SHARE, 20 + number) / MB
        _capture(figures, "successor", tools, tree)
    added = figures.megabytes["successor"]
    for name, samples in added.items():
        added[name] = [sum(samples)]
    _ends(figures, tools, tree, modes=False)  # an image is contents alone


def _ends(figures: Figures, tools: list[Tool], tree: Path, *, modes: bool) -> None:
    """Checks and restores, each begun cold: whoever checks or restores has not just written."""
    for tool in tools:
        figures.megabytes["stored in all"][tool.name].append(tool.stored() / MB)
        _forget()
        figures.take("check, structure", tool, tool.check(data=False))
        _forget()
        figures.take("check, every byte", tool, tool.check(data=True))
    wanted = _digest(tree, modes=modes)
    for tool in tools:
        target = tool.place / "restored"
        target.mkdir()
        _forget()
        took, found = tool.restore(target)
        subprocess.run(["sync", "-f", str(target)], check=True)
        figures.take("full restore", tool, took)
        if _digest(found, modes=modes) != wanted:
            raise SystemExit(f"{tool.name} restored something else than was stored")
        shutil.rmtree(target)


def _read(tree: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def _digest(tree: Path, *, modes: bool) -> str:
    """Of names, kinds, targets, contents, and modes where all keep them."""
    total = hashlib.blake2b()
    for path in sorted(tree.rglob("*")):
        facts = path.lstat()
        mode = facts.st_mode if modes else stat.S_IFMT(facts.st_mode)
        total.update(f"{path.relative_to(tree)} {mode:o} ".encode())
        if stat.S_ISLNK(facts.st_mode):
            total.update(os.fsencode(path.readlink()))
        elif stat.S_ISREG(facts.st_mode):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


# -- rows -------------------------------------------------------------------------------------
_NAMES = [OursPlain.name, Restic.name, Borg.name, BorgZstd.name]
_RIVALS = [Restic.name, Borg.name, BorgZstd.name]


def _rows(what: str, figures: Figures) -> list[Row]:
    rows = []
    for step, samples in figures.seconds.items():
        middle = {name: median(found) for name, found in samples.items()}
        ours, best = middle[Ours.name], min(middle[name] for name in _RIVALS)
        target, reached = "< both", ours < best
        if what == "files" and step == "unchanged capture":
            target, reached = (
                f"< both, < {UNCHANGED_LIMIT:.1f} s",
                ours < min(best, UNCHANGED_LIMIT),
            )
        work = figures.processor[step]
        spent = ", ".join(f"{name} {median(work[name]):.1f}" for name in [Ours.name, *_RIVALS])
        rows.append(
            Row(
                f"{what}: {step}",
                ours,
                best,
                target,
                unit="s",
                reached=reached,
                note=f"processor seconds: {spent}",
                samples=samples[Ours.name],
                others={name: middle[name] for name in _NAMES},
            )
        )
    for step, samples in figures.megabytes.items():
        middle = {name: median(found) for name, found in samples.items()}
        ours, best = middle[Ours.name], min(middle[name] for name in _RIVALS)
        target, kept, note = "", None, ""
        if step in ("first capture", "stored in all"):
            target, kept = "<= 1.1 x the better", ours <= BYTES_LIMIT * best
        if step == "successor":
            target, kept = "<= 1.3 x the changed pages", ours <= PAGES_LIMIT * figures.changed
            note = f"{SUCCESSORS} successors, {figures.changed:.1f} MB of pages changed in all"
        elif step == "1 % changed capture":
            note = f"{figures.changed:.1f} MB of files changed"
        rows.append(
            Row(
                f"{what}: bytes, {step}",
                ours,
                best,
                target or "-",
                unit="MB",
                reached=kept,
                note=note,
                samples=samples[Ours.name],
                others={name: middle[name] for name in _NAMES},
            )
        )
    return rows
