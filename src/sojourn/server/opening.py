"""Opening the object store that a server's database speaks of.

Guarantee: nothing is read from a repository, or sent to it, before the database speaks of it. One
that vanished is never made anew, and one that alone holds something is not left for another.
Neither a start nor a stop waits for a store that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from sojourn.database.base import Database
from sojourn.database.records import DurableObjects, ObjectStore
from sojourn.errors import (
    Interrupted,
    InvalidRequest,
    ObjectMissing,
    SojournError,
    StoreKeyInvalid,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.repository.backends.base import Backend
from sojourn.repository.copies import StoredCopies
from sojourn.repository.repository import Repository

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 10.0  # a start waits so long for a store that does not answer
_LOOK_SECONDS = 0.2


class StoreOpening:
    """Opens one object store, at the latest when it is needed. `root` is the node's own store."""

    def __init__(
        self,
        database: Database,
        url: str,
        secret: bytes | None,
        root: Path,
        *,
        several: bool = False,
    ) -> None:
        self._database = database
        self._several = several  # nodes, none of which has all that there is
        self._url = url
        self._secret = secret
        self._root = root
        self._known: ObjectStore | None = None
        self._found: Repository | None = None  # opened; the database may not speak of it yet
        self._accepted: Repository | None = None
        self._accepting = asyncio.Lock()
        self._opening = threading.Lock()
        self._backend: Backend | None = None  # of a repository that is just being opened
        self._meeting: asyncio.Task[None] | None = None  # an opening that takes long
        self._stopping = False
        self.on_change: Callable[[DurableObjects], None] | None = None
        """Told what is durable when another repository takes the place of the one before."""

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> str | None:
        """Open it, for as long as a start may wait; answers what keeps it from serving yet.

        Raises StoreKeyInvalid, InvalidRequest, and StoreRefused when it is not the one this
        database speaks of; any failure when it is opened for the first time, but for one that
        cannot be reached. A known one that fails does not keep the sessions from their users: it
        is tried again.
        """
        self._known = await self._database.object_store()
        opening = asyncio.create_task(self._meet(), name="open the object store")
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(opening)
        except TimeoutError:
            # Whoever waits for the server does not wait for a store that does not answer.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._meeting = opening
            cause = f"the object store has not answered within {_START_SECONDS:g} s"
            log.warning("%s; it is waited for in the background", cause)
            return cause
        except (StoreKeyInvalid, InvalidRequest):  # wrong settings do not pass
            raise
        except SojournError as error:
            passing = isinstance(error, StoreUnreachable)
            if not passing and (self._known is None or "repository" in error.details):
                raise
            log.warning("the object store does not serve yet: %s", error)
            return error.message
        return None

    def stop(self) -> None:
        """End what is being opened; nothing is opened from now on."""
        self._stopping = True
        if self._meeting is not None:
            self._meeting.cancel()
        if (backend := self._backend) is not None:
            backend.close()  # it is being opened: no further try

    async def close(self) -> None:
        """Let go of the object store. Idempotent."""
        if self._found is not None:
            await asyncio.to_thread(self._found.close)

    async def _meet(self) -> None:
        await self._greet(await self.repository())

    async def _greet(self, repository: Repository) -> None:
        """Say when the store holds sessions that this server's database has never heard of."""
        known = {tenant.id for tenant in await self._database.list_tenants()}
        stored = await asyncio.to_thread(repository.tenant_ids)
        if strangers := set(stored) - known:
            log.warning(
                "the object store holds sessions of %d tenants that this server does not know;"
                " `sojourn recover` brings them into a new data directory",
                len(strangers),
            )

    # -- the repository ---------------------------------------------------------------------

    @property
    def accepted(self) -> Repository | None:
        """The repository, once the database speaks of it."""
        return self._accepted

    def read(self) -> Repository:
        """The repository that the database speaks of, for who reads. Blocks.

        Raises StoreUnreachable, also while it is not settled whether another one takes its place;
        StoreRefused, StoreKeyInvalid, Interrupted."""
        if self._accepted is not None:
            return self._accepted
        known = self._known
        if known is None or known.url != self._url:
            raise StoreUnreachable("the object store is not open yet")
        return self._open()

    async def repository(self) -> Repository:
        """The repository, which the database speaks of from then on. Raises as `read` does, and
        StoreRefused where another one alone holds something."""
        async with self._accepting:
            if self._accepted is not None:
                return self._accepted
            known = self._known = await self._database.object_store()
            found = await _in_daemon(self._open)
            store = ObjectStore(self._url, found.config.id)
            if known is not None and known.repository != store.repository:
                if self._several:
                    raise _another(known, "this is another one")
                await self._require_all_here(known)
            if store != known and await self._database.use_object_store(store) and known:
                log.warning("another object store than before: everything is sent to it anew")
                if self.on_change is not None:
                    self.on_change(await self._database.durable_objects())
            self._known = store
            self._accepted = found
            return found

    def _open(self) -> Repository:
        while not self._opening.acquire(timeout=_LOOK_SECONDS):
            self._check_stopping()  # who opens it may have to wait for long
        try:
            self._check_stopping()
            if self._found is not None:
                return self._found
            known = self._known if self._known and self._known.url == self._url else None
            try:
                found = Repository.open(
                    self._url, self._secret, create=known is None, opening=self._note_backend
                )
            except ObjectMissing as error:
                raise _another(known, "there is no repository any more") from error
            except StoreUnreachable as error:
                if "absent" not in error.details:
                    raise
                raise _another(known, "there is none any more") from error
            if known is not None and found.config.id != known.repository:
                found.close()
                raise _another(known, "another repository stands there now")
            self._found = found
            return found
        finally:
            self._backend = None
            self._opening.release()

    def _note_backend(self, backend: Backend) -> None:
        self._backend = backend
        if self._stopping:
            backend.close()

    def _check_stopping(self) -> None:
        if self._stopping and self._found is None:
            raise Interrupted("the server stops", next_step="Ask again when it runs again.")

    async def _require_all_here(self, known: ObjectStore) -> None:
        """Refuse to leave an object store that alone holds something."""
        objects = await self._database.durable_objects()
        here = StoredCopies(self._root)
        names = (*objects.layers, *objects.images, *objects.templates)
        gone = await asyncio.to_thread(lambda: [id for id in names if not here.has(id)])
        if gone:
            raise StoreRefused(
                f"{len(gone)} layers and memory images are only in the object store {known.url}",
                next_step="Start with that one again and bring them to this node (for each session"
                " `sojourn session verify` does); then change.",
                repository=known.repository,
            )


async def _in_daemon(call: Callable[[], T]) -> T:
    """A call in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="open the object store", daemon=True).start()
    return await future


def _another(known: ObjectStore | None, cause: str) -> StoreRefused:
    assert known is not None  # without it any repository is taken
    return StoreRefused(
        f"{known.url} was this server's object store, and {cause}",
        next_step="Bring it back (is its file system mounted?), or give another place (--store),"
        " to which everything is sent anew.",
        repository=known.repository,
    )
