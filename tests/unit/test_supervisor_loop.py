"""An event reaches only who is watched for it, whatever a restored kernel reports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
SOURCES = HERE.parent / "supervisor"


def test_what_a_restored_kernel_reports_of_removed_sources_reaches_nobody(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    program = tmp_path / "loop"
    sources = [HERE / "support" / "loop_harness.c", SOURCES / "loop.c", SOURCES / "bytes.c"]
    wraps = [f"-Wl,--wrap=epoll_{name}" for name in ("create1", "ctl", "wait")]
    options = ["-D_GNU_SOURCE", "-std=gnu11", "-O1", "-fsanitize=address,undefined", *wraps]
    subprocess.run(["cc", *options, "-fno-sanitize-recover", "-o", program, *sources], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
