"""Warm pause and resume, against runsc pause and resume."""

from __future__ import annotations

from bench.harness import Row, bare, median, server, session, timed

ROUNDS = 20


def measure() -> list[Row]:
    """The rows of this measure."""
    with server() as (client, _), bare() as runtime, session(client) as one:
        name, _ = runtime.start()
        pauses, resumes, bare_pauses, bare_resumes = [], [], [], []
        for _ in range(ROUNDS):
            pauses.append(timed(one.pause))
            resumes.append(timed(lambda: one.exec(["/usr/bin/true"])))
            bare_pauses.append(timed(lambda: runtime.runsc("pause", name)))

            def wake() -> None:
                runtime.runsc("resume", name)
                runtime.exec(name, "/usr/bin/true")

            bare_resumes.append(timed(wake))
    return [
        Row("pause", median(pauses), median(bare_pauses), "-", samples=pauses),
        Row(
            "resume from pause, to the first command",
            median(resumes),
            median(bare_resumes),
            "-",
            samples=resumes,
        ),
    ]
