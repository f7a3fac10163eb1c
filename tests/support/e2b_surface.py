"""The public methods of E2B's SDKs, each with whether it works against this server and why not.

`found` lists what the installed SDKs have; `KNOWN` says what becomes of it; docs/e2b.md shows it.
"""

from __future__ import annotations

from typing import Any

import e2b
import e2b_code_interpreter
from e2b.sandbox_async.commands.command import Commands as AsyncCommands
from e2b.sandbox_async.commands.pty import Pty as AsyncPty
from e2b.sandbox_async.filesystem.filesystem import Filesystem as AsyncFilesystem
from e2b.sandbox_async.git import Git as AsyncGit
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem

CLASSES: dict[str, tuple[Any, ...]] = {
    "Sandbox": (e2b.Sandbox, e2b.AsyncSandbox),
    "Sandbox.commands": (Commands, AsyncCommands),
    "Sandbox.files": (Filesystem, AsyncFilesystem),
    "Sandbox.pty": (Pty, AsyncPty),
    "Sandbox.git": (e2b.Git, AsyncGit),
    "CommandHandle": (e2b.CommandHandle, e2b.AsyncCommandHandle),
    "CommandInputHandle": (e2b.AsyncCommandInputHandle,),
    "WatchHandle": (e2b.WatchHandle, e2b.AsyncWatchHandle),
    "SandboxPaginator": (e2b.SandboxPaginator, e2b.AsyncSandboxPaginator),
    "SnapshotPaginator": (e2b.SnapshotPaginator, e2b.AsyncSnapshotPaginator),
    "code interpreter": (e2b_code_interpreter.Sandbox, e2b_code_interpreter.AsyncSandbox),
    "Template": (e2b.Template, e2b.AsyncTemplate),
    "Volume": (e2b.Volume, e2b.AsyncVolume),
    "Secret": (e2b.Secret, e2b.AsyncSecret),
}

YES, NO, LOCAL = "yes", "no", "local"
"""Works; is refused with the SDK's own error; asks no server anything."""

Row = tuple[str, str]

_NO_BUILDS = "templates are made with `sojourn template` (`BuildException` or `SandboxException`)"
_NO_VOLUMES = "a session's own files last (`VolumeException`)"
_NO_SECRETS = "secrets are set with `sojourn secret` (`SecretException`)"
NO_MCP = "there is no MCP gateway in sandboxes (`SandboxException` at create)"
GIT = "runs `git` as a command: the template must have it"

