"""Secrets, put into requests on the way out and taken out of answers on the way in.

Guarantee: a value goes only to the domains it is bound to, over TLS unless its use says otherwise,
and no answer brings it into a session: not in headers, not in a body, not across the borders of its
pieces. Values stand in no representation, error or record.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote, quote_plus

from sojourn.gateway.messages import Granted
from sojourn.gateway.names import covers
from sojourn.model.network import SecretPlace, SecretUse, placeholder

Headers = list[tuple[bytes, bytes]]
_BASIC = b"basic "
# Pieces and encodings of a body cannot be searched for a value.
_NOT_WITH_SECRETS = frozenset({b"accept-encoding", b"range", b"if-range", b"want-content-digest"})
# Of a value in a stream that cannot be changed, before it is known to be one.
_TOLD_AT_MOST = 7
_SHORTEST_BASE64 = 10
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class Placed:
    """A request with its secrets in it."""

    __slots__ = ("headers", "names", "scrubber", "target")

    def __init__(
        self, target: bytes, headers: Headers, names: list[str], scrubber: Scrubber | None
    ) -> None:
        self.target, self.headers, self.names, self.scrubber = target, headers, names, scrubber


def place(
    granted: Sequence[Granted], name: str | None, tls: bool, target: bytes, headers: Headers
) -> Placed:
    """Put in what is bound to a host's name, in place of what the program itself put there."""
    uses = [
        (secret, use)
        for secret in granted
        for use in secret.uses
        if name is not None
        and (tls or use.over_http)
        and any(covers(domain, name) for domain in use.domains)
    ]
    if not uses:
        return Placed(target, headers, [], None)
    forms: dict[bytes, bytes] = {}
    headers = [(key, value) for key, value in headers if key.lower() not in _NOT_WITH_SECRETS]
    headers.append((b"accept-encoding", b"identity"))
    for secret in {id(secret): secret for secret, _ in uses}.values():
        target, headers = _replace(secret, target, headers, forms)
    for secret, use in uses:
        target, headers = _inject(secret, use, target, headers, forms)
    names = list(dict.fromkeys(secret.name for secret, _ in uses))
    return Placed(target, headers, names, Scrubber(forms))


def _replace(
    secret: Granted, target: bytes, headers: Headers, forms: dict[bytes, bytes]
) -> tuple[bytes, Headers]:
    """Placeholders in the query and in headers, also inside basic credentials."""
    stand_in, value = placeholder(secret.name).encode(), secret.value.encode()
    # One secret's name may begin another's.
    pattern = re.compile(re.escape(stand_in) + rb"(?![A-Za-z0-9_-])")
    for form in _forms(value):
        forms[form] = stand_in
    path, mark, query = target.partition(b"?")
    escaped = quote(value, safe="").encode()
    target = path + mark + pattern.sub(lambda _: escaped, query)
    found: Headers = []
    for key, said in headers:
        if key.lower() in (b"authorization", b"proxy-authorization") and said[:6].lower() == _BASIC:
            said = _replace_basic(said, pattern, value, forms)
        found.append((key, pattern.sub(lambda _: value, said)))
    return target, found


def _replace_basic(
    said: bytes, pattern: re.Pattern[bytes], value: bytes, forms: dict[bytes, bytes]
) -> bytes:
    try:
        pair = base64.b64decode(said[6:].strip(), validate=True)
    except ValueError:
        return said
    filled = pattern.sub(lambda _: value, pair)
    if filled == pair:
        return said
    encoded = base64.b64encode(filled)
    forms[encoded] = base64.b64encode(pair)
    return said[:6] + encoded


def _inject(
    secret: Granted, use: SecretUse, target: bytes, headers: Headers, forms: dict[bytes, bytes]
) -> tuple[bytes, Headers]:
    value = secret.value.encode()
    if use.place is SecretPlace.QUERY:
        return _set_query(target, use.name, value), headers
    if use.place is SecretPlace.BASIC:
        name, pair = b"Authorization", use.name.encode() + b":" + value
        encoded = base64.b64encode(pair)
        forms[encoded] = placeholder(secret.name).encode()
        text = b"Basic " + encoded
    else:
        name, text = use.name.encode(), value
        if use.place is SecretPlace.TEMPLATE or name.lower() == b"authorization":
            text = use.template.encode().replace(b"{secret}", value)
    kept = [(key, said) for key, said in headers if key.lower() != name.lower()]
    return target, [*kept, (name, text)]


