"""Connections of a sandbox as tunnels: everything reaches the gateway, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sojourn.errors import Conflict
from sojourn.node.isolation.bubblewrap import BubblewrapDriver
from sojourn.node.link import GuestLink
from sojourn.wire.frames import Feature
from sojourn.wire.guest import ProcessSpec, Reach
from sojourn.wire.tunnels import Kind
from support.guests import Sandboxes, sandboxed, supervisor_program  # noqa: F401
from support.tunnel_gateway import LATE, TunnelGateway, pattern

COMMON = r"""
import hashlib, json, os, socket, struct, sys, threading, time
def pattern(offset, size):
    first = offset // 8
    words = b"".join(n.to_bytes(8, "big") for n in range(first, (offset + size) // 8 + 1))
    return words[offset - first * 8 :][:size]
def outcome(call):
    try:
        return call()
    except OSError as error:
        return type(error).__name__
def everything(one):
    found = b""
    while piece := one.recv(65536):
        found += piece
    return found
def ask(host, port=80, say=b""):
    with socket.create_connection((host, port), 30) as one:
        one.sendall(say)
        one.shutdown(socket.SHUT_WR)
        return everything(one).decode()
def tell(what):
    print(json.dumps(what), flush=True)
"""


def program(text: str, **more: Any) -> ProcessSpec:
    return ProcessSpec([b"python3", b"-c", (COMMON + text).encode()], **more)


async def said(guest: GuestLink, text: str) -> Any:
    """What a program inside tells, once it has ended."""
    state, pieces = await guest.run(program(text, timeout=60))
    out = b"".join(piece.data for piece in pieces if piece.stream == 1)
    assert state.exit_code == 0, b"".join(piece.data for piece in pieces).decode()
    return json.loads(out)


async def lines(guest: GuestLink, process: int) -> Any:
    """What a program inside tells, line by line."""
    rest = b""
    async for piece in guest.output(process):
        rest += piece.data
        *whole, rest = rest.split(b"\n")
        for line in whole:
            try:
                yield json.loads(line)
            except ValueError:
                raise AssertionError(line) from None


async def eventually(look: Any, what: str) -> None:
    """Wait for something that has to come about; the bound only ends a hanging test."""
    for _ in range(1500):
        if look():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not come about: {what}")


def _ended(gateway: TunnelGateway, name: str) -> int:
    """How many tunnels of this kind the program has ended."""
    return sum(one.ended for one in gateway.opened if one.name.startswith(name))


OFF = r"""
open_port = socket.create_server(("0.0.0.0", 8080))
def datagram(address):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.settimeout(30)
    one.connect(address); one.send(b"?")
    return one.recv(9).hex()
def ping(host):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    one.settimeout(0.3)
    one.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FE, 0, 1), (host, 0))
    return one.recvfrom(99)[1][0]
tell([
    outcome(lambda: ask("192.0.2.1")), outcome(lambda: ask("240.0.0.1")),
    outcome(lambda: ask("9.9.9.9", 8080)), outcome(lambda: ask("169.254.169.254")),
    outcome(lambda: ask("2001:db8::1")), outcome(lambda: datagram(("192.0.2.1", 53))),
    outcome(lambda: datagram(("192.0.2.1", 443))), outcome(lambda: ping("192.0.2.1")),
    outcome(lambda: ping("127.0.0.1")), outcome(lambda: ask("127.0.0.1", 3128)),
    outcome(lambda: socket.getaddrinfo("name.test", 80) and "resolved"),
])
"""
REFUSED_ALL = [
    "ConnectionRefusedError",
    "ConnectionRefusedError",
    "ConnectionRefusedError",
    "ConnectionRefusedError",
    "OSError",
    "ConnectionRefusedError",
    "ConnectionRefusedError",
    "TimeoutError",
    "127.0.0.1",
    "ConnectionRefusedError",
    "gaierror",
]

ON = r"""
names = [
    ask("example.test"), ask("Sub.Example.test", 8443), ask("192.0.2.7", 22), ask("10.0.0.1"),
    ask("127.0.0.1", 3128),
]
echo = [ask("echo.test", 80, b"x" * n) == "x" * n for n in (0, 1, 70_000)]
with socket.create_connection(("source-100000.test", 80)) as one:
    half = everything(one) == pattern(0, 100000)  # its end comes while ours is open
    one.sendall(b"still open")
with socket.create_connection(("sink.test", 80)) as one:
    one.sendall(pattern(0, 3000000))
    one.shutdown(socket.SHUT_WR)
    sink = everything(one).decode() == "3000000 " + hashlib.sha256(pattern(0, 3000000)).hexdigest()
