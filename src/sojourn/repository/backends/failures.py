"""What a failure of the object store means.

Guarantee: every failure becomes one verdict, and what is said about it consists of our own words,
an HTTP status and the store's error code. The store's answer itself is never repeated: answers
about refused signatures hold the access key and what was signed.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    InvalidPathError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from sojourn.errors import SojournError, StorageFull, StoreRefused, StoreUnreachable


class Verdict(enum.Enum):
    """What to do about a failure."""

    PASSING = "passing"  # try again
    MISSING = "missing"
    TAKEN = "taken"  # a condition of a put does not hold
    RANGE = "range"  # no such piece: the object is shorter, or pieces are not given
    FULL = "full"
    REFUSED = "refused"


@dataclass(frozen=True)
class Failure:
    """A verdict and its cause in words that may be shown. `unsent` when the request cannot have
    had an effect."""

    verdict: Verdict
    cause: str
    unsent: bool = False


_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"(?:<Code>|\(code: |code: \")([A-Za-z][A-Za-z0-9]{1,63})\b")
_PASSING_STATUS = frozenset({408, 409, 425, 429})
_PASSING_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",
    }
)
_METADATA = re.compile(r"https?://[^/ ]+/latest/(api/token|meta-data)")
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})
_TRANSPORT = (
    ("InvalidListResponse", "its listing was not understood"),
    ("IncompleteBody", "the answer was cut off"),
    ("timed out", "the request timed out"),
    ("TimedOut", "the request timed out"),
    ("ConnectionRefused", "the connection was refused"),
    ("ConnectionReset", "the connection was reset"),
    ("IncompleteMessage", "the connection ended in the middle"),
    ("dns error", "the host's name is not known"),
    ("kind: Connect", "no connection could be made"),
    ("kind: Decode", "the answer was not understood"),
    ("kind: Timeout", "the request timed out"),
)


def judge(error: Exception) -> Failure:
    """The verdict on what obstore raised."""
    text = str(error)
    status = _first_status(text)
    code = _first_code(text)
    said = ", ".join(part for part in (f"status {status}" if status else "", code or "") if part)
    if code in _FULL_CODES or status == 507:
        return Failure(Verdict.FULL, said)
    if code in _PASSING_CODES:
        return Failure(Verdict.PASSING, said)
    if code == "NoSuchBucket":
        return Failure(Verdict.REFUSED, "the bucket does not exist (NoSuchBucket)")
    if isinstance(error, (AlreadyExistsError, PreconditionError, NotModifiedError)):
        if status == 409:
            return Failure(Verdict.PASSING, said)
        return Failure(Verdict.TAKEN, said)
    if isinstance(error, FileNotFoundError):
        return Failure(Verdict.MISSING, said)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return Failure(Verdict.REFUSED, said or "access was denied")
    if _METADATA.search(text) and (status is None or status < 500):
        return Failure(
            Verdict.REFUSED,
            "there are no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set,"
            " and this host has no role)",
        )
    if "InvalidCertificate" in text:
        return Failure(Verdict.REFUSED, "its certificate is not trusted (AWS_CA_BUNDLE)")
    if "BareRedirect" in text:
        return Failure(Verdict.REFUSED, "it redirects to nowhere: is AWS_REGION the bucket's?")
    if isinstance(error, (InvalidPathError, NotSupportedError, NotImplementedError)):
        return Failure(Verdict.REFUSED, type(error).__name__)
    if "StartTooLarge" in text or "NotPartial" in text:
        return Failure(Verdict.RANGE, said)
    if status is None and code is not None:  # of one key of a bulk deletion
        return Failure(Verdict.REFUSED, said)
    if status is None:
        return Failure(Verdict.PASSING, _transport(text), unsent="kind: Connect" in text)
    if status == 416:
        return Failure(Verdict.RANGE, said)
    if status >= 500 and status not in {501, 505}:
        return Failure(Verdict.PASSING, said)
    if status in _PASSING_STATUS:
        return Failure(Verdict.PASSING, said)
    return Failure(Verdict.REFUSED, said)


def final(failure: Failure, doing: str, where: str) -> SojournError:
    """The error of a failure that is not tried again (any more)."""
    if failure.verdict is Verdict.FULL:
        return StorageFull(
            f"The object store has no room ({failure.cause}) while {doing}.",
            next_step="Make room in the object store and try again.",
            url=where,
        )
    if failure.verdict is Verdict.PASSING:
        return StoreUnreachable(
            f"The object store {where} failed while {doing}: {failure.cause}.", url=where
        )
    return StoreRefused(
        f"The object store {where} refuses while {doing}: {failure.cause}.", url=where
    )


def _first_status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found.group(1)) if found else None


def _first_code(text: str) -> str | None:
    found = _CODE.search(text)
    return found.group(1) if found else None


def _transport(text: str) -> str:
    for sign, words in _TRANSPORT:
        if sign in text:
            return words
    return "the answer was not understood or the connection failed"
