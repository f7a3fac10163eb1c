"""The trees that the store and its rivals are measured on, made the same way every time.

Everything comes from one seeded generator, so that two runs measure the same bytes. Contents are
put together from vocabularies: repeating one string would flatter whoever compresses best, and
random bytes would flatter whoever does not compress.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

MIB = 1 << 20
PAGE = 4096
WHEN = 1_700_000_000  # files were not written just now: tools treat very young files in other ways

_SYLLABLES = [a + b for a in "bcdfghklmnprstvwz" for b in "aeiou"]
_SYLLABLES += ["al", "an", "ar", "en", "er", "in", "on", "or", "st", "un"]
_LINES = 150_000
_FORMS = (
    "{0} = {1}.{2}({3}, {4})\n",
    "if {0} is not None and {1}.{2} > {3}:\n",
    "return {0}({1}[{2}], {3}={4})\n",
    "for {0} in {1}.{2}({3}):\n",
    "self.{0} = {1} or {2}.{3}\n",
    "# {0} the {1} of {2} before {3} is {4}.\n",
    "def {0}(self, {1}: {2}, {3}: {4}) -> None:\n",
    "from {0}.{1} import {2}, {3}\n",
    'raise {0}Error(f"{1} {2} at {{{3}}} is not {4}")\n',
    "{0}.{1}({2}, [{3} for {3} in {4}])\n",
)


@cache
def _vocabulary() -> tuple[list[str], list[str]]:
    """Lines, and those among them that are everywhere. Words by a Zipf law."""
    rng = random.Random(0)
    words = sorted(
        {
            "_".join(
                "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))
                for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
            )
            for _ in range(9000)
        }
    )
    rng.shuffle(words)
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(words))))
    lines = [
        ("    " * rng.choice((0, 1, 1, 2, 2, 3)) + rng.choice(_FORMS)).format(
            *rng.choices(words, cum_weights=weights, k=5)
        )
        for _ in range(_LINES)
    ]
    common = ["\n", "\n", "\n", "    else:\n", "        pass\n", "    )\n", "}\n", "*/\n"]
    return lines, common + rng.sample(lines, 400)


class Text:
    """Source-like text: a few of its lines are everywhere, most are rare."""

    def __init__(self, seed: int) -> None:
        self.lines, self.common = _vocabulary()
        self._rng = random.Random(seed)

    def make(self, size: int, region: int) -> bytes:
        """Text of a size. Files of one region share some of their lines, as those of one directory
        do; no two files are the same."""
        rng, lines = self._rng, self.lines
        start = (region * 7919) % (len(lines) - 6000)
        count = size // 34 + 1
        rare = rng.choices(range(start, start + 6000), k=count)
        parts = [f"# {rng.getrandbits(64):016x}\n"]
        parts += [lines[at] if at & 3 else f"{lines[at][:-1]}  # {at * count:x}\n" for at in rare]
        parts += rng.choices(self.common, k=count // 3)
        body = parts[1:]
        rng.shuffle(body)
        text = (parts[0] + "".join(body)).encode()
        return text[:size]


def source_tree(root: Path, files: int, seed: int = 1) -> None:
    """Nested directories of small text files (log-normal sizes, 5 KiB on average), with one
    symbolic link and half a hard link for every hundred files."""
    rng, text = random.Random(seed), Text(seed)
    root.mkdir()
    directories = [root]
    depth = {root: 0}
    for number in range(max(files // 12, 1)):
        parent = rng.choice(directories[-400:] if rng.random() < 0.7 else directories)
        if depth[parent] >= 9:
            parent = root
        made = parent / f"part{number:05d}"
        made.mkdir()
        depth[made] = depth[parent] + 1
        directories.append(made)
    placed: list[Path] = []
    for number in range(files):
        at = rng.randrange(len(directories))
        path = directories[at] / f"source{number:06d}.py"
        kind = rng.random()
        if placed and kind < 0.01:
            path.symlink_to(os.path.relpath(rng.choice(placed), path.parent))
        elif placed and kind < 0.015:
            path.hardlink_to(rng.choice(placed))
        else:
            size = min(int(rng.lognormvariate(7.7, 1.3)), 200_000)
            path.write_bytes(text.make(size, at))
            os.utime(path, (WHEN + number, WHEN + number))
            placed.append(path)


def change_source(root: Path, share: float, seed: int) -> int:
    """Write `share` of the files anew with a few lines changed; how many bytes they hold."""
    rng, text = random.Random(seed), Text(seed + 100)
    paths = sorted(p for p in root.rglob("*.py") if not p.is_symlink())
    changed = 0
    for path in rng.sample(paths, max(int(len(paths) * share), 1)):
        content = path.read_bytes()
        at = rng.randrange(len(content) + 1)
        path.write_bytes(content[:at] + text.make(120, 0) + content[at + 60 :])
        changed += path.stat().st_size
    return changed


def _binary(rng: random.Random, size: int) -> Iterator[bytes]:
    """Tables, code and addresses: half of it compresses."""
    records = [
        rng.randbytes(3) + bytes(rng.choice((1, 5))) + rng.randbytes(rng.choice((4, 8)))
        for _ in range(40_000)
    ]
    for _ in range(size // MIB):
        part = b"".join(rng.choices(records, k=60_000))[: MIB * 3 // 4]
        yield part + rng.randbytes(MIB - len(part))


def _log(rng: random.Random, text: Text, size: int) -> Iterator[bytes]:
    """Lines of a server's log."""
    messages = [line.strip() for line in text.lines[:30_000]]
    clock = float(WHEN)
    for _ in range(size // MIB):
        parts = []
        for message in rng.choices(messages, k=11_000):
            clock += rng.random() / 50
            parts.append(
                f"{clock:.3f} host{int(clock) % 17} [{int(clock * 7919) % 9999}] {message}\n"
            )
        yield "".join(parts).encode()[:MIB].ljust(MIB, b"\n")


def _write(path: Path, parts: Iterator[bytes]) -> Path:
    with path.open("wb") as file:
        file.writelines(parts)
    os.utime(path, (WHEN, WHEN))
    return path


def _shifted(rng: random.Random, source: Path, target: Path) -> None:
    """A copy with bytes put in at the start and at three more places."""
    data = source.read_bytes()
    cuts = [0, *sorted(rng.randrange(len(data)) for _ in range(3)), len(data)]
    with target.open("wb") as file:
        for start, end in pairwise(cuts):
            file.write(rng.randbytes(rng.randint(1, 5000)))
            file.write(data[start:end])
    os.utime(target, (WHEN, WHEN))


def mixed_tree(root: Path, size: int, seed: int = 2) -> None:
    """Large files: a fifth each of binaries, incompressible data, logs, exact duplicates and
    shifted duplicates."""
    rng, text = random.Random(seed), Text(seed)
    root.mkdir()
    fifth = size // 5
    originals = []
    for number in range(6):
        part = max(fifth // 6 // MIB, 1) * MIB
        originals.append(_write(root / f"binary{number}.bin", _binary(rng, part)))
        originals.append(
            _write(root / f"random{number}.dat", (rng.randbytes(MIB) for _ in range(part // MIB)))
        )
        originals.append(_write(root / f"server{number}.log", _log(rng, text, part)))
    (root / "copies").mkdir()
    (root / "shifted").mkdir()
    for source in rng.sample(originals, 6):
        shutil.copy2(source, root / "copies" / source.name)
    for source in rng.sample(originals, 6):
        _shifted(rng, source, root / "shifted" / source.name)


def change_mixed(root: Path, share: float, seed: int) -> int:
    """Change `share` of the bytes: half as lines added to logs, half as MiB-sized places written
    over; how many bytes that is."""
    rng, text = random.Random(seed), Text(seed)
    total = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    amount = max(int(total * share / 2) // MIB, 1)
    logs = sorted(root.glob("*.log"))
    for number in range(amount):
        with logs[number % len(logs)].open("ab") as file:
            file.writelines(_log(rng, text, MIB))
    others = sorted(p for p in root.glob("*") if p.suffix in {".bin", ".dat"})
    for _ in range(amount):
        path = rng.choice(others)
        with path.open("r+b") as file:
            file.seek(rng.randrange(max(path.stat().st_size - MIB, 1)))
            file.write(rng.randbytes(MIB))
    return 2 * amount * MIB


class Pages:
    """Memory pages: zeros, heap (addresses, small numbers, words), text, and some noise."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        bases = [0x7F0000000000 + rng.getrandbits(36) for _ in range(40)]
        self._words = [
            (base + rng.randrange(1 << 22) * 16).to_bytes(8, "little")
            for base in rng.choices(bases, k=30_000)
        ]
        self._words += [rng.randrange(1 << 10).to_bytes(8, "little") for _ in range(9000)]
        self._words += [rng.randbytes(8) for _ in range(6000)] + [bytes(8)] * 5000
        self._text = Text(seed)

    def heap(self) -> bytes:
        """A page of a heap."""
        return b"".join(self._rng.choices(self._words, k=PAGE // 8))

    def any(self) -> bytes:
        """A page of any kind."""
        kind = self._rng.random()
        if kind < 0.3:
            return bytes(PAGE)
        if kind < 0.75:
            return self.heap()
        if kind < 0.9:
            return self._text.make(PAGE, self._rng.randrange(1000)).ljust(PAGE, b"\0")
        return self._rng.randbytes(PAGE)


def memory_image(root: Path, size: int, seed: int = 3) -> None:
    """An image as a driver writes it: the pages, and a little state."""
    pages = Pages(seed)
    root.mkdir()
    with (root / "pages.img").open("wb") as file:
        for _ in range(size // PAGE):
            file.write(pages.any())
    (root / "checkpoint.img").write_bytes(random.Random(seed).randbytes(16_384))


def change_image(root: Path, share: float, seed: int) -> int:
    """Write over `share` of the pages at random; how many bytes that is."""
    rng, pages = random.Random(seed), Pages(seed)
    path = root / "pages.img"
    count = path.stat().st_size // PAGE
    chosen = rng.sample(range(count), max(int(count * share), 1))
    with path.open("r+b") as file:
        for page in chosen:
            file.seek(page * PAGE)
            file.write(pages.heap())
    return len(chosen) * PAGE
