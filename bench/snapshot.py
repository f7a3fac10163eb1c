"""The stall of a live snapshot as the session sees it, and what an empty turn costs."""

from __future__ import annotations

import time

from bench.harness import Row, bare, median, server, session, timed

ROUNDS = 10

WATCH = """
import time
last = time.monotonic()
while True:
    time.sleep(0.0005)
    now = time.monotonic()
    if now - last > 0.008:
        with open("/tmp/gaps", "a") as file:
            file.write(f"{(now - last) * 1000}\\n")
    last = time.monotonic()
"""


def measure() -> list[Row]:
    """The rows of this measure."""
    stalls, whole, bare_whole = [], [], []
    argv = ["/usr/bin/python3", "-c", WATCH]
    with server() as (client, _), bare() as runtime, session(client) as one:
        one.spawn(argv)
        name, _ = runtime.start(argv)
        time.sleep(1)
        for _ in range(ROUNDS):
            one.exec("rm -f /tmp/gaps; sleep 0.2")
            whole.append(timed(one.snapshot))
            time.sleep(0.2)
            gaps = one.exec("cat /tmp/gaps").text.split()
            stalls.append(max(map(float, gaps), default=0.0))
            bare_whole.append(timed(lambda: runtime.checkpoint(name, leave=True)))
    rows = [
        Row(
            "live snapshot, stall inside",
            median(stalls),
            median(bare_whole),
            "-",
            note="bare: whole runsc checkpoint -leave-running, files not kept",
            samples=stalls,
        ),
        Row("live snapshot, until it is safe", median(whole), None, "-", samples=whole),
    ]
    with server() as (client, _):
        command = ["/usr/bin/true"]
        with session(client) as without, session(client, policy={}) as with_snapshots:
            on, off = [], []
            for _ in range(20):
                without.exec(command)
                with_snapshots.exec(command)
            for _ in range(200):
                off.append(timed(lambda: without.exec(command)))
                on.append(timed(lambda: with_snapshots.exec(command)))
    cost = median(on) - median(off)
    rows.append(
        Row(
            "empty turn, cost of looking for changes",
            cost,
            None,
            "<= 1 ms",
            reached=cost <= 1,
            note=f"exec true with snapshots {median(on):.2f} ms, without {median(off):.2f}",
            samples=on,
        )
    )
    return rows
