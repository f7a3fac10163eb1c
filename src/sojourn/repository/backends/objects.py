"""Objects in a bucket (S3 and what speaks its protocol) or in memory, through obstore.

Guarantee: that of `backends.base`. A passing failure (throttling, 5xx, a broken or slow connection,
half a body, half a page of a listing) is tried again with growing pauses until the patience ends,
then it is StoreUnreachable; a refusal is raised at once. Every length is compared with what was
asked for or declared, so a short answer is never taken for the object. obstore's own retries are
turned off: they do not cover bodies of pieces, pages and lost answers of conditional writes, and
one place decides here how long a call may take.

A conditional write whose answer was lost may have been done. When the next try finds its condition
no longer true, the object that is there is compared with what was to be written: the same bytes
mean that it was done. Objects are sealed with random salts, so equal bytes are one's own. A
request given up here may still arrive at the store, late: objects that change are therefore only
ever written with a condition, which it then no longer meets.

Versions are ETags: on S3 those of the bytes, so that writing the very same bytes again gives the
same version; the salt makes that harmless as well.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError

from sojourn.errors import Conflict, IntegrityError, ObjectMissing, StoreRefused
from sojourn.repository.backends.base import ObjectInfo
from sojourn.repository.backends.failures import Failure, Verdict, final, judge
from sojourn.repository.backends.object_keys import (
    CLOCK_KEY,
    check_key,
    check_prefix,
    check_ranges,
    is_key,
)
from sojourn.repository.backends.retrying import Patience

_PAGE = 1000
_CLOCK_SECONDS = 60.0  # how long a reading of the store's clock is carried on by our own

T = TypeVar("T")


class _Failed(Exception):
    """A failure to be dealt with by the caller: not PASSING, or PASSING for too long."""

    def __init__(self, failure: Failure, *, ambiguous: bool) -> None:
        super().__init__(failure.cause)
        self.failure = failure
        self.ambiguous = ambiguous


class ObjectBackend:
    """Implements `sojourn.repository.backends.base.Backend` over a store of obstore.

    `url` is what is shown. `local_clock`: the store lives in this process (memory).
    """

    def __init__(
        self,
        store: Any,
        url: str,
        *,
        patience: Patience | None = None,
        local_clock: bool = False,
    ) -> None:
        self._store = store
        self._url = url
        self._patience = patience if patience is not None else Patience()
        self._local_clock = local_clock
        self._bucket_seen = local_clock
        self._closed = threading.Event()
        self._clock_guard = threading.Lock()
        self._clock: tuple[float, float] | None = None  # our boot time, the store's time then

    @property
    def url(self) -> str:
        return self._url

    # -- writing ----------------------------------------------------------------------------
    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        check_key(key)
        if create:
            mode: Any = "create"
        elif replaces is not None:
            mode = {"e_tag": replaces}
        else:
            mode = "overwrite"
        doing = f"writing {key}"
        try:
            result = self._call(
                lambda: obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            )
        except _Failed as failed:
            error = failed
        else:
            return self._etag(result["e_tag"], key)
        verdict = error.failure.verdict
        conditional = create or replaces is not None
        if not conditional or verdict not in {Verdict.TAKEN, Verdict.MISSING}:
            raise final(error.failure, doing, self._url)
        if create or error.ambiguous:
            try:
                there, version = self.get(key, limit=len(data))
            except (ObjectMissing, IntegrityError):
                pass  # gone, or longer than ours: another one's
            else:
                if there == data:
                    return version
        if create:
            raise Conflict(f"{key} is there already, with other content.", key=key)
        raise Conflict(f"{key} was changed by someone else.", key=key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        for start in range(0, len(keys), _PAGE):
            batch = list(keys[start : start + _PAGE])
            try:
                self._call(functools.partial(obstore.delete, self._store, batch))
            except _Failed as failed:
                error = failed
            else:
                continue
            if error.failure.verdict is not Verdict.MISSING:
                raise final(error.failure, f"removing {len(batch)} objects", self._url)

    # -- reading ----------------------------------------------------------------------------
    def get(self, key: str, *, limit: int | None = None) -> tuple[bytes, str]:
        check_key(key)

        def read() -> tuple[bytes, str]:
            result = obstore.get(self._store, key)
            size = result.meta["size"]
            if limit is not None and size > limit:
                raise IntegrityError(
                    f"{key} has {size} bytes, more than the {limit} it may have.", object=key
                )
            data = bytes(result.bytes())
            if len(data) != size:
                raise _Short(f"{len(data)} of {size} bytes arrived")
            return data, self._etag(result.meta["e_tag"], key)

        return self._read(key, read)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_key(key)
        check_ranges(ranges)
        wanted = [(offset, length) for offset, length in ranges if length]
        if not wanted:
            self.head(key)
            return [b"" for _ in ranges]

        def read() -> list[bytes]:
            try:
                pieces = obstore.get_ranges(
                    self._store,
                    key,
                    starts=[offset for offset, _ in wanted],
                    lengths=[length for _, length in wanted],
                )
            except BaseError as raised:
                if judge(raised).verdict is not Verdict.RANGE:
                    raise
                pieces = []
            found = iter([bytes(piece) for piece in pieces])
            answer = [next(found, b"") if length else b"" for _, length in ranges]
            if any(len(a) != length for a, (_, length) in zip(answer, ranges, strict=True)):
                self._check_size(key, self._head(key).size, ranges)
                raise _Short("a piece that is there was not given, or not whole")
            return answer

        return self._read(key, read)

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_key(key)
        check_ranges([(0, length)])
        if length == 0:
            return b"", self.head(key).size

        def read() -> tuple[bytes, int]:
            try:
                result = obstore.get(self._store, key, options={"range": {"suffix": length}})
            except BaseError as raised:
                if judge(raised).verdict is not Verdict.RANGE:
                    raise
                # An empty object has no last bytes: some answer with all of it, some refuse.
                if self._head(key).size == 0:
                    return b"", 0
                raise _Short("a piece that is there was not given") from None
            size = result.meta["size"]
            data = bytes(result.bytes())
            if len(data) != min(length, size):
                raise _Short(f"{len(data)} of {min(length, size)} bytes arrived")
            return data, size

        return self._read(key, read)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return self._read(key, lambda: self._head(key))

    def _head(self, key: str) -> ObjectInfo:
        return _info(obstore.head(self._store, key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In the order the store gives (on S3: of the keys)."""
        check_prefix(prefix)
        tries = self._patience.begin(self._closed)
        last: str | None = None
        while True:
            try:
                for page in obstore.list(
                    self._store, prefix.rstrip("/") or None, offset=last, chunk_size=_PAGE
                ):
                    self._bucket_seen = True
                    for found in page:
                        info = _info(found)
                        last = info.key
                        if is_key(info.key) and info.key.startswith(prefix):
                            yield info
                    tries = self._patience.begin(self._closed)
                return
            except (BaseError, OSError, NotImplementedError) as raised:
                failure = judge(raised)
            if failure.verdict is not Verdict.PASSING or not tries.pause():
                raise final(failure, f"listing {prefix or 'everything'}", self._url)

    # -- the clock --------------------------------------------------------------------------
    def now(self) -> float:
        """A bucket's clock is the time it gives to an object just written, rounded down; between
        such readings, a minute apart, the time since boot carries it on."""
        if self._local_clock:
            return time.time()
        with self._clock_guard:
            ours = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._clock is None or not 0 <= ours - self._clock[0] < _CLOCK_SECONDS:
                self._clock = (time.clock_gettime(time.CLOCK_BOOTTIME), self._read_clock())
            return self._clock[1] + time.clock_gettime(time.CLOCK_BOOTTIME) - self._clock[0]

    def _read_clock(self) -> float:
        def read() -> float:
            obstore.put(self._store, CLOCK_KEY, b"", use_multipart=False)
            return self._head(CLOCK_KEY).modified

        return self._read(CLOCK_KEY, read)

    def close(self) -> None:
        """Calls under way end with the try they are at, later ones make only one. Connections end
        with the last reference to the store."""
        self._closed.set()

    # -- tries ------------------------------------------------------------------------------
    def _read(self, key: str, read: Callable[[], T]) -> T:
        try:
            return self._call(read)
        except _Failed as failed:
            failure = failed.failure
        if failure.verdict is Verdict.MISSING:
            self._require_bucket(key)
            raise ObjectMissing(f"There is no object {key}.", key=key)
        raise final(failure, f"reading {key}", self._url)

    def _require_bucket(self, key: str) -> None:
        """The answer to a HEAD does not tell a missing bucket from a missing object: until the
        bucket was seen once, ask in a way that does."""
        if self._bucket_seen:
            return
        try:
            self._call(lambda: next(iter(obstore.list(self._store, None, chunk_size=1)), None))
        except _Failed as failed:
            failure = failed.failure
        else:
            return
        raise final(failure, f"reading {key}", self._url)

    def _call(self, request: Callable[[], T]) -> T:
        tries = self._patience.begin(self._closed)
        ambiguous = False
        while True:
            try:
                answer = request()
            except _Short as short:
                failure = Failure(Verdict.PASSING, str(short))
            except (BaseError, OSError, NotImplementedError) as raised:
                failure = judge(raised)
            else:
                self._bucket_seen = True
                return answer
            if failure.verdict is not Verdict.PASSING or not tries.pause():
                raise _Failed(failure, ambiguous=ambiguous)
            ambiguous = ambiguous or not failure.unsent

    def _check_size(self, key: str, size: int, ranges: Sequence[tuple[int, int]]) -> None:
        for offset, length in ranges:
            if length and offset + length > size:
                raise IntegrityError(
                    f"{key} has {size} bytes, too few for {offset}+{length}.", object=key
                )

    def _etag(self, etag: str | None, key: str) -> str:
        if not etag:
            raise StoreRefused(
                f"The object store {self._url} gives no ETag for {key}; it cannot be used.",
                url=self._url,
            )
        return etag


class _Short(Exception):
    """Fewer bytes than declared: a passing failure."""


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or ""
    )
