"""Failures as a model can act on them.

Guarantee: a tool that fails answers with `isError` and our code, message and next step, in the
words of these tools instead of the command line's. Nothing else of a failure goes out: no
traceback, no token. What is not of our tree is told as `internal` and logged here.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from mcp_types import CallToolResult, TextContent

from sojourn.errors import SojournError, all_errors
from sojourn.mcp.texts import clipped

_log = logging.getLogger(__name__)

_MESSAGE = 4_000
_DETAILS = 4_000

_NEXT_STEPS = {
    "session_not_found": "session_list tells the sessions; session_create makes one.",
    "snapshot_not_found": "history tells the snapshots.",
    "process_not_found": "process_list tells the processes.",
    "capture_refused": "End what is named, then try again.",
    "unlinked_open_file": "Close the file that is named, or keep such files under /tmp.",
    "integrity_error": "Roll back to another snapshot; history tells them.",
    "unauthenticated": "The user has to give `sojourn mcp` a token that is known (SOJOURN_TOKEN).",
    "forbidden": "The token that `sojourn mcp` was given does not allow this.",
    "unreachable": "The user has to start the server with `sojourn up`, or check SOJOURN_URL.",
    "unknown_template": "Use the template `debian`.",
    "resume_failed": "session_resume again; else session_resume with files_only=true (its processes"
    " end), rollback to another snapshot, or session_delete.",
    "interrupted": "A command that had begun goes on when the session is woken: process_output with"
    " the `process` of the details reads it.",
    "output_truncated": "Begin at details.first_offset.",
    "session_busy": "Wait a moment and try again: another operation holds the session.",
}
# What the command line's user would type; models have tools for it.
_COMMANDS = re.compile(r" \(`sojourn session[^)]*\)")


def next_step(error: SojournError) -> str:
    """What to do, in terms of the tools, unless the error itself says something special."""
    if error.next_step == type(error).default_next_step:
        step = _NEXT_STEPS.get(error.code, error.next_step)
    else:
        step = error.next_step
    return _COMMANDS.sub("", step)


def body(error: SojournError) -> dict[str, Any]:
    """An error as it is told."""
    told: dict[str, Any] = {
        "code": error.code,
        "message": clipped(error.message, _MESSAGE),
        "next_step": clipped(next_step(error), _MESSAGE),
    }
    details = msgspec.to_builtins(error.details, enc_hook=repr)
    if details and len(msgspec.json.encode(details)) <= _DETAILS:
        told["details"] = details
    return told


def failed(error: SojournError) -> CallToolResult:
    """A failed call."""
    text = msgspec.json.encode({"error": body(error)}).decode()
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def unexpected(tool: str, error: Exception) -> SojournError:
    """A failure that is none of ours: logged whole, told as little as can be."""
    _log.error("the tool %s failed", tool, exc_info=error)
    return SojournError(
        f"{tool} failed within the MCP server ({type(error).__name__})",
        next_step="Try again; the log of `sojourn mcp` (its standard error) tells more.",
    )


CODES = frozenset(all_errors())
"""Every code that can be told."""
