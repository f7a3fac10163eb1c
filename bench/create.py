"""From nothing to the first useful command: create and exec `true`, against runsc run and exec."""

from __future__ import annotations

from bench.harness import Row, bare, median, server, timed

ROUNDS = 10


def measure() -> list[Row]:
    """The rows of this measure."""
    ours: list[float] = []
    theirs: list[float] = []
    with server() as (client, _), bare() as runtime:
        for _ in range(ROUNDS):

            def product() -> None:
                session = client.sessions.create(policy={"auto_snapshot": "off"})
                assert session.exec(["/usr/bin/true"]).ok
                made.append(session)

            def by_hand() -> None:
                name, _ = runtime.start()
                runtime.exec(name, "/usr/bin/true")
                names.append(name)

            made: list = []
            names: list[str] = []
            ours.append(timed(product))
            theirs.append(timed(by_hand))
            made[0].delete()
            runtime.end(names[0])
    ratio = median(ours) / median(theirs)
    return [
        Row(
            "create, to the first command",
            median(ours),
            median(theirs),
            "<= 1.25 x runsc run + exec",
            reached=ratio <= 1.25,
            samples=ours,
        )
    ]
