"""How exposed ports are named from outside, by the server's settings."""

from __future__ import annotations

import pytest

from sojourn.errors import InvalidRequest
from sojourn.gateway.port_requests import Wanted, inside_headers
from sojourn.server.port_settings import PortSettings, Public


@pytest.mark.parametrize(
    ("told", "public", "suffix"),
    [
        ("localhost", Public("localhost"), ":7071"),
        ("box.example", Public("box.example"), ":7071"),
        ("https://box.example", Public("box.example", "https", 443), ""),
        ("https://box.example/", Public("box.example", "https", 443), ""),
        ("https://box.example:8443", Public("box.example", "https", 8443), ":8443"),
        ("http://box.example", Public("box.example", "http", 80), ""),
        ("http://box.example:8080", Public("box.example", "http", 8080), ":8080"),
    ],
)
def test_a_domain_or_what_is_seen_from_outside(told: str, public: Public, suffix: str) -> None:
    found = PortSettings(domain=told).public()
    assert found == public
    assert found.suffix(7071) == suffix


def test_the_usual_port_is_left_out() -> None:
    assert Public("box.example").suffix(80) == ""


@pytest.mark.parametrize(
    "told",
    ["", "box.example:8080", "ftp://box.example", "https://", "https://box.example:0", "a b",
     "https://box.example:x", "https://box.example/path", "*.box.example"],
)  # fmt: skip
def test_what_is_no_domain(told: str) -> None:
    with pytest.raises(InvalidRequest):
        PortSettings(domain=told).public()


def test_a_program_inside_is_told_what_is_spoken_outside() -> None:
    wanted = Wanted("ses_1", 8000, b"/", b"", None, None, None)
    for scheme in (b"http", b"https"):
        sent = inside_headers(wanted, None, [], "1.2.3.4", chunked=False, scheme=scheme)
        assert (b"x-forwarded-proto", scheme) in sent


def test_the_client_of_e2b_asks_where_the_guide_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "E2B's SDK is not installed (make frameworks)"
    config_module = pytest.importorskip("e2b.connection_config", reason=reason)

    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("E2B_DOMAIN", "box.example")
    public = PortSettings(domain="https://box.example").public()
    told = f"{public.domain}{public.suffix(7071)}"  # what the server says the domain is
    config = config_module.ConnectionConfig()
    assert config.api_url == "https://api.box.example"
    for port in (49983, 49999, 8000):
        host = f"{port}-ses-1.box.example"
        assert config.get_host("ses-1", told, port) == host
        assert config.get_sandbox_url("ses-1", told, port) == f"https://{host}"