def greedy(name, port=80):
    with socket.create_connection((name, port), 30) as one:
        return outcome(lambda: one.sendall(b"x")) or outcome(lambda: one.recv(9))
bad = [outcome(lambda: greedy("reset.test")), outcome(lambda: greedy("refuse.test")),
       outcome(lambda: greedy("127.0.0.1", 15001)), outcome(lambda: ask("2001:db8::1"))]
one = socket.create_connection(("hold.test", 80))
one.sendall(b"here")
time.sleep(0.3)
one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
one.close()
tell({"names": names, "echo": echo, "half": half, "sink": sink, "bad": bad})
"""

HOLDING = r"""
one = socket.create_connection(("hold.test", 80))
tell(outcome(lambda: one.recv(1)))
"""

SERVING = r"""
listener = socket.create_server((HOST, PORT), family=FAMILY)
tell("up")
one, _ = listener.accept()
one.sendall(b"in")
tell(one.recv(9).decode())
"""

RIGHTS = r"""
def raw():
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    return "raw"
def table():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.IPPROTO_IP, 64, bytes(200))
    return "table"
def rights():
    return [int(l.split()[1], 16) & 0x3000 for l in open("/proc/self/status") if l[:3] == "Cap"]
tell([os.getuid(), outcome(raw), outcome(table), sum(rights())])
"""

NAMES = r"""
import random
def question(name, kind=1, flags=0x0100, count=1, klass=1):
    labels = b"".join(bytes([len(l)]) + l for l in name.split(b".") if l)
    return struct.pack(">HHHHHH", 7, flags, count, 0, 0, 0) + labels + b"\0" + struct.pack(
        ">HH", kind, klass)
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.settimeout(10)
def exchange(data, to=("192.0.2.53", 53)):
    one.sendto(data, to)
    got = one.recv(4096)
    return got[3] & 15, struct.unpack(">H", got[6:8])[0], got[-4:] if got[7] else b""
first = exchange(question(b"a.test"))
again = exchange(question(b"A.TEST"), ("127.0.0.1", 53))
other = exchange(question(b"b.test"))
kinds = [exchange(question(b"a.test", kind))[:2] for kind in (28, 16, 12, 65, 255)]
odd = [exchange(question(b"single"))[:2], exchange(question(b"a.test", klass=3))[:2],
       exchange(question(b"a.test", flags=0x2800))[:2], exchange(question(b"a.test", count=2))[:2]]
seed = random.Random(5)
for _ in range(3000):
    data = bytearray(question(b"x%d.test" % seed.randrange(50)))
    data += seed.randbytes(seed.randrange(40))
    for _ in range(seed.randrange(6)):
        data[seed.randrange(len(data))] = seed.randrange(256)
    one.sendto(data[: seed.randrange(len(data) + 1)], ("192.0.2.53", 53))
