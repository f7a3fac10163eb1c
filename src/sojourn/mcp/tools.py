"""The tools: name, when to use what, and what a client may assume of each.

Guarantee: a tool that says it only reads changes nothing in any session and makes none (one that is
put away is woken). Schemas are those of the types that are checked and given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from mcp_types import ContentBlock, Tool, ToolAnnotations

from sojourn.mcp import arguments, commands, files, networks, results, sessions
from sojourn.mcp.calls import Call

Handler = Callable[
    [Call, Any], Awaitable[results.Result | tuple[results.Result, list[ContentBlock]]]
]

Effect = Literal["reads", "adds", "changes", "destroys"]
"""What a tool may do at most: read, only add, alter in a way that can be repeated or taken back,
or take something away."""


class Entry(msgspec.Struct, frozen=True):
    """A tool."""

    tool: Tool
    arguments: type[arguments.Arguments]
    handler: Handler


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A type's JSON schema in one piece, without null: what is none is left out, both ways."""
    (root,), parts = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")

    def joined(value: Any) -> Any:
        if isinstance(value, list):
            return [joined(one) for one in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            found = joined(parts[value["$ref"].rpartition("/")[2]])
            return found | {name: text for name, text in value.items() if name != "$ref"}
        made = {name: joined(one) for name, one in value.items()}
        made.pop("title", None)
        if "anyOf" in made:
            (left,) = [one for one in made.pop("anyOf") if one != {"type": "null"}]
            made = left | made
        if "enum" in made:
            made["enum"] = [one for one in made["enum"] if one is not None]
            made["type"] = "string"
        if made.get("default", 0) is None:
            del made["default"]
        if isinstance(made.get("description"), str):
            made["description"] = " ".join(made["description"].split())
        return made

    schema: dict[str, Any] = joined(root)
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    # What has to be given is read first.
    schema["properties"] = {name: fields[name] for name in required} | fields
    return schema


def _entry(
    name: str,
    title: str,
    description: str,
    handler: Handler,
    given: type[arguments.Arguments],
    result: type[results.Result],
    effect: Effect,
    *,
    repeatable: bool = False,
    open_world: bool = False,
) -> Entry:
    input_schema = schema_of(given)
    input_schema.pop("description", None)
    tool = Tool(
        name=name,
        title=title,
        description=description,
        input_schema=input_schema,
        output_schema=schema_of(result),
        annotations=ToolAnnotations(
            title=title,
            read_only_hint=effect == "reads",
            destructive_hint=effect == "destroys",
            idempotent_hint=effect == "reads" or repeatable,
            open_world_hint=open_world,
        ),
    )
    return Entry(tool, given, handler)


_ENTRIES = [
    _entry(
        "exec",
        "Run a command",
        "Run a shell command in your session and get its exit code, stdout and stderr. Files,"
        " installed packages and background processes stay for the next call. Use background=true"
        " for servers and anything longer than `timeout`. A non-zero exit code is no error of the"
        " tool.",
        commands.execute,
        arguments.Exec,
        results.ExecResult,
        "destroys",
        open_world=True,
    ),
    _entry(
        "exec_output",
        "Read the rest of an output",
        "Read what exec or run_code left out of a long output, part by part. Only outputs that a"
        " result named in `output` can be read.",
        commands.exec_output,
        arguments.ExecOutput,
        results.OutputResult,
        "reads",
    ),
    _entry(
        "run_code",
        "Run Python code",
        "Run Python in your session's interpreter. Variables and imports stay for the next call."
        " Use it for data and calculation; use exec for everything that is a command.",
        commands.run_code,
        arguments.RunCode,
        results.CodeResult,
        "destroys",
        open_world=True,
    ),
    _entry(
        "process_list",
        "List processes",
        "List the processes of a session that were started with background=true, ended ones too.",
        commands.process_list,
        arguments.Own,
        results.ProcessesResult,
        "reads",
    ),
    _entry(
        "process_output",
        "Read a background process",
        "Read what a background process wrote, from `offset` on, and whether it still runs. Give"
        " `wait` to wait for its end first. Go on at `next_offset`.",
        commands.process_output,
        arguments.ProcessOutput,
        results.ProcessOutputResult,
        "reads",
    ),
    _entry(
        "process_kill",
        "End a background process",
        "Send a signal to a background process and all it started.",
        commands.process_kill,
        arguments.ProcessKill,
        results.Done,
        "destroys",
        repeatable=True,
    ),
    _entry(
        "file_read",
        "Read a file",
        "Read a file, or a part of it from `offset` on. Content that is not UTF-8 comes as base64."
        " Large files come in parts: go on at `next_offset`.",
        files.read,
        arguments.FileRead,
        results.FileReadResult,
        "reads",
    ),
    _entry(
        "file_write",
        "Write a file",
        "Make a file, or replace all of its content; directories above it are made. Better than"
        " exec with echo or heredocs: nothing has to be quoted.",
        files.write,
        arguments.FileWrite,
        results.FileResult,
        "destroys",
        repeatable=True,
    ),
    _entry(
        "file_list",
        "List a directory",
        "List the entries of a directory with type, size and mode.",
        files.entries,
        arguments.FileList,
        results.FilesResult,
        "reads",
    ),
    _entry(
        "file_delete",
        "Delete a file",
        "Delete a file, or with recursive=true a directory and all in it.",
        files.delete,
        arguments.FileDelete,
        results.Done,
        "destroys",
        repeatable=True,
    ),
    _entry(
        "snapshot",
        "Take a snapshot",
        "Keep the present state (files and processes) as a point to come back to. Every change is"
        " kept by itself already; take one with a label before something risky.",
        sessions.snapshot,
        arguments.Snapshot,
        results.SnapshotResult,
        "adds",
    ),
    _entry(
        "history",
        "List snapshots",
        "List the snapshots of a session, the newest first. `current` marks where it is now.",
        sessions.history,
        arguments.History,
        results.HistoryResult,
        "reads",
    ),
    _entry(
        "rollback",
        "Go back to a snapshot",
        "Put a session back to a snapshot: files, and processes where the snapshot has memory. What"
        " it leaves stays in the history.",
        sessions.rollback,
        arguments.Rollback,
        results.RollbackResult,
        "destroys",
    ),
    _entry(
        "fork",
        "Fork a session",
        "Make new sessions that go on from a snapshot or from now, each by itself: to try several"
        " ways at once. Give their ids as `session` in later calls.",
        sessions.fork,
        arguments.Fork,
        results.ForkResult,
        "adds",
    ),
    _entry(
        "diff",
        "Compare snapshots",
        "Tell which files differ between two snapshots; with text=true also how.",
        sessions.diff,
        arguments.Diff,
        results.DiffResult,
        "reads",
    ),
    _entry(
        "network_get",
        "Look at the network",
        "Tell what a session may reach outside. By default that is nothing.",
        networks.get,
        arguments.Own,
        results.NetworkResult,
        "reads",
    ),
    _entry(
        "network_set",
        "Set the network",
        "Set what a session may reach outside. To open it takes the user's leave: ask for it when"
        " you are refused. Closing it is always allowed.",
        networks.change,
        arguments.NetworkSet,
        results.NetworkResult,
        "destroys",
        repeatable=True,
        open_world=True,
    ),
    _entry(
        "session_create",
        "Make another session",
        "Make another, separate session. You rarely need it: exec, run_code and file_write make"
        " your own one. Give its id as `session` in later calls.",
        sessions.create,
        arguments.Create,
        results.SessionResult,
        "adds",
    ),
    _entry(
        "session_list",
        "List sessions",
        "List sessions, the newest first. `own` marks yours.",
        sessions.listed,
        arguments.ListSessions,
        results.SessionsResult,
        "reads",
    ),
    _entry(
        "session_get",
        "Look at a session",
        "Tell a session's id, name, state and newest snapshot. Does not wake it.",
        sessions.get,
        arguments.Own,
        results.SessionResult,
        "reads",
    ),
    _entry(
        "session_pause",
        "Pause a session",
        "Freeze a session in memory for a moment. The next call wakes it.",
        sessions.pause,
        arguments.Own,
        results.SessionResult,
        "changes",
        repeatable=True,
    ),
    _entry(
        "session_suspend",
        "Put a session away",
        "Put a session away with its processes, so that it uses no memory. The next call wakes it,"
        " also days later. Idle sessions are put away by themselves.",
        sessions.suspend,
        arguments.Own,
        results.SessionResult,
        "changes",
        repeatable=True,
    ),
    _entry(
        "session_resume",
        "Wake a session",
        "Let a paused or suspended session run again. Calls do this by themselves. With"
        " files_only=true it starts without its processes, where these cannot be restored.",
        sessions.resume,
        arguments.Resume,
        results.SessionResult,
        "changes",
        repeatable=True,
    ),
    _entry(
        "session_delete",
        "Delete a session",
        "Delete a session with all its files and its history, for good. Only when the user wants"
        " that.",
        sessions.delete,
        arguments.Named,
        results.Done,
        "destroys",
        repeatable=True,
    ),
]

TOOLS: dict[str, Entry] = {entry.tool.name: entry for entry in _ENTRIES}
"""Every tool by its name, in the order they are told."""
