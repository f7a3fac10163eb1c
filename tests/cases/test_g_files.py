"""C33, C35, C74, C76: files move in and out of a session, and never anywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from sojourn.client import Session
from sojourn.errors import (
    FileConflict,
    FileMissing,
    InvalidRequest,
    PathInvalid,
    SojournError,
    TooLarge,
)
from support.servers import ServerProcess, eventually

SECRET = "only on the host\n"


@pytest.fixture(scope="module")
def session(shared_server):  # type: ignore[no-untyped-def]
    """One session for the module."""
    with shared_server.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        yield session
        session.delete()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of the host that no session may touch: at a path no session has."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    yield path
    assert path.read_text() == SECRET
    assert path.stat().st_mode & 0o7777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


# -- C74: planted links --------------------------------------------------------------------------


def test_c74_no_file_route_leaves_the_session(session: Session, secret: Path) -> None:
    host = str(secret)
    above = str(secret.parent)
    files = session.files
    session.exec(["rm", "-rf", "/srv/w", above])
    files.mkdir("/srv/w")
    session.exec(["ln", "-s", host, "/srv/w/file"])
    session.exec(["ln", "-s", above, "/srv/w/dir"])
    session.exec(["ln", "-s", "../../../../../../../.." + host, "/srv/w/up"])
    session.exec(["ln", "-s", "/proc/self/root" + host, "/srv/w/proc"])
    session.exec(["ln", "-s", "/proc/1/root" + above, "/srv/w/proc1"])
    tries: list[Callable[[], object]] = []
    for name in ("file", "up", "proc", "dir/secret", "proc1/secret"):
        path = f"/srv/w/{name}"
        tries += [
            lambda path=path: files.read(path),
            lambda path=path: files.stat(path),
            lambda path=path: files.list(path),
            lambda path=path: files.chmod(path, 0o777),
            lambda path=path: files.write(path, b"from inside"),
            lambda path=path: files.write(path, b"from inside", append=True),
        ]
    tries += [
        lambda: files.list("/srv/w/dir"),
        lambda: files.move("/srv/w/dir/secret", "/srv/w/stolen"),
        lambda: files.remove("/srv/w/dir/secret"),
        lambda: files.remove("/srv/w/dir", recursive=True),
        lambda: files.mkdir("/srv/w/proc1/made"),
        lambda: next(iter(files.watch("/srv/w/dir"))),
        lambda: files.write("/srv/w/proc1/new", b"from inside"),
    ]
    for one in tries:
        try:
            got = one()
        except SojournError as error:
            assert error.code in ("file_not_found", "file_conflict", "forbidden", "path_invalid"), (
                error
            )
        else:
            assert SECRET.encode() not in repr(got).encode()
    assert SECRET.strip() not in session.exec(f"cat {host} /srv/w/* 2>/dev/null").text
    session.exec(["rm", "-rf", "/srv/w", above])


def test_c74_a_link_to_a_file_of_both_sides_is_read_inside(session: Session) -> None:
    session.exec("ln -sf /etc/hostname /srv/hostname; echo inside > /etc/hostname")
    assert session.files.read("/srv/hostname") == b"inside\n"
    session.exec("ln -sf /etc/machine-id-of-host /srv/x")
    with pytest.raises(FileMissing):
        session.files.read("/srv/x")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/srv/fifo", "/srv", "/proc/self/mem"])
def test_c76_what_is_no_file_is_refused_at_once(session: Session, path: str) -> None:
    session.exec("test -p /srv/fifo || mkfifo /srv/fifo")
    with pytest.raises(SojournError) as raised:
        session.files.read(path)
    assert raised.value.code in ("file_conflict", "forbidden")


@pytest.mark.parametrize("path", ["/dev/full", "/srv/fifo", "/srv"])
def test_c76_writing_to_what_is_no_file_is_refused_or_replaces(session: Session, path: str) -> None:
    session.exec("test -p /srv/fifo || mkfifo /srv/fifo")
    kind = session.files.stat(path).type
    try:
        session.files.write(path, b"x")
    except SojournError as error:
        assert error.code in ("file_conflict", "forbidden")
        assert session.files.stat(path).type == kind
    else:
        assert session.files.read(path) == b"x"


def test_c76_proc_files_can_be_read(session: Session) -> None:
    assert b"Linux" in session.files.read("/proc/version")


# -- C76: sizes ----------------------------------------------------------------------------------


def resident_peak(pid: int) -> int:
    """The most memory a host process ever used, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.slow
