"""Code in a sandbox: the service of E2B's code interpreter, over the session's own interpreter.

Guarantee: a context is a process of the sandbox, so it goes on through pause and resume with all it
holds; one that was removed or lost is unknown, never silently a fresh one. What the code writes
arrives when it is done.
"""

from __future__ import annotations

import asyncio
import base64
import signal as signals
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from sojourn.errors import (
    Conflict,
    Interrupted,
    InvalidRequest,
    NotFound,
    ProcessNotFound,
    SandboxLost,
    SessionNotFound,
    SojournError,
    WrongState,
)
from sojourn.server.answers import StreamAnswer
from sojourn.server.checks import check_code
from sojourn.server.e2b import ids
from sojourn.server.e2b.calls import Call, answer, nothing
from sojourn.server.e2b.failures import rpc_message
from sojourn.server.e2b.rooms import Rooms
from sojourn.wire.api import CodeRequest
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import ProcessState

DEFAULT = "default"
LANGUAGE = "python"
_TAG = "interpreter:"
_HOME = "/home/user"
_FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}
_REMEMBERED = 10_000
_HEARTBEAT = b'{"type":"keepalive"}\n'


class Execute(msgspec.Struct):
    """Code to run."""

    code: str = ""
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class NewContext(msgspec.Struct):
    """A context to be made."""

    language: str | None = None
    cwd: str | None = None


def _line(kind: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"type": kind, **fields}) + b"\n"


def lines(result: CodeResult, count: int) -> list[bytes]:
    """A result, line by line as the client reads it."""
    at = time.time_ns()
    found = [_line("number_of_executions", execution_count=count)]
    if result.stdout:
        found.append(_line("stdout", text=result.stdout, timestamp=at))
    if result.stderr:
        found.append(_line("stderr", text=result.stderr, timestamp=at))
    shown = list(result.results)
    main = None
    if result.text is not None:
        # What `display` showed always has a text; rich forms of the last expression may have one.
        last = shown[-1] if shown else {"text/plain": ""}
        if "text/plain" not in last or (last["text/plain"] == result.text and len(last) > 1):
            shown[-1] = {"text/plain": result.text, **last}
        else:
            shown.append({"text/plain": result.text})
        main = len(shown) - 1
    drawn = len(result.images) - sum("image/png" in forms for forms in result.results)
    for image in result.images[:drawn]:
        shown.append({"image/png": base64.b64encode(image).decode()})
    for number, forms in enumerate(shown):
        found.append(_line("result", **_forms(forms), is_main_result=number == main))
    if result.error is not None:
        error = result.error
        found.append(_line("error", name=error.name, value=error.value, traceback=error.traceback))
    if result.truncated:
        note = "[what was written beyond the bound of output is left out]\n"
        found.append(_line("stderr", text=note, timestamp=at))
    found.append(_line("end_of_execution"))
    return found