one.close()
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.settimeout(10)
alive = exchange(question(b"a.test")) == first
tell([first == again, first != other, first[2].hex()[:4], kinds, odd, alive])
"""


@sandboxed
async def test_what_leaves_and_what_does_not(sandboxes: Sandboxes) -> None:
    """Off, on, off again; names; rights; dialing: one sandbox for all."""
    spec, guest = await sandboxes.start("--max-processes", "128")
    try:
        assert guest.features == Feature.TUNNELS | Feature.TRANSPARENT
        assert await said(guest, OFF) == REFUSED_ALL
        async with TunnelGateway(spec.control / "net.sock") as gateway:
            assert await guest.network(True) is Reach.TRANSPARENT
            assert await guest.network(True) is Reach.TRANSPARENT
            found = await said(guest, ON)
            assert found["names"] == [
                "1 example.test 80\n",
                "1 sub.example.test 8443\n",
                "1 192.0.2.7 22\n",
                "1 10.0.0.1 80\n",
                "3  0\n",
            ]
            assert found["echo"] == [True, True, True]
            assert found["half"] and found["sink"]
            assert found["bad"] == ["ConnectionResetError"] * 3 + ["OSError"]
            held = next(one for one in gateway.opened if one.name == "hold")
            # A program's reset is a reset outside.
            await eventually(lambda: held.number not in gateway.tunnels, "the reset")
            await _rights(guest)
            await _names(guest)
            await _dialing(guest, gateway)
            await eventually(lambda: gateway.connections == 0, "every tunnel has ended")
            assert gateway.errors == []
            holding = await guest.start(program(HOLDING))
            await eventually(lambda: gateway.connections == 1, "a tunnel")
            assert await guest.network(False) is Reach.OFF
            assert [line async for line in lines(guest, holding.id)] == ["ConnectionResetError"]
            assert await said(guest, OFF) == REFUSED_ALL
        # The supervisor itself stays small.
        (status,) = [piece async for piece in guest.read(b"/proc/1/status")]
        match = re.search(rb"VmRSS:\s+(\d+) kB", status)
        assert match is not None and int(match[1]) < 12288
    finally:
        await guest.close()


async def _rights(guest: GuestLink) -> None:
    """Nobody inside has the supervisor's rights over the network: root, others, on a terminal,
    through a program with the set-uid bit."""
    refused = ["PermissionError", "OSError", 0]  # the table is only known to raw sockets
    assert await said(guest, RIGHTS) == [0, *refused]
    for more in ({"user": "65534"}, {"pty": (24, 80)}):
        state, pieces = await guest.run(program(RIGHTS, **more))
        found = json.loads(b"".join(piece.data for piece in pieces))
        assert found[1:] == refused, (state, more)
    script = (
        "cp $(readlink -f $(command -v python3)) /root/python-suid; chmod 4755 /root/python-suid"
    )
    state, _ = await guest.run(ProcessSpec([b"sh", b"-c", script.encode() + b"; chmod 755 /root"]))
    assert state.exit_code == 0
    spec = ProcessSpec(
        [b"/root/python-suid", b"-c", (COMMON + RIGHTS.replace("getuid", "geteuid")).encode()],
        user="65534",
    )
    state, pieces = await guest.run(spec)
    # (Some versions of the sandbox's kernel do not heed the bit; then nothing is gained at all.)
    assert json.loads(b"".join(piece.data for piece in pieces))[1:] == refused


async def _names(guest: GuestLink) -> None:
    same, differs, prefix, kinds, odd, alive = await said(guest, NAMES)
    assert same and differs and alive
    assert prefix in ("c612", "c613")
    assert kinds == [[0, 0]] * 5  # no address of these kinds, but the name exists
    assert odd == [[3, 0], [4, 0], [4, 0], [1, 0]]


async def _dialing(guest: GuestLink, gateway: TunnelGateway) -> None:
    for port, host, family in ((4001, "127.0.0.1", "AF_INET"), (4002, "::1", "AF_INET6")):
        source = SERVING.replace("HOST", repr(host)).replace("PORT", str(port))
        server = await guest.start(program(source.replace("FAMILY", f"socket.{family}")))
        told = lines(guest, server.id)
        assert await anext(told) == "up"
        token = bytes(range(16))
        await guest.dial(token, port)
        await eventually(lambda: gateway.opened[-1].kind is Kind.INBOUND, "the tunnel")
        tunnel = gateway.opened[-1]
        assert (tunnel.host, tunnel.port) == (token, port)
        await eventually(lambda seen=tunnel: seen.received == 2, "its data")
        tunnel.to_send += b"out"
        tunnel.end_due = True
        assert await anext(told) == "out"
    with pytest.raises(Conflict, match="port 4003: Connection refused"):
        await guest.dial(bytes(16), 4003)


MANY = r"""
failed = []
def one(n):
    data = pattern(n * 8, 20000)
    with socket.create_connection(("echo.test", 80), 60) as link:
        def write():
            for at in range(0, len(data), 777):
                link.sendall(data[at : at + 777])
            link.shutdown(socket.SHUT_WR)
        writer = threading.Thread(target=write)
        writer.start()
        if everything(link) != data:
            failed.append(n)
        writer.join()
