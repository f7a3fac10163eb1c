"""Templates from images, sessions and Containerfiles, on a real server with an object store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sojourn import AsyncSojourn, Sojourn, allow
from sojourn.errors import (
    CaptureRefused,
    ContainerfileInvalid,
    ImageInvalid,
    InvalidRequest,
    NameTaken,
    TemplateNotFound,
    UnknownTemplate,
)
from support.durable import lose, sojourn
from support.images import MadeImage, directory, layer, member, small_root
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

COUNTER = (
    "i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.05; done"
)
CONFIG = {
    "Env": ["PATH=/bin", "A=image", "B=image"],
    "User": "agent",
    "WorkingDir": "/app",
    "Entrypoint": ["sh", "-c"],
    "Cmd": ["echo started > /tmp/started; sleep 1000"],
    "Labels": {"team": "a"},
}


@pytest.fixture(scope="module")
def base() -> bytes:
    return layer(small_root())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[ServerProcess]:
    place = tmp_path_factory.mktemp("templates")
    shutil.copytree(stocked, place / "objects")
    found = ServerProcess(place / "data", store=(place / "objects").as_uri())
    found.start()
    yield found
    if not found.running:
        found.start()
    client = found.client()
    for one in client.templates.list():
        if one.version is not None:
            client.templates.remove(one.name)
    found.remove()


@pytest.fixture
def api(server: ServerProcess) -> Iterator[Sojourn]:
    with server.client() as client:
        yield client
        for session in client.sessions.list():
            session.delete()


def application(base: bytes, text: bytes) -> MadeImage:
    top = [directory("app", uid=1000, gid=1000), member("app/hello", text, uid=1000, gid=1000)]
    return MadeImage([base, layer(top)], config=CONFIG)


def test_versions_of_an_image(api: Sojourn, base: bytes, tmp_path: Path) -> None:
    first = application(base, b"one\n").layout(tmp_path / "one")
    made = api.templates.build("app", f"oci:{first}")
    assert (made.name, made.version, made.layers, made.memory) == ("app", 1, 2, False)
    assert made.user == "agent" and made.cwd == "/app" and made.labels == {"team": "a"}
    assert made.digest == application(base, b"one\n").top["digest"]
    session = api.sessions.create(template="app", name="old", env={"B": "mine"})
    assert session.info.template == "app@1"
    told = session.exec("cat hello; id -u; echo $A $B; stat -c %u:%g hello")
    assert told.text == "one\n1000\nimage mine\n1000:1000\n", told
    saved = application(base, b"two\n").saved(tmp_path / "two.tar", "app:2")
    again = api.templates.build("app", f"docker-archive:{saved}")
    assert again.version == 2 and again.versions == [1, 2] and again.layer == made.layer
    assert api.sessions.create(template="app").exec("cat hello").text == "two\n"
    assert api.sessions.create(template="app@1").exec("cat hello").text == "one\n"
    listed = {one.name: one.version for one in api.templates.list()}
    assert listed["app"] == 2 and listed["debian"] is None
    assert {one.id for one in api.sessions.list()}.isdisjoint({made.name})
    # A version that is removed is gone for new sessions; those that were made of it go on.
    session.exec("echo more >> hello")
    api.templates.remove("app@1")
    with pytest.raises(UnknownTemplate):
        api.sessions.create(template="app@1")
    with pytest.raises(TemplateNotFound):
        api.templates.get("app@1")
    session.suspend()
    assert session.exec("cat hello").text == "one\nmore\n"
    assert session.verify().faults == []
    api.templates.remove("app@2")
    with pytest.raises(TemplateNotFound):
        api.templates.get("app")
    assert session.fork(1)[0].exec("cat hello").text == "one\nmore\n"


def test_what_is_refused_leaves_nothing(api: Sojourn, base: bytes, tmp_path: Path) -> None:
    image = application(base, b"x")
    before = {one.name for one in api.templates.list()}
    layout = image.layout(tmp_path / "image")
    blob = layout / "blobs/sha256" / image.manifest["layers"][1]["digest"].partition(":")[2]
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(ImageInvalid):
        api.templates.build("bad", f"oci:{layout}")
    (tmp_path / "noise").write_bytes(os.urandom(4096))
    with pytest.raises(ImageInvalid):
        api.templates.build("bad", f"docker-archive:{tmp_path / 'noise'}")
    good = image.archive()
    (tmp_path / "good").write_bytes(good)
    with pytest.raises(NameTaken):
        api.templates.build("debian", f"oci-archive:{tmp_path / 'good'}")
    with pytest.raises(InvalidRequest):
        api.templates.build("no name", f"oci-archive:{tmp_path / 'good'}")
    (tmp_path / "short").write_bytes(good[: len(good) // 2])
    with pytest.raises(ImageInvalid):
        api.templates.build("bad", f"oci-archive:{tmp_path / 'short'}")
    assert {one.name for one in api.templates.list()} == before


def test_another_tenant_sees_nothing(
    api: Sojourn, server: ServerProcess, base: bytes, tmp_path: Path
) -> None:
    api.templates.build("mine", f"oci:{application(base, b'x').layout(tmp_path / 'x')}")
    token = api.tokens.create("other").token
    with server.client(token) as other:
        assert [one.name for one in other.templates.list()] == ["debian"]
        for act in (other.templates.get, other.templates.remove):
            with pytest.raises(TemplateNotFound):
                act("mine")
        with pytest.raises(UnknownTemplate):
            other.sessions.create(template="mine")
    api.templates.remove("mine")


def test_a_warm_template_starts_with_its_processes(api: Sojourn) -> None:
    session = api.sessions.create(name="source", env={"KEY": "kept"})
    process = session.spawn(COUNTER)
    eventually(lambda: int(session.exec("cat /tmp/n").text or 0) > 3)
    session.run_code("value = 41")
    session.files.write("/root/note", b"note")
    made = session.to_template("warm")
    assert made.memory and made.memory_bytes > 0 and made.version == 1
    reached = int(session.exec("cat /tmp/n").text)
    marks = {session.exec("cat /run/sojourn/generation").text}
    for name in ("first", "second"):
        child = api.sessions.create(template="warm", name=name)
        assert child.info.parent_session is None
        assert process.id in [one.id for one in child.processes() if one.running]
        then = int(child.exec("cat /tmp/n").text)
        eventually(lambda child=child, then=then: int(child.exec("cat /tmp/n").text) > then)
        assert child.run_code("value + 1").text == "42"
        assert child.exec("echo $KEY; cat /root/note").text == "kept\nnote"
        marks.add(child.exec("cat /run/sojourn/generation").text)
        child.files.write("/root/note", name.encode())
        if name == "first":
            # What it was made of runs on, and may go: the template stays whole.
            assert session.files.read("/root/note") == b"note"
            assert int(session.exec("cat /tmp/n").text) >= reached
            session.delete()
    assert len(marks) == 3
    assert api.sessions.get("first").files.read("/root/note") == b"first"
    with pytest.raises(InvalidRequest, match="driver"):
        api.sessions.create(template="warm", driver="bubblewrap")
    cold = child.to_template("warm", memory=False)
    assert cold.version == 2 and not cold.memory
    api.templates.remove("warm")


def test_memory_that_may_hold_what_others_must_not_have_is_refused(api: Sojourn) -> None:
    api.secrets.set("key", "value-of-it", ["api.example"])
    session = api.sessions.create(network=allow("api.example", secrets=["key"]))
    with pytest.raises(CaptureRefused, match="secrets"):
        session.to_template("leak")
    with pytest.raises(TemplateNotFound):
        api.templates.get("leak")
    assert session.to_template("leak", memory=False).version == 1
    other = api.sessions.create()
    other.expose(8000)
    with pytest.raises(CaptureRefused, match="token"):
        other.to_template("leak")
    api.templates.remove("leak")
    api.secrets.delete("key")


def test_a_template_that_says_so_starts_its_command(
    api: Sojourn, base: bytes, tmp_path: Path
) -> None:
    layout = application(base, b"x").layout(tmp_path / "image")
    api.templates.build("quiet", f"oci:{layout}")
    assert api.sessions.create(template="quiet").processes() == []
    api.templates.build("served", f"oci:{layout}", start=True)
    session = api.sessions.create(template="served")
    eventually(lambda: session.exec("cat /tmp/started").text == "started\n")
    assert len([one for one in session.processes() if one.running]) == 1
    session.suspend()
    assert len([one for one in session.processes() if one.running]) == 1
    for name in ("quiet", "served"):
        api.templates.remove(name)


def test_a_containerfile(api: Sojourn, server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/one").write_text("1")
    (tmp_path / "src/skip.pyc").write_text("no")
    (tmp_path / "src/link").symlink_to("/etc/passwd")
    (tmp_path / ".dockerignore").write_text("**/*.pyc\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    text = """FROM debian
