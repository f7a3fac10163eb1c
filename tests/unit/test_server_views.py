"""What the server says of places and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.server.views import lies_in


def test_a_store_in_the_data_directory_is_known_by_path_and_url(tmp_path: Path) -> None:
    data = tmp_path / "the data"
    (data / "objects").mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    assert lies_in((data / "objects").as_uri(), data)
    assert lies_in(str(data / "objects"), data)
    assert lies_in(str(tmp_path / "link" / "objects"), data)
    assert lies_in((data / "objects").as_uri(), tmp_path / "link")


@pytest.mark.parametrize("url", [None, "memory:", "s3://bucket/data"])
def test_what_is_no_directory_lies_elsewhere(url: str | None, tmp_path: Path) -> None:
    assert not lies_in(url, tmp_path)


def test_a_store_beside_the_data_directory_lies_elsewhere(tmp_path: Path) -> None:
    assert not lies_in((tmp_path / "data-objects").as_uri(), tmp_path / "data")
    assert not lies_in(str(tmp_path), tmp_path / "data")