KNOWN: dict[str, dict[str, Row]] = {
    "Sandbox": {
        "create": (
            YES,
            "`mcp`, `iam`, `volume_mounts`, `network.rules` and a timeout that pauses files only"
            " are refused",
        ),
        "connect": (
            YES,
            "never shortens the time; `on_resume='reboot'` only after a pause without memory",
        ),
        "list": (YES, ""),
        "kill": (YES, ""),
        "get_info": (YES, ""),
        "get_metrics": (YES, "one sample of this moment; there is no history"),
        "is_running": (YES, ""),
        "set_timeout": (YES, "of a running sandbox"),
        "pause": (YES, "with memory or without"),
        "beta_pause": (YES, "the same"),
        "fork": (YES, ""),
        "create_snapshot": (YES, "outlives its sandbox"),
        "list_snapshots": (YES, ""),
        "delete_snapshot": (YES, ""),
        "update_network": (
            YES,
            "all traffic, none, or none but a list; single denials and rules are refused",
        ),
        "download_url": (YES, "signed"),
        "upload_url": (YES, "signed"),
        "get_host": (YES, "see [Ports](#ports)"),
        "traffic_access_token": (YES, ""),
        "get_mcp_token": (NO, NO_MCP),
        "get_mcp_url": (NO, NO_MCP),
        "commands": (YES, ""),
        "files": (YES, ""),
        "pty": (YES, ""),
        "git": (YES, GIT),
        "sandbox_id": (LOCAL, ""),
        "sandbox_domain": (LOCAL, ""),
        "envd_api_url": (LOCAL, ""),
        "envd_direct_url": (LOCAL, ""),
        "connection_config": (LOCAL, ""),
        "default_template": (LOCAL, ""),
        "default_mcp_template": (LOCAL, ""),
        "default_sandbox_timeout": (LOCAL, ""),
        "mcp_port": (LOCAL, ""),
    },
    "Sandbox.commands": {
        "run": (YES, "the timeout ends the whole group of processes"),
        "connect": (YES, "also to commands of before a pause, and to ended ones still known"),
        "list": (YES, "commands of every client, those of Sojourn's own SDK too"),
        "kill": (YES, "the whole group"),
        "send_stdin": (YES, ""),
        "stream_input": (YES, ""),
        "close_stdin": (YES, ""),
    },
    "Sandbox.files": {
        "read": (YES, "text, bytes and stream"),
        "write": (YES, "whole or not at all; `metadata` is refused (`InvalidArgumentException`)"),
        "write_files": (YES, "the same for each file"),
        "list": (YES, ""),
        "exists": (YES, ""),
        "get_info": (YES, ""),
        "remove": (YES, ""),
        "rename": (YES, ""),
        "make_dir": (YES, ""),
        "watch_dir": (YES, "a watcher of the blocking SDK does not outlive the server"),
    },
    "Sandbox.pty": {
        "create": (YES, ""),
        "connect": (YES, ""),
        "kill": (YES, ""),
        "resize": (YES, ""),
        "send_stdin": (YES, ""),
        "stream_input": (YES, ""),
    },
    "Sandbox.git": {
        name: (YES, GIT)
        for name in (
            *("add", "branches", "checkout_branch", "clone", "commit", "configure_user"),
            *("create_branch", "dangerously_authenticate", "delete_branch", "get_config", "init"),
            *("pull", "push", "remote_add", "remote_get", "reset", "restore", "set_config"),
            "status",
        )
    },
    "CommandHandle": {
        "wait": (YES, ""),
        "kill": (YES, ""),
        "disconnect": (YES, "the command goes on"),
        "send_stdin": (YES, ""),
        "close_stdin": (YES, ""),
        "pid": (LOCAL, ""),
        "stdout": (LOCAL, ""),
        "stderr": (LOCAL, ""),
        "error": (LOCAL, ""),
        "exit_code": (LOCAL, ""),
    },
    "CommandInputHandle": {"send": (YES, ""), "close": (YES, "")},
    "WatchHandle": {"get_new_events": (YES, ""), "stop": (YES, "")},
    "SandboxPaginator": {
        "next_items": (YES, ""),
        "has_next": (LOCAL, ""),
        "next_token": (LOCAL, ""),
    },
    "SnapshotPaginator": {
        "next_items": (YES, ""),
        "has_next": (LOCAL, ""),
        "next_token": (LOCAL, ""),
    },
    "code interpreter": {
        "run_code": (YES, "Python; what code writes arrives when it is done"),
        "create_code_context": (YES, "Python"),
        "list_code_contexts": (YES, ""),
        "restart_code_context": (YES, ""),
        "remove_code_context": (YES, ""),
    },
    "Template": {
        "exists": (YES, "names of this server's templates and of snapshots"),
        "alias_exists": (YES, "the same"),
        "build": (NO, _NO_BUILDS),
        "build_in_background": (NO, _NO_BUILDS),
        "get_build_status": (NO, _NO_BUILDS),
        "assign_tags": (NO, _NO_BUILDS),
        "remove_tags": (NO, _NO_BUILDS),
        "get_tags": (NO, _NO_BUILDS),
        **{
            name: (LOCAL, "describes a build")
            for name in (
                *("from_alpine_image", "from_arch_image", "from_aws_registry", "from_base_image"),
                *("from_bun_image", "from_debian_image", "from_dockerfile", "from_fedora_image"),
                *("from_gcp_registry", "from_image", "from_node_image", "from_python_image"),
                *("from_template", "from_ubuntu_image", "skip_cache", "to_dockerfile", "to_json"),
            )
        },
    },
    "Volume": {
        **{
            name: (NO, _NO_VOLUMES)
            for name in (
                *("connect", "create", "destroy", "exists", "get_info", "list", "make_dir"),
                *("read_file", "remove", "update_metadata", "write_file"),
            )
        },
        "name": (LOCAL, ""),
        "token": (LOCAL, ""),
        "volume_id": (LOCAL, ""),
    },
    "Secret": {
        **{
            name: (NO, _NO_SECRETS)
            for name in ("create", "destroy", "exists", "get_info", "list", "update")
        },
        "fill": (LOCAL, "for `network.rules`, which are refused"),
        "iam_token": (LOCAL, "for `iam`, which is refused"),
    },
}


def found() -> dict[str, set[str]]:
    """What the installed SDKs have."""
    names = {
        name: {member for kind in kinds for member in dir(kind) if not member.startswith("_")}
        for name, kinds in CLASSES.items()
    }
    names["code interpreter"] -= names["Sandbox"]
    return names


def table(known: dict[str, dict[str, Row]]) -> str:
    """The tables of docs/e2b.md."""
    words = {YES: "supported", NO: "refused", LOCAL: "needs no server"}
    lines = []
    for name, methods in known.items():
        lines += [f"### {name}", "", "| method | | |", "|---|---|---|"]
        grouped: dict[Row, list[str]] = {}
        for method, row in methods.items():
            grouped.setdefault(row, []).append(f"`{method}`")
        for (kind, note), found_methods in grouped.items():
            lines.append(f"| {', '.join(found_methods)} | {words[kind]} | {note} |")
        lines.append("")
    return "\n".join(lines)