ARG WHO=nobody
ENV GREETING="hello $WHO"
WORKDIR /srv/app
COPY src ./data/
COPY --chmod=755 --chown=1000:1000 run.sh /usr/local/bin/run
RUN echo "$GREETING from $WHO" > greeting && id -u > uid
USER nobody
RUN ["sh", "-c", "id -u > /tmp/lost; test ! -w /srv"]
LABEL made=here
CMD ["run"]
"""
    file = tmp_path / "Containerfile"
    file.write_text(text)
    seen: list[tuple[int, bool]] = []

    def build(**options: Any) -> Any:
        seen.clear()
        return api.templates.build_file(
            "made",
            file,
            tmp_path,
            on_step=lambda line, text, known: seen.append((line, known)),
            **options,
        )

    made = build(arguments={"WHO": "you"})
    assert made.version == 1 and made.cmd == ["run"] and made.labels == {"made": "here"}
    assert made.env == {"GREETING": "hello you"} and made.user == "nobody"
    assert made.source == "a Containerfile on debian"
    assert [line for line, known in seen if not known] == [4, 5, 6, 7, 9]
    session = api.sessions.create(template="made")
    assert (
        session.exec("cat greeting uid; run; id -un").text == "hello you from you\n0\nran\nnobody\n"
    )
    found = session.exec("find data -type f -o -type l; stat -c %u:%a /usr/local/bin/run").text
    assert found == "data/one\ndata/link\n1000:755\n" or found == "data/link\ndata/one\n1000:755\n"
    assert build(arguments={"WHO": "you"}).version == 2
    assert all(known for _, known in seen)
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho changed\n")
    assert build(arguments={"WHO": "you"}).version == 3
    assert [line for line, known in seen if not known] == [6, 7, 9]
    assert api.sessions.create(template="made").exec("run; cat greeting").text.startswith("changed")
    file.write_text(text + "RUN echo said; exit 3\n")
    with pytest.raises(ContainerfileInvalid, match="line 12: RUN ended with exit code 3") as failed:
        build(arguments={"WHO": "you"})
    assert failed.value.details["output"] == "said\n"
    assert api.templates.get("made").version == 3
    assert not [one for one in api.sessions.list() if "building" in one.info.labels]

    async def twin() -> int | None:
        async with AsyncSojourn(url=server.url, token=server.token) as client:
            file.write_text(text)
            found = await client.templates.build_file(
                "made", file, tmp_path, arguments={"WHO": "you"}
            )
            return found.version

    assert asyncio.run(twin()) == 4
    api.templates.remove("made")


def test_templates_survive_a_kill_and_the_loss_of_the_node(
    server: ServerProcess, base: bytes, tmp_path: Path
) -> None:
    client = server.client()
    layout = application(base, b"kept\n").layout(tmp_path / "image")
    client.templates.build("kept", f"oci:{layout}")
    source = client.sessions.create(template="kept", name="kept")
    source.spawn(COUNTER)
    source.exec("echo grown >> hello")
    source.to_template("warmed")
    server.kill()
    # As after the loss of a node that had the newest version alone.
    with contextlib.closing(sqlite3.connect(server.data / "sojourn.db")) as database, database:
        lost = "UPDATE sessions SET state = 'failed', head = NULL WHERE kind = 'template'"
        assert database.execute(f"{lost} AND name = 'kept'").rowcount == 1
    client = server.start()
    assert client.templates.build("kept", f"oci:{layout}").versions == [1, 2]
    assert {"kept", "warmed"} <= {one.name for one in client.templates.list()}
    source = client.sessions.get("kept")
    source.suspend(wait="durable")
    eventually(lambda: client.templates.get("kept").durable_at is not None)
    eventually(lambda: client.templates.get("warmed").durable_at is not None)
    eventually(lambda: client.status().objects.waiting == 0)  # type: ignore[union-attr]
    lose(server)
    done = sojourn("recover", "--store", server.store, "--data", str(server.data))
    assert done.returncode == 0, done.stderr
    client = server.start()
    assert {"kept", "warmed"} <= {one.name for one in client.templates.list()}
    assert client.sessions.get("kept").exec("cat hello").text == "kept\ngrown\n"
    assert client.sessions.create(template="kept@1").exec("cat hello").text == "kept\n"
    warmed = client.sessions.create(template="warmed")
    assert warmed.exec("cat hello").text == "kept\ngrown\n"
    first = int(warmed.exec("cat /tmp/n").text)
    eventually(lambda: int(warmed.exec("cat /tmp/n").text) > first)
    assert client.templates.build("kept", f"oci:{layout}").version == 3
    for session in client.sessions.list():
        session.delete()
