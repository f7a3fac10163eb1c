"""A bucket that throttles, refuses, answers half or not at all: typed errors, never wrong data."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sojourn.errors import (
    Conflict,
    ObjectMissing,
    SojournError,
    StorageFull,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.opening import open_backend
from support.object_stores import ACCESS_KEY, SECRET_KEY, FaultProxy, S3Server, s3_options

CONTENT = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def module_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy.before(s3_server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(module_proxy: FaultProxy) -> Iterator[FaultProxy]:
    yield module_proxy
    module_proxy.clear()
    module_proxy.seen.clear()


@pytest.fixture
def place(s3_server: S3Server) -> str:
    return f"s3://{s3_server.make_bucket()}/store"


@pytest.fixture
def direct(s3_server: S3Server, place: str) -> Backend:
    """The same place without faults."""
    return open_backend(place, options=s3_options(s3_server.url))


@pytest.fixture
def backend(proxy: FaultProxy, place: str, direct: Backend) -> Backend:
    """Behind the proxy, and with little patience. It has seen its
    bucket; `kept` is there."""
    backend = open_backend(place, options=s3_options(proxy.url, timeout=10, patience=0.4))
    backend.put("kept", CONTENT)
    proxy.seen.clear()
    return backend


def everything(backend: Backend) -> dict[str, Callable[[], Any]]:
    """One call of each kind, with results that can be compared."""
    return {
        "put": lambda: backend.put("new", CONTENT),
        "create": lambda: backend.put("created", CONTENT, create=True),
        "get": lambda: backend.get("kept")[0],
        "get_ranges": lambda: backend.get_ranges("kept", [(5, 7), (90_000, 1000)]),
        "get_tail": lambda: backend.get_tail("kept", 99),
        "head": lambda: backend.head("kept").size,
        "list": lambda: [info.key for info in backend.list("")],
        "delete": lambda: backend.delete(["absent"]),
        "now": lambda: backend.now() > 0,
    }


RIGHT = {
    "get": CONTENT,
    "get_ranges": [CONTENT[5:12], CONTENT[90_000:91_000]],
    "get_tail": (CONTENT[-99:], len(CONTENT)),
    "head": len(CONTENT),
    "list": ["kept"],
    "delete": None,
    "now": True,
}
CALLS = ["put", "create", *RIGHT]


def inject(proxy: FaultProxy, fault: str, times: int | None) -> None:
    {
        "slow down": lambda: proxy.answer(503, code="SlowDown", times=times),
        "internal error": lambda: proxy.answer(500, code="InternalError", times=times),
        "too many requests": lambda: proxy.answer(429, times=times),
        "bad gateway": lambda: proxy.answer(502, body=b"<html>", times=times),
        "conflict of writers": lambda: proxy.answer(
            409, code="ConditionalRequestConflict", times=times
        ),
        "dropped before": lambda: proxy.drop(times=times),
        "dropped after": lambda: proxy.drop(after=True, times=times),
        "answer cut off": lambda: proxy.truncate(0.5, times=times),
        "error after the work": lambda: proxy.answer(500, after=True, times=times),
    }[fault]()


FAULTS = [
    "slow down",
    "internal error",
    "too many requests",
    "bad gateway",
    "conflict of writers",
    "dropped before",
    "dropped after",
    "answer cut off",
    "error after the work",
]


@pytest.mark.parametrize("call", CALLS)
def test_passing_failures_are_tried_again(backend: Backend, proxy: FaultProxy, call: str) -> None:
    for fault in FAULTS:
        proxy.clear()
        proxy.seen.clear()
        backend.delete(["new", "created"])
        backend = fresh(backend)
        inject(proxy, fault, times=1)
        answer = everything(backend)[call]()
        if call in RIGHT:
            assert answer == RIGHT[call], fault
        assert backend.get("kept")[0] == CONTENT
        for key, written in (("new", call == "put"), ("created", call == "create")):
            if written:
                assert backend.get(key)[0] == CONTENT, fault


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_that_do_not_pass_are_unreachability(
    backend: Backend, direct: Backend, proxy: FaultProxy, fault: str
) -> None:
    calls = everything(backend)
    inject(proxy, fault, times=None)
    for call in CALLS if fault == "slow down" else ["create", "get", "list"]:
        if fault == "answer cut off" and call == "create":
            continue  # the answer to a put has no body that could be cut
        proxy.seen.clear()
        with pytest.raises(StoreUnreachable):
            calls[call]()
        assert proxy.count() > 1, "it was not tried again"
    # What was not acknowledged may be there, but then whole; what was there is.
    assert direct.get("kept")[0] == CONTENT
    assert {info.key for info in direct.list("")} <= {"kept", "created"}
    assert all(direct.get(info.key)[0] == CONTENT for info in direct.list(""))


@pytest.fixture
def hasty(backend: Backend, proxy: FaultProxy, place: str) -> Backend:
    """Gives up requests soon, and then the call."""
    return open_backend(place, options=s3_options(proxy.url, timeout=0.5, patience=0.4))


def fresh(backend: Backend) -> Backend:
    """A backend that has read no clock yet, of the same place."""
    backend._clock = None  # type: ignore[attr-defined]
    return backend


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (403, "RequestTimeTooSkewed"),
        (401, ""),
        (404, "NoSuchBucket"),
        (400, "ExpiredToken"),
        (501, "NotImplemented"),
    ],
)
def test_refusals_are_said_at_once_and_tell_no_secret(
    backend: Backend,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    status: int,
    code: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    said = f"key {ACCESS_KEY} secret {SECRET_KEY} signed AWS4-HMAC-SHA256"
    proxy.answer(status, code=code, message=said, times=None)
    for name, call in everything(backend).items():
        if name == "head" and code == "NoSuchBucket":
            continue  # the answer to a HEAD has no code
        proxy.seen.clear()
        with pytest.raises(StoreRefused) as refused:
            call()
        assert proxy.count() == 1, f"{name} was tried again"
        shown = "".join(traceback.format_exception(refused.value))
        shown += f"{refused.value!r} {refused.value.details} {refused.value.next_step}"
        assert_silent(shown)
        if name not in {"head"}:
            assert code in str(refused.value)
    assert_silent(caplog.text)
    assert_silent("".join(capfd.readouterr()))


def assert_silent(text: str) -> None:
    for secret in (ACCESS_KEY, SECRET_KEY, "AWS4-HMAC"):
        assert secret not in text


def test_unreachability_tells_no_secret(backend: Backend, proxy: FaultProxy) -> None:
    proxy.answer(500, code="InternalError", message=SECRET_KEY, times=None)
    with pytest.raises(StoreUnreachable) as failed:
        backend.get("kept")
    assert_silent("".join(traceback.format_exception(failed.value)))


def test_a_bucket_that_is_not_there_is_refused_by_every_call(s3_server: S3Server) -> None:
    for name in CALLS:
        backend = open_backend("s3://absent-bucket/x", options=s3_options(s3_server.url))
        with pytest.raises(StoreRefused) as refused:
            everything(backend)[name]()
        assert "NoSuchBucket" in str(refused.value)


@pytest.mark.parametrize(("status", "code"), [(507, "XMinioStorageFull"), (403, "QuotaExceeded")])
def test_a_full_store_is_said_to_be_full(
    backend: Backend, direct: Backend, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.answer(status, code=code, times=None)
    with pytest.raises(StorageFull):
        backend.put("new", b"x")
    with pytest.raises(ObjectMissing):
        direct.get("new")


def test_a_create_whose_answer_was_lost_counts_as_done(backend: Backend, proxy: FaultProxy) -> None:
    proxy.drop(after=True, method="PUT")
    version = backend.put("key", b"ours", create=True)
    assert backend.get("key") == (b"ours", version)
    assert proxy.count("PUT") == 2


def test_a_create_that_came_second_is_a_conflict_also_after_a_lost_answer(
    backend: Backend, direct: Backend, proxy: FaultProxy
) -> None:
    direct.put("key", b"theirs")
    for content in (b"ours", b"ours, and longer"):
        proxy.drop(after=True, method="PUT")
        with pytest.raises(Conflict):
            backend.put("key", content, create=True)
    assert direct.get("key")[0] == b"theirs"


def test_a_replacement_whose_answer_was_lost_counts_as_done(
    backend: Backend, direct: Backend, proxy: FaultProxy
) -> None:
    before = backend.put("key", b"before")
    proxy.drop(after=True, method="PUT")
    version = backend.put("key", b"after", replaces=before)
    assert direct.get("key") == (b"after", version)
    with pytest.raises(Conflict):  # without a lost answer there is nothing to doubt
        backend.put("key", b"after", replaces=before)


def test_a_replacement_that_lost_is_a_conflict_also_after_a_lost_answer(
    backend: Backend, direct: Backend, proxy: FaultProxy
) -> None:
    before = backend.put("key", b"before")
    direct.put("key", b"theirs")
    proxy.drop(method="PUT")
    with pytest.raises(Conflict):
        backend.put("key", b"ours", replaces=before)
    assert direct.get("key")[0] == b"theirs"


def page(keys: list[str], after: str | None) -> bytes:
    """A page of a listing as S3 answers it; `after`: more follow."""
    entries = "".join(
        f"<Contents><Key>store/{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"x"</ETag><Size>1</Size></Contents>'
        for key in keys
    )
    more = f"<NextContinuationToken>{after}</NextContinuationToken>" if after else ""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>b</Name>'
        f"<IsTruncated>{'true' if after else 'false'}</IsTruncated>{more}{entries}"
        f"</ListBucketResult>"
    ).encode()


def test_a_listing_that_breaks_off_goes_on_where_it_was(
    backend: Backend, proxy: FaultProxy
) -> None:
    first = [f"a/{number:04}" for number in range(999)]
    proxy.answer(200, body=page([*first, "b"], "token"), key="list-type")
    proxy.answer(503, code="SlowDown", key="continuation-token")
    assert [info.key for info in backend.list("")] == [*first, "b", "kept"]
    assert proxy.count(key="start-after=store(/|%2F)b") == 1


def test_a_listing_that_breaks_off_never_looks_complete(
    backend: Backend, proxy: FaultProxy
) -> None:
    first = [f"a/{number:04}" for number in range(1000)]
    proxy.answer(200, body=page(first, "token"), key="list-type")
    proxy.answer(500, times=None)
    listing, seen = backend.list(""), []
    with pytest.raises(StoreUnreachable):
        for info in listing:
            seen.append(info.key)
    assert seen == first
    proxy.clear()
    whole = page(["a", "b"], None)
    proxy.answer(200, body=whole[: len(whole) // 2], times=None)
    with pytest.raises(StoreUnreachable):
        list(backend.list(""))


def test_a_deletion_that_is_refused_for_one_object_is_refused(
    backend: Backend, proxy: FaultProxy
) -> None:
    failed = (
        b"<DeleteResult><Error><Key>store/kept</Key><Code>%s</Code><Message>no</Message></Error>"
        b"</DeleteResult>"
    )
    proxy.answer(200, body=failed % b"AccessDenied", method="POST")
    with pytest.raises(StoreRefused):
        backend.delete(["kept"])
    proxy.answer(200, body=failed % b"SlowDown", method="POST")
    backend.delete(["kept"])
    with pytest.raises(ObjectMissing):
        backend.get("kept")


def test_whole_objects_where_pieces_were_asked_for_are_not_taken_for_them(
    backend: Backend, proxy: FaultProxy
) -> None:
    proxy.answer(200, body=b"the whole of another object", times=None, method="GET")
    for read in (
        lambda: backend.get_ranges("kept", [(3, 5)]),
        lambda: backend.get_tail("kept", 5),
    ):
        with pytest.raises(StoreUnreachable):
            read()


@pytest.mark.parametrize("fault", ["delay", "throttle"])
def test_what_takes_too_long_is_given_up_and_tried_again(
    hasty: Backend, direct: Backend, proxy: FaultProxy, place: str, fault: str
) -> None:
    patient = open_backend(place, options=s3_options(proxy.url, timeout=0.5, patience=30))
    for call in ("get", "create"):
        if fault == "delay":
            proxy.delay(1.5)
        else:
            proxy.throttle(1000, method="GET")
        everything(patient)[call]()
    assert direct.get("created")[0] == CONTENT
    if fault == "delay":
        proxy.delay(30, times=None)
    else:
        proxy.throttle(1000, times=None)
    with pytest.raises(StoreUnreachable) as failed:
        hasty.get("kept")
    assert "timed out" in str(failed.value)


@pytest.mark.parametrize("silent", [False, True])
def test_a_partition_is_unreachability_and_heals(
    backend: Backend, hasty: Backend, proxy: FaultProxy, silent: bool
) -> None:
    proxy.partition(silent=silent)
    try:
        for call in (lambda: hasty.get("kept"), lambda: hasty.put("new", b"x")):
            with pytest.raises(StoreUnreachable):
                call()
    finally:
        proxy.heal()
    assert backend.get("kept")[0] == CONTENT
    with pytest.raises(ObjectMissing):
        backend.get("new")


def test_closing_ends_the_waiting_for_a_store_that_is_gone(proxy: FaultProxy, place: str) -> None:
    patient = open_backend(place, options=s3_options(proxy.url, patience=3600))
    proxy.answer(503, times=None)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(patient.get, "kept"), pool.submit(lambda: list(patient.list("")))]
        while proxy.count("GET") < 6:
            time.sleep(0.01)
        patient.close()
        for call in calls:
            with pytest.raises(StoreUnreachable):
                call.result(timeout=60)


def test_without_credentials_it_is_refused_and_says_which(
    s3_server: S3Server, proxy: FaultProxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.url)
    proxy.answer(404, times=None)
    options = s3_options(s3_server.url)
    del options["AWS_ACCESS_KEY_ID"], options["AWS_SECRET_ACCESS_KEY"]
    with pytest.raises(StoreRefused) as refused:
        open_backend(place, options=options).get("kept")
    assert "AWS_ACCESS_KEY_ID" in str(refused.value)


@pytest.mark.parametrize("status", [301, 302, 304, 400, 405, 412, 416])
def test_every_failure_is_one_of_ours(backend: Backend, proxy: FaultProxy, status: int) -> None:
    proxy.answer(status, times=None)
    for call in everything(backend).values():
        with pytest.raises(SojournError):
            call()
        with pytest.raises(SojournError):
            backend.put("kept", b"x", replaces="1")
