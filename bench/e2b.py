"""E2B's SDK against our own, on one server in one run: create, commands, files, pauses.

Both run the same command as the same user (E2B's `commands.run` is a login shell), with the same
policy of automatic snapshots, and take turns, so that what differs is the interface.
"""

from __future__ import annotations

import os

from bench.harness import Row, median, server, timed

ROUNDS = int(os.environ.get("SOJOURN_BENCH_ROUNDS", "1"))
CREATES, COMMANDS, FILES, PAUSES = 10 * ROUNDS, 60 * ROUNDS, 60 * ROUNDS, 8 * ROUNDS
MOST = 1.5
POLICY = {"auto_snapshot": "idle", "idle_timeout": None, "max_lifetime": 600.0}


def measure() -> list[Row]:
    """The rows of this measure."""
    from e2b import Sandbox

    from sojourn.server.e2b.ids import session_id

    with server() as (client, data):
        point = {
            "api_url": client.url,
            "sandbox_url": client.url,
            "api_key": (data / "token").read_text().strip(),
        }
        command = ["/bin/bash", "-l", "-c", "true"]
        creates: tuple[list[float], list[float]] = ([], [])
        for turn in range(CREATES):
            made: list = []

            def own() -> None:
                session = client.sessions.create(policy=POLICY)
                assert session.exec(command).ok
                made.append(session)

            def theirs() -> None:
                box = Sandbox.create(timeout=600, **point)
                assert box.commands.run("true").exit_code == 0
                made.append(box)

            # Each is first every other time: what the one before left behind is cleared meanwhile.
            order = [(0, own), (1, theirs)]
            for number, work in order if turn % 2 else order[::-1]:
                creates[number].append(timed(work))
            for one in made:
                one.kill() if isinstance(one, Sandbox) else one.delete()

        box = Sandbox.create(timeout=600, **point)
        session = client.sessions.get(str(session_id(box.sandbox_id)))
        whole = {"user": "user", "cwd": "/home/user"}
        for _ in range(10):
            session.exec(command, **whole)
            box.commands.run("true")
        commands: tuple[list[float], list[float]] = ([], [])
        for _ in range(COMMANDS):
            commands[0].append(timed(lambda: session.exec(command, **whole)))
            commands[1].append(timed(lambda: box.commands.run("true")))
        files: tuple[list[float], list[float]] = ([], [])
        content = b"x" * 10_000
        for _ in range(FILES):
            files[0].append(
                timed(
                    lambda: (
                        session.files.write("/home/user/a", content),
                        session.files.read("/home/user/a"),
                    )
                )
            )
            files[1].append(
                timed(
                    lambda: (
                        box.files.write("/home/user/b", content),
                        box.files.read("/home/user/b", format="bytes"),
                    )
                )
            )
        pauses: tuple[list[float], list[float]] = ([], [])
        for _ in range(PAUSES):
            pauses[0].append(timed(lambda: (session.suspend(), session.resume())))
            pauses[1].append(timed(lambda: (box.pause(), Sandbox.connect(box.sandbox_id, **point))))
        box.kill()
    return [
        _row("create, to the first command", creates),
        _row("a command (login shell)", commands),
        _row("write and read a file of 10 kB", files),
        _row("pause and connect, suspend and resume", pauses),
    ]


def _row(measure: str, samples: tuple[list[float], list[float]]) -> Row:
    own, theirs = median(samples[0]), median(samples[1])
    return Row(
        f"through E2B's SDK: {measure}",
        theirs,
        own,
        f"<= {MOST} x our own SDK",
        reached=theirs <= MOST * own,
        samples=samples[1],
        others={"our own SDK": own},
    )
