"""What a server says of itself when it starts: one line in its log, and whether its object store
would be lost together with its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import InvalidRequest
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged


def announced(server: ServerProcess) -> str:
    (line,) = [line for line in server.log().splitlines() if "object store: " in line]
    return line


def test_a_store_in_the_data_directory_is_told(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", store="", whole=True)
    objects = server.start().status().objects
    try:
        assert objects is not None and objects.in_data
        url = (tmp_path / "data" / "objects").as_uri()
        assert announced(server).endswith(
            f"data in {tmp_path / 'data'}, object store: {url} (not encrypted)"
        )
    finally:
        server.remove()


def test_an_encrypted_store_elsewhere_is_told(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", store=(tmp_path / "objects").as_uri(), whole=True)
    secret = {"SOJOURN_STORE_KEY": "a secret of this test alone"}
    objects = server.start(**secret).status().objects
    try:
        assert objects is not None and not objects.in_data
        assert announced(server).endswith(f"{server.store} (encrypted)")
        assert secret["SOJOURN_STORE_KEY"] not in server.log()
    finally:
        server.remove(**secret)


def test_a_credential_in_the_url_is_not_repeated(tmp_path: Path) -> None:
    server = ServerProcess(
        tmp_path / "data", store="s3://someone:very-secret@bucket/prefix", whole=True
    )
    with pytest.raises(RuntimeError, match=InvalidRequest.code):
        server.start()
    assert "very-secret" not in server.log()
