"""Driving `sojourn mcp` with the protocol library's own client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

COMMAND = (sys.executable, "-m", "sojourn.cli.main", "mcp")


def drive(work: Callable[[], Awaitable[None]], seconds: float = 60) -> None:
    """Run a test's coroutine, bounded."""

    async def bounded() -> None:
        await asyncio.wait_for(work(), seconds)

    try:
        asyncio.run(bounded())
    except BaseExceptionGroup as group:
        cause: BaseException = group
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise cause from None  # the test's own failure, not where the client's tasks ended for it


def environment(data: Path, **more: str) -> dict[str, str]:
    """That of a program that finds the server by its data directory."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SOJOURN_")}
    homes = {name: os.environ[name] for name in ("SOJOURN_HOME",) if name in os.environ}
    return kept | homes | {"SOJOURN_DATA": str(data)} | more


def stdio(data: Path, *arguments: str, mode: str = "auto", **more: str) -> Client:
    """A client that starts `sojourn mcp` and speaks to it over its pipes."""
    program = StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], *arguments], env=environment(data, **more)
    )
    return Client(program, mode=mode)


class Web:
    """`sojourn mcp --http` in a process of its own."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "--http", "127.0.0.1:0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment(data),
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            self._process.wait(timeout=30)
            raise RuntimeError(f"no ready line but {line!r}, exit {self._process.returncode}")
        self.url = line.split()[1]
        self.token = (data / "token").read_text().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    @asynccontextmanager
    async def client(self, mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
        sent = self.bearer() | headers
        async with httpx2.AsyncClient(headers=sent, timeout=60) as http:
            transport = streamable_http_client(self.url, http_client=http)
            async with Client(transport, mode=mode) as client:
                yield client

    def stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(timeout=30)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


async def call(client: Client, tool: str, **given: Any) -> dict[str, Any]:
    """A call that succeeds: what it gives."""
    result = await client.call_tool(tool, given)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def refused(client: Client, tool: str, **given: Any) -> dict[str, Any]:
    """A call that fails: its error."""
    result = await client.call_tool(tool, given)
    assert result.is_error, result.structured_content
    (content,) = result.content
    error = json.loads(content.text)["error"]
    assert error["message"] and error["next_step"] and "Traceback" not in content.text
    return error
