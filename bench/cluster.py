"""The database of a large cluster: what its nodes and servers ask of it, among few sessions and a
million.

    python -m bench.cluster [--sizes 10000,100000,1000000] [--nodes 200] [--samples 400]

Every node has a fence, a lease that it renews every three seconds, and sessions that it holds; what
is measured are the methods that nodes and servers call, one after the other and eight at once, on a
PostgreSQL of its own that syncs everything. A few database objects speak for all nodes: each call
is made in the name of the node whose session it is about.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import cluster_rows
from bench.cluster_calls import (
    CHANGES,
    HELD,
    READS,
    RUNNING,
    Call,
    Cluster,
    lose,
    new_session,
    pages,
    snapshot,
)
from bench.harness import Row
from sojourn.database import open_database
from sojourn.database.base import Database
from sojourn.database.postgres import transactions
from sojourn.database.writes import InsertSession, InsertSnapshot, UpdateSession
from sojourn.errors import Conflict
from sojourn.model import Session, new_id
from sojourn.model.nodes import Node, Resources

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.postgres import PostgresServer, postgres_server

SIZES = (10_000, 100_000, 1_000_000)
NODES = 200
LIVE = 10_000
SAMPLES = 400
PROCESSES = 6  # database objects, each with connections and threads of its own
LOST_SESSIONS = 50
TARGET = 20.0  # ms, the worst of a hundred changes of a session's state
_SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "autovacuum": "on",
}
# -- measuring -----------------------------------------------------------------------------------


def cpu_seconds(server: PostgresServer) -> float:
    """Processor time of the database's processes, those that ended included."""
    assert server.pid is not None
    own = _times(server.pid)
    pids = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return sum(own) + sum(sum(_times(int(pid))[:2]) for pid in pids)


def watch_transactions() -> list[float]:
    """From now on the seconds of each transaction, from its begin to its acknowledged commit: what
    the database takes, without the queues and the event loop of the client before and after it."""
    took: list[float] = []
    attempt = transactions._attempt

    def timed_attempt(*arguments: Any) -> None:
        began = time.perf_counter()
        attempt(*arguments)
        took.append(time.perf_counter() - began)

    transactions._attempt = timed_attempt
    return took


TRANSACTIONS = watch_transactions()


def _times(pid: int) -> tuple[float, ...]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return (0.0, 0.0, 0.0, 0.0)
    fields = text.rpartition(")")[2].split()
    return tuple(int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])


def part(samples: list[float], share: float) -> float:
    """The sample below which this share of them is, in milliseconds."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


async def timed(
    cluster: Cluster,
    server: PostgresServer,
    call: Call,
    made: list[Session],
    times: int,
    beside: int,
) -> dict[str, float]:
    """So many calls, `beside` of them at once: milliseconds, rate, and the database's time."""
    took: list[float] = []
    left = times

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began = time.perf_counter()
            await call(cluster, made)
            took.append(time.perf_counter() - began)

    TRANSACTIONS.clear()
    cpu, began = cpu_seconds(server), time.perf_counter()
    await asyncio.gather(*[work() for _ in range(beside)])
    seconds = time.perf_counter() - began
    found = {
        "p50": part(took, 0.5),
        "p99": part(took, 0.99),
        "rate": len(took) / seconds,
        "cpu_ms": (cpu_seconds(server) - cpu) / len(took) * 1000,
    }
    if len(TRANSACTIONS) >= times:  # it changes something
        found |= {
            "transaction_p50": part(TRANSACTIONS, 0.5),
            "transaction_p99": part(TRANSACTIONS, 0.99),
        }
    return found


@asynccontextmanager
async def opened(server: PostgresServer, name: str, count: int) -> AsyncIterator[list[Database]]:
    databases: list[Database] = []
    try:
        for _ in range(count):
            databases.append(await open_database(server.url(name)))
        yield databases
    finally:
        for database in databases:
            await database.close()


async def join(server: Database, name: str) -> Node:
    """A node that has joined and started."""
    await server.add_node(name, name)
    return await server.start_node(
        name,
        address=f"{name}:7000",
        capacity=Resources(cpus=32.0, memory_bytes=1 << 38, sessions=500),
        runtime="runsc-1",
        cpu=["avx2"],
        version="1",
        lease=HELD,
    )


async def measure_size(
    server: PostgresServer, name: str, size: int, began: float, given: argparse.Namespace
) -> dict[str, object]:
    """All measures with as many sessions as there are now."""
    results: dict[str, object] = {}
    lost = given.sizes.index(size) + 1
    async with opened(server, name, PROCESSES + 1) as (front, *databases):
        nodes = [await _started(front, f"nod_{number}") for number in range(given.nodes)]
        cluster = Cluster(front, databases, nodes)
        renewing = asyncio.create_task(cluster.renew())
        try:
            for beside in (1, 8):
                made: list[Session] = []
                for what, call in CHANGES:
                    # Some are measured on what others made: `create` comes first.
                    results[f"{what}, {beside} at once"] = await timed(
                        cluster, server, call, made, given.samples, beside
                    )
                for what, call in [*READS, *pages(size, began)]:
                    results[f"{what}, {beside} at once"] = await timed(
                        cluster, server, call, made, given.samples // 2, beside
                    )
            await _losses(cluster, front, f"nod_{lost}", results)
            results["renewal of a lease, beside all that"] = {
                "p50": part(cluster.renewals, 0.5),
                "p99": part(cluster.renewals, 0.99),
            }
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
    return results


