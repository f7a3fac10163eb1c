"""exec `true` through the SDK, against a spawn inside the sandbox and `runsc exec`; run_code."""

from __future__ import annotations

from bench.harness import Row, bare, median, server, session, timed

ROUNDS = 200

SPAWN = """
import os, time
samples = []
for _ in range(200):
    started = time.perf_counter()
    os.waitpid(os.posix_spawn("/usr/bin/true", ["true"], {}), 0)
    samples.append((time.perf_counter() - started) * 1000)
print(sorted(samples)[100])
"""


def measure() -> list[Row]:
    """The rows of this measure."""
    with server() as (client, _), bare() as runtime, session(client) as one:
        name, _ = runtime.start()
        command = ["/usr/bin/true"]
        for _ in range(20):
            one.exec(command)
            one.run_code("1")
        exec_samples = [timed(lambda: one.exec(command)) for _ in range(ROUNDS)]
        inside = float(one.exec(["python3", "-c", SPAWN]).text)
        code_samples = [timed(lambda: one.run_code("1 + 1")) for _ in range(ROUNDS)]
        runsc_exec = median([timed(lambda: runtime.exec(name, *command)) for _ in range(20)])
    ours, code = median(exec_samples), median(code_samples)
    return [
        Row(
            "exec true",
            ours,
            inside,
            "<= spawn inside + 1 ms",
            reached=ours <= inside + 1,
            note=f"runsc exec takes {runsc_exec:.1f} ms",
            samples=exec_samples,
        ),
        Row("run_code, round trip", code, None, "<= 2 ms", reached=code <= 2, samples=code_samples),
    ]
