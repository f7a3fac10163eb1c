"""The blocking and the asynchronous client have one surface; the package keeps its promises."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import sojourn
from sojourn import client, errors

PAIRS = [
    ("Sojourn", "AsyncSojourn"),
    ("Sessions", "AsyncSessions"),
    ("Tokens", "AsyncTokens"),
    ("Secrets", "AsyncSecrets"),
    ("Templates", "AsyncTemplates"),
    ("Nodes", "AsyncNodes"),
    ("Session", "AsyncSession"),
    ("Files", "AsyncFiles"),
    ("Process", "AsyncProcess"),
    ("Turn", "AsyncTurn"),
]


def surface(kind: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_twins_are_alike(blocking: str, asynchronous: str) -> None:
    one, other = surface(getattr(client, blocking)), surface(getattr(client, asynchronous))
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, property):
            assert isinstance(other[name], property), name
            continue
        assert shape(value) == shape(other[name]), name
        assert (value.__doc__ is None) == (other[name].__doc__ is None), name


@pytest.mark.parametrize("name", sorted({name for pair in PAIRS for name in pair}))
def test_everything_is_documented_and_typed(name: str) -> None:
    kind = getattr(client, name)
    assert kind.__doc__
    for method, value in surface(kind).items():
        function = value.fget if isinstance(value, property) else value
        assert function.__doc__, f"{name}.{method}"
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, f"{name}.{method}"
        for parameter in list(signature.parameters.values())[1:]:
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}.{method}"


def test_promised_names() -> None:
    promised = {
        "Session": "id state head exec spawn run_code files snapshot history diff rollback fork"
        " promote pause suspend resume delete events verify keep_alive refresh turn",
        "Files": "read write list stat remove move mkdir watch upload download chmod exists",
        "Process": "pid output wait kill write",
        "Sessions": "create get list",
        "ExecResult": "exit_code stdout stderr text ok",
    }
    for kind, names in promised.items():
        for name in names.split():
            found = getattr(client, kind)
            known = hasattr(found, name) or name in inspect.getsource(found)
            assert known, f"{kind}.{name}"


def test_exports() -> None:
    for name in sojourn.__all__:
        assert getattr(sojourn, name) is not None
    kinds = {kind.__name__ for kind in errors.all_errors().values()}
    assert kinds <= set(sojourn.__all__)
    for name in client.__all__:
        assert getattr(client, name) is not None
    with pytest.raises(AttributeError):
        _ = sojourn.nothing


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("sojourn.errors", "httpcore"),
        ("sojourn.client.sync_client", "sojourn.client.async_client"),
        ("sojourn.client.sync_client", "litestar"),
        ("sojourn.cli.main", "httpcore"),
        ("sojourn.cli.session", "httpcore"),
        ("sojourn.server.app", "sojourn.server.e2b.sandboxes"),
    ],
)
def test_imports_stay_cheap(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
