"""Sandboxes of the OpenAI Agents SDK: its own runner and tools, with a model that has a script."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.sandbox", reason="needs the extra `frameworks`")

from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.errors import (
    ExecTimeoutError,
    InvalidManifestPathError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Manifest

from sojourn.adapters import openai_agents_session
from sojourn.adapters.openai_agents import SojournSandboxClient, SojournSandboxClientOptions
from sojourn.adapters.openai_agents_session import SojournSandboxSession
from sojourn.errors import SessionNotFound
from support.loopback import only_loopback  # noqa: F401 (used by all)
from support.scripted_openai import Scripted
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged
set_tracing_disabled(True)  # nothing goes out


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("agents") / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def _snapshots_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def agent(model: Scripted) -> SandboxAgent[Any]:
    return SandboxAgent(name="worker", model=model, capabilities=[Filesystem(), Shell()])


def config(client: SojournSandboxClient, **more: Any) -> RunConfig:
    return RunConfig(sandbox=SandboxRunConfig(client=client, **more), tracing_disabled=True)


def terminal(heard: list[str]) -> int:
    return int(
        next(one for one in heard if "session ID " in one).split("session ID ")[1].split()[0]
    )


PATCH = "*** Begin Patch\n*** Add File: notes.md\n+first\n*** End Patch\n"

ANOTHER_PROCESS = """
import asyncio, json, sys
from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Filesystem, Shell
from sojourn.adapters.openai_agents import SojournSandboxClient
from support.scripted_openai import Scripted

