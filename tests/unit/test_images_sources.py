"""Images on their way to the server: from layouts, files and registries, proven while they are
sent; logins go where they belong and nowhere else."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import ImageInvalid, InvalidRequest, RegistryRefused, SojournError
from sojourn.images import registry as registry_module
from sojourn.images.archives import Image, open_archive
from sojourn.images.credentials import Login, find_login
from sojourn.images.documents import Platform, fits, host_platform
from sojourn.images.references import is_loopback, parse_reference
from sojourn.images.sources import open_source
from support.images import MadeImage, layer, member
from support.registry import LOGIN, Registry


@pytest.fixture(scope="module")
def running() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.stop()


@pytest.fixture
def registry(running: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(registry_module, "_PAUSE", 0.01)
    running.requests.clear()
    running.login = running.redirect = running.cut_after = None
    running.cuts = running.busy = 0
    running.corrupt, running.ranges, running.garbled = False, True, None
    return running


def log_in(tmp_path: Path, host: str) -> None:
    place = tmp_path / "docker"
    place.mkdir()
    auth = base64.b64encode(":".join(LOGIN).encode()).decode()
    (place / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def image() -> MadeImage:
    return MadeImage(
        [layer([member("a", b"a" * 100_000)]), layer([member("b", os.urandom(300_000))])]
    )


def sent(source: str, tag: str | None = None, platform: str | None = None) -> Image:
    """What the server makes of what is sent."""
    with open(os.memfd_create("sent"), "w+b", buffering=0) as file:  # noqa: PTH123
        with open_source(source, platform=platform) as sending:
            total = 0
            for piece in sending.pieces:
                total += len(piece)
                file.write(piece)
            assert sending.size == total
        found = open_archive(file, tag or sending.tag, host_platform())
        for one in found.layers:
            assert b"".join(one.tar())
        return found


def test_a_layout_and_files_are_sent_whole(tmp_path: Path) -> None:
    made = image()
    layout = made.layout(tmp_path / "lay:out", "v1")
    assert sent(f"oci:{layout}").digest == made.top["digest"]
    assert sent(f"oci:{layout}:v1").digest == made.top["digest"]
    with pytest.raises(ImageInvalid, match="v2"):
        sent(f"oci:{layout}:v2")
    (tmp_path / "archive.tar").write_bytes(made.archive())
    assert sent(f"oci-archive:{tmp_path / 'archive.tar'}").digest == made.top["digest"]
    saved = made.saved(tmp_path / "saved.tar", "name:v1", "name:v2")
    assert sent(f"docker-archive:{saved}").digest is None
    assert len(sent(f"docker-archive:{saved}:v2").layers) == 2
    with pytest.raises(ImageInvalid, match="no image"):
        sent(f"docker-archive:{saved}:v3")
    blob = layout / "blobs/sha256" / made.manifest["layers"][1]["digest"].partition(":")[2]
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(ImageInvalid, match="damaged"):
        sent(f"oci:{layout}")
    blob.unlink()
    with pytest.raises(ImageInvalid):
        sent(f"oci:{layout}")
    for missing in (f"oci:{tmp_path}/none", "oci:", f"docker-archive:{tmp_path}/none"):
        with pytest.raises(InvalidRequest):
            sent(missing)


def test_a_registry_gives_by_tag_and_by_digest(registry: Registry) -> None:
    made = image()
    digest = registry.push(made, "team/app", "v1")
    assert sent(f"{registry.host}/team/app:v1").digest == digest
    assert sent(f"{registry.host}/team/app@{digest}").digest == digest
    with pytest.raises(RegistryRefused, match="has no v2"):
        sent(f"{registry.host}/team/app:v2")
    other = image()
    registry.manifests["team/app", digest] = (other.blobs[other.top["digest"]], "")
    with pytest.raises(RegistryRefused, match="another manifest"):
        sent(f"{registry.host}/team/app@{digest}")


def test_of_several_machines_that_of_this_one_is_taken(registry: Registry) -> None:
    mine, other = image(), MadeImage([layer([member("x", b"x")])], architecture="s390x")
    registry.push_index([other, mine], "many", "latest")
    assert sent(f"{registry.host}/many").digest == mine.top["digest"]
    registry.push_index([other], "foreign", "latest")
    with pytest.raises(ImageInvalid, match="s390x"):
        sent(f"{registry.host}/foreign")
    with open_source(f"{registry.host}/foreign", platform="linux/s390x") as sending:
        assert sum(map(len, sending.pieces)) == sending.size


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_a_login_is_used_and_goes_nowhere_else(
    registry: Registry, tmp_path: Path, kind: str
) -> None:
    digest = registry.push(image(), "private", "v1")
    registry.login = kind
    with pytest.raises(RegistryRefused) as refused:
        sent(f"{registry.host}/private:v1")
    assert "log in" in (refused.value.next_step or "").lower()
    log_in(tmp_path, registry.host)
    registry.redirect = "self"  # of another host it would be the same: see below
    elsewhere = Registry()
    try:
        elsewhere.blobs = registry.blobs
        registry.redirect = f"http://{elsewhere.host}/elsewhere/"
        assert sent(f"{registry.host}/private:v1").digest == digest
        assert elsewhere.requests
        assert not any("authorization" in headers for _, headers in elsewhere.requests)
    finally:
        elsewhere.stop()
    registry.login = "bearer"
    registry.manifests.pop(("private", "v1"))
    with pytest.raises(RegistryRefused) as missing:
        sent(f"{registry.host}/private:v1")
    assert LOGIN[1] not in repr(missing.value) + str(missing.value) + str(missing.value.details)
    assert LOGIN[1] not in repr(Login(*LOGIN))


def test_an_identity_token_is_renewed(registry: Registry, tmp_path: Path) -> None:
    digest = registry.push(image(), "private", "v2")
    registry.login = "bearer"
    place = tmp_path / "docker"
    place.mkdir()
    auths = {registry.host: {"auth": "", "identitytoken": "identity"}}
    (place / "config.json").write_text(json.dumps({"auths": auths}))
    assert sent(f"{registry.host}/private:v2").digest == digest


def test_a_download_goes_on_where_it_broke_off(registry: Registry) -> None:
    made = image()
    digest = registry.push(made, "flaky", "v1")
    registry.cut_after, registry.cuts = 60_000, 3
    assert sent(f"{registry.host}/flaky:v1").digest == digest
    asked = [headers["range"] for path, headers in registry.requests if "range" in headers]
    assert asked == ["bytes=60000-", "bytes=120000-", "bytes=180000-"]
    registry.cuts, registry.ranges = 2, False
    assert sent(f"{registry.host}/flaky:v1").digest == digest
    registry.cut_after, registry.busy = None, 3
    assert sent(f"{registry.host}/flaky:v1").digest == digest


def test_what_stays_broken_is_told(registry: Registry) -> None:
    registry.push(image(), "broken", "v1")
    registry.cut_after, registry.cuts = 0, 1000
    with pytest.raises(SojournError):
        sent(f"{registry.host}/broken:v1")
    registry.cut_after = None
    registry.corrupt = True
    with pytest.raises(ImageInvalid, match="damaged"):
        sent(f"{registry.host}/broken:v1")
    registry.corrupt = False
    registry.redirect = "ftp://elsewhere/"
    with pytest.raises(RegistryRefused, match="TLS"):
        sent(f"{registry.host}/broken:v1")


@pytest.mark.parametrize(
    ("status", "header", "value"),
    [
        *(
            (302, "Location", where)
            for where in (
                *(
                    "",
                    "http://[bad",
                    "http://127.0.0.1:999999/",
                    "http://127.0.0.1:abc/",
                    "http://",
                ),
                *(
                    "file:///etc/passwd",
                    "http://u:p@127.0.0.1:1/",
                    "http://\xfc\xfc/",
                    "http://a b/",
                ),
            )
        ),
        *((503, "Retry-After", after) for after in ("\xb2", "9" * 400, "soon")),
        *(
            (401, "WWW-Authenticate", challenge)
            for challenge in (
                *("", "Basic", "Negotiate", "Bearer", 'Bearer realm=""', 'Bearer realm="/here"'),
                *('Bearer realm="http://[bad"', 'Bearer realm="http://127.0.0.1:99999/"'),
                *(
                    'Bearer realm="http://registry.example/"',
                    'Bearer realm="http://u:p@127.0.0.1/"',
                ),
            )
        ),
    ],
)
def test_answers_that_mean_nothing_are_told(
    registry: Registry, status: int, header: str, value: str
) -> None:
    registry.garbled = (status, {header: value})
    with pytest.raises(RegistryRefused) as raised:
        sent(f"{registry.host}/garbled:v1")
    assert "u:p" not in str(raised.value)


def test_references() -> None:
    found = parse_reference("registry.example:5000/a/b-c:v1.2")
    assert (found.host, found.repository, found.tag) == ("registry.example:5000", "a/b-c", "v1.2")
    assert parse_reference("localhost/x").tag == "latest"
    pinned = parse_reference("r.example/x@sha256:" + "0" * 64)
    assert pinned.tag is None and pinned.digest == "sha256:" + "0" * 64
    for wrong in (
        *("python", "library/python:3", "r.example/", "r.example/UP", "r.example/a//b"),
        *("r.example/a:", "r.example/a:ta g", "r.example/../etc", "r.example/a@sha256:00"),
        *("r.exa mple/a", "user@r.example/a", "r.example:1:2/a", ""),
    ):
        with pytest.raises(InvalidRequest):
            parse_reference(wrong)
    assert is_loopback("127.0.0.1:5000") and is_loopback("[::1]:5000") and is_loopback("localhost")
    assert not is_loopback("localhost.example") and not is_loopback("10.0.0.1")


def test_platforms() -> None:
    host = Platform("arm", "linux", "v7")
    assert fits(Platform("arm", "linux"), host) and fits(Platform("arm", "linux", "v7"), host)
    assert not fits(Platform("arm", "linux", "v6"), host)
    assert not fits(Platform("arm", "windows"), host)


def test_logins_of_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "docker"
    place.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(place))
    helper = tmp_path / "docker-credential-testing"
    helper.write_text(
        '#!/bin/sh\nread host; [ "$host" = r.example ] || exit 1\n'
        'echo \'{"ServerURL":"r.example","Username":"<token>","Secret":"abc"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_login("r.example") is None
    (place / "config.json").write_text(
        '{"credHelpers": {"r.example": "testing"}, "credsStore": ""}'
    )
    assert find_login("r.example") == Login("", "", "abc")
    assert find_login("other.example") is None
    (place / "config.json").write_text('{"credsStore": "../../evil"}')
    with pytest.raises(InvalidRequest):
        find_login("r.example")
    (place / "config.json").write_text('{"auths": {"r.example": {"auth": "%%%"}}}')
    with pytest.raises(InvalidRequest) as malformed:
        find_login("r.example")
    assert "%%%" not in str(malformed.value)
