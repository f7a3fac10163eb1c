"""Every failure a caller can meet, as one tree.

Guarantee: whatever goes wrong, the caller gets one of these classes with a stable code, a message
that names the cause, and the next step. Codes never change meaning, so programs may match them.

    SojournError                         internal
    ├── InvalidRequest                   invalid_request        400
    │   ├── UnknownTemplate              unknown_template       400
    │   ├── PathInvalid                  path_invalid           400
    │   ├── ImageInvalid                 image_invalid          400
    │   ├── ContainerfileInvalid         containerfile_invalid  400
    │   └── ArchiveInvalid               archive_invalid        400
    ├── Unauthenticated                  unauthenticated        401
    ├── Forbidden                        forbidden              403
    ├── NotFound                         not_found              404
    │   ├── SessionNotFound              session_not_found      404
    │   ├── SnapshotNotFound             snapshot_not_found     404
    │   ├── TemplateNotFound             template_not_found     404
    │   ├── ProcessNotFound              process_not_found      404
    │   ├── OperationNotFound            operation_not_found    404
    │   ├── ObjectMissing                object_missing         404
    │   ├── SecretNotFound               secret_not_found       404
    │   ├── PortNotFound                 port_not_found         404
    │   ├── NodeNotFound                 node_not_found         404
    │   └── FileMissing                  file_not_found         404
    ├── Conflict                         conflict               409
    │   ├── NameTaken                    name_taken             409
    │   ├── IdempotencyMismatch          idempotency_mismatch   409
    │   ├── SessionBusy                  session_busy           409
    │   ├── WrongState                   wrong_state            409
    │   ├── EffectsInTheWay              effects_in_the_way     409
    │   ├── StaleEpoch                   stale_epoch            409
    │   ├── NodeFenced                   node_fenced            409
    │   └── FileConflict                 file_conflict          409
    ├── SessionElsewhere                 session_elsewhere      421
    ├── TooLarge                         too_large              413
    ├── QuotaExceeded                    quota_exceeded         422
    │   └── DiskQuotaExceeded            disk_quota_exceeded    422
    ├── CommandNotStarted                command_not_started    422
    ├── OutputTruncated                  output_truncated       410
    ├── CaptureRefused                   capture_refused        409
    │   └── UnlinkedOpenFile             unlinked_open_file     409
    ├── CaptureFailed                    capture_failed         500
    ├── ResumeFailed                     resume_failed          500
    ├── IntegrityError                   integrity_error        500
    ├── Interrupted                      interrupted            503
    ├── SandboxLost                      sandbox_lost           503
    ├── StorageFull                      storage_full           507
    ├── Unsupported                      unsupported            501
    ├── HostUnfit                        host_unfit             500
    ├── RegistryRefused                  registry_refused       502
    ├── StoreRefused                     store_refused          502
    ├── StoreKeyInvalid                  store_key_invalid      500
    ├── SecretsKeyInvalid                secrets_key_invalid    500
    ├── PortSilent                       port_silent            504
    ├── CapacityExhausted                capacity_exhausted     503
    └── Unreachable                      unreachable            503
        ├── OutcomeUnknown               outcome_unknown        503
        ├── NodeUnavailable              node_unavailable       503
        └── StoreUnreachable             store_unreachable      503

Exit codes of the `sojourn` command: those of the command for `exec` and `run`, else 100 to 125
as given on each class (64 to 78 and 126 up are left to the commands and shells).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class SojournError(Exception):
    """Base of all errors of Sojourn.

    `code` is stable, `message` names the cause, `next_step` says what to do, `details` holds
    JSON-able facts (pid, path, object, snapshot, ...) for programs.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 100
    default_next_step: ClassVar[str] = "Report this with the server's log."

    def __init__(self, message: str, *, next_step: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step if next_step is not None else self.default_next_step
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.next_step}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.next_step, self.details))


def _rebuild(
    kind: type[SojournError], message: str, next_step: str, details: dict[str, Any]
) -> SojournError:
    return kind(message, next_step=next_step, **details)


class InvalidRequest(SojournError):
    """The request itself is wrong; nothing was changed."""

    code, status, exit_code = "invalid_request", 400, 101
    default_next_step = "Correct the named field and send it again."


