"""Opening a store that is to be there already: nothing is made where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import InvalidRequest, StoreUnreachable
from sojourn.repository.backends.directories import LOCK, STAGING
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.repository import Repository
from sojourn.repository.worker import Start, _Worker


@pytest.mark.parametrize("form", ["path", "url"])
@pytest.mark.parametrize("left", ["nothing", "directory", "other files"])
def test_nothing_is_made_by_opening_what_is_not_there(tmp_path: Path, left: str, form: str) -> None:
    place = tmp_path / "mounts" / "store"
    if left != "nothing":
        place.mkdir(parents=True)
    if left == "other files":
        (place / "config").write_bytes(b"of someone else")
    before = sorted(tmp_path.rglob("*"))
    url = str(place) if form == "path" else place.as_uri()
    worker = _Worker(Start(url, str(tmp_path / "node"), "00", bytes(32), False))
    for opening in (
        lambda: open_backend(url, create=False),
        lambda: Repository.open(url),
        worker._opened,
    ):
        with pytest.raises(StoreUnreachable) as told:
            opening()
        assert str(place) in told.value.message and "mounted" in told.value.message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_is_there_is_opened_and_cleared_of_what_crashed_writers_left(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    open_backend(str(place)).put("a/key", b"content")
    (place / STAGING / "left").write_bytes(b"half")
    assert open_backend(str(place), create=False).get("a/key")[0] == b"content"
    assert list((place / STAGING).iterdir()) == []
    (place / STAGING).rmdir()  # a copy without empty directories
    backend = open_backend(str(place), create=False)
    assert not (place / STAGING).exists()
    backend.put("a/other", b"more")
    assert [one.key for one in backend.list("")] == ["a/key", "a/other"]
    (place / LOCK).unlink()
    with pytest.raises(StoreUnreachable):
        open_backend(str(place), create=False)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest):
        open_backend(str(tmp_path / "file"), create=False)
    with pytest.raises(StoreUnreachable):
        open_backend(str(tmp_path / "file" / "below"), create=False)
