"""The unmodified JavaScript SDKs of E2B against a real server: the checks of tests/js/*.mjs."""

from __future__ import annotations

import pytest

from support import javascript
from support.servers import ServerProcess

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(bool(javascript.missing()), reason=javascript.missing() or "is there"),
]


@pytest.fixture(scope="module")
def variables(shared_server: ServerProcess) -> dict[str, str]:
    """What a program that is written for E2B is pointed here with, and another tenant's key."""
    with shared_server.client() as client:
        stranger = str(client.tokens.create("stranger").token)
    return {
        "E2B_API_URL": shared_server.url,
        "E2B_SANDBOX_URL": shared_server.url,
        "E2B_API_KEY": shared_server.token,
        "STRANGER_KEY": stranger,
    }


@pytest.mark.parametrize("theme", ["control", "commands", "files", "code"])
def test_e2b_js(variables: dict[str, str], theme: str) -> None:
    javascript.checked(f"{theme}.mjs", **variables)
