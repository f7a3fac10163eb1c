"""What a request to an exposed port asks for, and what of it goes inside: pure functions.

Guarantee: access tokens of Sojourn never go inside, whichever way they came; what is about one
connection only (RFC 9110 section 7.6.1) stays on it; what a sender says about who sent it is
replaced by what is seen here.

A browser keeps pages of one *origin* apart from those of others. By its host name each port of
each session is an origin of its own. By path all of them share one, so there no cookie opens a
port, and pages get an origin of their own by `Content-Security-Policy: sandbox`: else a page of
one session could read what the browser's user may read of another.
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec

from sojourn.gateway.heads import HOP

Headers = list[tuple[bytes, bytes]]

TOKEN_NAME = b"sojourn_token"
_BEARER = re.compile(rb"(?i:bearer) +([^\s]{1,512})")
_PATH = re.compile(rb"/s/(ses_[a-z0-9]{24})/([1-9][0-9]{0,4})(?=[/?]|$)")
_LABEL = re.compile(r"([1-9][0-9]{0,4})-ses-([a-z0-9]{24})")

_FORWARDED = {
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-prefix",
    b"x-forwarded-proto",
    b"x-real-ip",
}
_SANDBOX = (
    b"sandbox allow-downloads allow-forms allow-modals allow-orientation-lock allow-pointer-lock"
    b" allow-popups allow-presentation allow-scripts"
)
SAFE = {b"GET", b"HEAD", b"OPTIONS"}
CLIENT = b"sojourn-client"
"""The header in which a server that carries a request here says from where it came."""


class Wanted(msgspec.Struct, frozen=True):
    """What a request names: a port of a session, what to ask of it there, and the tokens shown.
    `prefix` is the part of the path that named it; empty: the host did."""

    session: str
    port: int
    target: bytes
    prefix: bytes
    bearer: bytes | None
    query: bytes | None
    cookie: bytes | None


def host_label(session: str, port: int) -> str:
    """The name below the domain that stands for a port of a session."""
    return f"{port}-{session.replace('_', '-')}"


def path_prefix(session: str, port: int) -> str:
    """The path that stands for it."""
    return f"/s/{session}/{port}"


def value_of(headers: Headers, name: bytes) -> bytes | None:
    """The value of a header that may be there once; None when it is missing or there more often."""
    found = [value for key, value in headers if key == name]
    return found[0] if len(found) == 1 else None


def read_request(target: bytes, headers: Headers, domain: str) -> Wanted | None:
    """What a request asks for; names of headers are in lower case. None: no port of any session."""
    if not target.startswith(b"/"):
        return None
    named = _by_host(value_of(headers, b"host") or b"", domain)
    prefix = b""
    if named is None:
        match = _PATH.match(target)
        if match is None:
            return None
        named = (match[1].decode(), int(match[2]))
        prefix = match[0]
        target = target[len(prefix) :]
        if not target.startswith(b"/"):
            target = b"/" + target
    session, port = named
    if port > 65535:
        return None
    target, query = without_token(target)
    bearer = _BEARER.fullmatch(value_of(headers, b"authorization") or b"")
    return Wanted(
        session=session,
        port=port,
        target=target,
        prefix=prefix,
        bearer=bearer[1] if bearer else None,
        query=query,
        cookie=None if prefix else _cookie_token(headers),
    )


def _by_host(host: bytes, domain: str) -> tuple[str, int] | None:
    name = host.decode("latin-1").lower()
    name = re.sub(r":[0-9]{0,5}$", "", name).removesuffix(".")
    label, dot, rest = name.partition(".")
    if not dot or rest != domain:
        return None
    match = _LABEL.fullmatch(label)
    return (f"ses_{match[2]}", int(match[1])) if match else None


def without_token(target: bytes) -> tuple[bytes, bytes | None]:
    """A target without the access token in its query, and that token. The rest stays as it is."""
    path, mark, query = target.partition(b"?")
    if not mark:
        return target, None
    token: bytes | None = None
    kept = []
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name == TOKEN_NAME:
            token = token or value
        else:
            kept.append(part)
    if len(kept) == query.count(b"&") + 1:
        return target, None
    return (path + b"?" + b"&".join(kept) if kept else path), token


def _cookies(headers: Headers) -> list[bytes]:
    return [
        part.strip() for key, value in headers if key == b"cookie" for part in value.split(b";")
    ]


def _cookie_token(headers: Headers) -> bytes | None:
    for part in _cookies(headers):
        name, _, value = part.partition(b"=")
        if name == TOKEN_NAME:
            return value
    return None


def token_fits(token: bytes | None, digest: bytes) -> bool:
    """Whether a token is the one of this digest; takes as long whatever the token is."""
    shown = hashlib.sha256(token or b"").digest()
    return hmac.compare_digest(shown, digest) and token is not None


def opened_by(wanted: Wanted, digest: bytes, method: bytes, headers: Headers) -> str | None:
    """How a request shows that it may: `bearer`, `query` or `cookie`; None: it does not.

    A cookie is sent by the browser whoever made it ask. It counts only where the request comes
    from the port's own pages or from a link that was followed."""
    shown = (("bearer", wanted.bearer), ("query", wanted.query), ("cookie", wanted.cookie))
    found = [way for way, token in shown if token_fits(token, digest)]
    for way in found:
        if way != "cookie" or _own_page(method, headers):
            return way
    return None


