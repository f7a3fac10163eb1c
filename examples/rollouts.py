"""Rollouts from one warm state: an environment is made once, then forked for each rollout.

What takes time (imports, data, a simulation brought to where it gets interesting) is done once and
kept in a snapshot with its memory. Every rollout begins in that very state, down to the variables
of the interpreter, plays by itself and is measured; the best of a generation is where the next one
begins.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from sojourn.client import Session, Sojourn

ENVIRONMENT = """
import random
class World:
    goal = 50
    def __init__(self):
        self.place, self.steps = 0, 0
    def step(self, size):
        self.place += size
        self.steps += 1
        return -abs(self.goal - self.place)
world = World()
reward = None
"""

PLAY = """
choices = random.Random({seed})
for _ in range(5):
    reward = world.step(choices.randint(0, 9))
reward
"""

ROLLOUTS, GENERATIONS = 3, 2


def play(session: Session, seed: int) -> int:
    """One rollout; its reward. Where a policy would choose, a random number does."""
    result = session.run_code(PLAY.format(seed=seed))
    if result.error is not None:
        raise RuntimeError(result.error)
    return int(result.text or 0)


def main() -> None:
    with Sojourn() as client, ThreadPoolExecutor(ROLLOUTS) as pool:
        best = client.sessions.create(policy={"auto_snapshot": "off"})
        made = [best]
        try:
            best.run_code(ENVIRONMENT)
            for generation in range(GENERATIONS):
                warm = best.snapshot(f"generation-{generation}")
                begin = time.perf_counter()
                forks = best.fork(ROLLOUTS, snapshot=warm)
                made += forks
                ready = time.perf_counter() - begin
                seeds = [generation * ROLLOUTS + number for number in range(ROLLOUTS)]
                rewards = list(pool.map(play, forks, seeds))
                winner = forks[rewards.index(max(rewards))]
                print(f"generation {generation}: rewards {rewards}; forks in {ready:.2f} s")
                for one in [*forks, best]:
                    if one is not winner:
                        one.delete()
                        made.remove(one)
                best = winner
            print("kept:", best.run_code("world.place, world.steps, reward").text)
        finally:
            for one in made:
                one.delete()


if __name__ == "__main__":
    main()
