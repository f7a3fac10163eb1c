"""Archives over HTTP: both clients, whole files, typed refusals."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path

import pytest

from sojourn import AsyncSojourn, Sojourn
from sojourn.errors import (
    ArchiveInvalid,
    FileConflict,
    Interrupted,
    InvalidRequest,
    NameTaken,
    SessionNotFound,
    SnapshotNotFound,
    StorageFull,
    StoreKeyInvalid,
)
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


@pytest.fixture
def client(rig: HttpRig):  # type: ignore[no-untyped-def]
    with Sojourn(rig.url, "token-a") as found:
        yield found
        for session in found.sessions.list():
            session.delete()


def test_out_and_in_by_path(client: Sojourn, rig: HttpRig, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    place.write_bytes(b"old")
    seen: list[tuple[int, int | None]] = []
    session = client.sessions.create(name="box")
    told = session.export(place, on_progress=lambda done, total: seen.append((done, total)))
    assert place.stat().st_size == told.bytes and place.stat().st_mode & 0o777 == 0o600
    assert seen[-1] == (told.bytes, told.bytes) and len(seen) > 1
    assert [one.name for one in tmp_path.iterdir()] == ["archive"]
    assert rig.service.archives[-1].closed
    sent: list[tuple[int, int | None]] = []
    made = client.sessions.import_(
        place, "other", told.digest, on_progress=lambda done, total: sent.append((done, total))
    )
    assert (made.name, made.state) == ("other", "suspended")
    assert sent[-1] == (told.bytes, told.bytes)
    assert client.sessions.import_(str(place), name="third").name == "third"


def test_out_and_in_by_streams_and_with_a_key(client: Sojourn) -> None:
    session = client.sessions.create(name="box")
    out = io.BytesIO()
    session.export(out, key=b"\x00\xff")
    data = out.getvalue()
    for source in (data, io.BytesIO(data), (data[at : at + 99999] for at in (0,)), [data]):
        if isinstance(source, bytes | list | io.BytesIO):
            client.sessions.import_(source, name="new", key=b"\x00\xff").delete()
    with pytest.raises(StoreKeyInvalid):
        client.sessions.import_(data, name="new")
    with pytest.raises(NameTaken):
        client.sessions.import_(data, key=b"\x00\xff")


def test_the_asynchronous_client(client: Sojourn, rig: HttpRig, tmp_path: Path) -> None:
    client.sessions.create(name="box")

    async def work() -> None:
        other = AsyncSojourn(rig.url, "token-a")
        try:
            session = await other.sessions.get("box")
            told = await session.export(tmp_path / "archive", key="secret")
            data = (tmp_path / "archive").read_bytes()
            assert len(data) == told.bytes

            async def pieces():  # type: ignore[no-untyped-def]
                yield data[:1000]
                yield data[1000:]

            for number, source in enumerate((tmp_path / "archive", data, pieces())):
                made = await other.sessions.import_(source, f"n{number}", told.digest, key="secret")
                assert made.name == f"n{number}"
        finally:
            await other.close()

    asyncio.run(work())


def test_what_is_cut_off_leaves_no_file(client: Sojourn, rig: HttpRig, tmp_path: Path) -> None:
    session = client.sessions.create()
    export = rig.service.export

    async def broken(*arguments):  # type: ignore[no-untyped-def]
        archive = await export(*arguments)
        archive.cut = True
        return archive

    rig.service.export = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(Interrupted):
            session.export(tmp_path / "archive")
    finally:
        rig.service.export = export  # type: ignore[method-assign]
    assert list(tmp_path.iterdir()) == []
    assert rig.service.archives[-1].closed


def test_what_was_damaged_on_its_way_is_not_kept(
    client: Sojourn, rig: HttpRig, tmp_path: Path
) -> None:
    session = client.sessions.create()
    export = rig.service.export

    async def other(*arguments):  # type: ignore[no-untyped-def]
        archive = await export(*arguments)
        archive._data = b"x" + archive._data[1:]
        return archive

    rig.service.export = other  # type: ignore[method-assign]
    try:
        with pytest.raises(ArchiveInvalid):
            session.export(tmp_path / "archive")
    finally:
        rig.service.export = export  # type: ignore[method-assign]
    assert list(tmp_path.iterdir()) == []


def test_refusals(client: Sojourn, rig: HttpRig, tmp_path: Path) -> None:
    session = client.sessions.create()
    with pytest.raises(SnapshotNotFound):
        session.export(tmp_path / "archive", "nowhere")
    rig.service.fail_next("export", StorageFull("no room"))
    with pytest.raises(StorageFull):
        session.export(tmp_path / "archive")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileConflict):
        session.export(tmp_path / "no" / "archive")
    with pytest.raises(FileConflict):
        client.sessions.import_(tmp_path / "nothing")
    for content in (b"", b"no archive", os.urandom(3 << 20)):
        with pytest.raises(ArchiveInvalid):
            client.sessions.import_(content)
    rig.service.fail_next("import", StorageFull("no room"))
    with pytest.raises(StorageFull):
        client.sessions.import_(bytes(3 << 20))


def test_as_plain_requests(client: Sojourn, rig: HttpRig) -> None:
    session = client.sessions.create(name="plain")
    status, headers, body = rig.raw("GET", f"/v1/sessions/{session.id}/export")
    assert status == 200 and headers["content-type"] == "application/vnd.sojourn.archive"
    told = json.loads(headers["sojourn-archive"])
    assert told["bytes"] == len(body) and told["digest"] == body[-32:].hex()
    status, _, answer = rig.raw("POST", f"/v1/import?name=p2&expect={told['digest']}", body)
    assert status == 201 and json.loads(answer)["name"] == "p2"
    status, _, answer = rig.raw("POST", "/v1/import", body, sojourn_archive_key="no base64!")
    assert status == 400 and json.loads(answer)["code"] == InvalidRequest.code
    status, _, answer = rig.raw("GET", f"/v1/sessions/{session.id}/export", token="token-b")
    assert status == 404 and json.loads(answer)["code"] == SessionNotFound.code
    assert rig.raw("POST", "/v1/import", body, token=None)[0] == 401
    assert rig.raw("GET", f"/v1/sessions/{session.id}/export", token=None)[0] == 401
