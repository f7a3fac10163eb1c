"""The link: leaving and coming back without loss, repeats without double effect, hostile peers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
from pathlib import Path

import pytest

from sojourn.errors import Interrupted, ProcessNotFound, SandboxLost
from sojourn.node import link_connection
from sojourn.node.link import GuestLink
from sojourn.wire import frames
from sojourn.wire.frames import Op
from sojourn.wire.guest import Output, ProcessSpec
from support.guests import HostedSupervisor, hosted, supervisor_program  # noqa: F401


def sh(text: str, **more: object) -> ProcessSpec:
    return ProcessSpec([b"/bin/sh", b"-c", text.encode()], **more)  # type: ignore[arg-type]


def host_descriptors(supervisor: HostedSupervisor) -> list[str]:
    """Sockets the supervisor holds open."""
    found = []
    for entry in Path(f"/proc/{supervisor.pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:"):
            found.append(target)
    return found


@hosted()
async def test_detached_nothing_is_attached(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    assert guest.attached
    assert list(supervisor.control.iterdir()) == []  # nobody else can get in
    assert len(host_descriptors(supervisor)) == 1
    for _round in range(20):
        await guest.detach(10)
        assert not guest.attached
        assert host_descriptors(supervisor) == []
        assert list(supervisor.control.iterdir()) == []
        await guest.attach(10)
    await guest.detach(10)
    await guest.detach(10)
    await guest.attach(10)
    await guest.attach(10)
    assert (await guest.run(ProcessSpec([b"true"])))[0].exit_code == 0


@hosted()
async def test_calls_in_flight_survive_a_pause(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    """A run, a wait and a stream go on; no byte is lost or doubled."""
    go = base / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.01; done; echo done; exit 5"
    running = asyncio.ensure_future(guest.run(sh(script)))
    waiting_for = await guest.start(sh(script))
    waiting = asyncio.ensure_future(guest.wait(waiting_for.id))
    counter = await guest.start(sh("i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; done"))

    async def collect() -> bytes:
        pieces: list[Output] = [piece async for piece in guest.output(counter.id)]
        at = 0
        for piece in pieces:
            assert piece.offset == at
            at += len(piece.data)
        return b"".join(piece.data for piece in pieces)

    collecting = asyncio.ensure_future(collect())
    for _round in range(10):
        await asyncio.sleep(0.005)
        await guest.detach(10)
        late = asyncio.ensure_future(guest.activity())
        await asyncio.sleep(0.002)
        assert not late.done()
        await guest.attach(10)
        assert (await late).started == 3
    assert await collecting == b"".join(b"%d\n" % n for n in range(1, 3001))
    await guest.detach(10)
    go.touch()
    while not (base / "never").exists():
        await asyncio.sleep(0.2)  # both end meanwhile
        break
    await guest.attach(10)
    state, out = await running
    assert (state.exit_code, out[0].data) == (5, b"done\n")
    assert (await waiting).exit_code == 5


@hosted()
async def test_input_survives_a_pause(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    state = await guest.start(
        sh(f"while [ ! -e {base}/go ]; do sleep 0.01; done; md5sum", stdin="pipe")
    )
    data = os.urandom(3 << 20)
    writing = asyncio.ensure_future(guest.write(state.id, data))
    for _round in range(5):
        await asyncio.sleep(0.005)
        await guest.detach(10)
        await guest.attach(10)
    assert not writing.done()
    (base / "go").touch()
    await writing
    await guest.close_stdin(state.id)
    import hashlib

    (piece,) = [one async for one in guest.output(state.id)]
    assert piece.data.split()[0].decode() == hashlib.md5(data).hexdigest()


class RawPeer:
    """A node that speaks frames by hand."""

    def __init__(self, control: Path) -> None:
        path = control / "node.sock"
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(20)
        self.listener.bind(os.fspath(path))
        self.listener.listen()

    def accept(self) -> socket.socket:
        link, _ = self.listener.accept()
        link.settimeout(20)
        op, _, _ = self.answer(link)
        assert op == Op.HELLO
        return link

    @staticmethod
    def exactly(link: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = link.recv(size - len(data))
            if not part:
                raise ConnectionError("the supervisor hung up")
            data += part
        return data

    def answer(self, link: socket.socket) -> tuple[int, int, bytes]:
        length, op, status, _, _ = frames.HEADER.unpack(self.exactly(link, frames.HEADER.size))
        return op, status, self.exactly(link, length)

    def attach(self, link: socket.socket, client: bytes) -> None:
        body = struct.pack("<H", frames.VERSION) + frames.blob(client)
        link.sendall(frames.frame(Op.ATTACH, 1, body))
        assert self.answer(link)[:2] == (Op.ATTACH, 0)

    def close(self) -> None:
        self.listener.close()


@hosted()
async def test_a_repeated_request_takes_effect_once(
    guest: GuestLink, supervisor: HostedSupervisor, base: Path
) -> None:
    await guest.detach(10)
    peer = RawPeer(supervisor.control)
    client = b"c" * 16

    def work() -> None:
        start = frames.frame(Op.START, 7, frames.start_body(sh(f"echo x >> {base}/log")))
        run = frames.frame(Op.RUN, 8, frames.start_body(sh(f"echo y >> {base}/log")))
        head = frames.text(os.fsencode(base / "app")) + bytes([2]) + bytes(4) + frames.text(b"")
        append = frames.frame(Op.WRITE_FILE, 9, head + frames.blob(b"z"))
        answers = []
        for _ in range(3):
            link = peer.accept()
            peer.attach(link, client)
            link.sendall(start + run + append)
            got = sorted(peer.answer(link) for _ in range(3))
            assert [status for _, status, _ in got] == [0, 0, 0]
            answers.append(got[0])  # the same process each time
            link.close()  # without a word
        assert answers[0] == answers[1] == answers[2]
        # Once acknowledged the answers go; the same numbers of another client are other requests.
        link = peer.accept()
        peer.attach(link, b"d" * 16)
        link.sendall(append)
        assert peer.answer(link)[1] == 0
        link.close()

    await asyncio.to_thread(work)
    peer.close()
    assert sorted((base / "log").read_text().split()) == ["x", "y"]
    assert (base / "app").read_bytes() == b"zz"
    await guest.attach(10)
    assert len(await guest.processes()) == 2


@hosted()
async def test_garbage_ends_the_connection_only(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    keeper = await guest.start(sh("sleep 600"))
    await guest.detach(10)
    peer = RawPeer(supervisor.control)
    chance = random.Random(42)

    def refused(data: bytes, attached: bool) -> None:
        link = peer.accept()
        if attached:
            peer.attach(link, b"e" * 16)
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        try:
            while link.recv(65536):
                pass
        except ConnectionResetError:
            pass
        link.close()

    def work() -> None:
        refused(b"GET / HTTP/1.1\r\n\r\n" * 3, False)
        refused(frames.HEADER.pack(0xFFFFFFFF, 17, 0, 5, 0), True)
        refused(frames.HEADER.pack(0, 2, 0, 5, 0), False)  # attach without a body
        refused(frames.HEADER.pack(0, 17, 0, 5, 0), False)  # a request before attaching
        for op in Op:
            refused(frames.frame(op, 5, b""), True)
            refused(frames.frame(op, 5, b"\xff" * 64), True)
            refused(frames.frame(op, 5, chance.randbytes(200)), True)
            refused(frames.frame(op, 5, frames.number(1) * 40), True)
        refused(chance.randbytes(5000), True)
        link = peer.accept()
        peer.attach(link, b"f" * 16)
        link.sendall(frames.frame(999, 5, b""))
        assert peer.answer(link)[1] == 38  # ENOSYS, and the connection goes on
        link.sendall(frames.frame(Op.INFO, 6, b""))
        assert peer.answer(link)[:2] == (Op.INFO, 0)
        link.close()

    await asyncio.to_thread(work)
    peer.close()
    await guest.attach(10)
    assert (await guest.process(keeper.id)).running


@hosted()
async def test_the_node_refuses_what_is_no_supervisor(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    """A process inside may connect first; it is sent away, and the supervisor still gets in."""
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        lost = asyncio.ensure_future(guest.detach(0.2))
        with pytest.raises(SandboxLost):
            await lost
        path = supervisor.control / "node.sock"
        while not path.exists():
            await asyncio.sleep(0.005)
        for data in (b"\xff" * 100, frames.frame(Op.INFO, 0, b"x"), b"\0" * 24):
            while True:
                try:
                    _, writer = await asyncio.open_unix_connection(path)
                    break
                except OSError:
                    await asyncio.sleep(0.005)
            writer.write(data)
            writer.close()
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    await guest.attach(10)
    assert (await guest.run(ProcessSpec([b"true"])))[0].exit_code == 0


@hosted()
async def test_a_broken_connection_mends_itself(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    state = await guest.start(sh("sleep 600"))
    waiting = asyncio.ensure_future(guest.wait(state.id))
    for _round in range(5):
        assert guest._stream is not None and guest._stream.transport is not None
        guest._stream.transport.abort()
        results = await asyncio.gather(*(guest.run(ProcessSpec([b"true"])) for _ in range(5)))
        assert [state.exit_code for state, _ in results] == [0] * 5
    await guest.signal(state.id, signal.SIGKILL)
    assert (await waiting).signal == signal.SIGKILL
    assert (await guest.activity()).started == 26


@hosted()
async def test_a_new_node_finds_what_runs(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    """After a kill of the server: records, output and codes are still there."""
    state = await guest.start(
        sh("echo before; read x; echo after $x; exit 9", stdin="pipe", tag="t")
    )
    running = asyncio.ensure_future(guest.run(sh("echo run; sleep 600")))
    while len(await guest.processes()) < 2:
        await asyncio.sleep(0.01)
    await guest.close()
    with pytest.raises(SandboxLost):
        await running
    with pytest.raises(SandboxLost):
        await guest.activity()
    other = GuestLink(supervisor.control)
    try:
        await other.attach(10)
        first, second = await other.processes()
        assert (first.id, first.tag, first.running) == (state.id, "t", True)
        assert second.running and second.argv[-1] == b"echo run; sleep 600"
        await other.write(state.id, b"now\n")
        out = [piece.data async for piece in other.output(state.id)]
        assert b"".join(out) == b"before\nafter now\n"
        assert (await other.wait(state.id)).exit_code == 9
    finally:
        await other.close()


@hosted()
async def test_interrupt_ends_calls_and_streams(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    """C42: a stream ends typed; the command lives on."""
    state = await guest.start(sh("echo x; sleep 600"))
    stream = guest.output(state.id)
    assert (await anext(stream)).data == b"x\n"
    parked = asyncio.ensure_future(anext(stream))
    waiting = asyncio.ensure_future(guest.wait(state.id))
    running = asyncio.ensure_future(guest.run(sh("sleep 600")))
    idle = guest.output(state.id)
    await anext(idle)
    while len(await guest.processes()) < 2:
        await asyncio.sleep(0.01)
    await guest.detach(10)
    await guest.interrupt("the session was suspended")
    for one in (parked, waiting, running):
        with pytest.raises(Interrupted):
            await one
    await guest.attach(10)
    with pytest.raises(Interrupted):
        await anext(idle)
    assert [one.running for one in await guest.processes()] == [True, True]


@hosted()
async def test_a_dead_supervisor_is_told(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    guest._within = 0.2
    parked = asyncio.ensure_future(guest.run(sh("sleep 600")))
    await guest.info()
    supervisor.end()
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(parked, 10)
    with pytest.raises(SandboxLost):
        await guest.info()
    with pytest.raises(SandboxLost):
        await guest.attach(0.05)
    assert list(supervisor.control.iterdir()) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is a loss after half a second."""
    monkeypatch.setattr(link_connection, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(link_connection, "SILENT_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
@hosted()
async def test_a_supervisor_that_does_not_answer_is_lost(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    """Whoever waits is told, and nobody waits again; root inside can stop it with a debugger."""
    state = await guest.start(sh("sleep 600"))
    waiting = asyncio.ensure_future(guest.wait(state.id))
    running = asyncio.ensure_future(guest.run(sh("sleep 600")))
    stream = asyncio.ensure_future(anext(guest.output(state.id)))
    await guest.info()
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        for one in (waiting, running, stream, asyncio.ensure_future(guest.activity())):
            with pytest.raises(SandboxLost, match="does not answer") as told:
                await asyncio.wait_for(one, 30)
            assert told.value.details["cause"] == told.value.message
        assert guest.lost == "the supervisor does not answer"
        for call in (guest.info(), guest.detach(600), guest.attach(600)):
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(call, 30)
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    with pytest.raises(SandboxLost):
        await guest.attach(600)  # what it has missed is not to be made up for
    assert list(supervisor.control.iterdir()) == []


@pytest.mark.usefixtures("impatient")
@hosted()
async def test_slow_commands_and_pauses_are_not_silence(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    running = asyncio.ensure_future(guest.run(sh("sleep 2; echo done")))
    await asyncio.sleep(0.8)
    await guest.detach(10)
    os.kill(supervisor.pid, signal.SIGSTOP)
    await asyncio.sleep(0.8)
    os.kill(supervisor.pid, signal.SIGCONT)
    await guest.attach(10)
    assert guest.lost is None
    _state, out = await running
    assert out[0].data == b"done\n"
    # Nothing is owed: a probe would not be answered, so there is none.
    os.kill(supervisor.pid, signal.SIGSTOP)
    await asyncio.sleep(1)
    os.kill(supervisor.pid, signal.SIGCONT)
    assert guest.lost is None
    await guest.info()


@hosted()
async def test_after_a_failed_attach_nothing_waits(
    guest: GuestLink, supervisor: HostedSupervisor, _: Path
) -> None:
    parked = asyncio.ensure_future(guest.run(sh("sleep 600")))
    await guest.info()
    await guest.detach(10)
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SandboxLost):
            await guest.attach(0.1)
        for one in (parked, asyncio.ensure_future(guest.info())):
            with pytest.raises(SandboxLost, match="did not connect"):
                await asyncio.wait_for(one, 30)
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    await guest.attach(10)  # late is not never, as long as somebody asks
    assert guest.lost is None
    await guest.info()


@hosted()
async def test_refresh_publishes_the_generation(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    # Where the test runs, /run is the host's: give the supervisor one of its own.
    await guest.run(sh("mkdir -p /run && mount -t tmpfs none /run"))
    boot = (await guest.info()).boot
    for generation in ("one", "two"):
        await guest.refresh(generation=generation)
        _, out = await guest.run(ProcessSpec([b"cat", b"/run/sojourn/generation"]))
        assert out[0].data == generation.encode()
    assert (await guest.info()).boot != boot


@hosted()
async def test_unknown_processes(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    for call in (guest.wait, guest.process, guest.forget, guest.close_stdin):
        with pytest.raises(ProcessNotFound):
            await call(12345)
