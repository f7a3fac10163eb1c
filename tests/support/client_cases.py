"""Every way into a session behind one small interface, for cases that hold through each of them.

A `Client` is made for one session, in an event loop; blocking libraries are called in threads.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.client import AsyncSojourn
from sojourn.errors import SessionNotFound
from sojourn.server.e2b.ids import sandbox_id
from support import javascript
from support.mcp_rig import environment

PART = 3_000_000


@dataclass
class Point:
    """Where a session is, and who asks for it."""

    url: str
    token: str
    session: str
    data: Path
    """The server's data directory."""


@dataclass
class Done:
    """How a command ended; `told` when the client says that not all it wrote is here as it was."""

    stdout: bytes
    stderr: bytes
    code: int
    told: bool = False


class Client:
    """One way in."""

    exact = True
    """Output comes as bytes; text replaces what is none."""
    merged = False
    """Both streams of a command come as one."""

    async def run(self, command: str) -> Done:
        """Run a command of a shell to its end."""
        raise NotImplementedError

    async def head(self, path: str) -> bytes | Exception:
        """The first PART bytes of a file, or how a file of that size is refused."""
        raise NotImplementedError


Opener = Callable[[Point], AbstractAsyncContextManager[Client]]
CLIENTS: dict[str, tuple[Opener, tuple[type[BaseException], ...], str]] = {}
"""By name: what opens it, how it says that a session is not there, what it needs installed."""


def client(name: str, *missing: type[BaseException], needs: str = "") -> Callable[[Any], Any]:
    """Add a way in to the table."""

    def add(opener: Any) -> Any:
        CLIENTS[name] = (asynccontextmanager(opener), missing, needs)
        return opener

    return add


# -- our own ------------------------------------------------------------------------------------


class Own(Client):
    def __init__(self, session: Any) -> None:
        self._session = session

    async def run(self, command: str) -> Done:
        done = await asyncio.to_thread(self._session.exec, command)
        return Done(done.stdout, done.stderr, done.exit_code)

    async def head(self, path: str) -> bytes | Exception:
        return await asyncio.to_thread(self._session.files.read, path, length=PART)


@client("own SDK", SessionNotFound)
async def own(point: Point) -> AsyncIterator[Client]:
    from sojourn.client import Sojourn

    with Sojourn(point.url, point.token) as found:
        yield Own(await asyncio.to_thread(found.sessions.get, point.session))


class OwnAsync(Client):
    def __init__(self, session: Any) -> None:
        self.session = session

    async def run(self, command: str) -> Done:
        done = await self.session.exec(command)
        return Done(done.stdout, done.stderr, done.exit_code)

    async def head(self, path: str) -> bytes | Exception:
        return bytes(await self.session.files.read(path, length=PART))


@client("own SDK, asynchronous", SessionNotFound)
async def own_async(point: Point) -> AsyncIterator[Client]:
    async with AsyncSojourn(point.url, point.token) as found:
        yield OwnAsync(await found.sessions.get(point.session))


# -- E2B ----------------------------------------------------------------------------------------


def _e2b(point: Point) -> dict[str, str]:
    return {"api_url": point.url, "sandbox_url": point.url, "api_key": point.token}


class E2B(Client):
    exact = False

    def __init__(self, box: Any) -> None:
        self._box = box

    async def run(self, command: str) -> Done:
        from e2b import CommandExitException

        try:
            done = await asyncio.to_thread(self._box.commands.run, command, user="root")
        except CommandExitException as error:
            return Done(error.stdout.encode(), error.stderr.encode(), error.exit_code)
        return Done(done.stdout.encode(), done.stderr.encode(), done.exit_code)

    async def head(self, path: str) -> bytes | Exception:
        def read() -> bytes:
            found = bytearray()
            with self._box.files.read(path, format="stream", user="root") as stream:
                while len(found) < PART:
                    found += next(stream)
            return bytes(found[:PART])

        return await asyncio.to_thread(read)


def _e2b_missing() -> tuple[type[BaseException], ...]:
    from e2b import SandboxNotFoundException

    return (SandboxNotFoundException,)


@client("E2B, Python", *_e2b_missing())
async def e2b(point: Point) -> AsyncIterator[Client]:
    from e2b import Sandbox

    known = sandbox_id(point.session)
    yield E2B(await asyncio.to_thread(Sandbox.connect, known, **_e2b(point)))


class E2BAsync(Client):
    exact = False

    def __init__(self, box: Any) -> None:
        self._box = box

    async def run(self, command: str) -> Done:
        from e2b import CommandExitException

        try:
            done = await self._box.commands.run(command, user="root")
        except CommandExitException as error:
            return Done(error.stdout.encode(), error.stderr.encode(), error.exit_code)
        return Done(done.stdout.encode(), done.stderr.encode(), done.exit_code)

    async def head(self, path: str) -> bytes | Exception:
        found = bytearray()
        async with await self._box.files.read(path, format="stream", user="root") as stream:
            while len(found) < PART:
                found += await anext(stream)
        return bytes(found[:PART])


@client("E2B, Python, asynchronous", *_e2b_missing())
async def e2b_async(point: Point) -> AsyncIterator[Client]:
    from e2b import AsyncSandbox

    yield E2BAsync(await AsyncSandbox.connect(sandbox_id(point.session), **_e2b(point)))


def javascript_case(point: Point, name: str) -> Any:
    """What tests/js/cases.mjs tells of a case."""
    place = {"E2B_API_URL": point.url, "E2B_SANDBOX_URL": point.url, "E2B_API_KEY": point.token}
    [told] = javascript.run("cases.mjs", name, sandbox_id(point.session), **place)
    return told


