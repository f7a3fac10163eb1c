"""HTTP through the gateway, against real servers: bodies, secrets, records, quotas, policy."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
from collections.abc import Iterator

import pytest

from sojourn.gateway import http, outbound, records
from sojourn.gateway.messages import Attach, Granted
from sojourn.model.network import (
    Effect,
    NetworkMode,
    NetworkPolicy,
    NetworkRule,
    SecretPlace,
    SecretUse,
)
from sojourn.wire.tunnels import Kind, Refusal
from support.gateway_guests import GuestTls, GuestTunnel, TunnelRefused, TunnelReset
from support.gateway_rig import Rig, attempt, outcome, request
from support.gateway_world import ALLOWED, OTHER, PRIVATE, World

pytestmark = pytest.mark.privileged

VALUE = "sk-Very/Secret+Value-0123456789"
STAND_IN = b"sojourn-secret-KEY"
_RULES = [
    NetworkRule("web", domains=["example.com", "bad.example.com", "private.example.com"]),
    NetworkRule("db", domains=["example.com"], ports=[5432]),
    NetworkRule("pinned", domains=["pinned.example.org"], inspect=False),
    NetworkRule("office", cidrs=["10.9.0.0/16"]),
]
POLICY = NetworkPolicy(mode=NetworkMode.ALLOWLIST, rules=_RULES, secrets=["KEY"])
SECRETS = [
    Granted("KEY", [SecretUse(domains=["example.com"])], VALUE),
    Granted("PAIR", [SecretUse(["pinned.example.org"], SecretPlace.BASIC, "me")], VALUE),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("gateway")
    with World(directory) as world:
        for name in ("example.com", "pinned.example.org", "bad.example.com"):
            world.zone[name] = [ALLOWED]
        world.zone["private.example.com"] = [PRIVATE]
        world.serve(ALLOWED, 80, world.http)
        world.serve(PRIVATE, 80, world.http)
        world.serve(ALLOWED, 443, world.http, tls="example.com")
        world.serve(OTHER, 443, world.http, tls="pinned.example.org")
        world.zone["pinned.example.org"] = [OTHER]

        async def database(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"greeting\n")
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"bye\n")

        world.serve(ALLOWED, 5432, database)
        rig = Rig(directory, world, private=["10.9.0.0/16"])
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    shared.attach(POLICY, secrets=SECRETS)
    shared.server.bodies.clear()
    shared.world.requests.clear()
    yield shared
    shared.server.failing = shared.server.hanging = False
    shared.server.gate = None
    shared.detach()


def test_many_requests_go_over_one_connection(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 80)
        for _ in range(3):
            await tunnel.write(request("example.com"))
            assert (await tunnel.until(b"hello")).startswith(b"HTTP/1.1 200 OK")
        await tunnel.write(request("example.com") + request("example.com", "/2"))
        found = await tunnel.until(b"hello")
        while found.count(b"hello") < 2:
            found += await tunnel.read()
        await tunnel.end()
        assert await tunnel.all() == b""

    before = rig.world.connections.count((ALLOWED, 80))
    rig.run(run())
    assert rig.world.connections.count((ALLOWED, 80)) == before + 1


def test_bodies_stream_in_both_directions(rig: Rig) -> None:
    size = 3_000_000

    async def run() -> None:
        tunnel = await rig.open("example.com", 80)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (b"abc", b"d" * 70000))
        await tunnel.write(
            request("example.com", "/up", "Transfer-Encoding: chunked", method="PUT")
            + chunks
            + b"0\r\nX-Sum: 1\r\n\r\n"
        )
        assert (await tunnel.until(b"/up 70003")).startswith(b"HTTP/1.1 200")
        await tunnel.write(request("example.com", f"/bytes?{size}"))
        found = len((await tunnel.until(b"\r\n\r\n")).partition(b"\r\n\r\n")[2])
        while found < size:
            found += len(await tunnel.read())
        assert found == size
        await tunnel.write(
            request("example.com", "/up", f"Content-Length: {size}", method="PUT") + bytes(size)
        )
        await tunnel.until(b"/up %d" % size)

    rig.run(run())


def test_continue_head_no_content_and_trailers(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 80)
        await tunnel.write(
            request("example.com", "/w", "Content-Length: 2", "Expect: 100-continue", method="PUT")
        )
        assert b"100" in await tunnel.until(b"\r\n\r\n")
        await tunnel.write(b"ok")
        await tunnel.until(b"/w 2")
        await tunnel.write(request("example.com", "/", method="HEAD"))
        assert b"content-length: 7" in await tunnel.until(b"\r\n\r\n")
        await tunnel.write(request("example.com", "/empty"))
        assert b"204" in await tunnel.until(b"\r\n\r\n")
        await tunnel.write(request("example.com", "/echo-slowly"))
        assert b"x-trailer: end" in await tunnel.until(b"0\r\nx-trailer: end\r\n\r\n")
        await tunnel.write(b"GET / HTTP/1.0\r\nHost: example.com\r\n\r\n")
        assert (await tunnel.all()).endswith(b"hello")

    rig.run(run())


def test_headers_of_the_connection_stay_on_it(rig: Rig) -> None:
    more = ("Connection: X-Mine, close", "X-Mine: 1", "Proxy-Authorization: a", "Upgrade: h2c")
    assert rig.run(attempt(rig, "example.com", 80, request("example.com", "/", *more))) == "200"
    head = rig.world.requests[-1].lower()
    for name in (b"x-mine", b"proxy-authorization", b"upgrade", b"connection"):
        assert name not in head


def test_a_websocket_passes_through(rig: Rig) -> None:
    async def run() -> None:
        tls = await rig.tls("example.com", 443, "example.com")
        await tls.write(
            request("example.com", "/upgrade", "Connection: Upgrade", "Upgrade: websocket")
            + b"early"
        )
        assert b"101" in await tls.until(b"\r\n\r\n")
        assert await tls.until(b"early")
        await tls.write(b"\x81\x05hello")
        assert await tls.until(b"\x81\x05hello")
        tls.tunnel.close()

    rig.run(run())
    assert [effect.kind for effect in rig.server.began] == ["websocket"]
    assert rig.run(rig.ended(1))[0].status == 101


def test_streams_at_the_same_time_keep_their_bytes_apart(rig: Rig) -> None:
    async def one(seed: int) -> None:
        data = random.Random(seed).randbytes(400_000)
        tls = await rig.tls("example.com", 443, "example.com")
        await tls.write(
            request("example.com", "/upgrade", "Connection: Upgrade", "Upgrade: websocket")
        )
        found = (await tls.until(b"\r\n\r\n")).partition(b"\r\n\r\n")[2]

        async def send() -> None:
            for at in range(0, len(data), 50_000):
                await tls.write(data[at : at + 50_000])

        sending = asyncio.ensure_future(send())
        while len(found) < len(data):
            found += await tls.read()
        await sending
        assert found == data
        tls.tunnel.close()

    async def run() -> None:
        await asyncio.gather(*(one(seed) for seed in range(6)))

    rig.run(run())


def test_a_websocket_that_tells_a_secret_is_reset(rig: Rig) -> None:
    async def run() -> None:
        tls = await rig.tls("example.com", 443, "example.com")
        await tls.write(
            request("example.com", "/upgrade", "Connection: Upgrade", "Upgrade: websocket")
        )
        await tls.until(b"\r\n\r\n")
        await tls.write(b"first: " + VALUE[:9].encode())
        await tls.until(b"first: ")
        await tls.write(VALUE[9:].encode())
        with pytest.raises(TunnelReset):
            # Nor does the part come that was there before it was whole.
            await tls.until(VALUE[:9].encode())

    rig.run(run())


def test_an_answer_that_breaks_off_does_not_look_whole(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 80)
        await tunnel.write(request("example.com", "/cut"))
        with pytest.raises(TunnelReset):
            await tunnel.all()

    rig.run(run())
    assert rig.run(rig.ended(1))[0].outcome == "failed"


def test_a_slow_request_holds_up_nobody(rig: Rig) -> None:
    async def run() -> None:
        slow = await rig.open("example.com", 80)
        await slow.write(request("example.com", "/s", "Content-Length: 9", method="PUT") + b"a")
        hanging = await rig.open("example.com", 80)
        await hanging.write(request("example.com", "/hang"))
        answers = await asyncio.gather(
            *(attempt(rig, "example.com", 80, request("example.com")) for _ in range(20))
        )
        assert answers == ["200"] * 20
        await slow.write(b"b" * 8)
        await slow.until(b"/s 9")
        slow.close()
        hanging.close()

    rig.run(run())


def test_a_head_that_does_not_come_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    assert rig.run(attempt(rig, "example.com", 80, b"GET / HTTP/1.1\r\nHost: exam")) == "408"


def test_what_does_not_move_is_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "IDLE_SECONDS", 0.4)

    async def run() -> None:
        idle = await rig.open("example.com", 80)
        parked = await rig.open("example.com", 80)
        await parked.write(request("example.com"))
        await parked.until(b"hello")
        await parked.park()
        with pytest.raises(TunnelReset):
            await idle.read()
        await asyncio.sleep(0.5)
        await parked.resume()
        await parked.write(request("example.com"))
        await parked.until(b"hello")
        parked.close()

    rig.run(run())


def test_no_bytes_at_all_end_in_a_fault(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(11)
    parts = [
        *(b"GET ", b"POST ", b"/", b"*", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"Host: example.com"),
        *(b"\r\n", b"\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"0\r\n"),
        *(b"5\r\nhello\r\n", b"Connection: upgrade", b"Upgrade: websocket", b"\0", b"\xff", b"a"),
        *(b"Expect: 100-continue", b"http://example.com/", b"CONNECT ", b"HEAD ", b"/empty"),
    ]

    async def run() -> None:
        for number in range(150):
            data = b"".join(chance.choices(parts, k=chance.randrange(1, 12)))
            if number % 2:
                data = b"GET / HTTP/1.1\r\nHost: example.com\r\n" + data + b"\r\n\r\n"
            tunnel = await rig.open("example.com", 80, (Kind.CONNECT, Kind.PROXY)[number % 3 == 0])
            await tunnel.write(data)
            await tunnel.end()
            try:
                await asyncio.wait_for(tunnel.all(), 10)
            except TunnelReset:
                continue
            finally:
                tunnel.close()

    rig.run(run())
    assert "fault" not in caplog.text


def test_what_cannot_be_reached_is_told(rig: Rig) -> None:
    rig.world.zone["bad.example.com"] = ["93.184.216.99"]
    assert rig.run(attempt(rig, "bad.example.com", 80, request("bad.example.com"))) == "502"
    del rig.world.zone["bad.example.com"]
    assert rig.run(attempt(rig, "bad.example.com", 80, request("bad.example.com"))) == "502"
    rig.world.zone["bad.example.com"] = [ALLOWED]

    async def wrong_certificate() -> bytes:
        tls = await rig.tls("bad.example.com", 443, "bad.example.com")
        await tls.write(request("bad.example.com"))
        return await tls.until(b"again.\n")

    answer = rig.run(wrong_certificate())
    assert answer.startswith(b"HTTP/1.1 502")
    assert b"certificate" in answer


def test_a_private_address_a_rule_and_the_operator_name_is_reached(rig: Rig) -> None:
    ask = attempt(rig, "private.example.com", 80, request("private.example.com"))
    assert rig.run(ask) == "200"
    assert rig.run(attempt(rig, PRIVATE, 80, request(PRIVATE))) == "200"


def test_raw_bytes_go_where_a_rule_gives_the_port(rig: Rig) -> None:
    async def run() -> None:
        first = await rig.open("example.com", 5432)
        assert await first.read() == b"greeting\n"
        await first.write(b"query")
        assert await first.until(b"query") == b"query"
        await first.end()
        assert await first.all() == b"bye\n"
        second = await rig.open("example.com", 5432)
        await second.write(b"\0\0\0\x08\x04\xd2\x16\x2f")
        assert b"greeting" in await second.until(b"\x2f")
        second.close()

    rig.run(run())
    done = rig.run(rig.ended(1))[0]
    assert (done.kind, done.outcome, done.request_bytes, done.response_bytes) == (
        "tcp",
        "done",
        5,
        len(b"greeting\nquerybye\n"),
    )


def test_tls_passes_through_unopened_where_a_rule_says_so(rig: Rig) -> None:
    async def run() -> None:
        tls = await rig.open("pinned.example.org", 443)
        stream = await GuestTls(tls, rig.world.roots, "pinned.example.org").greet()
        assert await outcome(stream, request("pinned.example.org")) == "200"
        tls.close()

    rig.run(run())
    assert [effect.kind for effect in rig.server.began] == ["tls"]
    assert b"authorization" not in rig.world.requests[-1].lower()


# Secrets


async def _ask(rig: Rig, path: str, *more: str, tls: bool = True, method: str = "GET") -> bytes:
    asked = request("example.com", path, "Connection: close", *more, method=method)
    if tls:
        stream = await rig.tls("example.com", 443, "example.com")
        await stream.write(asked)
        return await stream.all()
    tunnel = await rig.open("example.com", 80)
    await tunnel.write(asked)
    return await tunnel.all()


@pytest.mark.parametrize("path", ["/echo-head", "/echo-gzip", "/echo-slowly"])
def test_a_secret_goes_out_and_does_not_come_back(rig: Rig, path: str) -> None:
    answer = rig.run(_ask(rig, path, "Accept-Encoding: gzip", "Range: bytes=0-9"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert VALUE.encode() not in answer
    assert answer.replace(b"\r\n", b"").count(STAND_IN) >= (path != "/echo-slowly")
    head = rig.world.requests[-1]
    assert f"authorization: Bearer {VALUE}\r\n".encode() in head.replace(b"Auth", b"auth")
    assert b"range" not in head.lower()
    effect = rig.run(rig.ended(1))[0]
    assert effect.secrets == ["KEY"]


def test_an_answer_that_cannot_be_searched_is_not_passed_on(rig: Rig) -> None:
    answer = rig.run(_ask(rig, "/echo-brotli"))
    assert answer.startswith(b"HTTP/1.1 502")
    assert VALUE.encode() not in answer


def test_placeholders_are_filled_in(rig: Rig) -> None:
    pair = base64.b64encode(b"me:" + STAND_IN).decode()
    rig.run(
        _ask(rig, f"/?key={STAND_IN.decode()}", f"X-Token: {STAND_IN.decode()}", f"X-P: {pair}")
    )
    head = rig.world.requests[-1]
    assert b"/?key=sk-Very%2FSecret%2BValue-0123456789 " in head
    assert f"x-token: {VALUE}\r\n".encode() in head.lower().replace(
        VALUE.lower().encode(), VALUE.encode()
    )


def test_no_secret_goes_out_in_the_clear(rig: Rig) -> None:
    answer = rig.run(_ask(rig, "/echo-head", tls=False))
    assert b"authorization" not in answer.lower()
    rig.run(attempt(rig, "private.example.com", 80, request("example.com")))
    for head in rig.world.requests:
        assert VALUE.encode() not in head


def test_a_value_stands_nowhere_but_in_requests(
    rig: Rig, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    broken = Granted("KEY", [SecretUse(domains=["example.com"])], VALUE + "\r\nX-More: 1")
    rig.attach(POLICY, secrets=[broken])
    answer = rig.run(_ask(rig, f"/?a={STAND_IN.decode()}"))
    assert answer.startswith(b"HTTP/1.1 502")
    rig.attach(POLICY, secrets=SECRETS)
    for path in ("/echo-head", "/cut", "/echo-brotli"):
        with_reset = _ask(rig, f"{path}?a={STAND_IN.decode()}")
        try:
            assert VALUE.encode() not in rig.run(with_reset)
        except TunnelReset:
            continue
    out, err = capfd.readouterr()
    for text in (caplog.text, out, err, repr(rig.server.bodies), repr(rig.gateway.__dict__)):
        assert "Very" not in text
    assert b"Very" not in b"".join(repr(body).encode() for body in rig.server.bodies)


# Records


def test_an_idempotent_request_is_one_record_and_another_two(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 80)
        await tunnel.write(request("example.com", "/a?token=x"))
        await tunnel.until(b"hello")
        await tunnel.write(
            request("example.com", "/b", "Content-Length: 3", method="POST") + b"abc"
        )
        await tunnel.until(b"/b 3")
        tunnel.close()
        await rig.ended(2)

    rig.run(run())
    first, second = rig.server.ended
    assert (first.method, first.path, first.idempotent, first.status) == ("GET", "/a", True, 200)
    assert (first.rule, first.host, first.port, first.scheme) == ("web", "example.com", 80, "http")
    assert (second.method, second.request_bytes, second.response_bytes) == ("POST", 3, 4)
    began: list[Effect] = rig.server.began
    assert [effect.id for effect in began] == [second.id]
    assert began[0].outcome == "open"
    assert second.outcome == "done"


@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_what_is_not_recorded_does_not_leave(
    rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "ACKNOWLEDGED_SECONDS", 0.3)
    setattr(rig.server, how, True)
    before = len(rig.world.requests)
    ask = request("example.com", "/b", "Content-Length: 0", method="POST")
    assert rig.run(attempt(rig, "example.com", 80, ask)) == "503"

    async def raw() -> None:
        tunnel = await rig.open("example.com", 5432)
        await tunnel.write(b"\0\0\0\x08")
        with pytest.raises(TunnelReset):
            await tunnel.all()

    rig.run(raw())
    assert len(rig.world.requests) == before
    setattr(rig.server, how, False)
    assert rig.run(attempt(rig, "example.com", 80, ask)) == "200"


def test_a_secret_that_was_taken_away_meanwhile_does_not_leave(rig: Rig) -> None:
    async def run() -> bytes:
        gate = rig.server.gate = asyncio.Event()
        asking = asyncio.ensure_future(_ask(rig, "/", "Content-Length: 0", method="POST"))
        while not rig.server.began:
            await asyncio.sleep(0.01)
        await rig.gateway.handle(
            Attach("sbx", "ses", "ten", 1, str(rig.socket()), POLICY, SECRETS[1:])
        )
        gate.set()
        return await asking

    assert rig.run(run()).startswith(b"HTTP/1.1 503")
    assert rig.world.requests == []
    assert rig.run(rig.ended(1))[0].outcome == "failed"


def test_requests_wait_while_the_server_takes_no_records(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "ACKNOWLEDGED_SECONDS", 0.3)
    monkeypatch.setattr(records, "_MOST_UNTOLD", 3)
    rig.server.hanging = True

    async def run() -> list[str]:
        return [await attempt(rig, "example.com", 80, request("example.com")) for _ in range(4)]

    assert rig.run(run()) == ["200"] * 3 + ["503"]
    rig.detach()


# Quotas


def test_requests_over_the_limit_are_told_to_wait(rig: Rig) -> None:
    rig.attach(NetworkPolicy(NetworkMode.ALLOWLIST, _RULES, requests_per_minute=2))

    async def run() -> bytes:
        tunnel = await rig.open("example.com", 80)
        found = b""
        for _ in range(3):
            await tunnel.write(request("example.com"))
            found = await tunnel.until(b"\r\n\r\n")
        return found

    answer = rig.run(run())
    assert b"HTTP/1.1 429 Too Many Requests" in answer
    assert b"retry-after: " in answer
    rig.attach(POLICY, secrets=SECRETS)


def test_connections_over_the_limit_are_refused(rig: Rig) -> None:
    rig.attach(NetworkPolicy(NetworkMode.ALLOWLIST, _RULES, connections=2))

    async def run() -> None:
        held = [await rig.open("example.com", 80) for _ in range(2)]
        with pytest.raises(TunnelRefused) as refused:
            await rig.open("example.com", 80)
        assert refused.value.reason is Refusal.QUOTA
        held[0].close()
        while True:
            try:
                (await rig.open("example.com", 80)).close()
                break
            except TunnelRefused:
                await asyncio.sleep(0.02)
        held[1].close()

    rig.run(run())


def test_bytes_pass_no_faster_than_the_limit(rig: Rig) -> None:
    rig.attach(NetworkPolicy(NetworkMode.ALLOWLIST, _RULES, bytes_per_second=200_000))

    async def run() -> float:
        tunnel = await rig.open("example.com", 80)
        began = time.monotonic()
        await tunnel.write(request("example.com", "/bytes?300000"))
        size = 0
        while size < 300_000:
            size += len(await tunnel.read())
        return time.monotonic() - began

    # A second's worth is in advance; the rest cannot have come sooner.
    assert rig.run(run()) >= 0.4


# Policy


def test_a_changed_policy_resets_what_it_no_longer_allows(rig: Rig) -> None:
    async def opened() -> tuple[GuestTunnel, GuestTunnel, GuestTunnel]:
        raw = await rig.open("example.com", 5432)
        await raw.until(b"greeting\n")
        idle = await rig.open("example.com", 80)
        await idle.write(request("example.com"))
        await idle.until(b"hello")
        private = await rig.open(PRIVATE, 80)
        await private.write(request(PRIVATE))
        await private.until(b"hello")
        return raw, idle, private

    raw, idle, private = rig.run(opened())
    rules = [rule for rule in _RULES if rule.name not in ("db", "office")]
    rig.attach(NetworkPolicy(NetworkMode.ALLOWLIST, rules))

    async def check() -> None:
        for tunnel in (raw, private):
            with pytest.raises(TunnelReset):
                await asyncio.wait_for(tunnel.read(), 5)
        await idle.write(request("example.com"))
        await idle.until(b"hello")
        idle.close()

    rig.run(check())
    rig.attach(NetworkPolicy())
    with pytest.raises(TunnelRefused):
        rig.run(rig.open("example.com", 80))


def test_a_changed_policy_resets_what_waits_for_the_first_word(rig: Rig) -> None:
    speak = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await speak.wait()
        writer.write(b"greeting\n")
        await reader.read()

    rig.world.serve(ALLOWED, 5433, silent)
    rule = NetworkRule("silent", domains=["example.com"], ports=[5433])
    rig.attach(NetworkPolicy(NetworkMode.ALLOWLIST, [rule]))

    async def connected() -> GuestTunnel:
        tunnel = await rig.open("example.com", 5433)
        while (ALLOWED, 5433) not in rig.world.connections:
            await asyncio.sleep(0.01)
        return tunnel

    tunnel = rig.run(connected())
    rig.attach(NetworkPolicy())

    async def speaks() -> None:
        speak.set()

    rig.world.call(speaks())
    with pytest.raises(TunnelReset):
        rig.run(tunnel.read())
