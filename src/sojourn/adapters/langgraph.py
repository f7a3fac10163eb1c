"""A checkpointer of LangGraph that keeps a session in step with its graph.

Guarantee: each thread has one session, and whatever a node finds in it is what was there at the
checkpoint it runs on. Each task that used the session ends with a snapshot, *before* its result is
recorded: after a crash between the two there is a snapshot that nothing refers to, and the task
runs again from the one before, never on its own traces and never without what is recorded.

Where a run goes on from an older checkpoint, the session is rolled back, not forked: the thread
stays one line of work with one session, its id and ports, as the graph itself goes on in the same
thread; what is left stays in the session's tree. `copy_thread` makes another thread, and its
session is a fork.

    saver = SojournSaver(InMemorySaver())
    graph = builder.compile(checkpointer=saver)

    def node(state, config):
        saver.session(config).exec("make")

The checkpoints themselves are kept by any other checkpointer, which is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)

from sojourn.adapters.langgraph_threads import (
    Asking,
    Threads,
    begins_run,
    place_of,
    thread_of,
)
from sojourn.client import AsyncSession, AsyncSojourn, Session, Sojourn

__all__ = ["SojournSaver"]

T = TypeVar("T")


class SojournSaver(BaseCheckpointSaver[Any]):
    """Keeps checkpoints in `inner` and a session for each thread that asks for one.

    The server is found as every client finds it, unless named; `create` is what `sessions.create`
    takes. `close`, or `aclose` where `asession` was used, closes the connections; sessions go on.
    """

    def __init__(
        self,
        inner: BaseCheckpointSaver[Any],
        *,
        url: str | None = None,
        token: str | None = None,
        prefix: str = "langgraph-",
        **create: Any,
    ) -> None:
        super().__init__(serde=inner.serde)
        self.inner = inner
        self._address = (url, token)
        # All of these are shared by the copies that the framework makes of a checkpointer.
        self._client = Sojourn(url, token)
        self._threads = Threads(self._client, prefix, create)
        self._by_loop: weakref.WeakKeyDictionary[Any, AsyncSojourn] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def aclose(self) -> None:
        """As `close`, with the one of this event loop."""
        client = self._by_loop.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()
        self.close()

    def __enter__(self) -> SojournSaver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> SojournSaver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- what nodes ask for

    def session(self, config: RunnableConfig) -> Session:
        """The session of the thread whose node this is, as it was at the checkpoint the node runs
        on. In an asynchronous node use `asession`: this one blocks.

        Raises InvalidRequest outside of a node; Unsupported with durability "exit", which records
        no task before the end; SessionNotFound where the thread's session was deleted, or is not
        this token's; what rollbacks raise."""
        place = place_of(config)
        with self._threads.entering(place):
            if not self._threads.positioned(place):
                self._threads.position(place, self._drive(self._threads.search(place)))
            return self._threads.hand_out(place)

    async def asession(self, config: RunnableConfig) -> AsyncSession:
        """As `session`, for asynchronous nodes."""
        place = place_of(config)
        async with _aside(self._threads.entering(place)):
            if not self._threads.positioned(place):
                found = await self._adrive(self._threads.search(place))
                await asyncio.to_thread(self._threads.position, place, found)
            session = await asyncio.to_thread(self._threads.hand_out, place)
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = AsyncSojourn(*self._address)
        return await self._by_loop[loop].sessions.get(session.id)

    def _drive(self, asking: Asking[T]) -> T:
        """Answer what a search asks of the checkpoints."""
        try:
            wanted = next(asking)
            while True:
                if wanted.all:
                    wanted = asking.send(list(self.inner.list(wanted.config)))
                else:
                    found = self.inner.get_tuple(wanted.config)
                    wanted = asking.send([] if found is None else [found])
        except StopIteration as end:
            value: T = end.value
            return value

    async def _adrive(self, asking: Asking[T]) -> T:
        try:
            wanted = next(asking)
            while True:
                if wanted.all:
                    wanted = asking.send([one async for one in self.inner.alist(wanted.config)])
                else:
                    found = await self.inner.aget_tuple(wanted.config)
                    wanted = asking.send([] if found is None else [found])
        except StopIteration as end:
            value: T = end.value
            return value

    # -- what the framework asks for

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """A checkpoint. A run begins with this: its first use of the session finds its place."""
        if begins_run(config):
            self._threads.begin(thread_of(config))
        return self.inner.get_tuple(config)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As `get_tuple`."""
        if begins_run(config):
            await asyncio.to_thread(self._threads.begin, thread_of(config))
        return await self.inner.aget_tuple(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first."""
        yield from self.inner.list(config, filter=filter, before=before, limit=limit)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As `list`."""
        async for one in self.inner.alist(config, filter=filter, before=before, limit=limit):
            yield one

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Keep a checkpoint, after a snapshot of what led to it unless its tasks left theirs."""
        with self._threads.putting(config, checkpoint["id"]):
            marked = self._threads.marked(config, metadata)
            return self.inner.put(config, checkpoint, marked, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As `put`."""
        async with _aside(self._threads.putting(config, checkpoint["id"])):
            marked = self._threads.marked(config, metadata)
            return await self.inner.aput(config, checkpoint, marked, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Keep the result of a task; if it used the session, after a snapshot of that."""
        with self._threads.ending(config, writes, task_id):
            self.inner.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """As `put_writes`."""
        async with _aside(self._threads.ending(config, writes, task_id)):
            await self.inner.aput_writes(config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread and its session. The checkpoints go first: what is left by a crash is a
        session that nothing refers to, and the next call deletes that."""
        self.inner.delete_thread(thread_id)
        self._threads.delete(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`."""
        await self.inner.adelete_thread(thread_id)
        await asyncio.to_thread(self._threads.delete, thread_id)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread; its session is forked first, so that no thread is without its past."""
        self._threads.fork(source_thread_id, target_thread_id)
        if type(self.inner).copy_thread is not BaseCheckpointSaver.copy_thread:
            self.inner.copy_thread(source_thread_id, target_thread_id)
            return
        found = list(self.inner.list({"configurable": {"thread_id": source_thread_id}}))
        for one in reversed(found):
            config = self.inner.put(*_copied(one, target_thread_id))
            for task, writes in _writes(one).items():
                self.inner.put_writes(config, writes, task)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`."""
        await asyncio.to_thread(self._threads.fork, source_thread_id, target_thread_id)
        if type(self.inner).acopy_thread is not BaseCheckpointSaver.acopy_thread:
            await self.inner.acopy_thread(source_thread_id, target_thread_id)
            return
        source: RunnableConfig = {"configurable": {"thread_id": source_thread_id}}
        for one in reversed([one async for one in self.inner.alist(source)]):
            config = await self.inner.aput(*_copied(one, target_thread_id))
            for task, writes in _writes(one).items():
                await self.inner.aput_writes(config, writes, task)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `inner` has it. Sessions keep their snapshots."""
        self.inner.delete_for_runs(run_ids)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `delete_for_runs`."""
        await self.inner.adelete_for_runs(run_ids)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As `inner` has it. Sessions keep their snapshots."""
        self.inner.prune(thread_ids, strategy=strategy)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As `prune`."""
        await self.inner.aprune(thread_ids, strategy=strategy)

    def get_next_version(self, current: Any, channel: None) -> Any:
        """As `inner` has it."""
        return self.inner.get_next_version(current, channel)


@contextlib.asynccontextmanager
async def _aside(held: AbstractContextManager[None]) -> AsyncIterator[None]:
    """A blocking context whose beginning is waited for in a thread. It is seen to its beginning
    also where whoever waits is cancelled: its lock would be held for ever."""
    begin = asyncio.ensure_future(asyncio.to_thread(held.__enter__))
    try:
        await asyncio.shield(begin)
    except asyncio.CancelledError:
        begin.add_done_callback(lambda done: done.exception() or held.__exit__(None, None, None))
        raise
    try:
        yield
    except BaseException as error:
        held.__exit__(type(error), error, error.__traceback__)
        raise
    held.__exit__(None, None, None)


def _copied(
    one: CheckpointTuple, thread: str
) -> tuple[RunnableConfig, Checkpoint, CheckpointMetadata, ChannelVersions]:
    """A checkpoint as it is put into another thread."""
    configurable = {
        "thread_id": thread,
        "checkpoint_ns": one.config["configurable"].get("checkpoint_ns", ""),
    }
    if one.parent_config is not None:
        configurable["checkpoint_id"] = one.parent_config["configurable"]["checkpoint_id"]
    versions = one.checkpoint["channel_versions"]
    return {"configurable": configurable}, one.checkpoint, one.metadata, versions


def _writes(one: CheckpointTuple) -> dict[str, Sequence[tuple[str, Any]]]:
    """The writes at a checkpoint by task."""
    found: dict[str, Any] = {}
    for task, channel, value in one.pending_writes or ():
        found.setdefault(task, []).append((channel, value))
    return found
