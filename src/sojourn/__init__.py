"""Sojourn: stateful execution for AI agents.

    from sojourn import Sojourn

Guarantee: importing the package costs next to nothing; the client and its HTTP stack are loaded
when one of their names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sojourn.errors import (
    ArchiveInvalid,
    CaptureFailed,
    CaptureRefused,
    CommandNotStarted,
    Conflict,
    DiskQuotaExceeded,
    FileConflict,
    FileMissing,
    Forbidden,
    HostUnfit,
    IdempotencyMismatch,
    IntegrityError,
    Interrupted,
    InvalidRequest,
    NameTaken,
    NotFound,
    ObjectMissing,
    OperationNotFound,
    OutputTruncated,
    PathInvalid,
    PortNotFound,
    PortSilent,
    ProcessNotFound,
    QuotaExceeded,
    ResumeFailed,
    SandboxLost,
    SecretNotFound,
    SecretsKeyInvalid,
    SessionBusy,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
    StaleEpoch,
    StorageFull,
    StoreKeyInvalid,
    StoreRefused,
    StoreUnreachable,
    TooLarge,
    Unauthenticated,
    UnknownTemplate,
    UnlinkedOpenFile,
    Unreachable,
    Unsupported,
    WrongState,
)

if TYPE_CHECKING:
    from sojourn.client import (
        AsyncFiles,
        AsyncProcess,
        AsyncSession,
        AsyncSojourn,
        ExecResult,
        Files,
        Process,
        Session,
        Sojourn,
    )
    from sojourn.model import AutoSnapshot, Limits, Policy, SessionState
    from sojourn.model.network import SecretPlace, SecretUse
    from sojourn.wire.api import (
        ChangeInfo,
        DiffInfo,
        DurabilityInfo,
        EventInfo,
        FileChange,
        FileInfo,
        ObjectStoreInfo,
        OperationInfo,
        PortInfo,
        ProcessInfo,
        SecretInfo,
        SessionInfo,
        SnapshotInfo,
        StatusInfo,
        TemplateInfo,
        TokenInfo,
        VerifyReport,
    )
    from sojourn.wire.code import CodeResult
    from sojourn.wire.guest import Output

_LAZY = {
    "sojourn.client": (
        "AsyncFiles",
        "AsyncProcess",
        "AsyncSession",
        "AsyncSojourn",
        "ExecResult",
        "Files",
        "Process",
        "Session",
        "Sojourn",
    ),
    "sojourn.model": ("AutoSnapshot", "Limits", "Policy", "SessionState"),
    "sojourn.model.network": ("SecretPlace", "SecretUse"),
    "sojourn.wire.api": (
        "ChangeInfo",
        "DiffInfo",
        "DurabilityInfo",
        "EventInfo",
        "FileChange",
        "FileInfo",
        "ObjectStoreInfo",
        "OperationInfo",
        "PortInfo",
        "ProcessInfo",
        "SecretInfo",
        "SessionInfo",
        "SnapshotInfo",
        "StatusInfo",
        "TemplateInfo",
        "TokenInfo",
        "VerifyReport",
    ),
    "sojourn.wire.code": ("CodeResult",),
    "sojourn.wire.guest": ("Output",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "ArchiveInvalid",
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSession",
    "AsyncSojourn",
    "AutoSnapshot",
    "CaptureFailed",
    "CaptureRefused",
    "ChangeInfo",
    "CodeResult",
    "CommandNotStarted",
    "Conflict",
    "DiffInfo",
    "DiskQuotaExceeded",
    "DurabilityInfo",
    "EventInfo",
    "ExecResult",
    "FileChange",
    "FileConflict",
    "FileInfo",
    "FileMissing",
    "Files",
    "Forbidden",
    "HostUnfit",
    "IdempotencyMismatch",
    "IntegrityError",
    "Interrupted",
    "InvalidRequest",
    "Limits",
    "NameTaken",
    "NotFound",
    "ObjectMissing",
    "ObjectStoreInfo",
    "OperationInfo",
    "OperationNotFound",
    "Output",
    "OutputTruncated",
    "PathInvalid",
    "Policy",
    "PortInfo",
    "PortNotFound",
    "PortSilent",
    "Process",
    "ProcessInfo",
    "ProcessNotFound",
    "QuotaExceeded",
    "ResumeFailed",
    "SandboxLost",
    "SecretInfo",
    "SecretNotFound",
    "SecretPlace",
    "SecretUse",
    "SecretsKeyInvalid",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "SessionNotFound",
    "SessionState",
    "SnapshotInfo",
    "SnapshotNotFound",
    "Sojourn",
    "SojournError",
    "StaleEpoch",
    "StatusInfo",
    "StorageFull",
    "StoreKeyInvalid",
    "StoreRefused",
    "StoreUnreachable",
    "TemplateInfo",
    "TokenInfo",
    "TooLarge",
    "Unauthenticated",
    "UnknownTemplate",
    "UnlinkedOpenFile",
    "Unreachable",
    "Unsupported",
    "VerifyReport",
    "WrongState",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'sojourn' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
