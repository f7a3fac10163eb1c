"""From an errno of the supervisor to the error a caller can act on.

Guarantee: every errno becomes one of the classes of `sojourn.errors`, with the path or command it
is about, so that no caller ever has to look at numbers.
"""

from __future__ import annotations

import errno
import os

from sojourn import errors
from sojourn.wire.frames import FrameError, Op, Reader, Stage

_CONFLICTS = {
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.EBUSY,
    errno.ELOOP,
    errno.EXDEV,
    errno.EMLINK,
    errno.ETXTBSY,
    errno.EIO,  # such as a file of /proc that has nothing to read
    errno.ENXIO,
}
_QUOTAS = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EDQUOT}
_STAGES = {
    Stage.USER: "user",
    Stage.CWD: "working directory",
    Stage.EXEC: "program",
    Stage.SPAWN: "process",
    Stage.PTY: "terminal",
}


def display(data: bytes) -> str:
    """Bytes as text for a message; what is no UTF-8 is escaped."""
    return data.decode(errors="backslashreplace")


def error_of(op: int, number: int, body: bytes) -> errors.SojournError:
    """The error an answer with an errno stands for."""
    reader = Reader(body)
    try:
        stage = reader.u8()
        about = reader.text()
    except FrameError:
        stage, about = 0, b""
    cause = os.strerror(number)
    if op in (Op.START, Op.RUN):
        return _not_started(stage, number, cause, about)
    if Op.START <= op < Op.STAT:
        return _of_process(number, cause, about)
    if Op.STAT <= op < Op.ACTIVITY:
        return _of_file(op, number, cause, about)
    if op in (Op.NETWORK, Op.DIAL):
        return _of_network(number, cause, about)
    return errors.SojournError(f"the supervisor could not do it: {cause}", errno=number)


def _not_started(stage: int, number: int, cause: str, about: bytes) -> errors.SojournError:
    what = _STAGES.get(Stage(stage), "command") if stage in _STAGES else "command"
    if stage == Stage.USER and number == errno.ENOENT:
        cause = "no such user or group in the session"
    return errors.CommandNotStarted(
        f"{what} {display(about)!r}: {cause}",
        stage=Stage(stage).name.lower() if stage in _STAGES else "none",
        errno=number,
        errno_name=errno.errorcode.get(number, str(number)),
    )


def _of_process(number: int, cause: str, about: bytes) -> errors.SojournError:
    if number == errno.ESRCH:
        return errors.ProcessNotFound(
            f"no such process: {display(about)}" if about else "no such process"
        )
    if number in (errno.EBADF, errno.EBUSY, errno.ENOTTY):
        return errors.Conflict(display(about) or cause)
    if number == errno.EINVAL:
        return errors.InvalidRequest(display(about) or cause)
    if number == errno.EPERM:
        return errors.Forbidden(display(about) or cause, next_step="The sandbox refuses this.")
    return errors.SojournError(f"the supervisor could not do it: {cause}", errno=number)


def _of_network(number: int, cause: str, about: bytes) -> errors.SojournError:
    message = f"{display(about)}: {cause}" if about else cause
    if number in (errno.ENOSYS, errno.EOPNOTSUPP):
        return errors.Unsupported(message, next_step="Create the session anew, or fork its files.")
    if number in _QUOTAS:
        return errors.QuotaExceeded(
            message, next_step="Close connections of the session, then try again.", errno=number
        )
    next_step = "Start a program in the session that listens there, then try again."
    if number == errno.EADDRINUSE:
        next_step = "End the program in the session that listens at port 3128, then try again."
    return errors.Conflict(message, next_step=next_step, errno=number)


def _of_file(op: int, number: int, cause: str, about: bytes) -> errors.SojournError:
    path = display(about)
    message = f"{path}: {cause}"
    if number == errno.ENOENT:
        return errors.FileMissing(message, path=path)
    if number == errno.ESTALE:
        return errors.FileConflict(f"{path}: it was replaced or ended meanwhile", path=path)
    if number == errno.EINVAL and op in (Op.READ, Op.WRITE_FILE, Op.WRITE_BEGIN):
        return errors.FileConflict(f"{path}: not a regular file", path=path)
    if number in (errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ):
        return errors.PathInvalid(message, path=path)
    if number in _CONFLICTS:
        return errors.FileConflict(message, path=path, errno_name=errno.errorcode[number])
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return errors.Forbidden(message, next_step="The file system inside refuses it.", path=path)
    if number == errno.ENOSPC:
        return errors.StorageFull(message, path=path)
    if number == errno.EFBIG:
        # No file grows beyond the session's disk limit (RLIMIT_FSIZE).
        return errors.DiskQuotaExceeded(
            f"{path}: the file would be larger than the session's disk limit", path=path
        )
    if number in _QUOTAS:
        return errors.QuotaExceeded(message, path=path)
    if number in (errno.ENOSYS, errno.EOPNOTSUPP):
        return errors.Unsupported(message, path=path)
    return errors.SojournError(message, path=path, errno=number)