# -- MCP ----------------------------------------------------------------------------------------


class Refused(Exception):
    """What a tool answered instead of a result."""


class NotThere(Refused):
    """That its session is not there."""


class MCP(Client):
    def __init__(self, protocol: Any, session: str) -> None:
        self._protocol = protocol
        self._session = session

    async def _call(self, tool: str, **given: Any) -> Any:
        result = await self._protocol.call_tool(tool, given | {"session": self._session})
        if result.is_error:
            text = result.content[0].text
            raise (NotThere if "session_not_found" in text else Refused)(text)
        return result.structured_content

    async def run(self, command: str) -> Done:
        done = await self._call("exec", command=command)
        told = False
        streams = []
        for name in ("stdout", "stderr"):
            text = done[name]
            if done.get(f"{name}_encoding") == "base64":
                streams.append(base64.b64decode(text))
            else:
                streams.append(text.encode())
            told = told or done.get(f"{name}_bytes", len(streams[-1])) != len(streams[-1])
        return Done(streams[0], streams[1], done["exit_code"], told)

    async def head(self, path: str) -> bytes | Exception:
        told = await self._call("file_read", path=path)
        assert told["next_offset"] < 100_000 and told["size"] > 2 << 30
        return told["content"].encode() + await self._rest(path, told["next_offset"])

    async def _rest(self, path: str, offset: int) -> bytes:
        # A model would not read three megabytes of it; one more part will do.
        told = await self._call("file_read", path=path, offset=offset)
        assert told["next_offset"] > offset
        return bytes(PART - offset)


@client("MCP", NotThere)
async def mcp(point: Point) -> AsyncIterator[Client]:
    import sys

    from mcp import Client as Protocol
    from mcp import StdioServerParameters

    place = {"SOJOURN_URL": point.url, "SOJOURN_TOKEN": point.token}
    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "sojourn.cli.main", "mcp"],
        env=environment(point.data) | place,
    )
    async with Protocol(program) as protocol:
        found = MCP(protocol, point.session)
        await found._call("session_get")
        yield found


# -- adapters -----------------------------------------------------------------------------------


class OpenAIAgents(Client):
    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def run(self, command: str) -> Done:
        done = await self._sandbox.exec(command)
        return Done(done.stdout, done.stderr, done.exit_code, b"were left out" in done.stderr)

    async def head(self, path: str) -> bytes | Exception:
        from agents.sandbox.errors import WorkspaceArchiveReadError

        place = Path(path).relative_to("/workspace")
        try:
            await self._sandbox.read(place)
        except WorkspaceArchiveReadError as error:
            assert error.context["reason"] == "too_large"
        else:
            raise AssertionError("read whole")
        return bytes(await self._sandbox.read_bounded(place, max_bytes=PART))


@client("OpenAI Agents SDK", SessionNotFound, needs="agents.sandbox")
async def openai_agents(point: Point) -> AsyncIterator[Client]:
    import uuid

    from agents.sandbox.manifest import Manifest
    from agents.sandbox.snapshot import NoopSnapshot

    from sojourn.adapters.openai_agents import SojournSandboxClient, SojournSandboxSessionState

    number = uuid.uuid4()
    state = SojournSandboxSessionState(
        session_id=number,
        manifest=Manifest(),
        snapshot=NoopSnapshot(id=str(number)),
        session=point.session,
    )
    sandbox = await SojournSandboxClient(point.url, point.token).resume(state)
    async with sandbox:
        yield OpenAIAgents(sandbox)


class Deepagents(Client):
    exact = False
    merged = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    async def run(self, command: str) -> Done:
        done = await self._backend.aexecute(command)
        return Done(done.output.encode(), b"", done.exit_code, done.truncated)

    async def head(self, path: str) -> bytes | Exception:
        [told] = await self._backend.adownload_files([path])
        assert told.content is None and "too_large" in told.error
        return Refused(told.error)


@client("deepagents", SessionNotFound, needs="deepagents")
async def deepagents(point: Point) -> AsyncIterator[Client]:
    from sojourn.adapters.deepagents import SojournSandbox
    from sojourn.client import Sojourn

    with Sojourn(point.url, point.token) as found:
        yield Deepagents(SojournSandbox(await asyncio.to_thread(found.sessions.get, point.session)))


class SweRex(Client):
    exact = False

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    async def run(self, command: str) -> Done:
        from swerex.runtime.abstract import Command

        done = await self._runtime.execute(Command(command=command, shell=True))
        told = "left out" in done.stderr
        return Done(done.stdout.encode(), done.stderr.encode(), done.exit_code, told)

    async def head(self, path: str) -> bytes | Exception:
        from swerex.runtime.abstract import ReadFileRequest

        try:
            await self._runtime.read_file(ReadFileRequest(path=path))
        except OSError as error:
            return error
        raise AssertionError("read whole")


def _startup_error() -> tuple[type[BaseException], ...]:
    try:
        from swerex.exceptions import DeploymentStartupError
    except ImportError:
        return ()
    return (DeploymentStartupError,)


@client("SWE-ReX", *_startup_error(), needs="swerex")
async def swe_rex(point: Point) -> AsyncIterator[Client]:
    import msgspec

    from sojourn.adapters.swerex import DeploymentState, SojournDeployment

    state = msgspec.json.encode(DeploymentState(point.session))
    deployment = SojournDeployment(url=point.url, token=point.token, state=state)
    await deployment.start()
    try:
        yield SweRex(deployment.runtime)
    finally:
        await deployment.stop()


def sha256(data: bytes) -> str:
    """As the scripts in JavaScript tell it."""
    return hashlib.sha256(data).hexdigest()
