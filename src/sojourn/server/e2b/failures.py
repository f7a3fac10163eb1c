"""Errors of the tree as E2B's SDKs expect them, so that each becomes the SDK's own exception; pure.

Guarantee: every error has a status for plain HTTP, a code for its RPCs, and a message that names
the cause and the next step. What is gone or asleep says "was not found", by which the SDKs tell a
sandbox that does not run from one that could not be reached.
"""

from __future__ import annotations

import msgspec

from sojourn.errors import (
    CommandNotStarted,
    Conflict,
    DiskQuotaExceeded,
    FileConflict,
    FileMissing,
    Forbidden,
    Interrupted,
    InvalidRequest,
    NotFound,
    OutputTruncated,
    QuotaExceeded,
    SandboxLost,
    SessionBusy,
    SessionNotFound,
    SojournError,
    StorageFull,
    TooLarge,
    Unauthenticated,
    Unsupported,
    WrongState,
)


def not_running(sandbox: str, why: str) -> Interrupted:
    """A sandbox that is gone or asleep, in the words the SDKs look for."""
    return Interrupted(f"The sandbox {sandbox} was not found: {why}", next_step="", gone=True)


def text(error: SojournError) -> str:
    """An error's message with its next step."""
    return f"{error.message} {error.next_step}".strip()


# -- the control plane: `code` is the HTTP status ----------------------------------------------


def api_status(error: SojournError) -> int:
    """The status that the SDK's control plane maps to its exceptions."""
    if isinstance(error, SessionBusy):
        return 503  # nothing was changed: the SDK tries again by itself
    return error.status


def api_body(error: SojournError, status: int | None = None) -> bytes:
    """The body of a failure."""
    return msgspec.json.encode({"code": status or api_status(error), "message": text(error)})


# -- files and code inside: plain HTTP ----------------------------------------------------------


def file_status(error: SojournError) -> int:
    """The status for contents of files and for code."""
    if isinstance(error, (Interrupted, SandboxLost, SessionNotFound, WrongState)):
        return 502
    if isinstance(error, (StorageFull, DiskQuotaExceeded)):
        return 507
    if isinstance(error, (FileConflict, Forbidden, QuotaExceeded, TooLarge, CommandNotStarted)):
        return 400
    return error.status


# -- RPCs ---------------------------------------------------------------------------------------

_CODES: list[tuple[type[SojournError], str]] = [
    # The first that fits counts.
    (SessionNotFound, "unavailable"),
    (Interrupted, "unavailable"),
    (SandboxLost, "unavailable"),
    (WrongState, "unavailable"),
    (FileMissing, "not_found"),
    (NotFound, "not_found"),
    (InvalidRequest, "invalid_argument"),
    (FileConflict, "invalid_argument"),
    (TooLarge, "invalid_argument"),
    (Forbidden, "permission_denied"),
    (Unauthenticated, "unauthenticated"),
    (OutputTruncated, "data_loss"),
    (DiskQuotaExceeded, "resource_exhausted"),
    (StorageFull, "resource_exhausted"),
    (QuotaExceeded, "resource_exhausted"),
    (SessionBusy, "aborted"),
    (Conflict, "failed_precondition"),
    (Unsupported, "unimplemented"),
]

_STATUSES = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "aborted": 409,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}


def rpc_code(error: SojournError) -> str:
    """The code of an RPC's failure; `details.rpc` says it where the class does not."""
    if "rpc" in error.details:
        return str(error.details["rpc"])
    if isinstance(error, CommandNotStarted):
        # A user the sandbox does not know is refused as one that may not come in.
        return "unauthenticated" if error.details.get("stage") == "user" else "invalid_argument"
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return "internal"


def rpc_message(error: SojournError, sandbox: str, *, stopping: bool = False) -> str:
    """The message of an RPC's failure. A sandbox that is gone or asleep is said to be so; where
    the server stops, nothing is said of sandboxes, which go on."""
    if stopping:
        return text(error)
    if error.details.get("gone"):
        return error.message
    if isinstance(error, (SessionNotFound, Interrupted, WrongState, SandboxLost)):
        return not_running(sandbox, error.message).message
    return text(error)


def rpc_status(code: str) -> int:
    """The HTTP status of a failed RPC that is not a stream."""
    return _STATUSES.get(code, 500)