class UnknownTemplate(InvalidRequest):
    """No template has this name."""

    code = "unknown_template"
    default_next_step = "`sojourn template ls` lists the templates."


class PathInvalid(InvalidRequest):
    """A path is empty, relative where it must be absolute, or leaves its tree."""

    code = "path_invalid"
    default_next_step = "Give an absolute path inside the session."


class ImageInvalid(InvalidRequest):
    """An image is damaged, forged, of another machine, or asks for more than it may; nothing of it
    was kept."""

    code = "image_invalid"
    default_next_step = "Check where the image comes from; fetch or build it again."


class ContainerfileInvalid(InvalidRequest):
    """A line of a Containerfile cannot be read or is not supported; details.line is its number."""

    code = "containerfile_invalid"
    default_next_step = "docs/templates.md lists what a Containerfile may say."


class ArchiveInvalid(InvalidRequest):
    """An archive is damaged, forged, or asks for more than it may; nothing of it was kept."""

    code = "archive_invalid"
    default_next_step = "Export it again, and compare what arrived with what was sent."


class Unauthenticated(SojournError):
    """The token is missing or unknown."""

    code, status, exit_code = "unauthenticated", 401, 102
    default_next_step = (
        "Pass a token (SOJOURN_TOKEN); the operator's is in the file `token` of the server's data"
        " directory."
    )


class Forbidden(SojournError):
    """The token is known but lacks the right."""

    code, status, exit_code = "forbidden", 403, 102
    default_next_step = "Use the operator's token."


class NotFound(SojournError):
    """The named object does not exist for this tenant."""

    code, status, exit_code = "not_found", 404, 103
    default_next_step = "Check the name or id."


class SessionNotFound(NotFound):
    """No such session for this tenant."""

    code = "session_not_found"
    default_next_step = "`sojourn session ls` lists the sessions."


class SnapshotNotFound(NotFound):
    """No such snapshot in the session's tree."""

    code = "snapshot_not_found"
    default_next_step = "`sojourn session history SESSION` lists the snapshots."


class TemplateNotFound(NotFound):
    """No template has this name, or no version of it this number."""

    code = "template_not_found"
    default_next_step = "`sojourn template ls` lists the templates."


class ProcessNotFound(NotFound):
    """No such process in the session's sandbox."""

    code = "process_not_found"
    default_next_step = "`sojourn session ps SESSION` lists the session's processes."


class OperationNotFound(NotFound):
    """No such operation."""

    code = "operation_not_found"
    default_next_step = "Check the id; an operation is known for a week after its end."


class ObjectMissing(NotFound):
    """The object store has no object under this key."""

    code = "object_missing"
    default_next_step = "`sojourn store check` tells what the store lacks."


class FileMissing(NotFound):
    """The path does not exist inside the session."""

    code = "file_not_found"
    default_next_step = "Check the path inside the session."


class SecretNotFound(NotFound):
    """The tenant has no secret of this name."""

    code = "secret_not_found"
    default_next_step = "`sojourn secret ls` lists the secrets; `sojourn secret set` makes one."


class PortNotFound(NotFound):
    """The session does not expose this port, or whoever asks may not know."""

    code = "port_not_found"
    default_next_step = "`sojourn port ls SESSION` lists the exposed ports and their addresses."


class NodeNotFound(NotFound):
    """No such node in the cluster, or it was removed from it."""

    code = "node_not_found"
    default_next_step = "`sojourn node ls` lists the nodes."


class Conflict(SojournError):
    """The request meets a state it cannot apply to; nothing was changed."""

    code, status, exit_code = "conflict", 409, 104
    default_next_step = "Read the current state (`sojourn session get SESSION`) and decide again."


class NameTaken(Conflict):
    """Another live session of the tenant has this name."""

    code = "name_taken"
    default_next_step = "Choose another name, or delete that session (`sojourn session rm NAME`)."


class IdempotencyMismatch(Conflict):
    """The idempotency key was used with another request."""

    code = "idempotency_mismatch"
    default_next_step = "Use a new key for a new request."


class SessionBusy(Conflict):
    """Another operation holds the session and the wait ran out."""

    code = "session_busy"
    default_next_step = (
        "Wait for the operation that `sojourn session get SESSION` names, and try again."
    )


class WrongState(Conflict):
    """The session's state does not allow the verb."""

    code = "wrong_state"


