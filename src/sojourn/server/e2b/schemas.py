"""What E2B's control plane is asked and answers, as far as it is served; pure values.

Guarantee: fields that mean something here are typed and checked; those that are not known are
ignored, as E2B's own API does, and those that ask for what cannot be done are named so that the
routes can refuse them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

ENVD_VERSION = "0.6.4"
"""The version of E2B's agent whose behaviour is answered; the SDKs decide by it what to offer."""
CLIENT_ID = "sojourn"
DEFAULT_TIMEOUT = 300
FORK_TIMEOUT = 15
NEVER = "9999-12-31T00:00:00Z"
"""The end of a sandbox that has none; the SDKs insist on a date."""


class AutoResume(msgspec.Struct):
    """Whether traffic wakes a paused sandbox."""

    enabled: bool = False


class NewSandbox(msgspec.Struct, rename="camel"):
    """A sandbox to be made. `network` and `allow_internet_access` say what it may reach."""

    template_id: str = msgspec.field(name="templateID")
    timeout: int = DEFAULT_TIMEOUT
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    metadata: dict[str, str] = {}
    env_vars: dict[str, str] = {}
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: dict[str, Any] | None = None
    mcp: Any = None
    iam: Any = None
    volume_mounts: list[Any] | None = None


class ConnectSandbox(msgspec.Struct):
    """Wake a sandbox, and keep it for at least so long."""

    timeout: int = DEFAULT_TIMEOUT
    memory: bool = True


class SetTimeout(msgspec.Struct):
    """The sandbox ends so many seconds from now."""

    timeout: int


class Refresh(msgspec.Struct):
    """The sandbox lives at least so many seconds from now."""

    duration: int = 0


class PauseSandbox(msgspec.Struct):
    """Put away, with memory or without."""

    memory: bool = True


class ForkSandbox(msgspec.Struct):
    """Copies of a running sandbox."""

    timeout: int = FORK_TIMEOUT
    count: int = 1


class SnapshotSandbox(msgspec.Struct):
    """A snapshot that new sandboxes can be made from."""

    name: str | None = None
    memory: bool = True


def stamp(seconds: float | None) -> str:
    """A time as the API shows it."""
    if seconds is None:
        return NEVER
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
