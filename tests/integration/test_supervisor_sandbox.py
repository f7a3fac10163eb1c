"""The supervisor as the first process of a real sandbox: capture, restore, fork storms."""

from __future__ import annotations

import asyncio
import re

from sojourn.node.interpreter import Interpreter
from sojourn.node.link import GuestLink
from sojourn.wire.guest import Output, ProcessSpec
from support.guests import Sandboxes, sandboxed, supervisor_program  # noqa: F401


def sh(text: str, **more: object) -> ProcessSpec:
    return ProcessSpec([b"/bin/sh", b"-c", text.encode()], **more)  # type: ignore[arg-type]


def of(pieces: list[Output], stream: int = 1) -> bytes:
    return b"".join(piece.data for piece in pieces if piece.stream == stream)


@sandboxed
async def test_commands_files_and_terminals(sandboxes: Sandboxes) -> None:
    _, guest = await sandboxes.start("--max-processes", "128")
    try:
        state, out = await guest.run(sh("echo $GREETING; echo e >&2; exit 7"))
        assert (state.exit_code, of(out), of(out, 2)) == (7, b"good day\n", b"e\n")
        results = await asyncio.gather(*(guest.run(sh(f"exit {n}")) for n in range(20)))
        assert [state.exit_code for state, _ in results] == list(range(20))
        state, _ = await guest.run(sh("sleep 600 & sleep 600", timeout=0.5))
        assert state.timed_out
        assert (await guest.activity()).alive == 0
        data = bytes(range(256)) * 8192
        await guest.write_file(b"/root/\xff/data", data)
        assert b"".join([piece async for piece in guest.read(b"/root/\xff/data")]) == data
        _, out = await guest.run(ProcessSpec([b"wc", b"-c"], stdin="inline", input=data * 4))
        assert of(out).strip() == b"%d" % (len(data) * 4)
        state = await guest.start(sh("tty; read x; echo got $x", pty=(24, 80), stdin="pipe"))
        await guest.write(state.id, b"hello\n")
        text = of([piece async for piece in guest.output(state.id)])
        assert b"/dev/pts/" in text and b"got hello" in text
        # A file without a name is told, unless it is part of memory.
        script = "import os,time\nfor d in '/root/', '/tmp/':\n  globals()[d]=open(d+'u','w')\n"
        script += "  os.unlink(d+'u')\nprint(1,flush=True)\ntime.sleep(600)"
        state = await guest.start(ProcessSpec([b"python3", b"-c", script.encode()]))
        await anext(guest.output(state.id))
        assert [(one.pid, one.path) for one in await guest.unlinked()] == [(state.pid, b"/root/u")]
        stream = guest.watch(b"/root")
        first = asyncio.ensure_future(anext(stream))
        await guest.info()
        await guest.write_file(b"/root/new", b"")
        assert (await first).path.startswith(b"/root/")
        await stream.aclose()  # type: ignore[attr-defined]
        # The supervisor itself stays small.
        (status,) = [piece async for piece in guest.read(b"/proc/1/status")]
        match = re.search(rb"VmRSS:\s+(\d+) kB", status)
        assert match is not None and int(match[1]) < 8192
    finally:
        await guest.close()


@sandboxed
async def test_a_restored_sandbox_goes_on(sandboxes: Sandboxes) -> None:
    """Processes, output at its offset, codes and the interpreter survive; twice, as in a fork."""
    driver = sandboxes.driver
    spec, guest = await sandboxes.start("--max-processes", "128")
    counting = await guest.start(
        sh("i=0; while true; do i=$((i+1)); echo $i; sleep 0.02; done", lossless=True)
    )
    ended = await guest.start(sh("echo kept; exit 9"))
    await guest.wait(ended.id)
    terminal = await guest.start(ProcessSpec([b"cat"], pty=(24, 80), stdin="pipe"))
    python = Interpreter(guest)
    await python.run("x = [1, 2, 3]")
    stream = guest.output(counting.id)
    seen = b""
    while seen.count(b"\n") < 5:
        seen += (await anext(stream)).data

    await guest.detach(10)
    image = spec.directory / "image"
    image.mkdir()
    driver.freeze(spec)
    driver.checkpoint(spec, image)
    # The live one goes on as if nothing had been.
    driver.thaw(spec)
    await guest.attach(10)
    while seen.count(b"\n") < 20:
        seen += (await anext(stream)).data
    assert seen.startswith(b"".join(b"%d\n" % n for n in range(1, 20)))
    assert (await python.run("x.append(4); x")).text == "[1, 2, 3, 4]"
    await guest.interrupt("rolled back")
    await guest.close()
    sandboxes.end(spec)

    for _ in range(2):
        other = sandboxes.spec("--max-processes", "128", over=spec)
        link = GuestLink(other.control)
        try:
            await asyncio.gather(asyncio.to_thread(driver.restore, other, image), link.attach(30))
            await link.refresh(generation="g1", hostname="again")
            known = {one.id: one for one in await link.processes()}
            assert known[counting.id].running and known[terminal.id].running
            assert known[ended.id].exit_code == 9
            assert of([piece async for piece in link.output(ended.id)]) == b"kept\n"
            text = b""
            async for piece in link.output(counting.id):
                text += piece.data
                if text.count(b"\n") >= 30:
                    break
            assert text.startswith(b"".join(b"%d\n" % n for n in range(1, 30)))
            await link.write(terminal.id, b"echo\n")
            assert b"echo" in (await anext(link.output(terminal.id))).data
            assert (await Interpreter(link).run("x")).text == "[1, 2, 3]"
            _, out = await link.run(sh("cat /run/sojourn/generation"))
            assert of(out) == b"g1"
        finally:
            await link.close()
            await asyncio.to_thread(sandboxes.driver.destroy, other)


@sandboxed
async def test_a_fork_bomb_is_survived(sandboxes: Sandboxes) -> None:
    """C65: the supervisor answers, and the record says what happened."""
    _, guest = await sandboxes.start("--max-processes", "64")
    try:
        for bomb in (
            [b"bash", b"-c", b":(){ :|:& };:"],
            [b"python3", b"-c", b"import os\nwhile 1: os.fork()"],
        ):
            state = await guest.start(ProcessSpec(bomb))
            while (await guest.process(state.id)).reason is None:
                await asyncio.sleep(0.1)
            while (await guest.activity()).alive:
                await asyncio.sleep(0.1)
            assert (await guest.process(state.id)).reason == "process limit exceeded"
            _, out = await guest.run(ProcessSpec([b"echo", b"well"]))
            assert of(out) == b"well\n"
    finally:
        await guest.close()
