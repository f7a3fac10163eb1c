"""Files and trees through both client twins: exact bytes, exact names, nothing outside."""

from __future__ import annotations

import io
import os
import socket
import stat as modes
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from sojourn import FileConflict, FileMissing, InvalidRequest, PathInvalid, TooLarge
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


def root_of(rig: HttpRig, work: Any) -> Path:
    """Where the fake keeps a session's files."""
    return Path(os.fsdecode(rig.service._sessions[work.id].guest.root))


def test_write_read_append_range(work: Any) -> None:
    data = os.urandom(3 * 1024 * 1024)
    info = work.files.write("/a/b/c", data, mode=0o600)
    assert (info.size, info.mode, info.type, info.path) == (len(data), 0o600, "file", "/a/b/c")
    assert work.files.read("/a/b/c") == data
    assert b"".join(work.files.stream("/a/b/c")) == data
    assert work.files.read("/a/b/c", offset=10, length=5) == data[10:15]
    assert work.files.read("/a/b/c", offset=len(data) - 3) == data[-3:]
    assert work.files.read("/a/b/c", length=0) == b""
    work.files.write("/a/b/c", "more", append=True)
    assert work.files.read("/a/b/c")[-4:] == b"more"
    work.files.write("/a/b/c", b"")
    assert work.files.read("/a/b/c") == b""
    work.files.write("/a/b/c", b"abc")
    with pytest.raises(InvalidRequest) as caught:
        work.files.read("/a/b/c", offset=5)
    assert caught.value.details["size"] == 3


@pytest.mark.parametrize("kind", ["file", "iterator", "text"])
def test_contents_of_every_kind(work: Any, kind: str) -> None:
    data = b"0123456789" * 200_000

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(data), 300_000):
            yield data[at : at + 300_000]

    given = {"file": io.BytesIO(data), "iterator": pieces(), "text": data.decode()}[kind]
    work.files.write("/x", given)
    assert work.files.read("/x") == data


def test_directories_and_facts(work: Any) -> None:
    work.files.mkdir("/d/e")
    work.files.write("/d/f", b"1")
    work.exec(["ln", "-s", "f", "d/link"], cwd="/")
    assert [(one.path, one.type) for one in work.files.list("/d")] == [
        ("/d/e", "dir"),
        ("/d/f", "file"),
        ("/d/link", "symlink"),
    ]
    assert work.files.stat("/d/link").type == "file"
    link = work.files.stat("/d/link", follow=False)
    assert (link.type, link.target) == ("symlink", "f")
    work.files.chmod("/d/f", 0o4755)
    assert work.files.stat("/d/f").mode == 0o4755
    work.files.move("/d/f", "/d/g")
    assert work.files.exists("/d/link") and not work.files.exists("/d/f")
    with pytest.raises(FileConflict):
        work.files.remove("/d")
    work.files.remove("/d", recursive=True)
    with pytest.raises(FileMissing):
        work.files.list("/d")


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a b+c%41&d=e?#", "\u00e9\u4e2d".encode(), b"new\nline", b"-rf", b"'; x"]
)
def test_names_are_exact_bytes(work: Any, name: bytes) -> None:
    path = b"/odd/" + name
    work.files.write(path, b"x")
    (only,) = work.files.list("/odd")
    found = only.path_bytes if only.path_bytes is not None else only.path.encode()
    assert found == path
    assert work.files.read(path) == b"x"
    work.files.remove(path)
    assert work.files.list("/odd") == []


def test_refused_paths(work: Any) -> None:
    for bad in ("", "relative", "/nul\0", "/" + "x" * 5000, b"a"):
        with pytest.raises(PathInvalid):
            work.files.read(bad)
    with pytest.raises(PathInvalid):
        work.files.remove("/", recursive=True)
    with pytest.raises(PathInvalid):
        work.files.write("/d/", b"")
    with pytest.raises(FileMissing):
        work.files.read("/none")
    with pytest.raises(FileConflict):
        work.files.read("/")
    work.files.write("/f", b"")
    with pytest.raises(FileConflict):
        list(work.files.watch("/f"))


def test_watch(work: Any) -> None:
    work.files.mkdir("/w")
    later = threading.Timer(0.1, work.files.write, ("/w/new", b""))
    later.start()
    for change in work.files.watch("/w"):
        if change.path == "/w/new":
            break
    later.join()
    assert (change.kind, change.is_dir) == ("created", False)