class EffectsInTheWay(Conflict):
    """A rollback or fork would leave requests behind that cannot be taken back, and the session's
    network policy refuses that; details.effects names them."""

    code = "effects_in_the_way"
    default_next_step = (
        "Take back outside what has to be, then do it with force (`--force`); or set on_effects to"
        " `list` in the session's network policy."
    )


class StaleEpoch(Conflict):
    """The writer acts for an older placement of the session; its write was refused."""

    code = "stale_epoch"
    default_next_step = "Fetch the session again; it has been placed anew."


class NodeFenced(Conflict):
    """The node was taken for lost: another incarnation of it, or another node, may have its
    sessions by now. Nothing was changed."""

    code = "node_fenced"
    default_next_step = "The node ends its sandboxes and starts anew by itself; see its log."


class FileConflict(Conflict):
    """The path is of another kind than the call needs (directory, file, exists already)."""

    code = "file_conflict"
    default_next_step = "Check what stands at the path."


class SessionElsewhere(SojournError):
    """Another node holds the session; details.holder names it (null: no node does). Nothing was
    changed."""

    code, status, exit_code = "session_elsewhere", 421, 125
    default_next_step = "Send the request to a server of the cluster, which finds the right node."


class TooLarge(SojournError):
    """A body, a name or a result is over its documented limit."""

    code, status, exit_code = "too_large", 413, 105
    default_next_step = "Stream it, or send less at once."


class QuotaExceeded(SojournError):
    """A limit of the session or tenant is reached."""

    code, status, exit_code = "quota_exceeded", 422, 106
    default_next_step = (
        "Free what the session holds, or raise its limits (`sojourn session update`)."
    )


class DiskQuotaExceeded(QuotaExceeded):
    """The session's files are over its disk limit."""

    code = "disk_quota_exceeded"
    default_next_step = (
        "Remove files, or raise limits.disk_bytes (`sojourn session update --disk-mib N SESSION`)."
    )


class CommandNotStarted(SojournError):
    """The command could not be started inside the sandbox (missing, not executable, ...)."""

    code, status, exit_code = "command_not_started", 422, 107
    default_next_step = "Check the command's path, mode, user and working directory."


class OutputTruncated(SojournError):
    """The asked bytes of output were already dropped; details.first_offset is the oldest kept."""

    code, status, exit_code = "output_truncated", 410, 108
    default_next_step = "Read from details.first_offset."


class CaptureRefused(SojournError):
    """A snapshot cannot be taken now; the session runs on."""

    code, status, exit_code = "capture_refused", 409, 109
    default_next_step = (
        "End what is named, or leave memory out (memory=false, `sojourn session snapshot"
        " --files-only`)."
    )


class UnlinkedOpenFile(CaptureRefused):
    """A process holds a file open whose name is gone; details name pid and path."""

    code = "unlinked_open_file"
    default_next_step = (
        "Close the file, keep such files under /tmp, or leave memory out (memory=false, `sojourn"
        " session snapshot --files-only`)."
    )


class CaptureFailed(SojournError):
    """Taking a snapshot failed; the message says what the session fell back to."""

    code, status, exit_code = "capture_failed", 500, 110
    default_next_step = "The session is usable; see its events (`sojourn session events SESSION`)."


class ResumeFailed(SojournError):
    """The sandbox could not be started from the snapshot; the snapshot is kept."""

    code, status, exit_code = "resume_failed", 500, 111
    default_next_step = (
        "Resume again, or its files alone (memory=false, `sojourn session resume --files-only`);"
        " roll back to another snapshot (`sojourn session rollback`), or delete the session."
    )


class IntegrityError(SojournError):
    """Stored bytes differ from what was put away; details.object names the object."""

    code, status, exit_code = "integrity_error", 500, 112
    default_next_step = "Roll back to another snapshot; `sojourn session verify` lists what is bad."


class Interrupted(SojournError):
    """The stream ended because the session was suspended, rolled back or deleted."""

    code, status, exit_code = "interrupted", 503, 113
    default_next_step = (
        "Take it up again at the last offset (`sojourn session attach`, `sojourn session logs`)."
    )


class SandboxLost(SojournError):
    """The sandbox ended by itself (killed, out of memory); the cause is in the message."""

    code, status, exit_code = "sandbox_lost", 503, 114
    default_next_step = "The session resumes from its last snapshot at the next call."