def test_c76_a_huge_sparse_file_is_read_in_bounds(
    session: Session, shared_server: ServerProcess
) -> None:
    whole = 2 << 30 if os.environ.get("SOJOURN_SOAK") else 256 << 20
    session.exec(f"truncate -s {whole} /srv/sparse; printf tail >> /srv/sparse")
    before = resident_peak(shared_server.pid)
    size = 0
    last = b""
    for piece in session.files.stream("/srv/sparse"):
        size += len(piece)
        last = (last + piece)[-4:]
    assert (size, last) == (whole + 4, b"tail")
    assert resident_peak(shared_server.pid) - before < 64 << 20
    session.exec("truncate -s 3G /srv/sparse; printf tail >> /srv/sparse")
    assert session.files.read("/srv/sparse", offset=3 << 30) == b"tail"
    assert session.files.read("/srv/sparse", offset=(3 << 30) - 2, length=4) == b"\0\0ta"
    session.exec("rm /srv/sparse")


def test_c76_a_large_upload_is_streamed(session: Session, shared_server: ServerProcess) -> None:
    before = resident_peak(shared_server.pid)
    piece = os.urandom(1 << 20)
    info = session.files.write("/srv/large", (piece for _ in range(200)))
    assert info.size == 200 << 20
    assert resident_peak(shared_server.pid) - before < 64 << 20
    assert (
        session.exec("cmp -n 1048576 /srv/large /srv/large 0 199M && rm /srv/large").exit_code == 0
    )


def put_partly(server: ServerProcess, target: str, sent: bytes, promised: int) -> None:
    """Begin an upload and leave in its middle."""
    where = urlsplit(server.url)
    assert where.hostname and where.port
    with socket.create_connection((where.hostname, where.port)) as link:
        link.sendall(
            f"PUT {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.token}\r\n"
            f"content-length: {promised}\r\n\r\n".encode()
        )
        link.sendall(sent)


@pytest.mark.parametrize(("sent", "promised"), [(10, 1000), (3 << 20, 8 << 20), (0, 5 << 20)])
def test_an_upload_that_breaks_off_leaves_no_half_file(
    session: Session, shared_server: ServerProcess, sent: int, promised: int
) -> None:
    session.exec("rm -rf /srv/up; mkdir /srv/up; echo old > /srv/up/old")
    for name in ("old", "new"):
        target = f"/v1/sessions/{session.id}/files?path=/srv/up/{name}"
        put_partly(shared_server, target, b"x" * sent, promised)
    assert eventually(lambda: session.exec("ls -A /srv/up").text == "old\n")
    assert session.files.read("/srv/up/old") == b"old\n"
    assert session.exec("ls -A /srv/up").text == "old\n"


def test_a_failing_source_leaves_no_half_file(session: Session) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * (2 << 20)
        raise ZeroDivisionError("the source broke")

    with pytest.raises(ZeroDivisionError):
        session.files.write("/srv/half", pieces())
    assert not session.files.exists("/srv/half")
    assert eventually(lambda: "half" not in session.exec("ls -A /srv").text)