def test_a_client_that_dies_leaves_no_half_file(work: Any, rig: HttpRig) -> None:
    work.files.write("/kept", b"old")
    port = int(rig.url.rpartition(":")[2])
    for target, head in (
        ("/kept", b"content-length: 9000000"),
        ("/fresh", b"transfer-encoding: chunked"),
    ):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(
                b"PUT /v1/sessions/%s/files?path=%s HTTP/1.1\r\nhost: x\r\n"
                b"authorization: Bearer token-a\r\n%s\r\n\r\n"
                % (work.id.encode(), target.encode(), head)
            )
            raw.sendall(b"100000\r\n" + b"x" * 500_000)
            time.sleep(0.1)
    while list(root_of(rig, work).glob("*.part")):
        time.sleep(0.01)
    assert work.files.read("/kept") == b"old"
    assert not work.files.exists("/fresh")


# -- trees


def make_tree(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    (root / "file").write_bytes(b"content")
    (root / "big").write_bytes(os.urandom(1_000_001))
    (root / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "tool").chmod(0o751)
    (root / "sub" / "deep" / ("n" * 150)).write_bytes(b"long")
    (root / "link").symlink_to("sub/../file")
    (root / "out").symlink_to("/etc/passwd")
    os.link(root / "file", root / "sub" / "hard")
    os.mkfifo(root / "fifo", 0o640)
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"odd")
    os.utime(root / "file", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    os.utime(root / "sub", ns=(1_500_000_000_000_000_001, 1_500_000_000_000_000_001))


def facts(root: Path) -> dict[bytes, tuple[Any, ...]]:
    found = {}
    base = os.fsencode(root)
    for directory, directories, names in os.walk(base):
        for name in [*directories, *names]:
            path = directory + b"/" + name
            stat = os.lstat(path)
            kind = modes.S_IFMT(stat.st_mode)
            content: Any = None
            if modes.S_ISREG(stat.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif modes.S_ISLNK(stat.st_mode):
                content = os.readlink(path)  # noqa: PTH115 - the path is bytes
            time_ns = None if modes.S_ISLNK(stat.st_mode) else stat.st_mtime_ns
            mode = modes.S_IMODE(stat.st_mode)
            links = stat.st_nlink if not modes.S_ISDIR(stat.st_mode) else 0
            found[path[len(base) :]] = (kind, mode, links, time_ns, content)
    return found


def test_a_tree_comes_back_as_it_was(work: Any, rig: HttpRig, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    done = work.files.upload(source, "/deep/target")
    assert done.members == len(facts(source)) + 1
    assert facts(root_of(rig, work) / "deep" / "target") == facts(source)
    down = work.files.download("/deep/target", tmp_path / "back")
    assert down.skipped == []
    assert facts(tmp_path / "back") == facts(source)
    work.files.upload(source, "/deep/target")  # over what is there
    assert facts(root_of(rig, work) / "deep" / "target") == facts(source)


def test_single_files(work: Any, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "one").chmod(0o755)
    assert work.files.upload(tmp_path / "one", "/dir/one").bytes == 1
    assert work.files.stat("/dir/one").mode == 0o755
    assert work.files.download("/dir/one", tmp_path / "two").bytes == 1
    assert (tmp_path / "two").read_bytes() == b"1"
    with pytest.raises(FileConflict):
        work.files.download("/dir/one", tmp_path / "none" / "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def put_tar(rig: HttpRig, work: Any, body: bytes, more: str = "") -> tuple[int, bytes]:
    target = f"/v1/sessions/{work.id}/tree?path=/in{more}"
    status, _, answer = rig.raw("PUT", target, body)
    return status, answer


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for info, content in members:
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info


def test_tars_cannot_leave_their_directory(work: Any, rig: HttpRig) -> None:
    outside = root_of(rig, work) / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"old")
    link_out = (member("l", tarfile.SYMTYPE, "../outside"), b"")
    attacks = [
        [(member("../evil"), b"x")],
        [(member("a/../../evil"), b"x")],
        [(member("/evil"), b"x")],
        [link_out, (member("l/evil"), b"x")],
        [link_out, (member("l/deeper/evil"), b"x")],
        [link_out, (member("l/d", tarfile.DIRTYPE), b"")],
        [link_out, (member("h", tarfile.LNKTYPE, "l/kept"), b"")],
        [(member("h", tarfile.LNKTYPE, "../outside/kept"), b"")],
        [(member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(member("."), b"x")],
    ]
    for attack in attacks:
        status, body = put_tar(rig, work, tar_of(*attack))
        assert status == 400 and b'"path_invalid"' in body, attack
    assert [path.name for path in outside.iterdir()] == ["kept"] and (
        outside / "kept"
    ).read_bytes() == b"old"
    assert not (root_of(rig, work) / "evil").exists()
    # A file over a link replaces the link and not what it names.
    status, _ = put_tar(rig, work, tar_of(link_out, (member("l"), b"file")))
    assert status == 200 and work.files.stat("/in/l", follow=False).type == "file"
    assert (outside / "kept").read_bytes() == b"old"


def test_a_link_already_there_is_not_followed(work: Any, rig: HttpRig) -> None:
    work.files.mkdir("/in")
    work.files.mkdir("/outside")
    work.exec(["ln", "-s", "../outside", "in/l"], cwd="/")
    status, body = put_tar(rig, work, tar_of((member("l/evil"), b"x")))
    assert status == 400 and b'"path_invalid"' in body
    assert work.files.list("/outside") == []


def test_malformed_tars_are_refused(work: Any, rig: HttpRig) -> None:
    good = tar_of((member("f"), b"x" * 2000))
    sparse = member("s", tarfile.GNUTYPE_SPARSE)
    for body, code in [
        (b"not a tar" * 200, b"invalid_request"),
        (good[:1000], b"invalid_request"),
        (good[:400], b"invalid_request"),
        (tar_of((sparse, b"")), b"invalid_request"),
        (tar_of((member("f"), b"x"))[:512], b"invalid_request"),
    ]:
        status, answer = put_tar(rig, work, body)
        assert status == 400 and code in answer, body[:50]
    assert put_tar(rig, work, good)[0] == 200
    assert put_tar(rig, work, b"")[0] == 200
    assert put_tar(rig, work, good, "&owner=me")[0] == 400


def test_tar_headers_are_bounded(work: Any, rig: HttpRig) -> None:
    header = member("x", tarfile.XHDTYPE)
    header.size = 2 * 1024 * 1024
    status, body = put_tar(rig, work, header.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 4096)
    assert status == TooLarge.status and b'"too_large"' in body


def test_downloads_are_read_by_tar_itself(work: Any, rig: HttpRig, tmp_path: Path) -> None:
    make_tree(root_of(rig, work))
    status, headers, body = rig.raw("GET", f"/v1/sessions/{work.id}/tree?path=/")
    assert (status, headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(body), errors="surrogateescape") as made:
        made.extractall(tmp_path / "x", filter="fully_trusted")
    assert facts(tmp_path / "x").keys() == facts(root_of(rig, work)).keys()


def test_ranges_of_the_protocol(work: Any, rig: HttpRig) -> None:
    work.files.write("/f", b"0123456789")
    target = f"/v1/sessions/{work.id}/files?path=/f"
    for given, status, body in [
        ("bytes=2-4", 206, b"234"),
        ("bytes=-3", 206, b"789"),
        ("bytes=7-100", 206, b"789"),
        ("bytes=5-", 206, b"56789"),
        ("bytes=4-2", 200, b"0123456789"),
        ("bytes=0-1,3-4", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
    ]:
        found = rig.raw("GET", target, Range=given)
        assert (found[0], found[2]) == (status, body), given
    status, headers, _ = rig.raw("GET", target, Range="bytes=2-4")
    assert headers["content-range"] == "bytes 2-4/10"
    status, _, body = rig.raw("GET", target, Range="bytes=10-")
    assert status == 416 and b'"invalid_request"' in body


def test_percent_encoding_is_checked(work: Any, rig: HttpRig) -> None:
    name = b"/\xff%zz"
    work.files.write(name, b"x")
    exact = quote_from_bytes(name)
    assert rig.raw("GET", f"/v1/sessions/{work.id}/files?path={exact}")[2] == b"x"
    status, _, body = rig.raw("GET", f"/v1/sessions/{work.id}/files?path=/%zz")
    assert status == 400 and b"percent" in body
