"""What a request to an exposed port asks for, and what goes inside."""

from __future__ import annotations

import hashlib

import pytest

from sojourn.gateway import port_requests as requests

SESSION = "ses_0123456789abcdefghjkmnpq"
LABEL = "8000-ses-0123456789abcdefghjkmnpq"
TOKEN = b"the-token"
DIGEST = hashlib.sha256(TOKEN).digest()


def read(target: bytes, *headers: tuple[bytes, bytes]) -> requests.Wanted | None:
    return requests.read_request(target, list(headers), "localhost")


def by_host(host: str, target: bytes = b"/") -> requests.Wanted | None:
    return read(target, (b"host", host.encode("latin-1")))


def test_names_and_paths_agree_with_the_addresses_that_are_told() -> None:
    assert requests.host_label(SESSION, 8000) == LABEL
    named = by_host(f"{requests.host_label(SESSION, 8000)}.localhost:9999", b"/a?b")
    assert named is not None
    assert (named.session, named.port, named.target, named.prefix) == (SESSION, 8000, b"/a?b", b"")
    target = f"{requests.path_prefix(SESSION, 8000)}/a/b?c=1".encode()
    pathed = read(target, (b"host", b"127.0.0.1:1"))
    assert pathed is not None
    assert (pathed.session, pathed.port, pathed.target) == (SESSION, 8000, b"/a/b?c=1")
    assert pathed.prefix == requests.path_prefix(SESSION, 8000).encode()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        f"{LABEL}.localhost.evil.example",
        f"{LABEL}.evil.example",
        f"x.{LABEL}.localhost",
        f"{LABEL}localhost",
        f"0{LABEL}.localhost",
        f"-{LABEL}.localhost",
        f"99999-ses-{SESSION[4:]}.localhost",
        f"8000-ses-{SESSION[4:-1]}.localhost",
        f"8000-snp-{SESSION[4:]}.localhost",
        f"{LABEL}.localhost@evil",
        f"{LABEL}.localhost\0",
        "",
    ],
)
def test_other_hosts_name_nothing(host: str) -> None:
    assert by_host(host) is None


@pytest.mark.parametrize("host", [f"{LABEL.upper()}.LOCALHOST", f"{LABEL}.localhost.:80"])
def test_spellings_of_a_host_name_the_same(host: str) -> None:
    found = by_host(host)
    assert found is not None and found.session == SESSION


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"*",
        b"http://127.0.0.1/s/" + SESSION.encode() + b"/8000/",
        b"/s/" + SESSION.encode() + b"/0/",
        b"/s/" + SESSION.encode() + b"/70000/",
        b"/s/" + SESSION.encode() + b"/8000x/",
        b"/s/" + SESSION.encode().upper() + b"/8000/",
        b"/s/" + SESSION.encode()[:-1] + b"/8000/",
        b"/s/../s/" + SESSION.encode() + b"/8000/",
        b"//s/" + SESSION.encode() + b"/8000/",
    ],
)
def test_other_paths_name_nothing(target: bytes) -> None:
    assert read(target, (b"host", b"127.0.0.1")) is None


def test_two_hosts_name_nothing() -> None:
    host = f"{LABEL}.localhost".encode()
    assert read(b"/", (b"host", host), (b"host", host)) is None


@pytest.mark.parametrize(
    ("target", "without", "token"),
    [
        (b"/a", b"/a", None),
        (b"/a?", b"/a?", None),
        (b"/a?b=1&&c", b"/a?b=1&&c", None),
        (b"/a?sojourn_token=t", b"/a", b"t"),
        (b"/a?b=1&sojourn_token=t&c=2", b"/a?b=1&c=2", b"t"),
        (b"/a?sojourn_token=t&sojourn_token=u", b"/a", b"t"),
        (b"/a?sojourn_tokens=t", b"/a?sojourn_tokens=t", None),
        (b"/a?x=sojourn_token=t", b"/a?x=sojourn_token=t", None),
    ],
)
def test_the_token_leaves_the_query(target: bytes, without: bytes, token: bytes | None) -> None:
    assert requests.without_token(target) == (without, token)


def opened(method: bytes, *headers: tuple[bytes, bytes], target: bytes = b"/") -> str | None:
    every = [(b"host", f"{LABEL}.localhost:1".encode()), *headers]
    wanted = read(target, *every)
    assert wanted is not None
    return requests.opened_by(wanted, DIGEST, method, every)


COOKIE = (b"cookie", b"a=b; sojourn_token=the-token")


def test_each_way_to_show_a_token() -> None:
    assert opened(b"GET", (b"authorization", b"Bearer the-token")) == "bearer"
    assert opened(b"GET", target=b"/?sojourn_token=the-token") == "query"
    assert opened(b"GET", COOKIE) == "cookie"
    assert opened(b"GET") is None
    assert opened(b"GET", (b"authorization", b"Bearer other")) is None
    assert opened(b"GET", (b"authorization", b"Basic the-token")) is None
    assert opened(b"GET", target=b"/?sojourn_token=") is None


def test_an_empty_token_never_fits() -> None:
    assert not requests.token_fits(None, hashlib.sha256(b"").digest())
    assert not requests.token_fits(b"the-token ", DIGEST)