def _own_page(method: bytes, headers: Headers) -> bool:
    origin = value_of(headers, b"origin")
    if origin is not None:
        host = value_of(headers, b"host") or b""
        return origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())
    site = value_of(headers, b"sec-fetch-site")
    if site is None or site in (b"same-origin", b"none"):
        # Programs say nothing of it; browsers name the origin of whatever is not safe.
        return site is not None or method in SAFE
    return method == b"GET" and value_of(headers, b"sec-fetch-mode") == b"navigate"


def access_cookie(token: bytes) -> bytes:
    """What has a browser show the token by itself from now on, to this one host."""
    return TOKEN_NAME + b"=" + token + b"; Path=/; HttpOnly; SameSite=Lax"


def wants_page(method: bytes, headers: Headers) -> bool:
    """Whether a browser's user goes there, so that the address shown should hold no token."""
    return method == b"GET" and value_of(headers, b"sec-fetch-mode") == b"navigate"


def upgrade_of(headers: Headers) -> bytes | None:
    """The protocol a request or answer switches to."""
    return value_of(headers, b"upgrade") if b"upgrade" in _listed(headers) else None


def _listed(headers: Headers) -> set[bytes]:
    """What the Connection headers name."""
    return {
        word.strip().lower()
        for key, value in headers
        if key == b"connection"
        for word in value.split(b",")
    }


def _end_to_end(headers: Headers) -> Headers:
    # What frames a message is no option of the connection, whatever a sender says.
    listed = (_listed(headers) | HOP) - {b"content-length", b"host"}
    return [(key, value) for key, value in headers if key not in listed]


def inside_headers(
    wanted: Wanted,
    opened: str | None,
    headers: Headers,
    client: str,
    *,
    chunked: bool,
    scheme: bytes = b"http",
) -> Headers:
    """The headers that go inside. `opened` is the way access was shown, `client` whose address it
    is, `chunked` whether a body of unknown length follows, `scheme` what the client speaks."""
    host = value_of(headers, b"host") or b""
    own = b"localhost:%d" % wanted.port
    sent: Headers = [(b"host", own if wanted.prefix else host)]
    for key, value in _end_to_end(headers):
        if key in _FORWARDED or key in (b"host", b"cookie", b"expect"):
            continue
        if key == b"authorization" and opened == "bearer":
            continue
        if key == b"content-length" and chunked:
            continue
        if key == b"referer":
            # The page that asks may have been opened by an address with the token in it.
            value, _ = without_token(value)
        sent.append((key, value))
    cookies = [part for part in _cookies(headers) if part.partition(b"=")[0] != TOKEN_NAME]
    if cookies and any(cookies):
        sent.append((b"cookie", b"; ".join(part for part in cookies if part)))
    sent.append((b"x-forwarded-for", client.encode("ascii", "replace")))
    sent.append((b"x-forwarded-proto", scheme))
    if host:
        sent.append((b"x-forwarded-host", host))
    if wanted.prefix:
        sent.append((b"x-forwarded-prefix", wanted.prefix))
    upgrade = upgrade_of(headers)
    if upgrade is not None:
        sent += [(b"connection", b"upgrade"), (b"upgrade", upgrade)]
    if chunked:
        sent.append((b"transfer-encoding", b"chunked"))
    return sent


def outside_headers(wanted: Wanted, headers: Headers) -> Headers:
    """The headers of an answer as they go to the client."""
    sent: Headers = []
    for key, value in _end_to_end(headers):
        if key == b"set-cookie":
            cookie = _cookie_of_host(value)
            if cookie is not None:
                sent.append((key, cookie))
            continue
        sent.append((key, value))
    if wanted.prefix:
        sent.append((b"content-security-policy", _SANDBOX))
    return sent


def _cookie_of_host(cookie: bytes) -> bytes | None:
    """A cookie for the host that sets it alone, not for those of other sessions beside it."""
    first, *attributes = cookie.split(b";")
    if first.partition(b"=")[0].strip() == TOKEN_NAME:
        return None
    kept = [part for part in attributes if part.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join([first, *kept])
