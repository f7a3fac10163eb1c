"""What holds for one sandbox: its policy, secrets, quotas and records, as they are at this moment.

Guarantee: everything that leaves asks the scope when it leaves, so a changed policy holds for the
next request, and connections it no longer allows are reset at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import msgspec

from sojourn.gateway.addresses import Address
from sojourn.gateway.denials import Denials
from sojourn.gateway.messages import Granted
from sojourn.gateway.names import Host
from sojourn.gateway.quotas import Pace, Rate
from sojourn.gateway.records import Recorder
from sojourn.gateway.resolving import NoName, Outside
from sojourn.gateway.rules import Verdict, judge_addresses, judge_host
from sojourn.gateway.streams import Connection, Stream
from sojourn.model.network import NetworkPolicy
from sojourn.wire.tunnels import Refusal

_RESOLVING = 8


class Denied(Exception):
    """The policy does not allow it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class Unreached(Exception):
    """It is allowed, and there is no way there."""

    def __init__(self, reason: str, refusal: Refusal) -> None:
        super().__init__(reason)
        self.reason, self.refusal = reason, refusal


class Ground(msgspec.Struct, eq=False):
    """Why an open connection is allowed; judged again when the policy changes."""

    stream: Stream
    host: Host | None = None
    port: int = 0
    addresses: Sequence[Address] = ()
    inspected: bool | None = None  # None: not TLS
    raw: bool = False

    def stand_on(
        self, host: Host, port: int, addresses: Sequence[Address], *, raw: bool = False
    ) -> None:
        """There is a connection outside: it is allowed for this."""
        self.host, self.port, self.addresses, self.raw = host, port, addresses, raw

    def clear(self) -> None:
        """There is none any more."""
        self.host, self.port, self.addresses, self.raw = None, 0, (), False


class Reached(msgspec.Struct, frozen=True):
    """A connection outside, with what allowed it."""

    connection: Connection
    verdict: Verdict
    addresses: list[Address]


class Scope:
    """What holds for one sandbox."""

    def __init__(
        self,
        policy: NetworkPolicy,
        granted: Sequence[Granted],
        recorder: Recorder,
        outside: Outside,
    ) -> None:
        self.policy = policy
        self.granted = list(granted)
        self.recorder = recorder
        self.denials = Denials(recorder)
        self.outside = outside
        self.rate = Rate(policy.requests_per_minute)
        self.pace_out = Pace(policy.bytes_per_second)
        self.pace_in = Pace(policy.bytes_per_second)
        self.grounds: set[Ground] = set()
        # Slow name servers of one session hold up no other.
        self._resolving = asyncio.Semaphore(_RESOLVING)

    def update(self, policy: NetworkPolicy, granted: Sequence[Granted]) -> None:
        """Another policy holds from now on."""
        self.policy, self.granted = policy, list(granted)
        self.rate.change(policy.requests_per_minute)
        self.pace_out.change(policy.bytes_per_second)
        self.pace_in.change(policy.bytes_per_second)
        for ground in list(self.grounds):
            if not self._still_allowed(ground):
                ground.stream.reset()

    def judge(self, host: Host, port: int) -> Verdict:
        """What the policy says of a host, before it is resolved."""
        return judge_host(self.policy, host, port)

    def refused(self, verdict: Verdict, host: Host, port: int) -> None:
        """What the policy says no to is on record."""
        self.denials.note(host, port, verdict.rule, verdict.reason)

    async def reach(self, host: Host, port: int, tls_name: str | None = None) -> Reached:
        """Connect, if it is allowed, to an address that is allowed. Raises Denied, Unreached."""
        verdict = self.judge(host, port)
        if not verdict.allowed:
            raise Denied(verdict)
        addresses = await self._allowed_addresses(host, port)
        try:
            connection = await self.outside.connect(addresses, port, tls_name)
        except ssl.SSLCertVerificationError as error:
            raise Unreached(
                f"the certificate of {host} is not valid: {error.verify_message}",
                Refusal.UNREACHABLE,
            ) from error
        except ssl.SSLError as error:
            raise Unreached(f"TLS with {host} failed: {error.reason}", Refusal.REFUSED) from error
        except TimeoutError as error:
            raise Unreached(f"{host}:{port} does not answer", Refusal.TIMEOUT) from error
        except ConnectionRefusedError as error:
            raise Unreached(f"{host}:{port} refuses connections", Refusal.REFUSED) from error
        except OSError as error:
            raise Unreached(
                f"{host}:{port} cannot be reached: {error.strerror or error}", Refusal.UNREACHABLE
            ) from error
        # The policy may have changed while the connection was made.
        verdict = self.judge(host, port)
        _, refused = self._judge_addresses(addresses, port)
        if not verdict.allowed or refused is not None:
            connection.reset()
            raise Denied(refused or verdict)
        return Reached(connection, verdict, addresses)

    async def _allowed_addresses(self, host: Host, port: int) -> list[Address]:
        if host.address is not None:
            found = [host.address]
        else:
            assert host.name is not None
            try:
                found = await self.outside.resolve(host.name, self._resolving)
            except NoName as error:
                raise Unreached(f"{host} cannot be resolved", Refusal.NAME) from error
            except TimeoutError as error:
                raise Unreached(f"{host} could not be resolved in time", Refusal.NAME) from error
        taken, refused = self._judge_addresses(found, port)
        if refused is not None:
            raise Denied(refused)
        return taken

    def _judge_addresses(
        self, addresses: Sequence[Address], port: int
    ) -> tuple[list[Address], Verdict | None]:
        return judge_addresses(
            self.policy,
            port,
            addresses,
            own=self.outside.own_addresses(),
            private=self.outside.private,
        )

    def _still_allowed(self, ground: Ground) -> bool:
        if ground.host is None:
            return True  # nothing was asked for yet
        verdict = self.judge(ground.host, ground.port)
        if not verdict.allowed or (ground.raw and not verdict.raw):
            return False
        if ground.inspected is not None and ground.inspected != verdict.inspect:
            return False
        taken, _ = self._judge_addresses(ground.addresses, ground.port)
        return len(taken) == len(ground.addresses)
