"""A process that holds a lease as a node does, for tests that stop and kill it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_HOLD = """
import sys, time
from pathlib import Path
from sojourn.node.watchdog import Watchdog
from sojourn.wire.lease_file import now

node = Watchdog(Path(sys.argv[1]), [Path(group) for group in sys.argv[2:]])
node.start()
while True:
    node.hold(now() + 400_000_000)
    node.thaw()
    print("held", flush=True)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def stand_in_node(path: Path, groups: Sequence[Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Holds the lease for 0.4 s, ten times a second, until it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), *map(str, groups)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
