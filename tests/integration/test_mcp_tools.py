"""`sojourn mcp` against a real server, driven by the protocol library's own client."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from sojourn.mcp.own_sessions import Server, Sessions, Settings
from sojourn.mcp.server import protocol_server
from sojourn.mcp.texts import KEPT, LIMIT
from sojourn.mcp.tools import TOOLS
from support.mcp_rig import COMMAND, Web, call, drive, environment, refused, stdio
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all of these; the last test kills it and starts it again."""
    server = ServerProcess(tmp_path_factory.mktemp("mcp") / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def web(own: ServerProcess) -> Iterator[Web]:
    found = Web(own.data)
    yield found
    assert found.stop() == 0


@pytest.fixture
def box(own: ServerProcess) -> Iterator[Any]:
    with own.client() as client:
        session = client.sessions.create()
        yield session
        session.delete()


def running(box: Any, word: str) -> bool:
    """Whether a command with this word in it runs in the session."""
    return any(one.running and word in " ".join(one.info.argv) for one in box.processes())


def test_every_tool_works_and_the_session_is_put_away(own: ServerProcess) -> None:
    called: set[str] = set()
    kept: dict[str, str] = {}

    async def use(client: Client, tool: str, **given: Any) -> dict[str, Any]:
        called.add(tool)
        return await call(client, tool, **given)

    async def work() -> None:
        async with stdio(own.data) as client:
            assert {one.name for one in (await client.list_tools()).tools} == set(TOOLS)
            for tool in ("session_get", "file_list", "history"):  # reading makes no session
                given = {"path": "/"} if tool == "file_list" else {}
                assert (await refused(client, tool, **given))["code"] == "session_not_found"
            done = await use(client, "exec", command="printf 'a\\n\\nb'; echo e >&2; exit 42")
            assert (done["exit_code"], done["stdout"], done["stderr"]) == (42, "a\n\nb", "e\n")
            mine = kept["id"] = done["session"]
            assert (await call(client, "exec", command="pwd", cwd="/usr"))["stdout"] == "/usr\n"
            late = await call(client, "exec", command="sleep 30", timeout=0.2)
            assert late["timed_out"] and late["exit_code"] == 137 and "longer" in late["next_step"]

            server = await use(client, "exec", command="echo up; exec sleep 300", background=True)
            number = server["process"]
            told = await use(client, "process_output", process=number, wait=0.2)
            assert (told["text"], told["running"]) == ("up\n", True)
            listed = await use(client, "process_list")
            assert [one["running"] for one in listed["processes"] if one["process"] == number]
            await use(client, "process_kill", process=number)
            told = await use(client, "process_output", process=number, offset=3, wait=10)
            assert (told["text"], told["exit_code"]) == ("", 137) and "next_offset" not in told

            await use(client, "run_code", code="x = 41")
            assert (await use(client, "run_code", code="print('p'); x + 1"))["value"] == "42"
            failed = await use(client, "run_code", code="1/0")
            assert failed["error"].startswith("ZeroDivisionError")

            code = "class P:\n    def _repr_png_(self): return b'png bytes'\nP()"
            shown = (await client.call_tool("run_code", {"code": code})).content[1]
            assert (shown.type, base64.b64decode(shown.data)) == ("image", b"png bytes")

            text = "gr\u00fc\u00dfe\n"
            await use(client, "file_write", path="/srv/deep/a.txt", content=text)
            told = await use(client, "file_read", path="/srv/deep/a.txt")
            assert (told["content"], told["size"]) == (text, len(text.encode()))
            data = base64.b64encode(b"\xff\0\x01").decode()
            await use(client, "file_write", path="/srv/deep/b", content=data, encoding="base64")
            told = await use(client, "file_read", path="/srv/deep/b")
            assert (told["content"], told["encoding"]) == (data, "base64")
            names = [
                one["path"] for one in (await use(client, "file_list", path="/srv/deep"))["entries"]
            ]
            assert names == ["/srv/deep/a.txt", "/srv/deep/b"]

            point = await use(client, "snapshot", label="good")
            await use(client, "file_delete", path="/srv/deep", recursive=True)
            found = await use(client, "diff", before="good", text=True)
            assert ("/srv/deep/a.txt", "removed") in [
                (c["path"], c["kind"]) for c in found["changes"]
            ]
            assert "-gr\u00fc\u00dfe" in found["text"]["/srv/deep/a.txt"]
            (child,) = (await use(client, "fork", snapshot="good"))["sessions"]
            assert (await call(client, "run_code", code="x", session=child["session"]))[
                "value"
            ] == "41"
            assert (await refused(client, "file_read", path="/srv/deep/a.txt"))["code"] == (
                "file_not_found"
            )
            await use(client, "rollback", snapshot="good")
            assert (await call(client, "file_read", path="/srv/deep/a.txt"))["content"] == text
            shots = (await use(client, "history"))["snapshots"]
            assert [one["label"] for one in shots if one["snapshot"] == point["snapshot"]] == [
                "good"
            ]

            assert (await use(client, "session_pause"))["state"] == "paused"
            assert (await use(client, "session_resume"))["state"] == "running"
            assert (await use(client, "session_suspend"))["state"] == "suspended"
            assert (await call(client, "run_code", code="x"))["value"] == "41"
            assert (await use(client, "session_suspend"))["state"] == "suspended"
            woken = await use(client, "session_resume", files_only=True)
            assert woken["state"] == "running"
            told = await call(client, "run_code", code="print('x' in globals()); x = 41")
            assert told["stdout"] == "False\n"  # its processes are gone, its files are there
            assert (await call(client, "file_read", path="/srv/deep/a.txt"))["content"] == text
            assert (await use(client, "network_get"))["mode"] == "none"
            error = await refused(client, "network_set", network="open")
            assert error["code"] == "forbidden" and "--allow-network" in error["next_step"]
            assert (await use(client, "network_set", network="none"))["mode"] == "none"
            other = await use(client, "session_create", name="other")
            listed = await use(client, "session_list")
            assert [one["session"] for one in listed["sessions"] if one.get("own")] == [mine]
            told = await use(client, "session_get", session="other")
            assert told["session"] == other["session"]
            for one in (other, child):
                await use(client, "session_delete", session=one["session"])
            long = await use(client, "exec", command="seq 20000")
            await use(client, "exec_output", output=long["output"], offset=-6)
            assert called == set(TOOLS)

    drive(work)
    with own.client() as client:
        session = client.sessions.get(kept["id"])
        eventually(lambda: session.refresh().state == "suspended")
        assert session.name is not None and session.name.startswith("mcp-mcp-")
        assert session.run_code("x").text == "41"  # nothing was lost
        session.delete()


def test_long_and_binary_output_is_bounded_and_all_of_it_can_be_read(web: Web, box: Any) -> None:
    async def work() -> None:
        async with web.client() as client:
            # Text: beginning and end around a mark, the rest part by part.
            done = await call(client, "exec", session=box.id, command="seq 100000")
            whole = "".join(f"{one}\n" for one in range(1, 100_001))
            assert done["stdout_bytes"] == len(whole) and len(done["stdout"]) < LIMIT + 300
            assert done["stdout"].startswith(whole[:10_000])
            assert done["stdout"].endswith(whole[-10_000:])
            assert f'exec_output(output="{done["output"]}", stream="stdout"' in done["stdout"]
            read, offset = "", 0
            while offset is not None:
                told = await call(client, "exec_output", output=done["output"], offset=offset)
                assert len(told["text"]) <= LIMIT
                read, offset = read + told["text"], told.get("next_offset")
            assert read == whole
            # 5 MiB of noise (C54): base64, flagged, every byte to be had.
            command = "head -c 5242880 /dev/urandom | tee /root/noise"
            done = await call(client, "exec", session=box.id, command=command)
            size = 5 * 1024 * 1024
            assert (done["stdout_encoding"], done["stdout_bytes"]) == ("base64", size)
            noise = box.files.read("/root/noise")
            assert base64.b64decode(done["stdout"]) == noise[:22_500]
            for offset in (0, 1_234_567, size - 100):
                told = await call(client, "exec_output", output=done["output"], offset=offset)
                part = base64.b64decode(told["text"])
                assert part and part == noise[offset : offset + len(part)]
            assert "next_offset" not in told
            # A sparse file of 2 GB (C76): a part of it, at once.
            box.exec("truncate -s 2000000000 /root/sparse; printf end >> /root/sparse")
            told = await call(client, "file_read", session=box.id, path="/root/sparse")
            assert told["content"] == "\0" * LIMIT and told["next_offset"] == LIMIT
            assert told["size"] == 2_000_000_003
            told = await call(
                client, "file_read", session=box.id, path="/root/sparse", offset=2_000_000_000
            )
            assert told["content"] == "end" and "next_offset" not in told
            error = await refused(
                client, "file_read", session=box.id, path="/root/sparse", offset=3_000_000_000
            )
            assert error["code"] == "invalid_request"
            # No end at all: killed in time, and this process keeps a bounded part.
            done = await call(client, "exec", session=box.id, command="yes", timeout=1)
            assert done["timed_out"] and done["stdout_bytes"] > KEPT
            assert "first" in done["stdout"]
            error = await refused(
                client, "exec_output", output=done["output"], offset=done["stdout_bytes"] - 1
            )
            assert error["code"] == "invalid_request"

    drive(work)
    status = Path(f"/proc/{web.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak * 1024 < 400 * 1024**2


def test_calls_at_once_stay_apart(web: Web, own: ServerProcess) -> None:
    """Two connections with a session each, twenty commands at a time (C60)."""
    ids: list[str] = []

    async def one(client: Client, word: str) -> str:
        async def run(number: int) -> str:
            said = f"{word}{number}"
            command = f"echo {said}; sleep 0.0{number % 7}; echo {said} >&2; exit {number}"
            done = await call(client, "exec", command=command)
            assert done["exit_code"] == number
            assert done["stdout"] == done["stderr"] == f"{said}\n"
            return done["session"]

        (session,) = set(await asyncio.gather(*(run(number) for number in range(20))))
        await call(client, "file_write", path="/root/who", content=word)
        assert (await call(client, "file_read", path="/root/who"))["content"] == word
        return session

    async def work() -> None:
        async with web.client("legacy") as left, web.client("legacy") as right:
            ids.extend(await asyncio.gather(one(left, "l"), one(right, "r")))

    drive(work)
    assert ids[0] != ids[1]
    with own.client() as client:
        for each in ids:  # the clients ended their connections
            session = client.sessions.get(each)
            eventually(lambda session=session: session.refresh().state == "suspended")
            session.delete()


def test_without_a_connection_a_session_is_named(web: Web, own: ServerProcess) -> None:
    """The newest protocol keeps no state over HTTP: no two clients may share a session unasked."""

    async def work() -> None:
        async with web.client() as client:
            error = await refused(client, "exec", command="true")
            assert error["code"] == "invalid_request" and "session_create" in error["next_step"]
            made = await call(client, "session_create")
            await call(client, "exec", command="true", session=made["session"])
            await call(client, "session_delete", session=made["session"])
        async with web.client(**{"sojourn-session": "by-header"}) as client:
            await call(client, "exec", command="echo 1 > /root/n")
        async with web.client("legacy", **{"sojourn-session": "by-header"}) as client:
            assert (await call(client, "file_read", path="/root/n"))["content"] == "1\n"

    drive(work)
    with own.client() as client:
        client.sessions.get("by-header").delete()


def test_one_session_for_all_and_a_token_of_its_own(own: ServerProcess, tmp_path: Path) -> None:
    """And the end of the process puts the session away."""
    (tmp_path / "token").write_text("of its own\n")
    more = ("--network", "allow=api.example.com", "--allow-network")
    options = (*more, "--session", "for-all", "--token-file", str(tmp_path / "token"))
    web = Web(own.data, *options, "--allow-host", "tools.example")
    try:

        async def work() -> None:
            with httpx2.Client() as http:
                assert http.get(web.url, headers=web.bearer()).status_code == 401
            web.token = "of its own"
            async with web.client() as one, web.client("legacy", host="tools.example") as other:
                await call(one, "exec", command="echo 1 > /root/n")
                assert (await call(other, "file_read", path="/root/n"))["content"] == "1\n"
                network = await call(one, "network_get")
                assert network["allowed"][0]["targets"] == ["api.example.com"]
                network = await call(one, "network_set", network="allow=b.example.com:8443")
                assert network["allowed"] == [
                    {"name": "b-example-com-8443", "targets": ["b.example.com"], "ports": [8443]}
                ]
                assert (await refused(one, "network_set", network="all"))["code"] == (
                    "invalid_request"
                )

        drive(work)
        with own.client() as client:
            session = client.sessions.get("for-all")
            assert session.state == "running"  # a connection ended, others may use it
            assert web.stop() == 0
            assert session.refresh().state == "suspended"
            session.delete()
    finally:
        web.stop()


def test_a_session_that_was_deleted_is_told_before_another_is_made(
    own: ServerProcess, web: Web
) -> None:
    async def work() -> None:
        async with web.client("legacy") as client:
            first = await call(client, "exec", command="true")
            await call(client, "session_delete", session=first["session"])
            error = await refused(client, "exec", command="true")
            assert error["code"] == "session_not_found" and "another" in error["next_step"]
            second = await call(client, "exec", command="true")
            assert second["session"] != first["session"]
            await call(client, "session_delete", session=second["session"])

    drive(work)


def test_nothing_is_answered_to_strangers(web: Web) -> None:
    good = web.bearer()
    port = web.url.split(":")[2].split("/")[0]
    expected: list[tuple[int, dict[str, str]]] = [
        (401, {}),
        (401, {"authorization": "Bearer wrong"}),
        (401, {"authorization": f"Basic {web.token}"}),
        (401, {"authorization": f"Bearer {web.token}x"}),
        (403, good | {"host": f"evil.example:{port}"}),
        (403, good | {"host": f"127.0.0.1.evil.example:{port}"}),
        (403, good | {"origin": "http://evil.example"}),
        (403, good | {"origin": "http://localhost.evil.example"}),
        (403, good | {"origin": "null"}),
        (200, good | {"origin": f"http://localhost:{port}", "host": f"localhost:{port}"}),
    ]
    message = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "raw", "version": "1"},
        },
    }
    accepted = {"accept": "application/json, text/event-stream"}
    with httpx2.Client() as http:
        for status, headers in expected:
            answer = http.post(web.url, json=message, headers=headers | accepted)
            assert answer.status_code == status, headers
            assert web.token not in answer.text
        for path in ("/", "/mcp", "/docs"):
            assert http.get(f"http://127.0.0.1:{port}{path}").status_code == 401


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_cancelled_call_leaves_nothing_running(web: Web, box: Any, mode: str) -> None:
    async def work() -> None:
        async with web.client(mode) as client:
            await call(client, "run_code", code="kept = 7", session=box.id)
            sleeping = asyncio.create_task(
                client.call_tool("exec", {"command": "sleep 1234 & wait", "session": box.id})
            )
            while not await asyncio.to_thread(running, box, "sleep 1234"):
                assert not sleeping.done()
                await asyncio.sleep(0.05)
            sleeping.cancel()
            await asyncio.wait({sleeping})
            while await asyncio.to_thread(running, box, "sleep 1234"):
                await asyncio.sleep(0.05)
            left = await call(
                client, "exec", command="pgrep -f '^sleep 1234' || echo none", session=box.id
            )
            assert left["stdout"] == "none\n"
            coding = asyncio.create_task(
                client.call_tool(
                    "run_code",
                    {
                        "code": "import time\nopen('/tmp/on','w')\ntime.sleep(1234)",
                        "session": box.id,
                    },
                )
            )
            while not await asyncio.to_thread(box.files.exists, "/tmp/on"):
                assert not coding.done()
                await asyncio.sleep(0.05)
            coding.cancel()
            await asyncio.wait({coding})
            # The interpreter listens again, with what it held.
            assert (await call(client, "run_code", code="kept", session=box.id))["value"] == "7"
            await call(client, "file_delete", path="/tmp/on", session=box.id)

    drive(work)