threads = [threading.Thread(target=one, args=(n,)) for n in range(200)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell([failed])
"""

BULK = r"""
SIZE = 10 << 20
link = socket.create_connection((f"mirror-{SIZE}.test", 80))
data = pattern(0, SIZE)
tell("begun")
def write():
    link.sendall(data)
    link.shutdown(socket.SHUT_WR)
writer = threading.Thread(target=write)
writer.start()
got = everything(link)
writer.join()
tell([len(got), got == data])
"""

LAST = r"""
links = [socket.create_connection((f"late{n}.test", 80)) for n in ("", "-gone")]
for link in links:
    link.shutdown(socket.SHUT_WR)
sys.stdin.readline()
tell([outcome(lambda: everything(link) == pattern(0, SIZE)) for link in links])
"""

BLOCKED = r"""
link = socket.create_connection(("hold.test", 80))
proxied = socket.create_connection(("127.0.0.1", 3128))
everything(proxied)
other = socket.create_connection(("192.0.2.9", 80))
tell("connected")
def wait(link):
    return outcome(lambda: link.recv(1).decode())
found = []
threads = [threading.Thread(target=lambda l=l: found.append(wait(l))) for l in (link,)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell(found)
# What is asked for now waits for a gateway that is about to come.
tell(ask("after.test"))
"""


@sandboxed
async def test_tunnels_over_captures(sandboxes: Sandboxes) -> None:
    """Many at once, and bytes under way, over live captures and pauses; a restore resets them."""
    driver = sandboxes.driver
    spec, guest = await sandboxes.start("--max-processes", "512")
    try:
        gateway = TunnelGateway(spec.control / "net.sock")
        async with gateway:
            await guest.network(True)
            last = await guest.start(program(LAST.replace("SIZE", str(LATE)), stdin="pipe"))
            await eventually(lambda: _ended(gateway, "late") == 2, "both have said all")
            bulk = await guest.start(program(BULK))
            told = lines(guest, bulk.id)
            assert await anext(told) == "begun"
            many = asyncio.ensure_future(said(guest, MANY))
            size = 10 << 20
            for turn in range(6):
                await asyncio.sleep(0.1)
                await guest.detach(10)
                await eventually(lambda: gateway.connections == 0, "nothing is open")
                await asyncio.to_thread(driver.freeze, spec)
                if turn == 2:
                    image = spec.directory / "live"
                    image.mkdir()
                    await asyncio.to_thread(driver.checkpoint, spec, image)
                await asyncio.to_thread(driver.thaw, spec)
                await guest.attach(10)
            assert await anext(told) == [size, True]
            assert await many == [[]]
            await guest.write(last.id, b"\n")
            assert [line async for line in lines(guest, last.id)] == [[True, True]]
            mirror = next(one for one in gateway.opened if one.name == f"mirror-{size}")
            await eventually(lambda: mirror.ended, "the last of what it has sent")
            assert mirror.resumed > 0 and mirror.received == size
            assert mirror.got.digest() == hashlib.sha256(pattern(0, size)).digest()
            assert len([one for one in gateway.opened if one.name == "echo"]) == 200

            blocked = await guest.start(program(BLOCKED))
            assert [await anext(lines(guest, blocked.id))] == ["connected"]
            assert gateway.errors == []
            await guest.detach(10)
            await asyncio.to_thread(driver.freeze, spec)
            image = spec.directory / "image"
            image.mkdir()
            await asyncio.to_thread(driver.checkpoint, spec, image)
            await guest.close()
        await asyncio.to_thread(sandboxes.end, spec)
        for _ in range(2):
            other = sandboxes.spec("--max-processes", "512", over=spec)
            link = GuestLink(other.control)
            await asyncio.gather(asyncio.to_thread(driver.restore, other, image), link.attach(30))
            async with TunnelGateway(other.control / "net.sock") as gateway:
                await link.refresh(generation="g")
                assert await link.network(True) is Reach.TRANSPARENT
                told = lines(link, blocked.id)
                assert [await anext(told) for _ in range(3)] == [
                    "connected",
                    ["ConnectionResetError"],
                    "1 after.test 80\n",
                ]
                assert await said(link, 'tell(ask("again.test"))') == "1 again.test 80\n"
                assert gateway.errors == []
            await link.close()
            await asyncio.to_thread(driver.destroy, other)
    finally:
        await guest.close()


WEAKER = r"""
found = [ask("127.0.0.1", 3128), outcome(lambda: ask("192.0.2.1")),
         outcome(lambda: socket.getaddrinfo("name.test", 80) and "resolved")]
one = socket.create_connection(("127.0.0.1", 3128))
tell(found + [everything(one).decode()])
sys.stdin.readline()
one.sendall(b"later")
tell("sent")
"""


@sandboxed
async def test_without_a_network_stack_of_its_own_the_proxy_is_served(
    sandboxes: Sandboxes,
) -> None:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("no bwrap")
    sandboxes.driver.close()
    sandboxes.driver = BubblewrapDriver(  # type: ignore[assignment]
        Path(bwrap), sandboxes.base / "weaker", f"{sandboxes.scope}w"
    )
    spec, guest = await sandboxes.start()
    try:
        assert guest.features == Feature.TUNNELS
        async with TunnelGateway(spec.control / "net.sock") as gateway:
            assert await guest.network(True) is Reach.PROXY
            running = await guest.start(program(WEAKER, stdin="pipe"))
            told = lines(guest, running.id)
            assert await anext(told) == ["3  0\n", "OSError", "gaierror", "3  0\n"]
            await guest.detach(10)
            await guest.attach(10)
            await guest.write(running.id, b"\n")
            assert await anext(told) == "sent"
            await eventually(lambda: gateway.opened[-1].received == 5, "what was sent later")
            assert gateway.opened[-1].resumed == 1
            await _dialing(guest, gateway)
            assert await guest.network(False) is Reach.OFF
            refused = await said(guest, 'tell(outcome(lambda: ask("127.0.0.1", 3128)))')
            assert refused == "ConnectionRefusedError"
            assert gateway.errors == []
    finally:
        await guest.close()
