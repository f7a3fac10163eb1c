"""Patterns of addresses, for what is counted by them."""

from __future__ import annotations

from sojourn.server.app import all_endpoints
from sojourn.server.route_patterns import RoutePatterns


def test_every_endpoint_is_found_and_nothing_else() -> None:
    paths = {one.path for one in all_endpoints()}
    patterns = RoutePatterns(paths)
    for path in paths:
        filled = "/".join("x-1" if part.startswith("{") else part for part in path.split("/"))
        assert patterns.find(filled) == path
    for path in (
        "/",
        "/v1",
        "/v1/nothing",
        "/v1/sessions/a/b/c/d/e/f",
        "",
        "/v1/sessions/a/exec/x",
    ):
        assert patterns.find(path) is None


def test_a_word_of_a_pattern_comes_before_a_blank() -> None:
    patterns = RoutePatterns(["/v1/{a}", "/v1/{a}/{b}", "/v1/sessions/{ref}", "/v1/{a}/x"])
    assert patterns.find("/v1/sessions/x") in ("/v1/sessions/{ref}", "/v1/{a}/x")
    assert patterns.find("/v1/other/x") == "/v1/{a}/x"
    assert patterns.find("/v1/other/y") == "/v1/{a}/{b}"
