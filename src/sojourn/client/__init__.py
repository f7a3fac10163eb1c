"""The client library: one core without input or output, a blocking and an asynchronous shell.

Guarantee: the names below are the library's surface; everything else in this package may change.
Each is loaded when it is first used, so that the blocking client does not wait for the other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sojourn.client.async_client import AsyncSecrets, AsyncSessions, AsyncSojourn, AsyncTokens
    from sojourn.client.async_files import AsyncFiles
    from sojourn.client.async_nodes import AsyncNodes
    from sojourn.client.async_process import AsyncProcess
    from sojourn.client.async_session import AsyncSession, AsyncTurn
    from sojourn.client.async_templates import AsyncTemplates
    from sojourn.client.core_commands import ExecResult
    from sojourn.client.core_networks import allow
    from sojourn.client.sync_client import Secrets, Sessions, Sojourn, Tokens
    from sojourn.client.sync_files import Files
    from sojourn.client.sync_nodes import Nodes
    from sojourn.client.sync_process import Process
    from sojourn.client.sync_session import Session, Turn
    from sojourn.client.sync_templates import Templates

_MODULES = {
    "async_client": ("AsyncSecrets", "AsyncSessions", "AsyncSojourn", "AsyncTokens"),
    "async_files": ("AsyncFiles",),
    "async_process": ("AsyncProcess",),
    "async_session": ("AsyncSession", "AsyncTurn"),
    "async_nodes": ("AsyncNodes",),
    "async_templates": ("AsyncTemplates",),
    "core_commands": ("ExecResult",),
    "core_networks": ("allow",),
    "sync_client": ("Secrets", "Sessions", "Sojourn", "Tokens"),
    "sync_files": ("Files",),
    "sync_process": ("Process",),
    "sync_session": ("Session", "Turn"),
    "sync_nodes": ("Nodes",),
    "sync_templates": ("Templates",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSecrets",
    "AsyncSession",
    "AsyncSessions",
    "AsyncSojourn",
    "AsyncNodes",
    "AsyncTemplates",
    "AsyncTokens",
    "AsyncTurn",
    "ExecResult",
    "Files",
    "Process",
    "Secrets",
    "Session",
    "Sessions",
    "Sojourn",
    "Nodes",
    "Templates",
    "Tokens",
    "Turn",
    "allow",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'sojourn.client' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sojourn.client.{module}"), name)
    globals()[name] = value
    return value
