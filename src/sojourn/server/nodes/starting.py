"""From a joined machine to a node that may act.

Guarantee: when this is done the node has a new incarnation, so nothing that an earlier process of
it still does is committed; what an earlier incarnation left running of sessions that are not this
node's any more was ended before anything was thawed; and a watchdog stands by.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from sojourn.database.base import Database
from sojourn.errors import HostUnfit, InvalidRequest, NodeNotFound
from sojourn.model import SessionState
from sojourn.model.nodes import Fence, Resources
from sojourn.node import host
from sojourn.node.isolation import processes
from sojourn.node.isolation.base import Driver
from sojourn.node.isolation.cgroups import CgroupTree
from sojourn.node.watchdog import Watchdog
from sojourn.server.nodes.identity import NodeIdentity, NodeSettings
from sojourn.server.nodes.lease import Lease
from sojourn.wire.lease_file import now

log = logging.getLogger(__name__)

LEASE_FILE = "lease"
_LIVE = {SessionState.CREATING, SessionState.RUNNING, SessionState.PAUSED}
_KILL_SECONDS = 10.0


def machine(data: Path) -> Resources:
    """What this machine has, where nobody said what of it sessions may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Resources(
        cpus=float(os.cpu_count() or 1),
        memory_bytes=memory,
        disk_bytes=shutil.disk_usage(data).total,
    )


def read_capacity(text: str, data: Path) -> Resources:
    """An operator's words: cpus=N,memory=BYTES,disk=BYTES,sessions=N; what is not named is what the
    machine has. Raises InvalidRequest."""
    names = {"memory": "memory_bytes", "disk": "disk_bytes"}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("cpus", "memory", "disk", "sessions") or not value.isascii():
            raise InvalidRequest(f"{part!r} is no part of a capacity", field="capacity")
        try:
            number = float(value) if name == "cpus" else int(value)
        except ValueError:
            number = 0
        if not 0 < number < 1e18:
            raise InvalidRequest(f"{part!r} is no capacity", field="capacity")
        found[names.get(name, name)] = number
    return msgspec.structs.replace(machine(data), **found)


async def start_node(
    database: Database,
    data: Path,
    scope: str,
    settings: NodeSettings,
    drivers: Mapping[str, Driver],
    used: Callable[[], Resources],
) -> NodeIdentity:
    """Be a node of the cluster from now on. Raises NodeNotFound, HostUnfit, Unreachable."""
    driver = drivers.get("gvisor")
    if driver is None:
        raise HostUnfit(
            "a node runs sessions with gVisor, which does not work here",
            next_step="Run `sojourn setup`.",
        )
    tree = CgroupTree(scope)
    await asyncio.to_thread(tree.prepare)
    watchdog = Watchdog(data / LEASE_FILE, tree.freezers)
    await asyncio.to_thread(watchdog.start)
    try:
        capacity = settings.capacity or machine(data)
        sent = now()
        try:
            node = await database.start_node(
                settings.id,
                address=settings.address,
                capacity=capacity,
                runtime=driver.runtime,
                cpu=host.cpu_features(),
                version=version("sojourn"),
                lease=settings.lease,
                labels=settings.labels or None,
                taints=settings.taints or None,
            )
        except NodeNotFound as error:
            raise NodeNotFound(
                f"this node ({settings.id}) was removed from the cluster",
                next_step="Join again with another data directory (`sojourn node token`,"
                " `sojourn node join --data DIR`).",
                node=settings.id,
            ) from error
        database.fence(node.fence)
        await _end_strangers(database, tree, node.fence)
        lease = Lease(database, node.fence, settings.lease, watchdog, used)
        await lease.begin(sent)
    except BaseException:
        await asyncio.to_thread(watchdog.close)
        raise
    log.info("node %s (%s), incarnation %d", node.name, node.id, node.incarnation)
    return NodeIdentity(settings, capacity, lease, tree, watchdog)


async def _end_strangers(database: Database, tree: CgroupTree, fence: Fence) -> None:
    """End the sandboxes of sessions that are not this node's any more, which may be frozen: they
    must not run on for a moment when the others are thawed."""
    keep: set[str] = set()
    cursor: str | None = None
    while True:
        page = await database.list_sessions(
            None, states=_LIVE, limit=500, after=cursor, holder=fence.node
        )
        keep.update(one.sandbox for one in page.items if one.sandbox is not None)
        cursor = page.next
        if cursor is None:
            break
    await asyncio.to_thread(_kill, tree, keep)


def _kill(tree: CgroupTree, keep: set[str]) -> None:
    strangers = sorted(tree.sandboxes() - keep)
    if strangers:
        log.warning("ending what was left of sandboxes %s", ", ".join(strangers[:10]))
    for name in strangers:
        # Where they are frozen from above, the signal takes effect at the thaw, before anything.
        processes.kill(tree.group(name).pids)


async def end_all(node: NodeIdentity) -> None:
    """After a fence: end every sandbox, frozen as they are, before it does anything more."""
    until = time.monotonic() + _KILL_SECONDS
    left = await asyncio.to_thread(node.tree.kill_all, until)
    if left:
        log.error("these processes of sandboxes do not end: %s", left)