class StorageFull(SojournError):
    """The node's disk has no room; nothing was acknowledged, older snapshots are intact."""

    code, status, exit_code = "storage_full", 507, 115
    default_next_step = "Free space in the data directory and try again."


class Unsupported(SojournError):
    """The driver or host does not have this capability."""

    code, status, exit_code = "unsupported", 501, 116
    default_next_step = "`sojourn doctor` says what this host can do."


class HostUnfit(SojournError):
    """The host lacks something Sojourn needs."""

    code, status, exit_code = "host_unfit", 500, 117
    default_next_step = "Run `sojourn doctor` and apply the cures it names."


class RegistryRefused(SojournError):
    """A registry of images refused a request, or answered what no registry answers."""

    code, status, exit_code = "registry_refused", 502, 123
    default_next_step = "Check the name of the image, and that you are logged in to the registry."


class StoreRefused(SojournError):
    """The object store says no: credentials, rights, a bucket that is not there."""

    code, status, exit_code = "store_refused", 502, 119
    default_next_step = "Check the store's URL, its credentials and their rights."


class StoreKeyInvalid(SojournError):
    """The repository is encrypted and the given key does not open it, or none was given."""

    code, status, exit_code = "store_key_invalid", 500, 120
    default_next_step = "Give the key it was made with (SOJOURN_STORE_KEY_FILE)."


class SecretsKeyInvalid(SojournError):
    """What is sealed cannot be opened: with another key than the server's, or it is damaged."""

    code, status, exit_code = "secrets_key_invalid", 500, 121
    default_next_step = "Give the server the key back (SOJOURN_SECRETS_KEY_FILE), or set it again."


class PortSilent(SojournError):
    """Nothing inside the session answers at an exposed port in time."""

    code, status, exit_code = "port_silent", 504, 122
    default_next_step = "Start a program that listens on the port inside the session."


class CapacityExhausted(SojournError):
    """No node has room for the session, and none came free in time; nothing was changed."""

    code, status, exit_code = "capacity_exhausted", 503, 124
    default_next_step = "Try again later, suspend or delete sessions, or add a node."


class Unreachable(SojournError):
    """The server does not answer."""

    code, status, exit_code = "unreachable", 503, 118
    default_next_step = "Start it with `sojourn up`, or check SOJOURN_URL."


class OutcomeUnknown(Unreachable):
    """The database went away while a change was committed and did not come back in time: the
    change was made or it was not, and is not half made."""

    code = "outcome_unknown"
    default_next_step = (
        "When the database answers again, look at what the change was about; the same request with"
        " the same idempotency key takes effect once."
    )


class NodeUnavailable(Unreachable):
    """The node that holds the session does not answer, and it is not known yet whether it is
    lost."""

    code = "node_unavailable"
    default_next_step = "Try again: within a minute the node answers or its sessions move on."


class StoreUnreachable(Unreachable):
    """The object store does not answer, or only with passing failures; what was asked of it was
    not acknowledged. Sessions go on with the node's own store meanwhile."""

    code = "store_unreachable"
    default_next_step = "Check that the store can be reached; it is tried again by itself."


class ErrorBody(msgspec.Struct, frozen=True):
    """How an error travels: the body of every answer with a status of 400 or more."""

    code: str
    message: str
    next_step: str
    details: dict[str, Any] = {}


def _tree(base: type[SojournError]) -> list[type[SojournError]]:
    found = [base]
    for child in base.__subclasses__():
        found.extend(_tree(child))
    return found


def all_errors() -> dict[str, type[SojournError]]:
    """Every error class by its code."""
    return {kind.code: kind for kind in _tree(SojournError)}


def to_body(error: SojournError) -> ErrorBody:
    """The travelling form of an error."""
    return ErrorBody(error.code, error.message, error.next_step, error.details)


def from_body(body: ErrorBody) -> SojournError:
    """The error a body stands for; an unknown code becomes a plain SojournError."""
    kind = all_errors().get(body.code, SojournError)
    details = {k: v for k, v in body.details.items() if k not in {"message", "next_step", "self"}}
    error = kind(body.message, next_step=body.next_step, **details)
    if kind is SojournError and body.code != "internal":
        error.details["remote_code"] = body.code
    return error
