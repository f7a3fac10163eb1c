"""Every errno of the supervisor becomes an error with a class of its own meaning."""

from __future__ import annotations

import errno

import pytest

from sojourn import errors
from sojourn.node.link_errors import error_of
from sojourn.wire import frames
from sojourn.wire.frames import Op, Stage


def body(stage: int, about: bytes) -> bytes:
    return bytes([stage]) + frames.text(about)


@pytest.mark.parametrize("op", sorted(Op))
def test_every_errno_is_mapped(op: Op) -> None:
    for number in errno.errorcode:
        error = error_of(op, number, body(0, b"/somewhere"))
        assert isinstance(error, errors.SojournError)
        assert error.message and error.next_step


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, errors.FileMissing),
        (errno.EEXIST, errors.FileConflict),
        (errno.ENOTEMPTY, errors.FileConflict),
        (errno.EISDIR, errors.FileConflict),
        (errno.EACCES, errors.Forbidden),
        (errno.ENOSPC, errors.StorageFull),
        (errno.EFBIG, errors.DiskQuotaExceeded),
        (errno.ENAMETOOLONG, errors.PathInvalid),
    ],
)
def test_file_errors(number: int, kind: type[errors.SojournError]) -> None:
    error = error_of(Op.MKDIR, number, body(0, b"/p\xff"))
    assert type(error) is kind
    assert "/p\\xff" in error.message


def test_a_start_names_what_failed() -> None:
    error = error_of(Op.RUN, errno.ENOENT, body(Stage.CWD, b"/gone"))
    assert type(error) is errors.CommandNotStarted
    assert error.details["stage"] == "cwd"
    assert error.details["errno_name"] == "ENOENT"
    assert "/gone" in error.message


@pytest.mark.parametrize(
    ("op", "number", "kind", "cure"),
    [
        (Op.DIAL, errno.ECONNREFUSED, errors.Conflict, "listens there"),
        (Op.DIAL, errno.EAGAIN, errors.QuotaExceeded, "Close connections"),
        (Op.NETWORK, errno.EADDRINUSE, errors.Conflict, "End the program"),
        (Op.NETWORK, errno.ENOSYS, errors.Unsupported, "fork its files"),
    ],
)
def test_network_errors_say_what_helps(
    op: Op, number: int, kind: type[errors.SojournError], cure: str
) -> None:
    error = error_of(op, number, body(0, b"port 80"))
    assert type(error) is kind
    assert cure in (error.next_step or "")


def test_a_broken_error_body_is_still_an_error() -> None:
    assert type(error_of(Op.WAIT, errno.ESRCH, b"")) is errors.ProcessNotFound
