"""Fork 1, 8 and 32 ways to a first command in each, against as many bare restores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.harness import Row, bare, median, server, session, timed

COUNTS = ((1, 7), (8, 3), (32, 1))


def measure() -> list[Row]:
    """The rows of this measure."""
    rows = []
    with server() as (client, _), bare() as runtime, session(client) as one:
        one.exec("echo something > /root/file")
        argv = ["/bin/sleep", "infinity"]
        name, upper = runtime.start(argv)
        for count, rounds in COUNTS:
            ours, theirs = [], []
            for _ in range(rounds):
                children: list = []

                def product() -> None:
                    children.extend(one.fork(n=count))
                    with ThreadPoolExecutor(2) as pool:
                        assert all(pool.map(lambda c: c.exec(["/usr/bin/true"]).ok, children))

                ours.append(timed(product))
                for child in children:
                    child.delete()
                names: list[str] = []

                def by_hand() -> None:
                    image = runtime.checkpoint(name, leave=True)

                    def start(_: int) -> None:
                        child = runtime.restore(image, upper, argv)
                        runtime.exec(child, "/usr/bin/true")
                        names.append(child)

                    with ThreadPoolExecutor(2) as pool:
                        list(pool.map(start, range(count)))

                theirs.append(timed(by_hand))
                for child in names:
                    runtime.end(child)
            ratio = median(ours) / median(theirs)
            rows.append(
                Row(
                    f"fork {count}, to the first command in each",
                    median(ours),
                    median(theirs),
                    "<= 1.25 x runsc checkpoint + restores + execs",
                    reached=ratio <= 1.25,
                    samples=ours,
                )
            )
    return rows
