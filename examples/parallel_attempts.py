"""Several attempts at one task, from the same state, at the same time; the best goes on.

The project is prepared once. Each attempt is a fork: it has the files, the installed packages and
the running processes as they were, and nothing it does is seen by another. The best one's state is
promoted to the session the work began in; the rest is deleted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sojourn.client import Session, Sojourn

TEST = """
import time, fib
begin = time.perf_counter()
assert [fib.fib(n) for n in range(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
assert fib.fib(24) == 46368
print(time.perf_counter() - begin)
"""

# What three calls of a model might come back with.
ATTEMPTS = {
    "recursive": "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "wrong": "def fib(n):\n    return n\n",
    "loop": "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a\n",
}


def attempt(session: Session, code: str) -> float | None:
    """Try one solution; how long its test took, None when it failed."""
    session.files.write("/project/fib.py", code)
    done = session.exec(["python3", "test_fib.py"], cwd="/project", timeout=30)
    return float(done.stdout) if done.ok else None


def main() -> None:
    with Sojourn() as client:
        session = client.sessions.create()
        try:
            session.files.write("/project/test_fib.py", TEST)
            forks = session.fork(len(ATTEMPTS))
            try:
                with ThreadPoolExecutor(len(forks)) as pool:
                    seconds = list(pool.map(attempt, forks, ATTEMPTS.values()))
                results = dict(zip(ATTEMPTS, seconds, strict=True))
                for name, one in results.items():
                    print(f"{name}: {'failed' if one is None else 'passed'}")
                passed = {name: one for name, one in results.items() if one is not None}
                if not passed:
                    raise SystemExit("no attempt passed; the session is as it was")
                best = min(passed, key=lambda name: passed[name])
                print("best:", best)
                forks[list(ATTEMPTS).index(best)].promote()
            finally:
                for one in forks:
                    one.delete()
            session.refresh()
            print(
                "in the session:", session.exec("grep -c for /project/fib.py").text.strip(), "loop"
            )
        finally:
            session.delete()


if __name__ == "__main__":
    main()
