"""A sandbox as the routes of its agent find it: awake, prepared, and who acts in it.

Guarantee: a request reaches a running sandbox or fails with words that say it does not run; a
sleeping one is woken only where its policy lets traffic do that. The default user is there before
anything runs as it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sojourn.errors import SessionNotFound, WrongState
from sojourn.node.guest import Guest
from sojourn.server.e2b import failures, ids, users
from sojourn.server.e2b.calls import Call
from sojourn.server.e2b.drains import Drains
from sojourn.server.e2b.entries import text
from sojourn.server.e2b.sandboxes import Sandboxes, environment
from sojourn.wire.api import SessionInfo

_REMEMBERED = 10_000


class Rooms:
    """Opens sandboxes for requests."""

    def __init__(self, sandboxes: Sandboxes, drains: Drains) -> None:
        self._sandboxes = sandboxes
        self._drains = drains
        # Seen to have the default user, in which placement: a rollback may go behind that.
        self._prepared: dict[str, tuple[int, dict[str, str]]] = {}
        self._users = users.Remembered()

    async def enter(self, call: Call) -> dict[str, str]:
        """Have the sandbox run; the variables its commands get beside the session's own. Raises
        Interrupted in the words the SDKs look for."""
        with contextlib.suppress(SessionNotFound):
            state, epoch = await call.service.standing(call.who, call.session)
            known = self._prepared.get(call.session)
            if state == "running" and known is not None and known[0] == epoch:
                return known[1]
        info = await self._woken(call)
        known = self._prepared.get(info.id)
        if known is None or known[0] != info.epoch:
            await self.prepare(call, info)
        return environment(info)

    async def _woken(self, call: Call) -> SessionInfo:
        name = ids.sandbox_id(call.session)
        try:
            info = await call.service.get(call.who, call.session)
            info = await self._sandboxes.awake(call.who, info)
        except SessionNotFound:
            raise failures.not_running(name, "it was killed or reached its timeout") from None
        except WrongState as error:
            raise failures.not_running(name, error.message) from None
        if info.state == "creating":
            await self._sandboxes.settled(call.who, info)
            info = await call.service.get(call.who, call.session)
        if info.state != "running":
            raise failures.not_running(name, f"it is {info.state}")
        return info

    async def prepare(self, call: Call, info: SessionInfo) -> None:
        """What a sandbox needs each time it begins to run, before anything else is asked of it."""
        async with call.service.files(
            call.who, info.id, "files.prepare /home/user", mutates=True
        ) as guest:
            await users.prepare(guest)
        await self._drains.resume(call.who, info.id, info.epoch)
        if len(self._prepared) >= _REMEMBERED:
            self._prepared.clear()
        self._prepared[info.id] = (info.epoch, environment(info))

    async def accounts(self, guest: Guest, call: Call) -> users.Accounts:
        """Who is in the sandbox."""
        return await self._users.accounts(guest, call.session)

    @contextlib.asynccontextmanager
    async def files(
        self, call: Call, what: str, path: str, *, mutates: bool, owner: bool = True
    ) -> AsyncIterator[tuple[Guest, users.Account, bytes]]:
        """Around an access to files: the guest, who acts, and the path in full. Without `owner`
        numbers and home of who acts are looked up only where the path needs them."""
        await self.enter(call)
        user = users.user_of(call.header(b"authorization"), call.query.get("username"))
        # The log is text; the path itself keeps its bytes.
        event = f"files.{what} {text(path.encode('utf-8', 'surrogateescape'))}"
        async with call.service.files(call.who, call.session, event, mutates=mutates) as guest:
            if path.startswith("/") and (user == "root" or (user == users.DEFAULT and not owner)):
                account = users.ROOT if user == "root" else users.PREPARED
            else:
                account = (await self.accounts(guest, call)).find(user)
            yield guest, account, users.place(path, account)
