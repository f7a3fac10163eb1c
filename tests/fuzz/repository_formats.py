"""A coverage-guided fuzzer for every parser of the repository's stored bytes.

Run by hand as `python tests/fuzz/repository_formats.py [corpus] [-max_total_time=60]`, with atheris
installed; the slow tests run it for some seconds. The first byte of an input chooses the parser.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["sojourn.repository", "support"]):
    from support.stored_bytes import PARSERS, attempt, samples

NAMES = sorted(PARSERS)


def one_input(data: bytes) -> None:
    if data:
        attempt(NAMES[data[0] % len(NAMES)], data[1:])


def main() -> None:
    with tempfile.TemporaryDirectory() as seeds:
        for number, name in enumerate(NAMES):
            for count, sample in enumerate(samples()[name]):
                Path(seeds, f"{name}-{count}").write_bytes(bytes([number]) + sample)
        # The first directory is where new finds go; without one of the caller's it is the seeds'.
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
