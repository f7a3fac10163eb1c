"""The OpenAPI document: complete, and nothing in it that is not served."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sojourn.errors import ErrorBody
from sojourn.server.app import all_endpoints
from sojourn.server.openapi import make_document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(json.loads(msgspec.json.encode(make_document(all_endpoints()))))


def references(value: Any) -> set[str]:
    """All references in a document."""
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*(references(one) for one in value.values()))
    if isinstance(value, list):
        return set().union(*(references(one) for one in value))
    return set()


def test_every_endpoint_is_in_it_and_no_other(document: dict[str, Any]) -> None:
    documented = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert documented == {(one.method, one.path) for one in all_endpoints()}


def test_all_references_lead_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


def test_operations_are_complete(document: dict[str, Any]) -> None:
    names = set()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            where = f"{method} {path}"
            names.add(operation["operationId"])
            assert operation["summary"], where
            declared = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            public = operation.get("security") == []
            assert public == (path == "/v1/health"), where
            assert public or "401" in operation["responses"], where
            errors = [int(status) for status in operation["responses"] if int(status) >= 400]
            for status in errors:
                content = operation["responses"][str(status)]["content"]["application/json"]
                assert content["schema"]["$ref"].endswith("/ErrorBody"), where
                msgspec.convert(content["example"], ErrorBody)
    assert len(names) == len(all_endpoints())


def test_examples_are_valid() -> None:
    for one in all_endpoints():
        if one.example is not None:
            msgspec.convert(one.example, one.body)


def test_verbs_take_an_idempotency_key(document: dict[str, Any]) -> None:
    keyed = {
        path
        for path, item in document["paths"].items()
        for operation in item.values()
        if any(one["name"] == "Idempotency-Key" for one in operation["parameters"])
    }
    verbs = {
        *{"pause", "suspend", "resume", "snapshots", "rollback", "fork", "promote", "template"},
        "migrate",
    }
    assert keyed == {
        "/v1/sessions",
        "/v1/sessions/{ref}",
        *(f"/v1/sessions/{{ref}}/{verb}" for verb in verbs),
    }
