"""The SWE-ReX deployment, through the package's own requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("swerex", reason="needs the extra `frameworks`")

from swerex.deployment.abstract import AbstractDeployment
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from sojourn.adapters import swerex_runtime
from sojourn.adapters.swerex import SojournDeployment
from sojourn.errors import SessionNotFound
from support.loopback import only_loopback  # noqa: F401 (used by all)
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("swerex") / "data")
    server.start()
    yield server
    server.remove()


def made(own: ServerProcess, **more: Any) -> SojournDeployment:
    return SojournDeployment(url=own.url, token=own.token, **more)


def test_a_harness_works_as_with_any_other_deployment(own: ServerProcess, tmp_path: Path) -> None:
    async def work() -> None:
        deployment: AbstractDeployment = made(
            own, on_stop="delete", policy={"auto_snapshot": "off"}
        )
        with pytest.raises(DeploymentNotStartedError):
            await deployment.is_alive()
        await deployment.start()
        assert await deployment.is_alive()
        runtime = deployment.runtime
        number = runtime.session.id

        done = await runtime.execute(Command(command=["sh", "-c", "echo o; echo e >&2; exit 7"]))
        assert (done.stdout, done.stderr, done.exit_code) == ("o\n", "e\n", 7)
        done = await runtime.execute(
            Command(command="echo o; echo e >&2", shell=True, merge_output_streams=True)
        )
        assert (done.stdout, done.stderr) == ("o\ne\n", "")
        with pytest.raises(NonZeroExitCodeError):
            await runtime.execute(Command(command="exit 3", shell=True, check=True))
        with pytest.raises(CommandTimeoutError):
            await runtime.execute(Command(command=["sleep", "30"], timeout=0.2))
        with pytest.raises(FileNotFoundError):
            await runtime.execute(Command(command="no-such-program"))

        await runtime.write_file(WriteFileRequest(path="/srv/deep/a", content="gr\u00fc\u00df\n"))
        assert (
            await runtime.read_file(ReadFileRequest(path="/srv/deep/a"))
        ).content == "gr\u00fc\u00df\n"
        with pytest.raises(FileNotFoundError):
            await runtime.read_file(ReadFileRequest(path="/srv/none"))
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/one").write_bytes(b"\xff\0")
        await runtime.upload(
            UploadRequest(source_path=str(tmp_path / "tree"), target_path="/srv/t")
        )
        assert (
            await runtime.execute(Command(command="od -An -tx1 /srv/t/one", shell=True))
        ).stdout == " ff 00\n"

        await runtime.create_session(CreateBashSessionRequest())
        with pytest.raises(SessionExistsError):
            await runtime.create_session(CreateBashSessionRequest())

        async def run(command: str, **more: Any) -> tuple[str, int | None]:
            more.setdefault("check", "silent")
            seen = await runtime.run_in_session(BashAction(command=command, **more))
            return seen.output, seen.exit_code

        assert await run("cd /srv && X=1; f() { echo in $X; }") == ("", 0)
        assert await run("pwd; f; (exit 42)") == ("/srv\nin 1\n", 42)
        assert await run("echo $?") == ("42\n", 0)
        assert await run("cat <<'EOF'\na'b\"c\n\tx\\\nEOF") == ("a'b\"c\n\tx\\\n", 0)
        assert await run("printf 'no end'") == ("no end", 0)
        assert await run("false", check="ignore") == ("", None)
        with pytest.raises(NonZeroExitCodeError, match="told"):
            await run("false", check="raise", error_msg="told")
        with pytest.raises(BashIncorrectSyntaxError):
            await run("if then")
        with pytest.raises(CommandTimeoutError):
            await run("sleep 60", timeout=0.3)
        await runtime.run_in_session(BashInterruptAction())
        assert await run("pwd") == ("/srv\n", 0)
        with pytest.raises(CommandTimeoutError):
            await run("trap '' INT; sleep 60", timeout=0.3)
        await runtime.run_in_session(BashInterruptAction(n_retry=1))
        assert (await run("echo alive"))[0].endswith("alive\n")

        text, _ = await run("python3 -q", is_interactive_command=True, expect=[">>> "], timeout=30)
        assert ">>> " in text
        text, _ = await run("6 * 7", is_interactive_command=True, expect=[r"\d+\r?\n>>> "])
        assert "42" in text
        await run("quit()", is_interactive_quit=True, timeout=10)
        assert await run("echo $X") == ("1\n", 0)
        with pytest.raises(SessionDoesNotExistError):
            await run("true", session="none")
        await runtime.close_session(CloseBashSessionRequest())
        await runtime.close()
        await deployment.stop()
        await deployment.stop()
        with own.client() as client, pytest.raises(SessionNotFound):
            client.sessions.get(number)

    asyncio.run(work())


def test_shells_go_on_in_another_process_and_in_forks(own: ServerProcess) -> None:
    async def begin() -> bytes:
        deployment = made(own, name="task")
        await deployment.start()
        runtime = deployment.runtime
        await runtime.create_session(CreateBashSessionRequest())
        await runtime.run_in_session(BashAction(command="cd /srv; X=1"))
        state = deployment.state()
        await deployment.stop()
        return state

    async def go_on(state: bytes) -> None:
        deployment = made(own, state=state)
        await deployment.start()
        children = await deployment.fork(2)

        async def grow(one: SojournDeployment, by: int) -> str:
            command = f"X=$((X + {by})); echo $X $PWD; echo $X > /srv/x"
            return (await one.runtime.run_in_session(BashAction(command=command))).output

        told = await asyncio.gather(
            *(grow(one, by) for by, one in enumerate((deployment, *children)))
        )
        assert told == ["1 /srv\n", "2 /srv\n", "3 /srv\n"]
        await children[1].session.promote()
        await deployment.session.refresh()
        found = await deployment.runtime.read_file(ReadFileRequest(path="/srv/x"))
        assert found.content == "3\n"
        for one in children:
            await one.stop()
        await deployment.session.delete()
        await deployment.stop()

    state = asyncio.run(begin())
    assert own.token.encode() not in state
    with own.client() as client:
        assert client.sessions.get("task").state == "suspended"
    asyncio.run(go_on(state))


def test_output_is_bounded_and_a_missing_server_is_told(
    own: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swerex_runtime, "OUTPUT_BYTES", 100_000)

    async def work() -> None:
        deployment = made(own, on_stop="delete")
        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest())
        seen = await deployment.runtime.run_in_session(BashAction(command="seq 200000"))
        assert seen.exit_code == 0 and "bytes left out" in seen.output
        assert seen.output.startswith("1\n2\n") and seen.output.endswith("\n200000\n")
        assert len(seen.output) < 400_000
        await deployment.stop()

        nowhere = SojournDeployment(url="http://127.0.0.1:1", token="no")
        with pytest.raises(DeploymentStartupError, match="unreachable"):
            await nowhere.start()

    asyncio.run(work())
