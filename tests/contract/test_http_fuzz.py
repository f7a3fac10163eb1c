"""Arbitrary bodies and queries: always a proper answer, never a failure inside."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.server.app import all_endpoints
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]

TAKING_JSON = [
    one for one in all_endpoints() if one.body is not None and not isinstance(one.body, str)
]
FIELDS = sorted({field for one in TAKING_JSON for field in one.body.__struct_fields__})

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=8,
)
json_bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5).map(
    lambda value: json.dumps(value).encode("utf-8", "surrogatepass")
)
relaxed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def line(rig: HttpRig) -> Iterator[http.client.HTTPConnection]:
    """A kept connection."""
    connection = http.client.HTTPConnection("127.0.0.1", int(rig.url.rpartition(":")[2]))
    yield connection
    connection.close()


def ask(
    line: http.client.HTTPConnection, method: str, target: str, body: bytes
) -> tuple[int, bytes]:
    line.request(method, target, body, {"authorization": "Bearer token-a"})
    answer = line.getresponse()
    return answer.status, answer.read()


def check(status: int, raw: bytes) -> None:
    assert status < 500, raw
    if status >= 400:
        assert set(json.loads(raw)) == {"code", "message", "next_step", "details"}


@relaxed
@given(one=st.sampled_from(TAKING_JSON), body=json_bodies | st.binary(max_size=100))
def test_bodies(line: http.client.HTTPConnection, one: Any, body: bytes) -> None:
    path = one.path.replace("{ref}", "none").replace("{process}", "1").replace("{port}", "1")
    check(*ask(line, one.method, path + ("?wait=0" if "wait" in one.query else ""), body))


@relaxed
@given(
    one=st.sampled_from(all_endpoints()),
    names=st.lists(st.text(max_size=10) | st.sampled_from(["wait", "path", "limit"]), max_size=3),
    values=st.lists(st.binary(max_size=20), min_size=3, max_size=3),
)
def test_queries(
    line: http.client.HTTPConnection, one: Any, names: list[str], values: list[bytes]
) -> None:
    from urllib.parse import quote, quote_from_bytes

    path = one.path.replace("{process}", "1").replace("{port}", "1")
    for name in ("ref", "operation", "snapshot", "turn", "token", "template"):
        path = path.replace(f"{{{name}}}", quote(values[0].decode("latin-1"), safe="") or "x")
    query = "&".join(
        f"{quote(name, errors='replace')}={quote_from_bytes(value)}"
        for name, value in zip(names, values, strict=False)
    )
    check(*ask(line, one.method, f"{path}?{query}", b""))