async def _started(front: Database, name: str) -> Node:
    try:
        return await join(front, name)
    except Conflict:
        node = await front.get_node(name)
        return await front.start_node(
            name,
            address=node.address,
            capacity=node.capacity,
            runtime=node.runtime,
            cpu=node.cpu,
            version=node.version,
            lease=HELD,
        )


async def _losses(
    cluster: Cluster, front: Database, large: str, results: dict[str, object]
) -> None:
    """Nodes with 50 live sessions each, and one of the others with all that it holds."""
    small: list[float] = []
    for number in range(5):
        name = f"lost_{number}_{new_id('nod')}"
        node = await join(front, name)
        cluster.fences[name] = node.fence
        for _ in range(LOST_SESSIONS):
            session = msgspec.structs.replace(new_session(name), state=RUNNING)
            row = msgspec.structs.replace(snapshot(session), durable_at=1.0)
            head = UpdateSession(session.id, {RUNNING}, 0, {"head": row.id})
            await front.commit([InsertSession(session), InsertSnapshot(row), head])
        _, seconds, count = await lose(cluster, front, name)
        assert count == LOST_SESSIONS
        small.append(seconds)
    results[f"failover of a node with {LOST_SESSIONS} sessions"] = {
        "p50": part(small, 0.5),
        "p99": part(small, 0.99),
    }
    first, seconds, count = await lose(cluster, front, large)
    results["failover of a node with all it holds"] = {
        "sessions": count,
        "live_ms": first * 1000,
        "all_ms": seconds * 1000,
    }


async def run(given: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The results for each size."""
    found: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sojourn-bench-", ignore_cleanup_errors=True) as scratch,
        postgres_server(Path(scratch), durable=True, settings=_SETTINGS) as server,
    ):
        name = server.create()
        async with opened(server, name, 1):
            pass  # its tables are made
        began, first, live = time.time() - 2 * max(given.sizes), 1, 0
        for size in given.sizes:
            started = time.perf_counter()
            more, live = min(LIVE, size // 2) - live, min(LIVE, size // 2)
            await asyncio.to_thread(
                cluster_rows.fill,
                server.url(name),
                first,
                size,
                running=first - 1 + more,
                nodes=given.nodes,
                time=began,
            )
            first = size + 1
            print(f"{size:,} sessions after {time.perf_counter() - started:.0f} s", flush=True)
            bytes_of = cluster_rows.sizes(server.url(name))
            results: dict[str, object] = {
                "bytes": bytes_of,
                "bytes_per_session": sum(bytes_of.values()) / size,
                "load": os.getloadavg()[0],
            }
            results |= await measure_size(server, name, size, began, given)
            found[f"{size}"] = results
            print(table({f"{size}": results}), flush=True)
    return found


# -- telling -------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, object]]) -> str:
    """Markdown: of each measure the middle and the worst of a hundred, by number of sessions."""
    sizes = list(found)
    lines = [
        f"| milliseconds: p50, p99 | {' | '.join(f'{int(size):,} sessions' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for name in found[sizes[-1]]:
        cells = [_cell(found[size].get(name)) for size in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    if not isinstance(value, dict):
        return str(value)
    if "p99" not in value:
        return ", ".join(f"{name} {number:,.0f}" for name, number in value.items())
    text = f"{value['p50']:.1f}, {value['p99']:.1f}"
    if "rate" in value:
        text += f" ({value['rate']:,.0f}/s, {value['cpu_ms']:.2f} ms of the database's processors"
        if "transaction_p99" in value:
            text += (
                f"; each transaction {value['transaction_p50']:.1f}, {value['transaction_p99']:.1f}"
            )
        text += ")"
    return text


def measure() -> list[Row]:
    """For `python -m bench cluster`: the changes of sessions at the largest size."""
    given = argparse.Namespace(sizes=SIZES, nodes=NODES, samples=SAMPLES)
    found = write(given)
    largest = found[str(SIZES[-1])]
    rows = []
    for what, _ in CHANGES:
        one, many = largest[f"{what}, 1 at once"], largest[f"{what}, 8 at once"]
        assert isinstance(one, dict) and isinstance(many, dict)
        rows.append(
            Row(
                f"database of 1,000,000 sessions: a transaction of {what}, p99",
                one["transaction_p99"],
                None,
                f"<= {TARGET:g} ms",
                reached=one["transaction_p99"] <= TARGET,
                note=f"all of them p99 {one['p99']:.1f} ms; eight at once {many['rate']:,.0f}/s,"
                f" p99 {many['p99']:.1f} ms",
            )
        )
    return rows


def write(given: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Measure, and keep the results beside the others."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(given))
    results = Path(__file__).parent / "results" / "cluster.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args()
    given.sizes = tuple(int(size) for size in given.sizes.split(","))
    print(table(write(given)))


if __name__ == "__main__":
    main()