def test_parallel_writers_replace_whole_files(session: Session) -> None:
    pieces = [bytes([65 + number]) * 300_000 for number in range(6)]
    writers = [
        threading.Thread(target=session.files.write, args=("/srv/contended", data))
        for data in pieces
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert session.files.read("/srv/contended") in pieces
    assert session.exec("ls -A /srv | grep -c contended").text == "1\n"


# -- C33: hostile tars ---------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, **facts: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


HOSTILE = {
    "dot-dot": [(member("../out"), b"x")],
    "dot-dot-inside": [(member("a/../../out"), b"x")],
    "absolute": [(member("/srv/out"), b"x")],
    "link-then-write": [
        (member("leak", tarfile.SYMTYPE, linkname="/srv"), b""),
        (member("leak/out"), b"x"),
    ],
    "link-up-then-write": [
        (member("leak", tarfile.SYMTYPE, linkname=".."), b""),
        (member("leak/out"), b"x"),
    ],
    "link-then-directory": [
        (member("leak", tarfile.SYMTYPE, linkname="/srv"), b""),
        (member("leak", tarfile.DIRTYPE, mode=0o777), b""),
        (member("leak/out"), b"x"),
    ],
    "hardlink-outside": [(member("hard", tarfile.LNKTYPE, linkname="../outside"), b"")],
    "hardlink-absolute": [(member("hard", tarfile.LNKTYPE, linkname="/srv/outside"), b"")],
    "hardlink-through-link": [
        (member("leak", tarfile.SYMTYPE, linkname="/srv"), b""),
        (member("hard", tarfile.LNKTYPE, linkname="leak/outside"), b""),
    ],
    "write-through-final-link": [
        (member("leak", tarfile.SYMTYPE, linkname="/srv/out"), b""),
        (member("leak"), b"x"),
    ],
    "device": [(member("dev", tarfile.CHRTYPE, devmajor=1, devminor=1), b"")],
    "block-device": [(member("dev", tarfile.BLKTYPE, devmajor=8, devminor=0), b"")],
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_c33_a_hostile_tar_stays_in_its_directory(
    session: Session,
    raw,  # type: ignore[no-untyped-def]
    name: str,
) -> None:
    session.exec("rm -rf /srv/*; mkdir /srv/into; echo outside > /srv/outside")
    before = session.exec("ls -lA --time-style=full-iso /srv /; cat /srv/outside").stdout
    status, answer = raw(
        "PUT",
        f"/v1/sessions/{session.id}/tree?path=/srv/into",
        tar(*HOSTILE[name]),
        headers={"content-type": "application/x-tar"},
    )
    if status >= 400:
        assert answer["code"] in ("path_invalid", "file_conflict", "invalid_request", "forbidden")
    after = session.exec("ls -lA --time-style=full-iso /srv /; cat /srv/outside").stdout
    hide = [line for line in before.splitlines() if not line.endswith(b" into")]
    assert [line for line in after.splitlines() if not line.endswith(b" into")] == hide
    assert session.exec("find /srv/into -type b -o -type c -o -links +1 -type f").stdout == b""


@pytest.mark.parametrize(
    "body",
    [
        b"not a tar at all, but long enough to fill a header" * 20,
        b"\x1f\x8b\x08\0" + b"\0" * 600,
        tar((member("a"), b"x" * 5000))[:2000],
        b"x" * 100,
    ],
)
def test_c33_a_body_that_is_no_tar_is_refused(session: Session, raw, body: bytes) -> None:  # type: ignore[no-untyped-def]
    status, answer = raw(
        "PUT",
        f"/v1/sessions/{session.id}/tree?path=/srv/broken",
        body,
        headers={"content-type": "application/x-tar"},
    )
    assert status == 400
    assert answer["code"] == "invalid_request"


def test_c33_a_header_that_promises_a_bomb_is_refused(session: Session, raw) -> None:  # type: ignore[no-untyped-def]
    info = member("x" * 100, tarfile.XHDTYPE)
    info.size = 4 << 30
    body = info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 4096
    status, answer = raw(
        "PUT",
        f"/v1/sessions/{session.id}/tree?path=/srv/bomb",
        body,
        headers={"content-type": "application/x-tar"},
    )
    assert (status, answer["code"]) in ((413, "too_large"), (400, "invalid_request"))


def test_c33_a_hostile_session_cannot_write_outside_the_download(
    session: Session, tmp_path: Path
) -> None:
    """The links a session plants do not lead the client out of the directory it writes to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    session.exec("rm -rf /srv/t; mkdir -p /srv/t/d")
    session.exec(["ln", "-s", str(outside), "/srv/t/leak"])
    session.exec(["ln", "-s", "/etc/passwd", "/srv/t/passwd"])
    session.exec("echo x > /srv/t/d/file; mkfifo /srv/t/pipe; chmod 4755 /srv/t/d/file")
    into = tmp_path / "into"
    session.files.download("/srv/t", into)
    assert (into / "leak").is_symlink()
    assert (into / "passwd").readlink() == Path("/etc/passwd")
    assert not (into / "d" / "file").stat().st_mode & 0o7000
    # Again over the planted links, now with files below them.
    session.exec("rm /srv/t/leak; mkdir /srv/t/leak; echo evil > /srv/t/leak/evil")
    with contextlib.suppress(PathInvalid, FileConflict):
        session.files.download("/srv/t", into)
    assert not list(outside.iterdir())


# -- C35: trees ----------------------------------------------------------------------------------


def test_c35_a_repository_comes_back_with_its_links(session: Session, tmp_path: Path) -> None:
    source = tmp_path / "repository"
    source.mkdir()
    (source / "script.sh").write_text("#!/bin/sh\necho hello\n")
    (source / "script.sh").chmod(0o755)
    (source / "sub").mkdir()
    (source / "sub" / "data.bin").write_bytes(os.urandom(300_000))
    (source / "link").symlink_to("script.sh")
    (source / "sub" / "up").symlink_to("../script.sh")
    (source / "dangling").symlink_to("/nowhere/at/all")
    (source / "to-directory").symlink_to("sub")
    os.link(source / "script.sh", source / "hard")
    (source / "empty").mkdir()
    os.mkfifo(source / "pipe")
    (source / "name with spaces ü").write_text("x")
    (source / os.fsdecode(b"raw-\xff")).write_text("raw")
    os.utime(source / "sub" / "data.bin", ns=(10**18 + 1, 10**18 + 1))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "script.sh", "link", "sub"], ["commit", "-qm", "first"]):
        subprocess.run(git + words, cwd=source, check=True, capture_output=True)
    session.exec("rm -rf /srv/repository")
    session.files.upload(source, "/srv/repository")
    assert (
        session.exec(
            "git -c safe.directory=* -C /srv/repository status --porcelain -- script.sh link sub",
            env={"GIT_OPTIONAL_LOCKS": "0"},
        ).stdout
        == b""
    )
    assert session.exec("readlink /srv/repository/link").text == "script.sh\n"
    assert session.exec("stat -c %h /srv/repository/hard").text == "2\n"
    assert session.exec("/srv/repository/sub/up").text == "hello\n"
    back = tmp_path / "back"
    session.files.download("/srv/repository", back)
    listed = []
    for top in (source, back):
        found = {}
        for path in walk(top):
            facts = os.lstat(os.fsencode(top) + b"/" + path)
            found[path] = (facts.st_mode, facts.st_size, facts.st_mtime_ns)
        listed.append(found)
    assert listed[0] == listed[1]
    compare = subprocess.run(
        ["diff", "-r", "--no-dereference", "-x", "pipe", source, back], capture_output=True
    )
    assert compare.stdout == b""
    assert (back / "hard").stat().st_ino == (back / "script.sh").stat().st_ino


def walk(top: Path) -> list[bytes]:
    """Every path below `top`, relative, as bytes."""
    return sorted(os.fsencode(path.relative_to(top)) for path in top.rglob("*"))


def test_c35_an_upload_replaces_links_and_does_not_follow_them(
    session: Session, tmp_path: Path
) -> None:
    session.exec("rm -rf /srv/*; mkdir /srv/into; echo safe > /srv/target")
    session.exec("ln -s /srv/target /srv/into/file")
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("new")
    session.files.upload(source, "/srv/into")
    assert session.files.read("/srv/target") == b"safe\n"
    assert session.files.read("/srv/into/file") == b"new"


# -- single routes -------------------------------------------------------------------------------


def test_files_refuse_what_cannot_be_and_change_nothing(session: Session) -> None:
    files = session.files
    session.exec("rm -rf /srv/*; mkdir /srv/d; echo x > /srv/d/f; echo y > /srv/f")
    refusals: list[tuple[Callable[[], object], type[SojournError]]] = [
        (lambda: files.read("/srv/missing"), FileMissing),
        (lambda: files.read("/srv/f/below"), FileConflict),
        (lambda: files.read("/srv/d"), FileConflict),
        (lambda: files.list("/srv/f"), FileConflict),
        (lambda: files.list("/srv/missing"), FileMissing),
        (lambda: files.write("/srv/d", b""), FileConflict),
        (lambda: files.write("/srv/f/below", b""), FileConflict),
        (lambda: files.remove("/srv/missing"), FileMissing),
        (lambda: files.remove("/srv/d"), FileConflict),
        (lambda: files.move("/srv/missing", "/srv/x"), FileMissing),
        (lambda: files.move("/srv/f", "/srv/d"), FileConflict),
        (lambda: files.move("/srv/d", "/srv/d/inside"), PathInvalid),
        (lambda: files.mkdir("/srv/f"), FileConflict),
        (lambda: files.mkdir("/srv/a/b", parents=False), FileMissing),
        (lambda: files.mkdir("/srv/d", parents=False), FileConflict),
        (lambda: files.chmod("/srv/missing", 0o644), FileMissing),
        (lambda: files.read("relative"), PathInvalid),
        (lambda: files.read(""), SojournError),
        (lambda: files.read("/srv/\0"), PathInvalid),
        (lambda: files.write("/srv/" + "n" * 256, b""), SojournError),
        (lambda: files.write("/" + "deep/" * 1000, b""), SojournError),
        (lambda: files.remove("/", recursive=True), SojournError),
        (lambda: files.read("/srv/f", offset=-1), InvalidRequest),
        (lambda: files.read("/srv/f", length=-1), InvalidRequest),
        (lambda: files.read("/srv/f", offset=100), InvalidRequest),
    ]
    for index, (attempt, kind) in enumerate(refusals):
        with pytest.raises(kind) as raised:
            attempt()
        assert type(raised.value) is not SojournError, (index, raised.value)
        assert raised.value.code != "internal", (index, raised.value)
    assert session.exec("find /srv | sort; cat /srv/f /srv/d/f").text == (
        "/srv\n/srv/d\n/srv/d/f\n/srv/f\ny\nx\n"
    )


def test_dots_in_paths_stay_inside(session: Session) -> None:
    session.exec("mkdir -p /srv/d; echo x > /srv/d/f")
    for path in ("/srv/d/../d/f", "/srv/d/./f", "//srv//d//f", "/../../srv/d/f"):
        with contextlib.suppress(PathInvalid):
            assert session.files.read(path) == b"x\n"


def test_ranges(session: Session, raw) -> None:  # type: ignore[no-untyped-def]
    session.files.write("/srv/range", b"0123456789")
    target = f"/v1/sessions/{session.id}/files?path=/srv/range"
    for given, status, content in (
        ("bytes=0-0", 206, b"0"),
        ("bytes=5-", 206, b"56789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=0-999", 206, b"0123456789"),
        ("bytes=0-1,3-4", 200, b"0123456789"),
        ("bytes=garbage", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ):
        assert raw("GET", target, headers={"range": given}) == (status, content), given
    status, answer = raw("GET", target, headers={"range": "bytes=10-"})
    assert (status, answer["code"]) == (416, "invalid_request")


def test_watch_tells_of_changes(session: Session) -> None:
    session.exec("rm -rf /srv/watched; mkdir -p /srv/watched/sub")
    seen: list[tuple[str, str]] = []
    watching = threading.Event()
    enough = threading.Event()

    def watch() -> None:
        for change in session.files.watch("/srv/watched", recursive=True):
            seen.append((change.kind, change.path))
            watching.set()
            if change.path.endswith("/last"):
                enough.set()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # The watch begins at some moment; poke until it sees.
    assert eventually(
        lambda: (session.files.write("/srv/watched/poke", b"x"), watching.is_set())[1]
    )
    session.exec("echo 1 > /srv/watched/new; mv /srv/watched/new /srv/watched/sub/moved")
    session.exec("rm /srv/watched/sub/moved; mkdir /srv/watched/dir; touch /srv/watched/last")
    assert enough.wait(30)
    paths = {path for _, path in seen}
    assert {"/srv/watched/new", "/srv/watched/sub/moved", "/srv/watched/dir"} <= paths
    assert ("removed", "/srv/watched/sub/moved") in seen or any(
        kind in ("removed", "deleted") for kind, path in seen if path.endswith("/moved")
    )


def test_too_much_in_one_answer_is_refused_typed(session: Session, raw) -> None:  # type: ignore[no-untyped-def]
    target = f"/v1/sessions/{session.id}/files?path={quote('/srv/' + 'p' * 5000)}"
    status, answer = raw("GET", target)
    assert 400 <= status < 500
    assert answer["code"] in ("path_invalid", "invalid_request", "too_large")
    assert issubclass(TooLarge, SojournError)
