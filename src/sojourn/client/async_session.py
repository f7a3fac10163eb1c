"""A session, asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, overload

import msgspec

from sojourn.client import (
    core_commands,
    core_files,
    core_networks,
    core_ports,
    core_sessions,
    core_templates,
)
from sojourn.client.async_files import AsyncFiles
from sojourn.client.async_process import AsyncProcess
from sojourn.client.async_transport import AsyncTransport, content_of
from sojourn.client.core_commands import Command, ExecResult
from sojourn.client.core_networks import NetworkLike
from sojourn.client.core_sessions import Labels, LimitsLike, PolicyLike
from sojourn.client.listings import Listing
from sojourn.errors import SojournError
from sojourn.model.network import Denial, NetworkMode, NetworkPolicy, NetworkRule
from sojourn.wire.api import (
    ArchiveInfo,
    DiffInfo,
    DurabilityInfo,
    EffectInfo,
    EffectsLeft,
    EventInfo,
    SessionInfo,
    SnapshotInfo,
    TemplateInfo,
    TemplateRequest,
    VerifyReport,
)
from sojourn.wire.code import CodeResult
from sojourn.wire.networks import PortInfo


class AsyncTurn:
    """A group of calls under way; `snapshot` is what was taken at its end, if anything changed."""

    def __init__(self) -> None:
        self.snapshot: SnapshotInfo | None = None


class AsyncSession:
    """A session: files, processes and history that outlive every sandbox.

    Attributes tell what was last heard from the server; `refresh` asks anew. Commands and file
    access resume a paused or suspended session by themselves. Any call may raise SessionNotFound,
    SessionBusy, Unauthenticated and Unreachable.
    """

    def __init__(self, transport: AsyncTransport, info: SessionInfo) -> None:
        self._transport = transport
        self.info = info
        self._left_behind: EffectsLeft | None = None
        self.files = AsyncFiles(transport, info.id)

    def __repr__(self) -> str:
        return f"<AsyncSession {self.id} {self.info.name or ''} {self.state}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def name(self) -> str | None:
        """Its name."""
        return self.info.name

    @property
    def state(self) -> str:
        """creating, running, paused, suspended, failed or deleted, when last asked."""
        return self.info.state

    @property
    def head(self) -> str | None:
        """The id of its newest snapshot, when last asked."""
        return self.info.head

    @property
    def labels(self) -> dict[str, str]:
        """Its labels, when last asked."""
        return self.info.labels

    @property
    def network(self) -> NetworkPolicy:
        """Its network policy, when last asked."""
        return self.info.network

    @property
    def left_behind(self) -> EffectsLeft | None:
        """What the last rollback, promotion or fork here left behind: requests that cannot be taken
        back; None where there were none."""
        return self._left_behind

    async def refresh(self) -> AsyncSession:
        """Ask the server anew."""
        self.info = await self._transport.run(core_sessions.get_session(self.id))
        return self

    async def update(
        self,
        *,
        name: str | msgspec.UnsetType | None = msgspec.UNSET,
        labels: Labels | None = None,
        limits: LimitsLike | None = None,
        policy: PolicyLike | None = None,
        network: NetworkLike | None = None,
    ) -> AsyncSession:
        """Change what is given; `name=None` takes the name away. Raises NameTaken."""
        self.info = await self._transport.run(
            core_sessions.update(
                self.id, name=name, labels=labels, limits=limits, policy=policy, network=network
            )
        )
        return self

    async def set_network(self, network: NetworkLike) -> AsyncSession:
        """Give it another network policy (see `allow`), in force when this returns: connections
        that it does not allow are over. Raises InvalidRequest."""
        return await self.update(network=network)

    async def change_network(
        self,
        *,
        allow: Sequence[str | NetworkRule] = (),
        deny: Sequence[str] = (),
        mode: NetworkMode | str | None = None,
        grant: Sequence[str] = (),
        revoke: Sequence[str] = (),
    ) -> AsyncSession:
        """Change of its network policy what is named, and nothing else: `allow` domains, networks
        (as `sojourn.allow` takes them) or rules, `deny` what stands in a rule, `mode` "open",
        "allowlist" or "none", `grant` and `revoke` secrets. In force when this returns. Raises
        InvalidRequest, also where what is denied or revoked is not there."""
        plan = core_networks.change(
            self.id, allow=allow, deny=deny, mode=mode, grant=grant, revoke=revoke
        )
        self.info = await self._transport.run(plan)
        return self

    async def keep_alive(self, seconds: float) -> AsyncSession:
        """Keep it from being suspended as idle for at least `seconds` from now."""
        self.info = await self._transport.run(core_sessions.keep_alive(self.id, seconds))
        return self

    # -- exposed ports

    async def expose(
        self,
        port: int,
        *,
        public: bool = False,
        kind: Literal["http", "tcp"] = "http",
        sources: Sequence[str] = (),
    ) -> PortInfo:
        """Have a port of the session reached from outside; a request wakes a session that is put
        away. The address stays the same as long as it is exposed; forks expose nothing by that.

        One that is not `public` needs the answer's `token`. One of kind tcp is public, to the
        networks in `sources` (none: all). Raises InvalidRequest, Conflict (exposed otherwise)."""
        plan = core_ports.expose(self.id, port, public=public, kind=kind, sources=sources)
        return await self._transport.run(plan)

    async def ports(self) -> list[PortInfo]:
        """The exposed ports, with their addresses and tokens."""
        return await self._transport.run(core_ports.ports(self.id))

    async def unexpose(self, port: int) -> None:
        """Expose a port no longer; its open connections end. Raises PortNotFound."""
        await self._transport.run(core_ports.unexpose(self.id, port))

    # -- commands

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: Any = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        on_start: Callable[[int], object] | None = None,
    ) -> ExecResult:
        """Run a command to its end and give its exit code and all its output.

        `command` is text for the session's shell, or a list of arguments. `timeout` in seconds
        kills its whole process group. `stdin` is bytes, text, an open file or an iterable of
        bytes, of any size. The callbacks get output as it comes, and the process's id once it
        runs. A non-zero exit code raises nothing. Raises CommandNotStarted, Interrupted and
        SandboxLost.
        """
        collector = core_commands.Collector(on_stdout, on_stderr)
        if core_commands.streams_input(stdin):
            process = await self.spawn(
                command, timeout=timeout, env=env, cwd=cwd, user=user, stdin="pipe", lossless=True
            )
            if on_start is not None:
                on_start(process.id)
            return await self._feed(process, stdin, collector)
        source = core_commands.exec_source(
            self.id,
            command,
            timeout=timeout,
            env=env,
            cwd=cwd,
            user=user,
            stdin=core_commands.inline_input(stdin),
            on_start=on_start,
        )
        async for item in self._transport.stream(source):
            collector.take(item)
        return collector.result()

    async def _feed(
        self, process: AsyncProcess, stdin: Any, collector: core_commands.Collector
    ) -> ExecResult:
        """Stream input to a process while its output is read."""

        async def deliver() -> None:
            try:
                await process.write(content_of(stdin), eof=True)
            except SojournError as error:
                if not core_commands.forgive_input(error):
                    raise
            except Exception:
                await process.kill()  # the input's own failure: the command would wait for ever
                raise

        writer = asyncio.create_task(deliver())
        source = core_commands.FrameSource(self.id, process=process.id)
        try:
            async for item in self._transport.stream(source):
                collector.take(item)
            # An input that blocks must not hold back a result that is there.
            await asyncio.wait([writer], timeout=1.0)
        finally:
            if not writer.done():
                writer.cancel()
        if writer.done() and not writer.cancelled():
            writer.result()
        return collector.result()

    async def spawn(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | Literal["pipe"] | None = None,
        pty: tuple[int, int] | None = None,
        keep: int = 8 * 1024 * 1024,
        lossless: bool = False,
    ) -> AsyncProcess:
        """Start a command that goes on by itself, also through pause, suspend and fork.

        `stdin` is inline input, or "pipe" to `write` it later. `pty` (rows, columns) gives it a
        terminal. `keep` bytes of each output stream are kept for later reads; with `lossless` it
        is held back instead of dropping output. Raises CommandNotStarted.
        """
        info = await self._transport.run(
            core_commands.spawn(
                self.id,
                command,
                timeout=timeout,
                env=env,
                cwd=cwd,
                user=user,
                stdin=None if stdin == "pipe" else core_commands.inline_input(stdin),
                open_stdin=stdin == "pipe",
                pty=pty,
                keep=keep,
                lossless=lossless,
            )
        )
        return AsyncProcess(self._transport, self.id, info)

    async def processes(self) -> list[AsyncProcess]:
        """Its processes, ended ones as long as they are kept."""
        found = await self._transport.run(core_commands.processes(self.id))
        return [AsyncProcess(self._transport, self.id, info) for info in found]

    async def process(self, process_id: int) -> AsyncProcess:
        """A process by its id. Raises ProcessNotFound."""
        info = await self._transport.run(core_commands.process(self.id, process_id))
        return AsyncProcess(self._transport, self.id, info)

    async def run_code(
        self, code: str, *, context: str = "default", timeout: float | None = None
    ) -> CodeResult:
        """Run Python code in the session's persistent interpreter: what it defines is there for
        the next call, also after suspend and fork. An exception of the code is told in the
        result's `error`. Raises CommandNotStarted when the template has no python3."""
        return await self._transport.run(
            core_sessions.run_code(self.id, code, context=context, timeout=timeout)
        )

    # -- history

    async def snapshot(
        self, label: str | None = None, *, memory: bool = True, wait: str | None = None
    ) -> SnapshotInfo:
        """Take a snapshot; the session runs on. Without `memory` files only. It survives a crash
        of this node when it returns, with `wait="durable"` also the loss of the node.

        Raises CaptureRefused (UnlinkedOpenFile), CaptureFailed, StorageFull; StoreUnreachable when
        the object store does not have it in time (the node has it)."""
        found = await self._transport.run(
            core_sessions.snapshot(self.id, label=label, memory=memory, wait=wait)
        )
        self.info = msgspec.structs.replace(self.info, head=found.id)
        return found

    async def to_template(
        self,
        name: str,
        *,
        memory: bool = True,
        start: bool | None = None,
        wait: str | None = None,
    ) -> TemplateInfo:
        """Make a version of template `name` of its present state; the session runs on. Sessions
        made from it start with these processes running; without `memory` from its files alone.

        Raises CaptureRefused where processes may hold what no other session is to have (secrets,
        tokens of ports), CaptureFailed, NameTaken, StorageFull."""
        request = TemplateRequest(name=name, memory=memory, start=start)
        return await self._transport.run(core_templates.from_session(self.id, request, wait))

    async def history(self) -> list[SnapshotInfo]:
        """All snapshots of its tree."""
        return await self._transport.run(core_sessions.history(self.id))

    async def delete_snapshot(self, snapshot: str | SnapshotInfo) -> None:
        """Delete a snapshot, by id or label. Raises SnapshotNotFound, Conflict."""
        name = core_sessions.snapshot_name(snapshot)
        await self._transport.run(core_sessions.delete_snapshot(self.id, name))

    async def diff(
        self,
        a: str | SnapshotInfo | None = None,
        b: str | SnapshotInfo | None = None,
        *,
        text: bool = False,
        limit: int = 10_000,
    ) -> DiffInfo:
        """Differences of the files from snapshot `a` (None: the parent of `b`) to `b` (None: the
        head); `text` adds unified diffs. Raises SnapshotNotFound."""
        first = None if a is None else core_sessions.snapshot_name(a)
        second = None if b is None else core_sessions.snapshot_name(b)
        return await self._transport.run(
            core_sessions.diff(self.id, first, second, text=text, limit=limit)
        )

    async def rollback(self, snapshot: str | SnapshotInfo, *, force: bool = False) -> AsyncSession:
        """Go back to a snapshot, by id or label: files and, where it has memory, processes.
        `left_behind` then tells of requests since that cannot be taken back; where the network
        policy says `on_effects="refuse"`, only `force` goes through.

        Raises SnapshotNotFound, EffectsInTheWay, ResumeFailed, IntegrityError."""
        name = core_sessions.snapshot_name(snapshot)
        self.info, self._left_behind = await self._transport.run(
            core_sessions.rollback(self.id, name, force)
        )
        return self

    async def fork(
        self,
        n: int = 1,
        snapshot: str | SnapshotInfo | None = None,
        *,
        names: list[str] | None = None,
        labels: Labels | None = None,
        start: bool = True,
        force: bool = False,
        idempotency_key: str | None = None,
    ) -> list[AsyncSession]:
        """Make `n` new sessions that go on from `snapshot` (None: from now), each by itself. Of an
        older snapshot `left_behind` and `force` are as for `rollback`.

        Raises SnapshotNotFound, EffectsInTheWay, CaptureRefused, NameTaken, ResumeFailed."""
        source = None if snapshot is None else core_sessions.snapshot_name(snapshot)
        found, self._left_behind = await self._transport.run(
            core_sessions.fork(
                self.id,
                n=n,
                snapshot=source,
                names=names,
                labels=labels,
                start=start,
                force=force,
                key=idempotency_key,
            )
        )
        return [AsyncSession(self._transport, info) for info in found]

    async def promote(self) -> AsyncSession:
        """Make this fork's head the head of the session it came from; gives that session."""
        info, self._left_behind = await self._transport.run(core_sessions.promote(self.id))
        if info.id != self.id:
            return AsyncSession(self._transport, info)
        self.info = info
        return self

    async def verify(self, snapshot: str | SnapshotInfo | None = None) -> VerifyReport:
        """Read every byte of its snapshots (or one) and compare. Nothing is raised for what is
        bad: `ok` and `faults` tell."""
        name = None if snapshot is None else core_sessions.snapshot_name(snapshot)
        return await self._transport.run(core_sessions.verify(self.id, name))

    @overload
    def events(self, *, after: int = 0, follow: Literal[False] = False) -> Listing[EventInfo]: ...

    @overload
    def events(self, *, after: int = 0, follow: Literal[True]) -> AsyncIterator[EventInfo]: ...

    def events(
        self, *, after: int = 0, follow: bool = False
    ) -> Listing[EventInfo] | AsyncIterator[EventInfo]:
        """Who did what to it: events with a `seq` above `after`, to be awaited or gone through
        with `async for`. With `follow` an iterator that also gives those to come."""
        if follow:
            return self._transport.stream(core_files.event_source(self.id, after))
        return Listing(lambda: self._transport.run(core_sessions.events(self.id, after)))

    async def effects(self, *, all: bool = False) -> list[EffectInfo]:
        """What left it, oldest first: requests and connections that no rollback takes back; with
        `all` also requests that only read."""
        return await self._transport.run(core_networks.effects(self.id, all=all))

    async def denials(self) -> list[Denial]:
        """What its network policy did not let out, oldest first: the same host, port and rule once
        when it was refused first, then once a minute with how often."""
        return await self._transport.run(core_networks.denials(self.id))

    @contextlib.asynccontextmanager
    async def turn(self, label: str | None = None) -> AsyncIterator[AsyncTurn]:
        """Calls inside count as one turn: at most one automatic snapshot, at its end."""
        turn = AsyncTurn()
        name = await self._transport.run(core_sessions.begin_turn(self.id, label))
        try:
            yield turn
        finally:
            turn.snapshot = await self._transport.run(core_sessions.end_turn(self.id, name))

    # -- archives

    async def export(
        self,
        target: Any,
        snapshot: str | SnapshotInfo | None = None,
        key: bytes | str | None = None,
        *,
        on_progress: Callable[[int, int | None], object] | None = None,
    ) -> ArchiveInfo:
        """Write it to an archive: the whole history, or one snapshot. Of a session that runs the
        present state is taken first. `target` is a path, which is replaced whole or not at all,
        or an open binary file. With `key` (16 bytes or more) the archive is encrypted. The
        `digest` that is given tells this archive from any other.

        Raises SnapshotNotFound, CaptureRefused, IntegrityError, StorageFull, FileConflict."""
        from sojourn.client import core_archives  # only where it is needed

        name = None if snapshot is None else core_sessions.snapshot_name(snapshot)
        request = core_archives.export_request(self.id, name, key)
        headers: dict[str, str] = {}
        with core_archives.Receiving(target, on_progress) as receiving:
            async for piece in self._transport.content(request, headers):
                receiving.begin(headers)
                await asyncio.to_thread(receiving.feed, piece)
            return await asyncio.to_thread(receiving.finish)

    # -- verbs

    async def pause(self, *, wait: str | None = None) -> AsyncSession:
        """Freeze it in memory. With `wait="durable"` what is frozen is also put in the
        object store.

        Raises WrongState, Unsupported, StoreUnreachable."""
        self.info = await self._transport.run(core_sessions.simple_verb(self.id, "pause", wait))
        return self

    async def suspend(self, *, memory: bool = True, wait: str | None = None) -> AsyncSession:
        """Put it away: a snapshot, then no memory is used. Without `memory` processes end.
        With `wait="durable"` it returns when the object store has it.

        Raises CaptureRefused (UnlinkedOpenFile), CaptureFailed, StorageFull, StoreUnreachable."""
        self.info = await self._transport.run(core_sessions.suspend(self.id, memory, wait))
        return self

    async def durability(
        self, *, wait: float = 0.0, snapshot: str | SnapshotInfo | None = None
    ) -> DurabilityInfo:
        """How far it is in the object store; waits up to `wait` seconds until its head, or another
        snapshot, is there. Raises StoreUnreachable when it is not in time, Unsupported."""
        name = None if snapshot is None else core_sessions.snapshot_name(snapshot)
        return await self._transport.run(
            core_sessions.durability(self.id, wait=wait, snapshot=name)
        )

    async def resume(self, *, memory: bool = True) -> AsyncSession:
        """Let it run again. Without `memory` a suspended session starts from its files alone:
        no process goes on, and the snapshot keeps its memory. Raises ResumeFailed."""
        self.info = await self._transport.run(core_sessions.resume(self.id, memory))
        return self

    async def migrate(self, node: str | None = None) -> AsyncSession:
        """Move it to another node of the cluster, to the named one or one that is chosen. What
        runs goes on, under the same id and addresses; it stands still for a moment at the end.
        Raises Conflict (no node can take it), NodeNotFound, and what a snapshot raises: it stays
        where it is then."""
        self.info = await self._transport.run(core_sessions.migrate(self.id, node))
        return self

    async def delete(self) -> None:
        """Delete it and its history, from any state."""
        await self._transport.run(core_sessions.delete(self.id))