def _set_query(target: bytes, name: str, value: bytes) -> bytes:
    path, _, query = target.partition(b"?")
    key = quote(name, safe="").encode()
    kept = [part for part in query.split(b"&") if part and part.partition(b"=")[0] != key]
    kept.append(key + b"=" + quote(value, safe="").encode())
    return path + b"?" + b"&".join(kept)


def _forms(value: bytes) -> Iterable[bytes]:
    """How a server that repeats what it was sent may write a value."""
    text = value.decode()
    return {
        value,
        quote(text, safe="").encode(),
        quote(text).encode(),
        quote_plus(text).encode(),
        re.sub(rb"%[0-9A-F]{2}", lambda found: found[0].lower(), quote(text, safe="").encode()),
        json.dumps(text)[1:-1].encode(),
        json.dumps(text, ensure_ascii=False)[1:-1].encode(),
        json.dumps(text)[1:-1].replace("/", "\\/").encode(),
        re.sub(r"[&<>]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text)[1:-1]).encode(),
        html.escape(text).encode(),
        html.escape(text, quote=False).encode(),
        base64.b64encode(value),
        base64.urlsafe_b64encode(value),
        *_inside_base64(value),
    }


def _inside_base64(value: bytes) -> Iterable[bytes]:
    """What of base64 stems from a value alone when other bytes are before and after it, as in the
    encoding of a whole header."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + value)
        alone = encoded[(before * 8 + 5) // 6 : (before + len(value)) * 8 // 6]
        # Less of it is found by chance.
        if len(alone) >= _SHORTEST_BASE64:
            yield alone
            yield alone.translate(_URL_SAFE)


class Scrubber:
    """Puts placeholders in place of values."""

    def __init__(self, forms: dict[bytes, bytes]) -> None:
        self._forms = {form: stand_in for form, stand_in in forms.items() if form}
        longest_first = sorted(self._forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(form) for form in longest_first))
        self._held = b""
        self._unsent = 0

    def whole(self, data: bytes) -> bytes:
        """A piece that stands for itself: a header, say."""
        return self._pattern.sub(lambda found: self._forms[found[0]], data)

    def feed(self, data: bytes) -> bytes:
        """The next piece of a body. What may be the beginning of a value is held back."""
        data = self._held + data
        done: list[bytes] = []
        at = 0
        for found in self._pattern.finditer(data):
            done.append(data[at : found.start()])
            done.append(self._forms[found[0]])
            at = found.end()
        rest = data[at:]
        keep = self._beginning(rest)
        done.append(rest[: len(rest) - keep])
        self._held = rest[len(rest) - keep :] if keep else b""
        return b"".join(done)

    def last(self) -> bytes:
        """What was held back, at the end."""
        held, self._held = self._held, b""
        return held

    def passable(self, data: bytes) -> bytes | None:
        """What of a stream that cannot be changed may go on, this piece being its next; None once
        a value is in it. Of one that has only begun no more goes on than its first few bytes:
        to hold back those too would hold up messages that merely end like one begins."""
        context = self._held + data
        if self._pattern.search(context):
            return None
        waiting = context[len(self._held) - self._unsent :]
        self._unsent = min(self._beginning(context, least=_TOLD_AT_MOST + 1), len(waiting))
        longest = max(map(len, self._forms), default=1)
        self._held = context[-(longest - 1) :] if longest > 1 else b""
        return waiting[: len(waiting) - self._unsent]

    def passable_rest(self) -> bytes:
        """What was held back of such a stream, at its end."""
        unsent, self._unsent = self._unsent, 0
        return self._held[len(self._held) - unsent :]

    def named_in(self, name: bytes) -> bool:
        """Whether a header's name holds a value; case is lost in names."""
        name = name.lower()
        return any(form.lower() in name for form in self._forms)

    def _beginning(self, data: bytes, least: int = 1) -> int:
        """How many bytes at the end may be the beginning of a value, of which that many (or half
        of it) are to be there."""
        best = 0
        for form in self._forms:
            fewest = max(best + 1, min(least, (len(form) + 1) // 2))
            at = data.find(form[:1], max(0, len(data) - len(form) + 1))
            while 0 <= at <= len(data) - fewest:
                if form.startswith(data[at:]):
                    best = len(data) - at
                    break
                at = data.find(form[:1], at + 1)
        return best
