"""Bounds of what a request may say; pure.

Guarantee: each bound stands here once, and is checked before anything begins, so that a refused
request neither wakes a session nor leaves an event.
"""

from __future__ import annotations

import math
import re

from sojourn.errors import InvalidRequest, PathInvalid, TooLarge
from sojourn.model import Limits, Policy, Retention
from sojourn.wire.api import CodeRequest, ExecRequest, SpawnRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_SECONDS = 10 * 366 * 86400.0
MAX_LABELS = 64
MAX_ARGUMENTS = 1024 * 1024
MAX_INLINE_STDIN = 1024 * 1024
MAX_OUTPUT = 64 * 1024 * 1024
MAX_TIMEOUT = 7 * 86400.0
MIN_KEEP, MAX_KEEP = 4096, 256 * 1024 * 1024
MAX_SIDE = 10_000
MAX_KEPT = 100_000


def check_name(name: str) -> str:
    """Raises InvalidRequest for a name that could not serve as host name and in paths."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"name {name!r} must be 1 to 63 letters, digits, dots, dashes or underscores and begin"
            " with a letter or digit",
            field="name",
        )
    if name.startswith(("ses_", "snp_", "opn_")):
        raise InvalidRequest(f"name {name!r} looks like an id", field="name")
    return name


def check_limits(limits: Limits) -> Limits:
    """Raises InvalidRequest for limits nothing could run in."""
    for field, value, least in (
        ("cpus", limits.cpus, 0.05),
        ("memory_bytes", limits.memory_bytes, 64 * 1024**2),
        ("pids", limits.pids, 8),
        ("disk_bytes", limits.disk_bytes, 1024**2),
    ):
        if not math.isfinite(value) or value < least or value > 2**53:
            raise InvalidRequest(
                f"limits.{field} must be at least {least}, not {value}", field=f"limits.{field}"
            )
    return limits


def check_policy(policy: Policy) -> Policy:
    """Raises InvalidRequest for deadlines that make no sense."""
    for field, value in (
        ("idle_timeout", policy.idle_timeout),
        ("max_lifetime", policy.max_lifetime),
    ):
        if value is not None and not (math.isfinite(value) and 0 < value <= MAX_SECONDS):
            raise InvalidRequest(
                f"policy.{field} must be a positive number of seconds, not {value}",
                field=f"policy.{field}",
            )
    if policy.on_idle not in ("suspend", "delete"):
        raise InvalidRequest("policy.on_idle is suspend or delete", field="policy.on_idle")
    if policy.on_expiry not in ("suspend", "delete"):
        raise InvalidRequest("policy.on_expiry is suspend or delete", field="policy.on_expiry")
    if policy.on_stop not in ("adopt", "suspend"):
        raise InvalidRequest("policy.on_stop is adopt or suspend", field="policy.on_stop")
    if policy.auto_memory_bytes < 0:
        raise InvalidRequest(
            "policy.auto_memory_bytes is negative", field="policy.auto_memory_bytes"
        )
    if policy.retention is not None:
        _check_retention(policy.retention)
    return policy


def _check_retention(retention: Retention) -> None:
    seconds = retention.keep_all_for
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(
            f"policy.retention.keep_all_for must be a number of seconds, not {seconds}",
            field="policy.retention.keep_all_for",
        )
    for field in ("keep_last", "hourly", "daily", "weekly"):
        count = getattr(retention, field)
        if not 0 <= count <= MAX_KEPT:
            raise InvalidRequest(
                f"policy.retention.{field} must be between 0 and {MAX_KEPT}, not {count}",
                field=f"policy.retention.{field}",
            )


def check_map(field: str, values: dict[str, str], *, env: bool) -> dict[str, str]:
    """Raises InvalidRequest, TooLarge for labels or environment that cannot be used."""
    if not env and len(values) > MAX_LABELS:
        raise TooLarge(f"{field}: at most {MAX_LABELS}", field=field)
    if sum(len(key) + len(value) for key, value in values.items()) > 64 * 1024:
        raise TooLarge(f"{field} are over 64 KiB", field=field)
    for key, value in values.items():
        bad = not key or "\0" in key or "\0" in value or (env and "=" in key)
        if bad:
            raise InvalidRequest(f"{field}: bad key or value at {key!r}", field=field)
    return values


def check_label(label: str | None) -> str | None:
    """Raises InvalidRequest for a label nobody could find a snapshot by."""
    if label is not None and not 1 <= len(label) <= 200:
        raise InvalidRequest("label must be 1 to 200 characters", field="label")
    return label


def check_place(cwd: str | None, user: str | None) -> None:
    """Raises InvalidRequest for a directory or a user that no command could be started with."""
    if cwd is not None and (not cwd.startswith("/") or "\0" in cwd or len(cwd) > 4096):
        raise InvalidRequest("cwd must be an absolute path", field="cwd")
    if user is not None and (not 1 <= len(user) <= 255 or not user.isprintable()):
        raise InvalidRequest("user must be 1 to 255 printable characters", field="user")


# -- commands ---------------------------------------------------------------------------------


def check_command(request: ExecRequest) -> None:
    """Raises InvalidRequest, PathInvalid or TooLarge, naming the field."""
    argv, argv_bytes, shell = request.argv, request.argv_bytes, request.shell
    if (argv is None) + (argv_bytes is None) + (shell is None) != 2:
        raise InvalidRequest("give one of `argv`, `argv_bytes` and `shell`", field="argv")
    field, words = "argv", [word.encode(errors="surrogateescape") for word in argv or []]
    if argv_bytes is not None:
        field, words = "argv_bytes", argv_bytes
    elif shell is not None:
        field, words = "shell", [b"sh", shell.encode(errors="surrogateescape")]
    if not words or not words[0]:
        raise InvalidRequest(f"`{field}` names no command", field=field)
    if any(b"\0" in word for word in words):
        raise InvalidRequest(f"`{field}` holds a NUL byte", field=field)
    if sum(map(len, words)) > MAX_ARGUMENTS:
        raise TooLarge(
            f"`{field}` is over {MAX_ARGUMENTS} bytes",
            next_step="Pass the data by stdin or a file.",
            field=field,
            limit=MAX_ARGUMENTS,
        )
    for name, value in (request.env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(f"`env` holds the impossible variable {name!r}", field="env")
    if request.cwd is not None and (not request.cwd.startswith("/") or "\0" in request.cwd):
        raise PathInvalid("`cwd` is not an absolute path", field="cwd")
    check_timeout(request.timeout)
    if request.stdin is not None and len(request.stdin) > MAX_INLINE_STDIN:
        raise TooLarge(
            f"`stdin` is over {MAX_INLINE_STDIN} bytes",
            next_step="Spawn with `open_stdin` and stream the input to the process.",
            field="stdin",
            limit=MAX_INLINE_STDIN,
        )
    if not 0 <= request.max_output <= MAX_OUTPUT:
        raise InvalidRequest(f"`max_output` is not between 0 and {MAX_OUTPUT}", field="max_output")


def check_spawn(request: SpawnRequest) -> None:
    """Raises what `check_command` does, and for what only a process that goes on by itself has."""
    check_command(request)
    if request.pty is not None:
        check_terminal(*request.pty, field="pty")
    if not MIN_KEEP <= request.keep <= MAX_KEEP:
        raise InvalidRequest(f"`keep` is not between {MIN_KEEP} and {MAX_KEEP}", field="keep")
    if request.open_stdin and request.stdin is not None:
        raise InvalidRequest("give `stdin` or `open_stdin`, not both", field="stdin")


def check_code(request: CodeRequest) -> None:
    """Raises InvalidRequest for a context without a name or a bad timeout."""
    check_timeout(request.timeout)
    if not 0 < len(request.context) <= 64 or not request.context.isprintable():
        raise InvalidRequest("`context` is not 1 to 64 printable characters", field="context")


def check_timeout(timeout: float | None) -> None:
    """Raises InvalidRequest for a timeout that is not a positive number of seconds."""
    if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= MAX_TIMEOUT):
        raise InvalidRequest(
            f"`timeout` is not more than 0 and at most {MAX_TIMEOUT:.0f} seconds", field="timeout"
        )


def check_terminal(rows: int, columns: int, *, field: str) -> None:
    """Raises InvalidRequest for a size no terminal has."""
    if not (0 < rows <= MAX_SIDE and 0 < columns <= MAX_SIDE):
        raise InvalidRequest("the terminal's size is out of range", field=field)
