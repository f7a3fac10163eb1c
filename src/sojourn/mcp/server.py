"""The protocol's side of it: tools are told, calls are checked, carried out and answered.

Guarantee: every call of a known tool is answered with its result or with an error that has a code
and a next step; no failure of one call touches another.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server as ProtocolServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)

from sojourn.errors import InvalidRequest, SojournError
from sojourn.mcp.calls import Call
from sojourn.mcp.failures import failed, unexpected
from sojourn.mcp.own_sessions import OwnSession, Sessions
from sojourn.mcp.texts import Outputs
from sojourn.mcp.tools import TOOLS, Entry

_log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Sojourn gives you a Linux machine that lasts: commands, Python, files. You have a session of"
    " your own, made by the first exec, run_code or file_write; leave `session` out to use it."
    " Everything in it stays, also processes, until it is deleted, however long you are away."
    " Every change is kept as a snapshot: `history` lists them, `diff` compares, `rollback` goes"
    " back, `fork` tries several ways at once. There is no network unless the user allowed it."
)

Context = ServerRequestContext[Sessions, Any]
OwnOf = Callable[[Context], OwnSession]
"""How a transport tells whose session a call works on."""


def client_name(context: Context) -> str:
    """What the client calls itself."""
    told = context.session.client_params
    return told.client_info.name if told is not None else "client"


def protocol_server(sessions: Sessions, own_of: OwnOf) -> ProtocolServer[Sessions]:
    """The server that a transport drives."""
    outputs = Outputs()

    @asynccontextmanager
    async def lifespan(_server: ProtocolServer[Sessions]) -> AsyncIterator[Sessions]:
        yield sessions

    async def list_tools(
        _context: Context, _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=[entry.tool for entry in TOOLS.values()])

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        entry = TOOLS.get(params.name)
        if entry is None:
            raise MCPError(code=INVALID_PARAMS, message=f"there is no tool {params.name!r}")
        call = Call(sessions, outputs, lambda: own_of(context), context.session.report_progress)
        with sessions.call():
            return await answer(entry, call, params.arguments or {})

    state: Callable[[ProtocolServer[Sessions]], AbstractAsyncContextManager[Sessions]] = lifespan
    return ProtocolServer(
        "sojourn",
        version=version("sojourn"),
        title="Sojourn",
        description="Durable sessions for AI agents",
        instructions=INSTRUCTIONS,
        lifespan=state,
        get_tool_input_schema=lambda name: TOOLS[name].tool.input_schema if name in TOOLS else None,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def answer(entry: Entry, call: Call, given: dict[str, Any]) -> CallToolResult:
    """Carry out a call."""
    try:
        found = await entry.handler(call, checked(entry, given))
    except SojournError as error:
        return failed(error)
    except Exception as error:  # noqa: BLE001 - a client must never be left without an answer
        return failed(unexpected(entry.tool.name, error))
    result, blocks = found if isinstance(found, tuple) else (found, list[ContentBlock]())
    text = msgspec.json.encode(result).decode()
    return CallToolResult(
        content=[TextContent(type="text", text=text), *blocks],
        structured_content=msgspec.to_builtins(result),
    )


def checked(entry: Entry, given: dict[str, Any]) -> Any:
    """The arguments of a call. A null is taken as left out. Raises InvalidRequest."""
    present = {name: value for name, value in given.items() if value is not None}
    try:
        msgspec.json.encode(present)  # half a surrogate pair is no text that could be sent on
        return msgspec.convert(present, entry.arguments)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        takes = ", ".join(entry.tool.input_schema.get("properties", {}))
        raise InvalidRequest(
            f"the arguments of {entry.tool.name} are not valid: {error}",
            next_step=f"It takes: {takes}." if takes else "It takes no arguments.",
        ) from error
