"""The way out of a session against the same program with nothing between, and the way in.

One program asks a server in a network namespace over HTTP and HTTPS: once from a process in that
namespace (direct), once from inside a session, through its tunnels and the gateway. The way in: the
first answer of a port of a suspended session, beside a resume of the same session to its first
command.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.harness import Row, median, server, timed
from sojourn import Session, Sojourn, allow

ROUNDS = int(os.environ.get("SOJOURN_BENCH_ROUNDS", "3"))
ADDRESS, NAME = "93.184.216.34", "api.bench.example"
WAKES, RESUMES = 10, 10

# Prints medians in milliseconds, and megabytes a second.
PROGRAM = f"""
import http.client, json, ssl, statistics, sys, time
HOST, CAFILE = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
found = {{}}
for scheme in ("http", "https"):
    context = ssl.create_default_context(cafile=CAFILE)
    if CAFILE:
        context.check_hostname = False
    def opened():
        if scheme == "http":
            return http.client.HTTPConnection(HOST, timeout=30)
        return http.client.HTTPSConnection(HOST, timeout=30, context=context)
    def ask(connection, path="/100"):
        connection.request("GET", path, headers={{"Host": "{NAME}"}})
        return connection.getresponse().read()
    kept = opened()
    ask(kept)
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        ask(kept)
        times.append(time.perf_counter() - begun)
    found[scheme + " kept"] = statistics.median(times) * 1000
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        one = opened()
        ask(one)
        times.append(time.perf_counter() - begun)
        one.close()
    found[scheme + " new"] = statistics.median(times) * 1000
    size = 64 << 20
    begun = time.perf_counter()
    assert len(ask(kept, "/%d" % size)) == size
    found[scheme + " rate"] = size / (time.perf_counter() - begun) / 1e6
print(json.dumps(found))
"""


@contextlib.contextmanager
def outside() -> Iterator[tuple[str, Path]]:
    """A namespace with the server in it: its name, and the file of the authority to trust."""
    namespace = f"sojournbench{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-net-") as made:
        certificate, key = _certificate(Path(made))
        _ip("netns", "add", namespace)
        try:
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
            served = subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace),
                    *(sys.executable, "-m", "bench.network_outside"),
                    *(ADDRESS, NAME, str(certificate), str(key)),
                ],
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
            )
            assert served.stdout is not None
            try:
                if served.stdout.readline() != b"ready\n":
                    raise SystemExit("the server outside did not start")
                yield namespace, certificate
            finally:
                served.kill()
                served.wait()
                served.stdout.close()
        finally:
            _ip("netns", "del", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _certificate(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = directory / "certificate.pem", directory / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private


def measure() -> list[Row]:
    """The rows of this measure."""
    with outside() as (namespace, roots):
        settings = {
            "SOJOURN_EGRESS_NAMESPACE": f"/run/netns/{namespace}",
            "SOJOURN_EGRESS_NAMESERVERS": ADDRESS,
            "SOJOURN_EGRESS_ROOTS": str(roots),
        }
        with server(settings) as (client, _):
            return _out(client, namespace, roots) + _in(client)


def _out(client: Sojourn, namespace: str, roots: Path) -> list[Row]:
    direct: dict[str, list[float]] = {}
    through: dict[str, list[float]] = {}
    session = client.sessions.create(
        network=allow(NAME), policy={"auto_snapshot": "off", "idle_timeout": None}
    )
    session.files.write("/srv/program.py", PROGRAM.encode())
    for _ in range(ROUNDS):
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", PROGRAM, ADDRESS, str(roots)],
            capture_output=True,
            check=True,
        )
        for name, value in json.loads(done.stdout).items():
            direct.setdefault(name, []).append(value)
        result = session.exec(["python3", "/srv/program.py", NAME], timeout=300)
        if not result.ok:
            raise SystemExit(f"the program failed inside: {result.err}")
        for name, value in json.loads(result.text).items():
            through.setdefault(name, []).append(value)
    session.delete()
    rows = []
    for name, samples in through.items():
        scheme, kind = name.split()
        ours, bare = median(samples), median(direct[name])
        if kind == "rate":
            row = Row(f"{scheme}: download", ours, bare, "-", unit="MB/s")
        else:
            what = "a request on a kept connection" if kind == "kept" else "a new connection"
            added = f"{ours - bare:.2f} ms added"
            row = Row(f"{scheme}: {what}", ours, bare, "-", note=added)
        row.samples = samples
        rows.append(row)
    return rows


def _in(client: Sojourn) -> list[Row]:
    session = client.sessions.create(policy={"auto_snapshot": "off", "idle_timeout": None})
    session.spawn("cd /srv && exec python3 -m http.server 8000")
    port = session.expose(8000, public=True)
    url = urlsplit(port.path_url)

    def ask() -> None:
        connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=90)
        connection.request("GET", url.path)
        if connection.getresponse().status != 200:
            raise SystemExit("the port did not answer")
        connection.close()

    ask()
    warm = [timed(ask) for _ in range(50)]
    wakes, resumes = [], []
    for _ in range(max(WAKES, RESUMES)):
        session.suspend()
        time.sleep(0.2)
        wakes.append(timed(ask))
        session.suspend()
        time.sleep(0.2)
        resumes.append(timed(lambda: _first_command(session)))
    session.delete()
    return [
        Row("a request to an exposed port", median(warm), None, "-", samples=warm),
        Row(
            "wake on request: suspended, to the answer",
            median(wakes),
            median(resumes),
            "-",
            samples=wakes,
            note="beside: resume to the first command",
        ),
    ]


def _first_command(session: Session) -> None:
    session.resume()
    session.exec("true")