def _forms(forms: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    extra: dict[str, str] = {}
    for media, value in forms.items():
        name = _FORMATS.get(media)
        if name is None:
            extra[media] = value
        elif name == "json":
            found[name] = _decoded(value)
        else:
            found[name] = value
    if extra:
        found["extra"] = extra
    return found


def _decoded(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


class _Breakable:
    """An answer that is left without its end once `cut` is set."""

    def __init__(self, answer: ASGIApp, cut: asyncio.Event) -> None:
        self._answer = answer
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if not self._cut.is_set():
                await send(message)

        await self._answer(scope, receive, passed)


class Interpreters:
    """The routes of port 49999."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        # Pieces of code of this module's own, which the client's count leaves out.
        self._hidden: dict[tuple[str, str], int] = {}
        self._locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock]
        self._locks = weakref.WeakValueDictionary()
        # Contexts whose variables of one piece of code are still set.
        self._owed: set[tuple[str, str]] = set()

    # -- running ----------------------------------------------------------------------------

    async def execute(self, call: Call) -> ASGIApp:
        """POST /execute."""
        asked = await call.json(Execute)
        _check_language(asked.language)
        shared = await self._rooms.enter(call)
        context = asked.context_id or DEFAULT
        request = CodeRequest(code=asked.code, context=context)
        check_code(request)
        _check_variables(asked.env_vars or {})
        process = await self._find(call, context)
        if process is None:
            if context != DEFAULT:
                raise NotFound(f"Context {context} not found", next_step="Create one.")
            await self._begin(call, context, _HOME, shared)
        cut = asyncio.Event()
        answer = StreamAnswer(
            self._run(call, request, asked.env_vars or {}),
            call.shutdown,
            media_type=b"application/x-ndjson",
            heartbeat=_HEARTBEAT,
            encode_error=lambda error: self._failed(call, error, cut),
        )
        return _Breakable(answer, cut)

    def _failed(self, call: Call, error: SojournError, cut: asyncio.Event) -> bytes:
        """A failure in the middle, which no status can tell any more."""
        if isinstance(error, (Interrupted, SandboxLost, SessionNotFound, WrongState)):
            # The client takes a connection that breaks for what it is, and asks whether the
            # sandbox runs; a whole answer would be a result of the code.
            cut.set()
            return b""
        return _line(
            "error",
            name=type(error).__name__,
            value=rpc_message(error, ids.sandbox_id(call.session), stopping=call.shutdown.stopping),
            traceback="",
        )

    async def _run(
        self, call: Call, request: CodeRequest, env: dict[str, str]
    ) -> AsyncIterator[bytes]:
        key = (call.session, request.context)
        # What is set for one piece of code must not be seen by another.
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._owed:
                await self._reset(call, key)
            if env:
                await self._set(call, key, env)
            hidden = self._hidden.get(key, 0)
            try:
                result = await call.service.run_code(call.who, call.session, request)
            finally:
                if env:
                    await self._reset(call, key)
        for line in lines(result, max(1, result.execution_count - hidden)):
            yield line

    async def _set(self, call: Call, key: tuple[str, str], env: dict[str, str]) -> None:
        """Set variables for one piece of code. Raises InvalidRequest for what cannot be set."""
        if len(self._owed) >= _REMEMBERED:
            self._owed.clear()
        self._owed.add(key)
        result = await self._code(call, key[1], _SET.format(env=repr(env)))
        if result.error is not None:
            await self._reset(call, key)
            raise InvalidRequest(
                f"the variables cannot be set: {result.error.value}", field="env_vars"
            )

    async def _reset(self, call: Call, key: tuple[str, str]) -> None:
        """Undo that; after an interruption, before the next piece of code."""
        await self._code(call, key[1], _RESET)
        self._owed.discard(key)

    async def _code(self, call: Call, context: str, code: str) -> CodeResult:
        result = await call.service.run_code(
            call.who, call.session, CodeRequest(code=code, context=context)
        )
        if len(self._hidden) >= _REMEMBERED:
            self._hidden.clear()
        key = (call.session, context)
        self._hidden[key] = self._hidden.get(key, 0) + 1
        return result

    async def _begin(self, call: Call, context: str, cwd: str, env: dict[str, str]) -> None:
        """Start a context, in its directory. Raises InvalidRequest, and is not there then."""
        result = await self._code(call, context, _BEGIN.format(cwd=repr(cwd), env=repr(env)))
        if result.error is not None:
            await self._end(call, context)
            raise InvalidRequest(
                f"the context cannot begin in {cwd!r}: {result.error.value}", field="cwd"
            )

    # -- contexts ---------------------------------------------------------------------------

    async def create(self, call: Call) -> ASGIApp:
        """POST /contexts."""
        asked = await call.json(NewContext)
        _check_language(asked.language)
        shared = await self._rooms.enter(call)
        context = uuid.uuid4().hex
        cwd = asked.cwd or _HOME
        await self._begin(call, context, cwd, shared)
        return answer({"id": context, "language": LANGUAGE, "cwd": cwd}, 201)

    async def list(self, call: Call) -> ASGIApp:
        """GET /contexts."""
        await self._rooms.enter(call)
        found = []
        for state in await call.service.processes(call.who, call.session):
            if state.running and state.tag.startswith(_TAG):
                context = state.tag.removeprefix(_TAG)
                cwd = await self._cwd(call, state)
                found.append({"id": context, "language": LANGUAGE, "cwd": cwd})
        return answer(found)

    async def remove(self, call: Call) -> ASGIApp:
        """DELETE /contexts/{id}."""
        context = call.groups["context"]
        await self._rooms.enter(call)
        await self._known(call, context)
        await self._end(call, context)
        return nothing()

    async def restart(self, call: Call) -> ASGIApp:
        """POST /contexts/{id}/restart."""
        context = call.groups["context"]
        shared = await self._rooms.enter(call)
        cwd = await self._cwd(call, await self._known(call, context))
        await self._end(call, context)
        await self._begin(call, context, cwd, shared)
        return nothing()

    async def _cwd(self, call: Call, state: ProcessState) -> str:
        """Where a context stands now."""
        link = b"/proc/%d/cwd" % state.pid
        async with call.service.files(
            call.who, call.session, "files.stat /proc", mutates=False
        ) as guest:
            try:
                stat = await guest.stat(link, follow=False)
            except NotFound:
                return _HOME
        return (stat.target or _HOME.encode()).decode("utf-8", "replace")

    async def _find(self, call: Call, context: str) -> ProcessState | None:
        for state in await call.service.processes(call.who, call.session):
            if state.running and state.tag == _TAG + context:
                return state
        return None

    async def _known(self, call: Call, context: str) -> ProcessState:
        found = await self._find(call, context)
        if found is None:
            raise NotFound(f"Context {context} not found", next_step="")
        return found

    async def _end(self, call: Call, context: str) -> None:
        """Its process ends; returns when it has."""
        self._hidden.pop((call.session, context), None)
        self._owed.discard((call.session, context))
        state = await self._find(call, context)
        if state is None:
            return
        try:
            await call.service.signal(call.who, call.session, state.id, signals.SIGKILL, True)
            await call.service.wait_process(call.who, call.session, state.id, 10.0)
        except (ProcessNotFound, Conflict):
            return  # it ended by itself


_BEGIN = "__import__('os').environ.update({env})\n__import__('os').chdir({cwd})"
_SET = (
    "__import__('sys').__dict__.setdefault('_sojourn_environment', []).append("
    "dict(__import__('os').environ)) or __import__('os').environ.update({env})"
)
_RESET = (
    "for _sojourn_before in [__import__('sys')._sojourn_environment.pop()]:\n"
    "    __import__('os').environ.clear()\n"
    "    __import__('os').environ.update(_sojourn_before)\n"
    "del _sojourn_before"
)


def _check_language(language: str | None) -> None:
    if language is not None and language.lower() not in ("python", "python3"):
        raise InvalidRequest(
            f"there is no interpreter for {language!r}",
            next_step="Run it as a command, or use python.",
            field="language",
        )


def _check_variables(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidRequest(f"there is no variable {name!r}", field="env_vars")
