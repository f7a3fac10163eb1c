"""Commands under the supervisor: exact bytes, exact exit codes, timeouts, terminals, bounds."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest

from sojourn.errors import (
    CommandNotStarted,
    Conflict,
    InvalidRequest,
    OutputTruncated,
    ProcessNotFound,
    TooLarge,
)
from sojourn.node.link import GuestLink
from sojourn.wire.guest import Output, ProcessSpec, ProcessState
from support.guests import HostedSupervisor, hosted, supervisor_program  # noqa: F401


def sh(text: str, **more: object) -> ProcessSpec:
    return ProcessSpec([b"/bin/sh", b"-c", text.encode()], **more)  # type: ignore[arg-type]


def of(pieces: list[Output], stream: int = 1) -> bytes:
    return b"".join(piece.data for piece in pieces if piece.stream == stream)


async def rest(guest: GuestLink, process: int, offsets: tuple[int, int] = (0, 0)) -> list[Output]:
    return [piece async for piece in guest.output(process, offsets)]


async def gone(pid: int) -> None:
    """Wait until a process inside, as numbered there, is no more."""
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)


@hosted()
async def test_exit_codes_are_exact(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    """C64: every code arrives, also when many end at once."""
    spec = sh("exit 7")
    for _ in range(5):
        results = await asyncio.gather(*(guest.run(spec) for _ in range(40)))
        assert [state.exit_code for state, _ in results] == [7] * 40
    for code in (0, 1, 2, 126, 127, 128, 255):
        state, _ = await guest.run(sh(f"exit {code}"))
        assert (state.exit_code, state.signal) == (code, None)
    state, _ = await guest.run(sh("kill -TERM $$"))
    assert (state.exit_code, state.signal) == (None, signal.SIGTERM)


@hosted()
async def test_output_is_exact_to_the_byte(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    """C53, C54: blank and last lines, zero bytes, megabytes."""
    _, out = await guest.run(ProcessSpec([b"printf", b"a\\n\\nb"]))
    assert of(out) == b"a\n\nb"
    _, out = await guest.run(ProcessSpec([b"printf", b"\\0\\377\\r\\n\\n"]))
    assert of(out) == b"\0\xff\r\n\n"
    _, out = await guest.run(sh("echo out; echo err >&2"))
    assert (of(out, 1), of(out, 2)) == (b"out\n", b"err\n")
    _, out = await guest.run(sh("head -c 5242880 /dev/urandom | tee /dev/stderr"))
    assert len(of(out, 1)) == 5242880
    assert of(out, 1) == of(out, 2)


@hosted()
async def test_parallel_commands_do_not_mix(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    """C60: each gets its own output and code."""

    async def one(number: int) -> None:
        text = f"for i in $(seq 300); do echo {number}; done; exit {number}"
        state, out = await guest.run(sh(text))
        assert state.exit_code == number
        assert of(out) == f"{number}\n".encode() * 300

    await asyncio.gather(*(one(number) for number in range(24)))


@hosted()
async def test_arguments_are_literal(
    guest: GuestLink, _: HostedSupervisor, directory: Path
) -> None:
    """C62: nothing between the caller and the program interprets anything."""
    nasty = [b"a'; touch x; '", b"$(id)", b"\xff\xfe", b"", b"-n", b"a\nb", b"*"]
    _, out = await guest.run(ProcessSpec([b"printf", b"%s\\n", *nasty]))
    assert of(out) == b"".join(one + b"\n" for one in nasty)
    strange = directory / "it's; a `dir`"
    strange.mkdir()
    _, out = await guest.run(ProcessSpec([b"pwd"], cwd=os.fsencode(strange)))
    assert of(out) == os.fsencode(strange) + b"\n"


@hosted()
async def test_environment(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    _, out = await guest.run(ProcessSpec([b"env"], env={b"A": b"1=2\xff", b"LANG": b"other"}))
    lines = of(out).splitlines()
    assert {b"A=1=2\xff", b"LANG=other", b"HOME=/root"} <= set(lines)
    names = [line.split(b"=")[0] for line in lines]
    assert len(names) == len(set(names))
    assert not any(name.startswith((b"PYTEST", b"SOJOURN")) for name in names)


@hosted()
async def test_users_and_groups(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    _, out = await guest.run(ProcessSpec([b"id", b"-un"], user="nobody"))
    assert of(out) == b"nobody\n"
    show = sh("id -u; id -g; id -G; echo $HOME")
    spec = ProcessSpec(show.argv, user="4321:12")
    _, out = await guest.run(spec)
    assert of(out).split()[:3] == [b"4321", b"12", b"12"]
    _, out = await guest.run(ProcessSpec([b"env"], user="nobody"))
    assert b"USER=nobody" in of(out).splitlines()


@hosted()
async def test_a_start_that_fails_says_why(
    guest: GuestLink, _: HostedSupervisor, directory: Path
) -> None:
    plain = directory / "plain"
    plain.write_text("no program")
    plain.chmod(0o755)
    cases = [
        (ProcessSpec([b"/does/not/exist"]), "exec", "ENOENT"),
        (ProcessSpec([b"no-such-command"]), "exec", "ENOENT"),
        (ProcessSpec([b""]), "exec", "ENOENT"),
        (ProcessSpec([b"/etc/passwd"]), "exec", "EACCES"),
        (ProcessSpec([os.fsencode(plain)]), "exec", "ENOEXEC"),
        (ProcessSpec([b"true"], cwd=b"/nowhere"), "cwd", "ENOENT"),
        (ProcessSpec([b"true"], cwd=b"/etc/passwd"), "cwd", "ENOTDIR"),
        (ProcessSpec([b"true"], user="nemo"), "user", "ENOENT"),
    ]
    for spec, stage, name in cases:
        for call in (guest.run, guest.start):
            with pytest.raises(CommandNotStarted) as caught:
                await call(spec)
            assert caught.value.details["stage"] == stage
            assert caught.value.details["errno_name"] == name
    with pytest.raises(InvalidRequest):
        await guest.run(ProcessSpec([b"a\0b"]))
    with pytest.raises(TooLarge):
        await guest.run(ProcessSpec([b"true", b"x" * (2 << 20)]))
    with pytest.raises(CommandNotStarted):
        await guest.run(ProcessSpec([b"true", b"x" * (200 << 10)]))  # E2BIG, the kernel's limit
    assert await guest.processes() == []


@hosted()
async def test_a_timeout_ends_the_whole_group(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    """C51: grandchildren that hold the pipe neither survive nor delay the answer."""
    state, out = await guest.run(
        sh("trap '' TERM; sleep 600 & echo $!; echo begun; sleep 600; echo never", timeout=0.3)
    )
    assert state.timed_out and state.signal == signal.SIGKILL
    assert of(out).endswith(b"begun\n")
    alive = await guest.run(sh("kill -0 " + of(out).split()[0].decode()))
    assert alive[0].exit_code != 0
    activity = await guest.activity()
    assert activity.alive == 0


@hosted()
async def test_a_timeout_ends_other_groups_of_the_session(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    script = (
        "import os,time\nif os.fork()==0:\n  os.setpgid(0,0)\nprint(flush=True)\ntime.sleep(600)"
    )
    state, _ = await guest.run(ProcessSpec([b"python3", b"-c", script.encode()], timeout=1.5))
    assert state.timed_out
    while (await guest.activity()).alive:
        await asyncio.sleep(0.02)


@hosted()
async def test_a_background_child_does_not_hold_up_the_end(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    """What it writes later is kept, and its pipe is not closed under it."""
    state, out = await guest.run(
        sh("(while [ ! -e /proc/1/gone ]; do sleep 0.1; echo tick; done) & echo first")
    )
    assert state.exit_code == 0
    assert of(out).startswith(b"first\n")
    seen = state.out[1]
    while (await guest.process(state.id)).out[1] <= seen + 10:
        await asyncio.sleep(0.02)
    later = await rest(guest, state.id, (seen, 0))
    assert of(later).startswith(b"tick\n")
    await guest.forget(state.id)
    with pytest.raises(ProcessNotFound):
        await guest.process(state.id)
    assert (await guest.activity()).alive > 0  # forgetting is not killing
    await guest.run(sh("pkill -f 'echo [t]ick'"))


@hosted()
async def test_long_input_arrives_whole(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    """C59: any size, with its end."""
    data = os.urandom(8 << 20)
    _, out = await guest.run(ProcessSpec([b"sha256sum"], stdin="inline", input=data))
    assert of(out).split()[0].decode() == hashlib.sha256(data).hexdigest()
    _, out = await guest.run(ProcessSpec([b"wc", b"-c"], stdin="inline", input=b""))
    assert of(out).strip() == b"0"
    state = await guest.start(ProcessSpec([b"wc", b"-c"], stdin="pipe"))
    await guest.write(state.id, data)
    await guest.close_stdin(state.id)
    assert of(await rest(guest, state.id)).strip() == b"%d" % len(data)


@hosted()
async def test_input_nobody_reads_is_no_disaster(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    state, _ = await guest.run(sh("exit 3", stdin="inline", input=b"x" * 300000))
    assert state.exit_code == 3
    state = await guest.start(sh("exec 0<&-; sleep 600", stdin="pipe"))
    writing = asyncio.ensure_future(guest.write(state.id, b"x" * (1 << 20)))
    await asyncio.wait_for(writing, 20)
    await guest.signal(state.id, signal.SIGKILL)
    await guest.wait(state.id)
    await guest.write(state.id, b"more")  # taken and thrown away
    silent = await guest.start(sh("sleep 600"))
    with pytest.raises(Conflict):
        await guest.write(silent.id, b"x")


@hosted()
async def test_writing_waits_for_the_reader(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    state = await guest.start(sh("read x; cat | wc -c", stdin="pipe"))
    writing = asyncio.ensure_future(guest.write(state.id, b"y" * (2 << 20)))
    for _ in range(50):
        await guest.info()  # others are answered meanwhile
    assert not writing.done()
    await guest.signal(state.id, signal.SIGKILL)
    await asyncio.wait_for(writing, 20)


@hosted()
async def test_old_output_is_dropped_and_said_so(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    """C54: no silent cut: offsets and errors tell."""
    spec = sh("head -c 100000 /dev/zero; printf end", keep=1000)
    state, out = await guest.run(spec)
    assert state.out == (99003, 100003)
    assert of(out) == b"\0" * 997 + b"end"
    assert out[0].offset == 99003
    state = await guest.start(spec)
    await guest.wait(state.id)
    with pytest.raises(OutputTruncated) as caught:
        await rest(guest, state.id)
    assert caught.value.details["first_offset"] == 99003
    assert of(await rest(guest, state.id, (99003, 0))) == of(out)


@hosted()
async def test_lossless_holds_the_process_back(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    state = await guest.start(sh("seq 200000; echo done >&2", keep=70000, lossless=True))
    for _ in range(30):
        await guest.info()
    held = await guest.process(state.id)
    assert held.running and held.out[1] <= 70000
    out = await rest(guest, state.id)
    assert of(out) == b"".join(b"%d\n" % n for n in range(1, 200001))
    assert of(out, 2) == b"done\n"
    offsets = [piece.offset for piece in out if piece.stream == 1]
    assert offsets == sorted(offsets) and offsets[0] == 0


@hosted()
async def test_a_lossless_run_is_answered_early(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    state, out = await guest.run(sh("head -c 20000000 /dev/zero; echo x", lossless=True))
    assert state.running
    size = len(of(out))
    assert 0 < size < 4 << 20
    async for piece in guest.output(state.id, (size, 0)):
        assert piece.offset == size
        size += len(piece.data)
    assert size == 20000002
    assert (await guest.wait(state.id)).exit_code == 0
    state, out = await guest.run(sh("head -c 50000 /dev/zero", lossless=True))
    assert not state.running and len(of(out)) == 50000


@hosted()
async def test_terminals(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    state = await guest.start(
        sh("stty size; read x; stty size; echo got $x; tty", pty=(24, 80), stdin="pipe")
    )
    stream = guest.output(state.id)
    first = await anext(stream)
    assert first.data.startswith(b"24 80")
    await guest.resize(state.id, 50, 132)
    await guest.write(state.id, b"hello\n")
    out = first.data + b"".join([piece.data async for piece in stream])
    assert b"50 132" in out and b"got hello" in out and b"/dev/pts/" in out
    assert (await guest.wait(state.id)).exit_code == 0
    # Attaching again at an offset gives the rest, byte for byte.
    assert of(await rest(guest, state.id, (10, 0))) == out[10:]
    state = await guest.start(ProcessSpec([b"cat"], pty=(24, 80), stdin="pipe"))
    await guest.close_stdin(state.id)
    assert (await guest.wait(state.id)).exit_code == 0
    state = await guest.start(ProcessSpec([b"sleep", b"600"], pty=(24, 80), stdin="pipe"))
    await guest.write(state.id, b"\x03")
    assert (await guest.wait(state.id)).signal == signal.SIGINT
    with pytest.raises(Conflict):
        await guest.resize((await guest.start(sh("sleep 600"))).id, 1, 1)


@hosted()
async def test_signals_and_records(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    state = await guest.start(sh("sleep 600 & sleep 600", tag="mine"))
    assert [(one.id, one.tag, one.running) for one in await guest.processes()] == [
        (state.id, "mine", True)
    ]
    with pytest.raises(Conflict):
        await guest.forget(state.id)
    await guest.signal(state.id, signal.SIGTERM)
    ended = await guest.wait(state.id)
    assert ended.signal == signal.SIGTERM
    assert ended.ended_ns is not None and ended.ended_ns >= ended.started_ns
    while (await guest.activity()).alive:
        await asyncio.sleep(0.01)
    with pytest.raises(ProcessNotFound):
        await guest.signal(state.id, signal.SIGTERM)
    await guest.forget(state.id)
    for call in (guest.wait, guest.process, guest.forget):
        with pytest.raises(ProcessNotFound):
            await call(state.id)
    with pytest.raises(ProcessNotFound):
        await rest(guest, 999999)
    with pytest.raises(InvalidRequest):
        await guest.signal((await guest.start(sh("sleep 600"))).id, 999)


@hosted()
async def test_ended_records_are_bounded(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    running = await guest.start(sh("sleep 600"))
    spec = ProcessSpec([b"true"])
    states: list[ProcessState] = []
    for _ in range(30):
        states += await asyncio.gather(*(guest.start(spec) for _ in range(10)))
    await asyncio.gather(*(guest.wait(state.id) for state in states[-20:]))
    known = await guest.processes()
    while sum(one.running for one in known) > 1:
        await asyncio.sleep(0.01)
        known = await guest.processes()
    assert len(known) == 257
    assert known[0].id == running.id and known[0].running
    assert known[-1].id == max(state.id for state in states)


@hosted()
async def test_orphans_leave_no_zombies(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    await guest.run(sh("for i in $(seq 50); do (sleep 0.05 &) ; done"))
    while (await guest.activity()).alive:
        await asyncio.sleep(0.02)
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
    assert children.split() == []


@hosted("--max-processes", "60")
async def test_a_fork_storm_is_ended(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    """C65: the supervisor lives and says why."""
    quiet = await guest.start(sh("sleep 600"))
    storm = await guest.start(sh("for i in $(seq 200); do sleep 600 & done; wait"))
    state = await asyncio.wait_for(guest.wait(storm.id), 60)
    assert state.signal == signal.SIGKILL
    assert state.reason == "process limit exceeded"
    assert (await guest.process(quiet.id)).running
    assert (await guest.run(ProcessSpec([b"echo", b"well"])))[1][0].data == b"well\n"


@hosted()
async def test_a_cancelled_run_ends_its_command(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    task = asyncio.ensure_future(guest.run(sh("sleep 600 & sleep 600")))
    while not await guest.processes():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while (await guest.activity()).alive:
        await asyncio.sleep(0.01)


@hosted("--user", "nobody", "--cwd", "/usr")
async def test_the_sessions_user_and_directory(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    _, out = await guest.run(sh("id -un; pwd; echo $HOME $USER"))
    assert of(out) == b"nobody\n/usr\n/nonexistent nobody\n"
    _, out = await guest.run(sh("id -un", user="root"))
    assert of(out) == b"root\n"


@hosted()
async def test_activity_counts(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    before = await guest.activity()
    assert await guest.activity() == before
    await guest.run(ProcessSpec([b"true"]))
    after = await guest.activity()
    assert (after.started, after.ended) == (before.started + 1, before.ended + 1)
    started = time.time_ns()
    state = await guest.start(sh("exec sleep 600"))
    assert abs(state.started_ns - started) < 10**10
    assert (await guest.activity()).alive == 1