set_tracing_disabled(True)
kept = json.loads(sys.stdin.read())
client = SojournSandboxClient()
typed = {"session_id": kept["terminal"], "chars": "print(x + 1)\\n", "yield_time_ms": 500}
model = Scripted(
    ("write_stdin", typed),
    ("exec_command", {"cmd": "cat notes.md a.txt"}),
    "resumed",
    prefix="again",
)
agent = SandboxAgent(name="worker", model=model, capabilities=[Filesystem(), Shell()])
state = client.deserialize_session_state(kept["state"])
run = RunConfig(
    sandbox=SandboxRunConfig(client=client, session_state=state), tracing_disabled=True
)
result = asyncio.run(Runner.run(agent, "go on", run_config=run))
print(json.dumps({"heard": model.heard, "said": result.final_output}))
"""


def test_a_run_goes_on_in_another_process_with_its_terminals(own: ServerProcess) -> None:
    client = SojournSandboxClient(own.url, own.token)
    model = Scripted(
        ("exec_command", {"cmd": "echo hi > a.txt; pwd; echo e >&2; exit 3"}),
        ("apply_patch", PATCH),
        ("exec_command", {"cmd": "python3 -iq", "tty": True, "yield_time_ms": 1000}),
        lambda heard: (
            "write_stdin",
            {"session_id": terminal(heard), "chars": "x = 41\n", "yield_time_ms": 500},
        ),
        "done",
    )
    result = asyncio.run(Runner.run(agent(model), "go", run_config=config(client)))
    assert result.final_output == "done"
    assert "exited with code 3" in model.heard[0] and "/workspace\n" in model.heard[0]

    told = result.to_state().to_json()["sandbox"]["session_state"]
    assert own.token not in json.dumps(told)
    with own.client() as ours:
        assert ours.sessions.get(told["session"]).state == "suspended"
    own.restart()  # a crash of the server is no matter
    place = {"SOJOURN_URL": own.url, "SOJOURN_TOKEN": own.token}
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS],
        input=json.dumps({"state": told, "terminal": terminal(model.heard)}),
        env=os.environ | place | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["said"] == "resumed"
    assert "42" in seen["heard"][0]  # the interpreter was there, with what it held
    assert "first" in seen["heard"][1] and "hi\n" in seen["heard"][1]

    # The same state once more: what was done since its run is taken back.
    with own.client() as ours:
        ours.sessions.get(told["session"]).files.write("/workspace/a.txt", "changed")
    client = SojournSandboxClient(own.url, own.token)  # the server has another address now
    state = client.deserialize_session_state(told)
    model = Scripted(("exec_command", {"cmd": "cat a.txt"}), "seen", prefix="third")
    asyncio.run(Runner.run(agent(model), "look", run_config=config(client, session_state=state)))
    assert "hi\n" in model.heard[0] and "changed" not in model.heard[0]

    asyncio.run(client.destroy(state))
    with own.client() as ours, pytest.raises(SessionNotFound):
        ours.sessions.get(told["session"])
    with pytest.raises(SessionNotFound):
        asyncio.run(client.resume(state))


def test_commands_and_files_are_exact_and_bounded(
    own: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1024 * 1024
    monkeypatch.setattr(openai_agents_session, "OUTPUT_BYTES", limit)
    client = SojournSandboxClient(own.url, own.token)

    async def work() -> None:
        options = SojournSandboxClientOptions(
            on_exit="delete", env={"GIVEN": "yes"}, policy={"auto_snapshot": "off"}
        )
        manifest = Manifest(environment={"value": {"MORE": "also"}})
        sandbox = await client.create(options=options, manifest=manifest)
        async with sandbox:
            done = await sandbox.exec("printf '%s' \"$GIVEN $MORE\"; printf '\\377\\0' >&2; exit 9")
            assert (done.exit_code, done.stdout, done.stderr) == (9, b"yes also", b"\xff\0")
            assert (await sandbox.exec("id", "-un", user="nobody")).stdout == b"nobody\n"
            missing = await sandbox.exec("no-such-program", shell=False)
            assert missing.exit_code == 127 and missing.stderr
            with pytest.raises(ExecTimeoutError):
                await sandbox.exec("sleep 60", timeout=0.3)
            much = await sandbox.exec(f"head -c {limit + 5} /dev/zero")
            assert len(much.stdout) == limit and b"5 bytes" in much.stderr

            data = bytes(range(256)) * 5000
            await sandbox.write(Path("deep/b.bin"), io.BytesIO(data))
            assert (await sandbox.read(Path("deep/b.bin"))).read() == data
            assert await sandbox.read_bounded(Path("deep/b.bin"), max_bytes=10) == data[:10]
            await sandbox.exec("truncate -s 2G hole")
            assert await sandbox.read_bounded(Path("hole"), max_bytes=5) == b"\0" * 5
            with pytest.raises(WorkspaceReadNotFoundError):
                await sandbox.read(Path("none"))
            with pytest.raises(InvalidManifestPathError):
                await sandbox.read(Path("/etc/passwd"))
            await sandbox.exec("ln -s /etc/passwd out")
            with pytest.raises(InvalidManifestPathError):
                await sandbox.read(Path("out"))

            inner = sandbox._inner
            assert isinstance(inner, SojournSandboxSession)
            point = await inner.session.snapshot("here")
            await sandbox.rm(Path("deep"), recursive=True)
            await inner.session.rollback(point)
            assert (await sandbox.read(Path("deep/b.bin"))).read() == data
            number = inner.session.id
        await client.delete(sandbox)
        with own.client() as ours, pytest.raises(SessionNotFound):
            await asyncio.to_thread(ours.sessions.get, number)

    asyncio.run(work())


def test_an_archive_of_another_sandbox_is_unpacked(own: ServerProcess, tmp_path: Path) -> None:
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
    from agents.sandbox.snapshot import LocalSnapshotSpec

    kept = LocalSnapshotSpec(base_path=tmp_path)

    async def work() -> None:
        local = UnixLocalSandboxClient()
        first = await local.create(snapshot=kept)
        async with first:
            await first.write(Path("a.txt"), io.BytesIO(b"from elsewhere"))
        await local.delete(first)

        client = SojournSandboxClient(own.url, own.token)
        options = SojournSandboxClientOptions(on_exit="delete")
        second = await client.create(snapshot=first.state.snapshot, options=options)
        async with second:
            assert (await second.read(Path("a.txt"))).read() == b"from elsewhere"
        await client.delete(second)

    asyncio.run(work())
