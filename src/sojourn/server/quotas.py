"""The disk limit of sessions on file systems without a kernel quota.

Guarantee: a session over its limit gets no new command or file until it holds less again; the
commands that filled it are ended with the reason, files stay as they were written. Single files
are bounded by the kernel of the sandbox (file size limit), so what can be exceeded by is what many
files together gain within one look.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import stat
from pathlib import Path

from sojourn.database.writes import AppendEvent
from sojourn.errors import SojournError
from sojourn.node.sandboxes import Sandbox
from sojourn.server.context import Context
from sojourn.server.registry import ActiveSession
from sojourn.store.trees import join, open_below, open_directory

log = logging.getLogger(__name__)


def allocated_bytes(tree: Path) -> int:
    """Bytes of disk under a directory that may be changing; what vanishes is not counted.

    The session makes the tree, so it may be deeper than the kernel takes in one path: directories
    are opened from the tree's own descriptor.
    """
    total = 0
    pending = [b""]
    try:
        base = open_directory(tree)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    try:
        while pending:
            path = pending.pop()
            try:
                directory = open_below(base, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link took its place meanwhile
                    continue
                raise
            try:
                total += _allocated_in(directory, path, pending)
            finally:
                os.close(directory)
    finally:
        os.close(base)
    return total


def _allocated_in(directory: int, path: bytes, pending: list[bytes]) -> int:
    """What the entries of one directory hold; the directories among them become pending."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            total += facts.st_blocks * 512
            if stat.S_ISDIR(facts.st_mode):
                pending.append(join(path, os.fsencode(entry.name)))
    return total


class Quotas:
    """Compares what sessions hold with what they may hold."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def base_bytes(self, sandbox: Sandbox) -> int:
        """What the session's sealed layers above the template hold."""
        record = sandbox.record
        return sum(layer.bytes for layer in record.layers[record.config.base_layers :])

    async def check(self, active: ActiveSession, sandbox: Sandbox) -> None:
        """Look at one running session; enforce or lift."""
        limit = active.session.limits.disk_bytes
        used = self.base_bytes(sandbox) + await asyncio.to_thread(allocated_bytes, sandbox.upper)
        if used <= limit:
            active.over_quota = None
            return
        first = active.over_quota is None
        active.over_quota = used
        if not first and active.turns == 0:
            return
        stopped = await self._stop_writers(sandbox)
        if first or stopped:
            log.warning("session %s holds %d bytes, its limit is %d", active.id, used, limit)
            await self._context.database.append_event(
                AppendEvent(
                    session=active.id,
                    kind="quota.disk",
                    result="disk_quota_exceeded",
                    details={"used": used, "limit": limit, "stopped": stopped},
                    before=active.session.head,
                    after=active.session.head,
                )
            )

    async def _stop_writers(self, sandbox: Sandbox) -> list[int]:
        """End the session's commands that still run: one of them is filling the disk, and which
        one cannot be told from outside."""
        stopped = []
        try:
            for process in await sandbox.guest.processes():
                if process.running and not process.tag.startswith("interpreter"):
                    await sandbox.guest.signal(process.id, signal.SIGKILL, group=True)
                    stopped.append(process.id)
        except SojournError as error:
            log.warning("cannot stop the commands of %s: %s", sandbox.record.session, error)
        return stopped
