"""Memory of 50 idle sessions, against 50 bare sandboxes."""

from __future__ import annotations

import time

from bench.harness import Row, bare, processes_naming, pss_bytes, server

COUNT = 50


def measure() -> list[Row]:
    """The rows of this measure."""
    with server() as (client, data):
        before = sum(map(pss_bytes, processes_naming(data)))
        for _ in range(COUNT):
            client.sessions.create(policy={"auto_snapshot": "off"})
        time.sleep(5)
        ours = (sum(map(pss_bytes, processes_naming(data))) - before) / COUNT / 1e6
    with bare() as runtime:
        for _ in range(COUNT):
            runtime.start()
        time.sleep(5)
        theirs = sum(map(pss_bytes, processes_naming(runtime.directory))) / COUNT / 1e6
    return [
        Row(
            f"memory of an idle session ({COUNT} at once)",
            ours,
            theirs,
            "<= 15 MB",
            unit="MB",
            reached=ours <= 15,
            note="proportional set size of all host processes, the server's growth included",
        )
    ]
