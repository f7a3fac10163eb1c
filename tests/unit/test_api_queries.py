"""Query strings: exact bytes, and everything doubtful refused by name."""

from __future__ import annotations

from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import InvalidRequest, PathInvalid, all_errors
from sojourn.server.queries import MAX_PATH, Query, check_path, parse_query

DECLARED = {
    "path": Query("path", ""),
    "n": Query("int", "", default=1, low=0, high=10),
    "f": Query("float", ""),
    "b": Query("bool", "", default=False),
    "mode": Query("octal", "", low=0, high=0o7777),
    "s": Query("str", ""),
    "many": Query("str", "", many=True),
}


def test_defaults() -> None:
    assert parse_query(b"", DECLARED) == {
        "path": None,
        "n": 1,
        "f": None,
        "b": False,
        "mode": None,
        "s": None,
        "many": [],
    }


def test_values() -> None:
    found = parse_query(b"n=5&f=1.5&b=TRUE&mode=0644&s=a+b%2Bc&many=x&many=y%3D", DECLARED)
    assert found["n"] == 5 and found["f"] == 1.5 and found["b"] is True
    assert found["mode"] == 0o644 and found["s"] == "a b+c" and found["many"] == ["x", "y="]


@given(st.binary(max_size=100).filter(lambda raw: b"\0" not in raw))
def test_paths_keep_their_bytes(raw: bytes) -> None:
    path = b"/" + raw
    assert parse_query(b"path=" + quote_from_bytes(path).encode(), DECLARED)["path"] == path


@pytest.mark.parametrize(
    "raw",
    [
        b"other=1",
        b"n=1&n=2",
        b"n=x",
        b"n=11",
        b"n=-1",
        b"n=1_0",
        b"n=" + b"1" * 50,
        b"f=nan",
        b"f=inf",
        b"b=maybe",
        b"mode=9",
        b"mode=77777",
        b"s=%ff",
        b"s=%",
        b"s=%4",
        b"s=%zz",
        "n=\u0661".encode(),
    ],
)
def test_doubtful_values_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_query(raw, DECLARED)


def test_a_missing_one_is_named() -> None:
    with pytest.raises(InvalidRequest, match="`path`"):
        parse_query(b"", {"path": Query("path", "", required=True)})


@pytest.mark.parametrize("path", [b"", b"relative", b"/a\0", b"/" + b"x" * MAX_PATH])
def test_impossible_paths(path: bytes) -> None:
    with pytest.raises(PathInvalid):
        check_path(path)


def test_the_server_adds_no_error_classes() -> None:
    """A subclass elsewhere would take its parent's place when an error is read back."""
    import sojourn.server.app  # noqa: F401 - loads every route

    assert {kind.__module__ for kind in all_errors().values()} == {"sojourn.errors"}
