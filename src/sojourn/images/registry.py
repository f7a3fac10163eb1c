"""Images in a registry, by the distribution API.

Guarantee: whatever a registry answers, only blobs of the digests that were asked for are given on.
A login goes to the registry it is for, and to the service for tokens that this one names, over TLS
(or on this machine), never along a redirect and never into an error or a log. A download that
breaks off goes on where it broke off.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import httpcore
import msgspec

from sojourn.errors import RegistryRefused, Unreachable
from sojourn.images.credentials import Login, find_login
from sojourn.images.documents import INDEXES, MANIFESTS, MAX_DOCUMENT, Descriptor, check_digest
from sojourn.images.references import Reference, is_loopback

_TRIES = 6
_PAUSE = 0.2  # before the second try; twice as long before each further one
_LONGEST_PAUSE = 10.0
_REDIRECTS = 5
_TIMEOUTS = {"connect": 20.0, "read": 60.0, "write": 60.0, "pool": 60.0}
_ACCEPT = ", ".join(sorted(INDEXES | MANIFESTS)).encode()
_PARAMETER = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')
_AGAIN = frozenset({429, 500, 502, 503, 504})
_BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class _Again(Exception):
    """What failed may work when it is tried again, after so many seconds."""

    def __init__(self, error: RegistryRefused | Unreachable, after: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.after = after


class Registry:
    """One repository of one registry. Close it."""

    def __init__(self, reference: Reference, *, insecure: bool = False) -> None:
        self._reference = reference
        self._insecure = insecure or reference.loopback
        self._logins_insecure = insecure
        self._base = ""
        self._login: Login | None = find_login(reference.host)
        self._authorization: str | None = None
        self._pool = httpcore.ConnectionPool(max_connections=4)
        self._manifests: dict[str, bytes] = {}

    def __enter__(self) -> Registry:
        self._base = self._find_scheme()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def _find_scheme(self) -> str:
        """With TLS; without it only where that is allowed and the registry does without."""
        host = self._reference.host
        if self._insecure:
            with contextlib.suppress(*_BROKEN):
                url = f"http://{host}/v2/"
                with self._pool.stream("GET", url, extensions=_extensions()) as response:
                    if not 300 <= response.status <= 400:
                        return f"http://{host}"
        return f"https://{host}"

    # -- what is asked for ------------------------------------------------------------------

    def resolve(self) -> Descriptor:
        """The manifest or index that the reference means. Raises RegistryRefused, Unreachable."""
        reference = self._reference
        wanted = reference.digest or reference.tag or ""
        payload, kind = self._retried(lambda: self._manifest(wanted))
        digest = f"sha256:{hashlib.sha256(payload).hexdigest()}"
        if reference.digest is not None:
            algorithm, _, value = reference.digest.partition(":")
            if hashlib.new(algorithm, payload).hexdigest() != value:
                raise RegistryRefused(
                    f"{reference.host} answered another manifest than {reference.digest}"
                )
            digest = reference.digest
        self._manifests[digest] = payload
        return Descriptor(digest=digest, size=len(payload), media_type=kind)

    def blob(self, descriptor: Descriptor) -> Iterator[bytes]:
        """A blob's pieces, unproven. Raises RegistryRefused, Unreachable."""
        known = self._manifests.get(descriptor.digest)
        if known is None and descriptor.media_type in INDEXES | MANIFESTS:
            known, _ = self._retried(lambda: self._manifest(descriptor.digest))
        if known is not None:
            yield known
            return
        yield from self._download(check_digest(descriptor.digest), descriptor.size)

    def _manifest(self, wanted: str) -> tuple[bytes, str]:
        url = self._url("manifests", wanted)
        with self._get(url, {b"accept": _ACCEPT}) as response:
            payload = bytearray()
            for piece in _stream(response, self._reference.host):
                payload += piece
                if len(payload) > MAX_DOCUMENT:
                    raise RegistryRefused("the registry answered a manifest of over 4 MiB")
            kind = _header(response, b"content-type").partition(";")[0].strip()
        return bytes(payload), kind if kind in INDEXES | MANIFESTS else ""

    def _download(self, digest: str, size: int) -> Iterator[bytes]:
        """The blob; where the connection breaks, from there on."""
        done, failed = 0, 0
        while done < size or (done == 0 == size):
            before = done
            try:
                for piece in self._from(digest, done, size):
                    done += len(piece)
                    yield piece
                if done >= size:
                    return
                raise _Again(Unreachable(f"{self._reference.host} ended a blob too early"))
            except _Again as again:
                failed = 1 if done > before else failed + 1
                _wait(again, failed)

    def _from(self, digest: str, start: int, size: int) -> Iterator[bytes]:
        headers = {b"range": b"bytes=%d-" % start} if start else {}
        with self._get(self._url("blobs", digest), headers) as response:
            skipped = 0 if response.status == 206 else start
            begins = _header(response, b"content-range")
            if response.status == 206 and not begins.startswith(f"bytes {start}-"):
                raise RegistryRefused(f"{self._reference.host} answered another part of a blob")
            seen = 0
            for piece in _stream(response, self._reference.host):
                given = piece[max(0, skipped - seen) :]
                seen += len(piece)
                if seen - skipped + start > size:
                    raise RegistryRefused(f"{self._reference.host} answered too much of a blob")
                if given:
                    yield given

    def _url(self, kind: str, name: str) -> str:
        return f"{self._base}/v2/{self._reference.repository}/{kind}/{name}"

    # -- asking -----------------------------------------------------------------------------

    def _retried(self, work: Any) -> Any:
        failed = 0
        while True:
            try:
                return work()
            except _Again as again:
                failed += 1
                _wait(again, failed)

    @contextlib.contextmanager
    def _get(self, url: str, headers: dict[bytes, bytes]) -> Iterator[httpcore.Response]:
        """A successful answer; logs in and follows redirects. Raises _Again, RegistryRefused."""
        logged_in = False
        for _ in range(_REDIRECTS + 1):
            own = _origin(url) == _origin(self._base)
            sent = dict(headers)
            if own and self._authorization is not None:
                sent[b"authorization"] = self._authorization.encode()
            with self._request(url, sent) as response:
                if response.status in (200, 206):
                    yield response
                    return
                if response.status in (301, 302, 303, 307, 308):
                    url = self._redirected(url, _header(response, b"location"))
                    continue
                if response.status == 401 and own and not logged_in:
                    logged_in = True
                    self._log_in(_header(response, b"www-authenticate"))
                    continue
                raise self._refused(response, url)
        raise RegistryRefused(f"{self._reference.host} redirects without end")

    @contextlib.contextmanager
    def _request(
        self, url: str, headers: dict[bytes, bytes], content: bytes | None = None
    ) -> Iterator[httpcore.Response]:
        host = urlsplit(url).netloc
        given = [(b"host", host.encode()), (b"user-agent", b"sojourn"), *headers.items()]
        try:
            if content is not None:
                given.append((b"content-length", b"%d" % len(content)))
            method = "GET" if content is None else "POST"
            with self._pool.stream(
                method, url, headers=given, content=content, extensions=_extensions()
            ) as response:
                yield response
        except (httpcore.UnsupportedProtocol, UnicodeError) as error:
            raise RegistryRefused(f"{host} redirects to what is no address") from error
        except _BROKEN as error:
            raise _Again(_silent(host, error)) from error

    def _redirected(self, url: str, location: str) -> str:
        try:
            found = urljoin(url, location)
        except ValueError:
            found = ""
        if not location or not _is_address(found):
            raise RegistryRefused(f"{self._reference.host} redirects to what is no address")
        scheme = urlsplit(found).scheme
        if scheme != "https" and not (scheme == "http" and url.startswith("http://")):
            raise RegistryRefused(f"{self._reference.host} redirects to a place without TLS")
        return found

    def _refused(self, response: httpcore.Response, url: str) -> Exception:
        status = response.status
        host = self._reference.host
        if status in _AGAIN:
            after = _header(response, b"retry-after")
            number = after.isascii() and after.isdigit() and len(after) < 10
            seconds = float(after) if number else None
            return _Again(RegistryRefused(f"{host} answered {status}", status=status), seconds)
        if status in (401, 403):
            how = "with the login that is there" if self._login else "without a login"
            return RegistryRefused(
                f"{host} refuses {self._reference.repository} {how}",
                next_step="Log in (`docker login`), or check the image's name.",
                status=status,
            )
        if status == 404:
            what = urlsplit(url).path.rpartition("/")[2]
            return RegistryRefused(
                f"{host} has no {what[:100]} of {self._reference.repository}", status=status
            )
        return RegistryRefused(f"{host} answered {status}", status=status)

    # -- logging in -------------------------------------------------------------------------

    def _log_in(self, challenge: str) -> None:
        kind, _, rest = challenge.partition(" ")
        facts = {key.lower(): value for key, value in _PARAMETER.findall(rest)}
        if kind.lower() == "basic":
            if self._login is None or self._login.token:
                raise RegistryRefused(
                    f"{self._reference.host} wants a login", next_step="Log in (`docker login`)."
                )
            self._authorization = f"Basic {self._login.basic()}"
            return
        realm = facts.get("realm", "")
        if kind.lower() != "bearer" or not realm:
            raise RegistryRefused(f"{self._reference.host} wants a login of an unknown kind")
        self._authorization = f"Bearer {self._retried(lambda: self._token(realm, facts))}"

    def _token(self, realm: str, facts: dict[str, str]) -> str:
        if not _is_address(realm):
            raise RegistryRefused(f"{self._reference.host} wants logins sent to what is no address")
        parts = urlsplit(realm)
        plain = parts.scheme == "http" and (
            is_loopback(parts.netloc)
            or (self._logins_insecure and self._base.startswith("http://"))
        )
        if parts.scheme != "https" and not plain:
            raise RegistryRefused(f"{self._reference.host} wants logins to be sent without TLS")
        scope = facts.get("scope") or f"repository:{self._reference.repository}:pull"
        asked = {"scope": scope} | ({"service": facts["service"]} if "service" in facts else {})
        headers: dict[bytes, bytes] = {}
        content = None
        url = f"{realm}{'&' if parts.query else '?'}{urlencode(asked)}"
        if self._login is not None and self._login.token:
            url, headers = realm, {b"content-type": b"application/x-www-form-urlencoded"}
            grant = {"grant_type": "refresh_token", "client_id": "sojourn"}
            content = urlencode(asked | grant | {"refresh_token": self._login.token}).encode()
        elif self._login is not None:
            headers[b"authorization"] = b"Basic " + self._login.basic().encode()
        with self._request(url, headers, content) as response:
            if response.status != 200:
                raise self._refused(response, url)
            payload = bytearray()
            for piece in _stream(response, parts.netloc):
                payload += piece
                if len(payload) > MAX_DOCUMENT:
                    raise RegistryRefused("a token is over 4 MiB")
        try:
            found = msgspec.json.decode(payload, type=_Token)
        except msgspec.MsgspecError as error:
            raise RegistryRefused(f"{parts.netloc} answered no token") from error
        token = found.token or found.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise RegistryRefused(f"{parts.netloc} answered no token")
        return token


