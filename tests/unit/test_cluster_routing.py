"""What a request is about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.server.cluster.routing import Kind, Shared, Style, Wanted, classify

SESSION = "ses_" + "a" * 24
SANDBOX = "ses-" + "a" * 24
BEARER, KEY = b"authorization", b"x-api-key"


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/v1/nodes", Wanted(Kind.OWN, Style.API)),
        ("POST", "/v1/nodes/x/drain", Wanted(Kind.OWN, Style.API)),
        ("GET", "/v1/health", Wanted(Kind.OWN, Style.API)),
        ("POST", "/v1/sessions", Wanted(Kind.PLACE, Style.API, None, BEARER)),
        ("GET", "/v1/sessions", Wanted(Kind.ANY, Style.API, None, BEARER)),
        ("POST", "/v1/import", Wanted(Kind.PLACE, Style.API, None, BEARER)),
        ("GET", "/v1/sessions/web", Wanted(Kind.SESSION, Style.API, "web", BEARER)),
        ("POST", "/v1/sessions/web/exec", Wanted(Kind.SESSION, Style.API, "web", BEARER)),
        ("GET", "/v1/sessions/nodes/files", Wanted(Kind.SESSION, Style.API, "nodes", BEARER)),
        (
            "POST",
            "/v1/sessions/web/template",
            Wanted(Kind.SESSION, Style.API, "web", BEARER, Shared.TEMPLATES),
        ),
        ("GET", "/v1/operations/opr_1", Wanted(Kind.OPERATION, Style.API, "opr_1", BEARER)),
        ("PUT", "/v1/secrets/a", Wanted(Kind.ANY, Style.API, None, BEARER, Shared.SECRETS)),
        ("GET", "/v1/secrets", Wanted(Kind.ANY, Style.API, None, BEARER)),
        ("DELETE", "/v1/tokens/t", Wanted(Kind.ANY, Style.API, None, BEARER, Shared.TOKENS)),
        ("POST", "/v1/tokens", Wanted(Kind.ANY, Style.API, None, BEARER)),
        (
            "POST",
            "/v1/sessions/web/ports",
            Wanted(Kind.SESSION, Style.API, "web", BEARER, Shared.PORTS),
        ),
        ("GET", "/v1/sessions/web/ports", Wanted(Kind.SESSION, Style.API, "web", BEARER)),
        ("POST", "/v1/templates", Wanted(Kind.ANY, Style.API, None, BEARER, Shared.TEMPLATES)),
        ("GET", "/v1/nodesx", Wanted(Kind.ANY, Style.API, None, BEARER)),
        ("POST", "/sandboxes", Wanted(Kind.PLACE, Style.E2B_API, None, KEY)),
        ("POST", "/v2/sandboxes", Wanted(Kind.PLACE, Style.E2B_API, None, KEY)),
        ("GET", "/v2/sandboxes", Wanted(Kind.ANY, Style.E2B_API, None, KEY)),
        ("GET", "/sandboxes/nothing", Wanted(Kind.ANY, Style.E2B_API, None, KEY)),
        (
            "POST",
            f"/sandboxes/{SANDBOX}/pause",
            Wanted(Kind.SESSION, Style.E2B_API, SESSION, KEY),
        ),
        ("GET", "/snapshots", Wanted(Kind.ANY, Style.E2B_API, None, KEY)),
        (
            "DELETE",
            "/templates/x",
            Wanted(Kind.ANY, Style.E2B_API, None, KEY, Shared.TEMPLATES),
        ),
        ("GET", "/files", Wanted(Kind.ANY, Style.E2B_FILES)),
        ("POST", "/process.Process/Start", Wanted(Kind.ANY, Style.E2B_RPC)),
        ("GET", "/", Wanted(Kind.OWN, Style.API)),
        ("POST", "/node/evict", Wanted(Kind.OWN, Style.API)),
        ("POST", f"/node/sessions/{SESSION}/release", Wanted(Kind.OWN, Style.API)),
        ("GET", "/metrics", Wanted(Kind.OWN, Style.API)),
        ("POST", "//node/evict", Wanted(Kind.OWN, Style.API)),
    ],
)
def test_requests(method: str, path: str, wanted: Wanted) -> None:
    assert classify(method, path, {}) == wanted


@pytest.mark.parametrize(
    "headers",
    [
        {b"e2b-sandbox-id": SANDBOX.encode()},
        {b"host": b"49983-" + SANDBOX.encode() + b".localhost:8000"},
        # The header is what counts.
        {
            b"e2b-sandbox-id": SANDBOX.encode(),
            b"host": b"49983-ses-" + b"b" * 24 + b".localhost:8000",
        },
    ],
)
@pytest.mark.parametrize(
    ("path", "style"),
    [
        ("/files", Style.E2B_FILES),
        ("/health", Style.E2B_FILES),
        ("/execute", Style.E2B_FILES),
        ("/contexts/x/restart", Style.E2B_FILES),
        ("/process.Process/Start", Style.E2B_RPC),
        ("/filesystem.Filesystem/Stat", Style.E2B_RPC),
    ],
)
def test_a_sandbox_is_named_by_header_or_host(
    headers: dict[bytes, bytes], path: str, style: Style
) -> None:
    assert classify("POST", path, headers) == Wanted(Kind.SESSION, style, SESSION)


def test_a_host_names_no_session_to_the_api() -> None:
    headers = {b"host": b"1-" + SANDBOX.encode() + b".localhost"}
    assert classify("GET", "/v1/sessions", headers).ref is None
    assert classify("POST", "/sandboxes", headers).ref is None


@given(st.sampled_from(["GET", "POST", "DELETE", "X"]), st.text(), st.binary())
def test_every_request_is_of_a_kind(method: str, path: str, host: bytes) -> None:
    wanted = classify(method, "/" + path, {b"host": host})
    assert wanted.ref is None or wanted.kind in (Kind.SESSION, Kind.OPERATION)
    # What is the API's or the control plane's is never asked of a node without a caller.
    shown = wanted.shows is not None or wanted.kind is Kind.OWN
    assert shown or wanted.style in (Style.E2B_FILES, Style.E2B_RPC)


@given(st.text(), st.dictionaries(st.sampled_from([b"host", b"e2b-sandbox-id"]), st.binary()))
def test_what_nodes_answer_to_servers_is_never_passed_on(
    rest: str, headers: dict[bytes, bytes]
) -> None:
    for path in ("/node", f"/node/{rest}"):
        assert classify("POST", path, headers).kind is Kind.OWN
