"""The process that is killed while it works on a store in front of a repository.

    python -m support.cache_worker ROOT URL SEED CALLS LAST REFS

CALLS are names of audit events, separated by commas; at the one numbered LAST the process kills
itself. What was acknowledged goes to standard output, one snapshot a line. It is a program of its
own and not a fork: the hashing library's threads do not survive one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from contract.store_rig import capture, snapshot_of
from sojourn.model.snapshots import LayerRef, MemoryRef
from sojourn.repository import config
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.store.local import LocalStore
from support.sources import DomainSource

Refs = tuple[list[LayerRef], list[MemoryRef]]


def domain_at(url: str) -> Domain:
    """As a process that has just started sees it."""
    backend = open_backend(url)
    _, keyring = config.create(backend, None)
    return Domain(backend, keyring.domain("ten_1"))


def work(root: Path, url: str, seed: int, refs: Refs) -> None:
    """Fetch, publish, give up and collect for ever."""
    layers, images = refs
    choose = random.Random(seed)
    durable = {ref.id for ref in (*layers, *images)}
    store = LocalStore(root / "store", grace=0, source=DomainSource(domain_at(url)))
    upper = root / "upper"
    upper.mkdir(exist_ok=True)
    while True:
        what = choose.randrange(6)
        if what == 0:
            store.check_layer(choose.choice(layers))
        elif what == 1:
            store.verify_image(choose.choice(images))
        elif what == 2:
            store.evict(choose.randrange(300_000), keep=set(), durable=durable.__contains__)
        elif what == 3:
            (upper / "f").write_bytes(choose.randbytes(2000))
            own = capture(store, upper)
            made = snapshot_of([choose.choice(layers), own], choose.choice(images))
            store.publish_snapshot(made)
            os.write(1, msgspec.json.encode(made) + b"\n")
        elif what == 4:
            store.collect(set())
        else:
            store.usage()


def main() -> None:
    root, url, seed, names, last, refs = sys.argv[1:]
    calls_of = set(names.split(","))
    calls = 0

    def count(event: str, _: tuple[Any, ...]) -> None:
        nonlocal calls
        if event in calls_of:
            calls += 1
            if calls == int(last):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    work(Path(root), url, int(seed), msgspec.json.decode(refs, type=Refs))


if __name__ == "__main__":
    main()
