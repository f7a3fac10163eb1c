"""Bounds of what a request may say, checked before anything begins; pure."""

from __future__ import annotations

import math
import re

from sojourn.errors import InvalidRequest, TooLarge
from sojourn.model import Limits, Policy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_SECONDS = 10 * 366 * 86400.0
MAX_LABELS = 64


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
    if policy.on_expiry not in ("suspend", "delete"):
        raise InvalidRequest("policy.on_expiry is suspend or delete", field="policy.on_expiry")
    if policy.on_stop not in ("adopt", "suspend"):
        raise InvalidRequest("policy.on_stop is adopt or suspend", field="policy.on_stop")
    if policy.auto_memory_bytes < 0:
        raise InvalidRequest(
            "policy.auto_memory_bytes is negative", field="policy.auto_memory_bytes"
        )
    return policy


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


def check_place(cwd: str | None, user: str | None) -> None:
    """Raises InvalidRequest for a directory or a user that no command could be started with."""
    if cwd is not None and (not cwd.startswith("/") or "\0" in cwd or len(cwd) > 4096):
        raise InvalidRequest("cwd must be an absolute path", field="cwd")
    if user is not None and (not 1 <= len(user) <= 255 or not user.isprintable()):
        raise InvalidRequest("user must be 1 to 255 printable characters", field="user")