def test_long_calls_tell_their_progress(web: Web, box: Any) -> None:
    told: list[str | None] = []

    async def work() -> None:
        async def progress(_done: float, _total: float | None, message: str | None) -> None:
            told.append(message)

        async with web.client("legacy") as client:
            given = {"command": "sleep 2.5", "session": box.id}
            result = await client.call_tool("exec", given, progress_callback=progress)
            assert not result.is_error

    drive(work)
    assert told and told[0] is not None and told[0].startswith("running for 2")


def test_another_tenant_sees_nothing(
    own: ServerProcess, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C83: with another tenant's token every tool says that the session does not exist."""
    with own.client() as operator:
        token = operator.tokens.create("another").token
    assert token is not None
    more: dict[str, dict[str, Any]] = {
        "exec": {"command": "true"},
        "run_code": {"code": "1"},
        "process_output": {"process": 1},
        "process_kill": {"process": 1},
        "file_read": {"path": "/etc/passwd"},
        "file_write": {"path": "/root/x", "content": ""},
        "file_list": {"path": "/"},
        "file_delete": {"path": "/root/x"},
        "rollback": {"snapshot": box.snapshot("mine").id},
        "network_set": {"network": "none"},
    }

    async def work() -> None:
        sessions = Sessions(Server(), Settings())
        theirs = protocol_server(sessions, lambda _: sessions.of_call(None, "theirs", "test"))
        async with Client(theirs) as client:
            assert (await call(client, "session_list"))["sessions"] == []
            for name, entry in TOOLS.items():
                if "session" in entry.tool.input_schema["properties"]:
                    given = {"session": box.id} | more.get(name, {})
                    error = await refused(client, name, **given)
                    assert error["code"] == "session_not_found", name
                    assert token not in str(error)

    monkeypatch.setenv("SOJOURN_URL", own.url)
    monkeypatch.setenv("SOJOURN_TOKEN", token)
    drive(work)
    assert box.refresh().state == "running"


def test_wrong_arguments_are_told(web: Web, box: Any) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("exec", {}),
        ("exec", {"command": ""}),
        ("exec", {"command": ["ls"]}),
        ("exec", {"command": "true", "timeout": -1}),
        ("exec", {"command": "true", "timeout": "soon"}),
        ("exec", {"comand": "true"}),
        ("exec_output", {"output": "none"}),
        ("file_write", {"path": "/root/x", "content": "%%%", "encoding": "base64"}),
        ("file_read", {"path": "/root/x", "length": 30_001}),
        ("session_create", {"name": "not a name"}),
        ("session_list", {"state": "asleep"}),
    ]

    async def work() -> None:
        async with web.client() as client:
            for tool, given in wrong:
                extra = {"session": box.id} if tool in {"exec", "file_write", "file_read"} else {}
                error = await refused(client, tool, **given, **extra)
                assert error["code"] == "invalid_request", (tool, error)
            error = await refused(client, "exec", command="true", cwd="/none", session=box.id)
            assert error["code"] == "command_not_started"
            # What is null is left out.
            done = await call(client, "exec", command="pwd", cwd=None, timeout=None, session=box.id)
            assert done["exit_code"] == 0
            # A path is never code (C62).
            path = "/root/x'; touch /root/made; '"
            await call(client, "file_write", path=path, content="1", session=box.id)
            assert not box.files.exists("/root/made")

    drive(work)