def _wait(again: _Again, failed: int) -> None:
    """Pause before another try, or raise what failed when there were enough."""
    if failed >= _TRIES:
        raise again.error from again
    pause = min(_LONGEST_PAUSE, _PAUSE * 2 ** (failed - 1)) * random.uniform(0.7, 1.3)
    time.sleep(pause if again.after is None else min(again.after, _LONGEST_PAUSE))


def _extensions() -> dict[str, Any]:
    return {"timeout": dict(_TIMEOUTS)}


def _stream(response: httpcore.Response, host: str) -> Iterator[bytes]:
    stream = response.iter_stream()
    while True:
        try:
            piece = next(stream, None)
        except _BROKEN as error:
            raise _Again(_silent(host, error)) from error
        if piece is None:
            return
        yield piece


def _silent(host: str, error: Exception) -> Unreachable:
    reason = str(error) or type(error).__name__
    return Unreachable(
        f"{host} does not answer: {reason}", next_step="Check the image's name and the network."
    )


def _header(response: httpcore.Response, name: bytes) -> str:
    for key, value in response.headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return ""


def _is_address(url: str) -> bool:
    """Whether a registry's words are an address that can be asked, with no login in it."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    printable = url.isascii() and url.isprintable() and " " not in url
    return bool(host) and printable and "@" not in parts.netloc


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
