"""The client library: one core without input or output, a blocking and an asynchronous shell.

Guarantee: the names below are the library's surface; everything else in this package may change.
"""

from sojourn.client.async_client import AsyncSessions, AsyncSojourn, AsyncTokens
from sojourn.client.async_files import AsyncFiles
from sojourn.client.async_process import AsyncProcess
from sojourn.client.async_session import AsyncSession, AsyncTurn
from sojourn.client.core_commands import ExecResult
from sojourn.client.sync_client import Sessions, Sojourn, Tokens
from sojourn.client.sync_files import Files
from sojourn.client.sync_process import Process
from sojourn.client.sync_session import Session, Turn

__all__ = [
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSession",
    "AsyncSessions",
    "AsyncSojourn",
    "AsyncTokens",
    "AsyncTurn",
    "ExecResult",
    "Files",
    "Process",
    "Session",
    "Sessions",
    "Sojourn",
    "Tokens",
    "Turn",
]
