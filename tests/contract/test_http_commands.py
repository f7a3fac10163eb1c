"""Commands and processes through both client twins: exact bytes, exit codes, streams."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sojourn import (
    CommandNotStarted,
    Interrupted,
    InvalidRequest,
    PathInvalid,
    ProcessNotFound,
    SandboxLost,
    SessionNotFound,
)
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


def test_result_of_a_command(work: Any) -> None:
    result = work.exec("printf 'a\\n\\nb'; printf err >&2; exit 42")
    assert (result.exit_code, result.ok) == (42, False)
    assert (result.stdout, result.stderr) == (b"a\n\nb", b"err")
    assert (result.text, result.error_text) == ("a\n\nb", "err")
    assert work.exec(["true"]).ok
    assert work.exec("kill -TERM $$").exit_code == 128 + 15


def test_arguments_are_literal_bytes(work: Any) -> None:
    odd = b"'; echo \xff $(id)\n"
    assert work.exec(["printf", "%s", odd]).stdout == odd
    assert work.exec(["printf", "%s", "caf\u00e9 \udcfe"]).stdout == "caf\u00e9 ".encode() + b"\xfe"


def test_environment_and_directory(work: Any) -> None:
    work.files.mkdir("/some/where")
    result = work.exec('echo "$A" "$PWD"', env={"A": "1"}, cwd="/some/where")
    assert result.text.startswith("1 ") and result.text.rstrip().endswith("/some/where")


@pytest.mark.parametrize("size", [0, 1, 300_000, 5 * 1024 * 1024])
def test_output_is_exact(work: Any, size: int) -> None:
    work.files.write("/random", os.urandom(size))
    expected = work.files.read("/random")
    result = work.exec(["cat", "random"], cwd="/")
    assert result.stdout == expected and len(expected) == size


def test_output_callbacks_see_output_as_it_comes(work: Any) -> None:
    pieces: list[bytes] = []
    first = threading.Event()
    started: list[int] = []

    def take(data: bytes) -> None:
        pieces.append(data)
        if not first.is_set():
            first.set()
            # The command waits for this file: its output came while it ran.
            threading.Thread(target=work.files.write, args=("/go", b"")).start()

    result = work.exec(
        "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two",
        cwd="/",
        on_stdout=take,
        on_start=started.append,
    )
    assert result.stdout == b"".join(pieces) == b"one\ntwo\n"
    assert started == [result.process]


@pytest.mark.parametrize("kind", ["bytes", "text", "file", "iterator"])
def test_input_of_any_kind_and_size(work: Any, kind: str) -> None:
    data = b"0123456789abcdef" * (512 * 1024)  # 8 MiB

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(data), 1_000_000):
            yield data[at : at + 1_000_000]

    stdin = {
        "bytes": data,
        "text": data.decode(),
        "file": io.BytesIO(data),
        "iterator": pieces(),
    }[kind]
    assert work.exec("wc -c", stdin=stdin).text.split() == [str(len(data))]
    assert work.exec("wc -c", stdin=b"inline").text.split() == ["6"]
    assert work.exec("wc -c").text.split() == ["0"]


def test_command_that_does_not_read_its_input(work: Any) -> None:
    result = work.exec("exec true", stdin=b"x" * (4 * 1024 * 1024))
    assert result.ok


def test_input_that_fails_ends_the_command(work: Any) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * (2 * 1024 * 1024)
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        work.exec("cat >/dev/null; sleep 60", stdin=broken())


def test_timeout_is_told(work: Any) -> None:
    result = work.exec("sleep 60", timeout=0.2)
    assert result.timed_out and not result.ok


def test_twenty_at_once_are_isolated(api: Any, work: Any) -> None:
    results: dict[int, bytes] = {}

    def one(number: int) -> None:
        results[number] = work.exec(f"echo {number}; sleep 0.05; echo {number}").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: b"%d\n%d\n" % (number, number) for number in range(20)}


def test_refused_commands(work: Any, api: Any, rig: HttpRig) -> None:
    with pytest.raises(CommandNotStarted):
        work.exec(["/no/such/program"])
    for bad in ([], [""], ["a\0b"]):
        with pytest.raises(InvalidRequest):
            work.exec(bad)
    with pytest.raises(InvalidRequest):
        work.exec(["true"], timeout=-1)
    with pytest.raises(InvalidRequest):
        work.exec(["true"], env={"A=B": ""})
    with pytest.raises(PathInvalid):
        work.exec(["true"], cwd="relative")
    rig.service.fail_next("exec", SandboxLost("out of memory", cause="oom"))
    with pytest.raises(SandboxLost) as caught:
        work.exec(["true"])
    assert caught.value.details["cause"] == "oom"


def test_exec_is_never_repeated(work: Any, rig: HttpRig) -> None:
    before = rig.service.calls["exec"]
    rig.service.fail_next("exec", Interrupted("suspended"))
    with pytest.raises(Interrupted):
        work.exec(["true"])
    assert rig.service.calls["exec"] == before + 1


def test_spawned_process(work: Any) -> None:
    process = work.spawn("echo out; echo err >&2; read line; echo got $line; exit 3", stdin="pipe")
    assert process.running and process.pid > 0
    assert process.id in [one.id for one in work.processes()]
    with pytest.raises(TimeoutError):
        process.wait(timeout=0.05)
    process.write("word\n")
    info = process.wait()
    assert (info.exit_code, process.exit_code, process.running) == (3, 3, False)
    pieces = list(process.output())
    assert b"".join(one.data for one in pieces if one.stream == 1) == b"out\ngot word\n"
    assert b"".join(one.data for one in pieces if one.stream == 2) == b"err\n"
    again = list(process.output((4, 4)))
    assert [(one.offset, one.data) for one in again] == [(4, b"got word\n")]
    assert work.process(process.id).info.exit_code == 3


def test_output_without_following(work: Any) -> None:
    process = work.spawn("echo now; sleep 60")
    while not process.refresh().info.stdout[1]:
        time.sleep(0.01)
    assert b"".join(one.data for one in process.output(follow=False)) == b"now\n"
    assert list(process.output(4, follow=False)) == []
    process.kill()
    assert process.wait().signal == 9


def test_signals_and_input_end(work: Any) -> None:
    process = work.spawn(["cat"], stdin="pipe")
    process.write([b"a", b"b"], eof=True)
    assert process.wait().exit_code == 0
    assert b"".join(one.data for one in process.output()) == b"ab"
    process = work.spawn(["sleep", "60"])
    process.signal("term")
    assert process.wait().exit_code == 128 + 15
    with pytest.raises(InvalidRequest):
        process.signal("NOSUCH")
    with pytest.raises(ProcessNotFound):
        work.process(10_000)


def test_a_lost_connection_is_taken_up_at_its_offset(
    work: Any, rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.client.core.RETRY_DELAYS", (0.01, 0.01, 0.01))
    seen: list[bytes] = []

    def cut(data: bytes) -> None:
        seen.append(data)
        if len(seen) == 1:
            threading.Thread(target=cut_and_go_on).start()

    def cut_and_go_on() -> None:
        rig.call(close_busy)
        work.files.write("/go", b"")

    async def close_busy() -> None:
        for connection in list(rig.server.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()

    before = rig.service.calls["exec"]
    script = "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two; exit 5"
    result = work.exec(script, cwd="/", on_stdout=cut)
    assert (result.stdout, result.exit_code) == (b"one\ntwo\n", 5)
    assert rig.service.calls["exec"] == before + 1
    assert rig.service.calls["output"] >= 1


def test_code(work: Any) -> None:
    assert work.run_code("1 + 1").text == "'1 + 1'"
    with pytest.raises(InvalidRequest):
        work.run_code("1", context="")


def test_missing_session(api: Any) -> None:
    gone = api.sessions.create()
    gone.delete()
    with pytest.raises(SessionNotFound):
        gone.exec(["true"])
    with pytest.raises(SessionNotFound):
        list(gone.events(follow=True))