@pytest.mark.parametrize(
    ("method", "headers", "works"),
    [
        (b"POST", [(b"origin", f"http://{LABEL}.localhost:1".encode())], True),
        (b"POST", [(b"origin", b"http://8000-ses-other.localhost:1")], False),
        (b"POST", [(b"origin", b"null")], False),
        (b"POST", [], False),
        (b"GET", [(b"origin", b"http://evil.example")], False),
        (b"GET", [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"cors")], False),
        (b"GET", [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate")], True),
        (b"POST", [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], False),
        (b"GET", [(b"sec-fetch-site", b"same-origin")], True),
    ],
)
def test_a_cookie_counts_only_from_the_ports_own_pages(
    method: bytes, headers: list[tuple[bytes, bytes]], works: bool
) -> None:
    assert (opened(method, COOKIE, *headers) == "cookie") is works


def test_by_path_no_cookie_opens_anything() -> None:
    every = [(b"host", b"127.0.0.1"), COOKIE]
    wanted = read(f"{requests.path_prefix(SESSION, 8000)}/".encode(), *every)
    assert wanted is not None
    assert requests.opened_by(wanted, DIGEST, b"GET", every) is None


def inside(
    *headers: tuple[bytes, bytes], way: str = "bearer", target: bytes = b"/", chunked: bool = False
) -> requests.Headers:
    every = [(b"host", f"{LABEL}.localhost:1".encode()), *headers]
    wanted = read(target, *every)
    assert wanted is not None
    return requests.inside_headers(wanted, way, every, "203.0.113.9", chunked=chunked)


def test_no_token_of_ours_goes_inside() -> None:
    sent = inside(
        (b"authorization", b"Bearer the-token"), COOKIE, (b"cookie", b"sojourn_token=x; c=d")
    )
    assert b"the-token" not in b"".join(value for _, value in sent)
    assert requests.value_of(sent, b"cookie") == b"a=b; c=d"
    assert requests.value_of(sent, b"authorization") is None


def test_the_token_of_the_page_that_asks_does_not_go_inside() -> None:
    sent = inside((b"referer", b"http://a.localhost/s/x?a=1&sojourn_token=the-token&b=2"))
    assert requests.value_of(sent, b"referer") == b"http://a.localhost/s/x?a=1&b=2"


def test_what_the_program_asked_for_goes_inside() -> None:
    sent = inside((b"authorization", b"Basic abc"), (b"x-own", b"1"), way="cookie")
    assert requests.value_of(sent, b"authorization") == b"Basic abc"
    assert requests.value_of(sent, b"x-own") == b"1"
    assert requests.value_of(sent, b"host") == f"{LABEL}.localhost:1".encode()


def test_hop_by_hop_headers_stay_outside() -> None:
    sent = inside(
        (b"connection", b"close, X-Hop, content-length"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"1"),
        (b"proxy-authorization", b"Basic x"),
        (b"te", b"trailers"),
        (b"content-length", b"3"),
        (b"upgrade", b"h2c"),
    )
    names = {name for name, _ in sent}
    assert not names & {b"x-hop", b"keep-alive", b"proxy-authorization", b"te", b"upgrade"}
    assert requests.value_of(sent, b"content-length") == b"3"


def test_a_body_has_one_length() -> None:
    sent = inside((b"content-length", b"3"), (b"transfer-encoding", b"chunked"), chunked=True)
    assert requests.value_of(sent, b"content-length") is None
    assert requests.value_of(sent, b"transfer-encoding") == b"chunked"


def test_an_upgrade_is_passed_on() -> None:
    sent = inside((b"connection", b"keep-alive, Upgrade"), (b"upgrade", b"websocket"))
    assert requests.value_of(sent, b"connection") == b"upgrade"
    assert requests.value_of(sent, b"upgrade") == b"websocket"


def test_who_sent_it_is_said_by_the_gateway_alone() -> None:
    sent = inside((b"x-forwarded-for", b"10.0.0.1"), (b"forwarded", b"for=1"), (b"x-real-ip", b"1"))
    assert [value for name, value in sent if name == b"x-forwarded-for"] == [b"203.0.113.9"]
    assert requests.value_of(sent, b"forwarded") is None
    assert requests.value_of(sent, b"x-real-ip") is None
    assert requests.value_of(sent, b"x-forwarded-host") == f"{LABEL}.localhost:1".encode()


def test_cookies_of_an_answer_stay_with_their_host() -> None:
    wanted = by_host(f"{LABEL}.localhost")
    assert wanted is not None
    sent = requests.outside_headers(
        wanted,
        [
            (b"set-cookie", b"a=b; Domain=localhost; Path=/; HttpOnly"),
            (b"set-cookie", b"sojourn_token=stolen"),
            (b"connection", b"close"),
            (b"transfer-encoding", b"chunked"),
            (b"x-own", b"1"),
        ],
    )
    assert sent == [(b"set-cookie", b"a=b; Path=/; HttpOnly"), (b"x-own", b"1")]


def test_pages_by_path_have_an_origin_of_their_own() -> None:
    wanted = read(f"{requests.path_prefix(SESSION, 8000)}/".encode(), (b"host", b"127.0.0.1"))
    assert wanted is not None
    policy = dict(requests.outside_headers(wanted, []))[b"content-security-policy"]
    assert policy.startswith(b"sandbox ") and b"allow-same-origin" not in policy