def test_a_killed_server_is_told_and_found_again(own: ServerProcess) -> None:
    """Also at another address; and a signal puts the session away though the pipe stays open."""

    async def work() -> None:
        program = stdio(own.data, "--session", "lasting")
        async with program as client:
            await call(client, "run_code", code="x = 'still here'")
            own.kill()
            error = await refused(client, "run_code", code="x")
            assert error["code"] == "unreachable" and "sojourn up" in error["next_step"]
            await asyncio.to_thread(own.start)
            assert (await call(client, "run_code", code="x"))["value"] == "'still here'"

    drive(work)
    with own.client() as client:
        session = client.sessions.get("lasting")
        eventually(lambda: session.refresh().state == "suspended")
        process = subprocess.Popen(
            [*COMMAND, "--session", "lasting"],
            env=environment(own.data),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        params = (
            b'{"protocolVersion":"2025-06-18","capabilities":{},'
            b'"clientInfo":{"name":"raw","version":"1"}}'
        )
        for line in (
            b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":' + params + b"}",
            b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
            b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":'
            b'{"name":"run_code","arguments":{"code":"x"}}}',
            b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":'
            b'{"name":"exec","arguments":{"command":"sleep 4321"}}}',
        ):
            process.stdin.write(line + b"\n")
        process.stdin.flush()
        assert b"sojourn" in process.stdout.readline()
        assert b"still here" in process.stdout.readline()
        eventually(lambda: running(session, "sleep 4321"))
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        process.stdin.close()
        process.stdout.close()
        assert session.refresh().state == "suspended"
        assert not running(session, "sleep 4321")  # a call that was under way ended with it
        session.delete()
