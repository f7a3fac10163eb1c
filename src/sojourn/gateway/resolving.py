"""Names and connections outside, in the network namespace the operator chose.

Guarantee: what is connected to is the very address that was judged, and names are resolved anew for
each connection, so no answer given earlier or later to somebody else counts.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sojourn.errors import HostUnfit
from sojourn.gateway.addresses import Address, Network, parse_network
from sojourn.gateway.leases import UNBOUNDED, AnyLease
from sojourn.gateway.streams import Connection

CONNECT_SECONDS = 10
_RESOLVE_SECONDS = 5
_THREADS = 64
_MOST_ADDRESSES = 16
_OWN_SECONDS = 2
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class NoName(OSError):
    """A name has no address, or nobody answers for it."""


class Outside:
    """Resolves and connects."""

    def __init__(
        self,
        *,
        namespace: str | None = None,
        nameservers: Sequence[str] = (),
        private: Sequence[str] = (),
        roots: str | None = None,
        lease: AnyLease = UNBOUNDED,
    ) -> None:
        self._lease = lease
        self.private: list[Network] = [parse_network(text) for text in private]
        self._nameservers = list(nameservers)
        self._namespace = None if namespace is None else _open_namespace(namespace)
        self._pool = ThreadPoolExecutor(_THREADS, "names", initializer=self._enter)
        # Apart, so that no socket waits for a name server.
        self._sockets = ThreadPoolExecutor(1, "sockets", initializer=self._enter)
        self._entered: OSError | None = None
        self._own: tuple[float, frozenset[Address]] = (0.0, frozenset())
        self.tls = ssl.create_default_context()
        self.tls.set_alpn_protocols(["http/1.1"])
        if roots is not None:
            self.tls.load_verify_locations(cafile=roots)

    async def check(self) -> None:
        """Raises HostUnfit when the namespace cannot be entered."""
        await self._run(self._sockets, lambda: None)

    def close(self) -> None:
        """Let go."""
        for pool in (self._pool, self._sockets):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._namespace is not None:
            os.close(self._namespace)
            self._namespace = None

    def own_addresses(self) -> frozenset[Address]:
        """The addresses of the host that the gateway runs on."""
        at, found = self._own
        now = time.monotonic()
        if not found or now - at > _OWN_SECONDS:
            found = frozenset(_own_addresses())
            self._own = (now, found)
        return found

    async def resolve(self, name: str, slots: asyncio.Semaphore) -> list[Address]:
        """All addresses of a name. One of the slots is taken for as long as a thread is at it, also
        when nobody waits for that any more. Raises NoName, TimeoutError."""
        await slots.acquire()
        if not self._lease.valid():
            slots.release()
            raise NoName("the node has no lease")
        looking = asyncio.ensure_future(self._run(self._pool, lambda: self._lookup(name)))

        def looked(done: asyncio.Future[list[Address]]) -> None:
            slots.release()
            if not done.cancelled():
                done.exception()  # told to whoever still waits

        looking.add_done_callback(looked)
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await asyncio.shield(looking)
        return found[:_MOST_ADDRESSES]

    async def connect(
        self, addresses: Sequence[Address], port: int, tls_name: str | None = None
    ) -> Connection:
        """A connection to the first of the addresses that answers; over TLS, verified for
        `tls_name`, when one is given. Raises OSError, TimeoutError, ssl.SSLError."""
        failure: Exception = NoName("no address")
        async with asyncio.timeout(CONNECT_SECONDS):
            for index, address in enumerate(addresses):
                last = index == len(addresses) - 1
                try:
                    async with asyncio.timeout(None if last else CONNECT_SECONDS / 4):
                        return await self._connect(address, port, tls_name)
                except ssl.SSLError:
                    raise
                except (OSError, TimeoutError) as error:
                    failure = error
        raise failure

    async def _connect(self, address: Address, port: int, tls_name: str | None) -> Connection:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        if self._namespace is None:
            sock = _socket(family)
        else:
            sock = await self._run(self._sockets, lambda: _socket(family))
        try:
            self._require_lease()
            await loop.sock_connect(sock, (str(address), port))
            self._require_lease()
            _, connection = await loop.create_connection(
                lambda: Connection(secure=tls_name is not None, lease=self._lease),
                sock=sock,
                ssl=None if tls_name is None else self.tls,
                server_hostname=tls_name,
            )
        except BaseException:
            sock.close()
            raise
        return connection

    def _require_lease(self) -> None:
        if not self._lease.valid():
            raise ConnectionAbortedError("the node has no lease")

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        def inside() -> T:
            if self._entered is not None:
                raise HostUnfit(
                    f"the network namespace for connections outside cannot be entered: "
                    f"{self._entered}",
                    next_step="Start the server as root, and correct SOJOURN_EGRESS_NAMESPACE.",
                )
            return work()

        return await asyncio.get_running_loop().run_in_executor(pool, inside)

    def _enter(self) -> None:
        if self._namespace is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(self._namespace, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            self._entered = OSError(code, os.strerror(code))

    def _lookup(self, name: str) -> list[Address]:
        if self._nameservers:
            return self._ask(name)
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise NoName(f"{name} cannot be resolved") from error
        return [ipaddress.ip_address(str(answer[4][0])) for answer in answers]

    def _ask(self, name: str) -> list[Address]:
        # It loads half of what a gateway consists of, and most use the host's own name servers.
        import dns.exception
        import dns.resolver

        resolver = dns.resolver.Resolver(configure=False)
        resolver.nameservers = list(self._nameservers)
        resolver.lifetime = _RESOLVE_SECONDS
        found: list[Address] = []
        failure: Exception | None = None
        for kind in ("A", "AAAA"):
            try:
                for record in resolver.resolve(name + ".", kind, search=False):
                    found.append(ipaddress.ip_address(record.to_text()))
            except dns.resolver.NoAnswer:
                continue
            except (dns.exception.DNSException, ValueError) as error:
                failure = error
                if isinstance(error, dns.resolver.NXDOMAIN):
                    break
        if not found:
            raise NoName(f"{name} cannot be resolved") from failure
        return found


def _socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _open_namespace(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostUnfit(
            f"the network namespace {path} cannot be opened: {error.strerror}",
            next_step="Correct SOJOURN_EGRESS_NAMESPACE.",
        ) from error


def _own_addresses() -> list[Address]:
    found: list[Address] = []
    previous = ""
    for line in _lines("/proc/self/net/fib_trie"):
        text = line.strip()
        if text.endswith("host LOCAL"):
            found.append(ipaddress.IPv4Address(previous))
        elif text.startswith("|-- "):
            previous = text.removeprefix("|-- ")
    for line in _lines("/proc/self/net/if_inet6"):
        found.append(ipaddress.IPv6Address(int(line.split()[0], 16)))
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []  # a kernel without this protocol
