"""A process that captures, replicates, deletes and collects until it is killed.

`python -m support.repository_kills DIRECTORY` reads lines from its standard input, each a seed. For
each it forks a worker (so that no time goes into starting an interpreter) that works on the store
and the repository below the directory for ever, and tells on standard output, one line each:

    W <pid>        the worker that was forked
    P <snapshot>   a snapshot is durable in the repository
    D <id>         a snapshot is about to be deleted
    G              a collection is done
    K              the worker has ended: nothing more of it comes
    E <text>       something failed, which is never right
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from pathlib import Path

import msgspec

from sojourn.model import new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.repository.collection import collect
from sojourn.repository.copies import StoredCopies
from sojourn.repository.repository import Repository
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore

TENANT = "ten_1"
CONFIG = SnapshotConfig(template="t", env={}, user="root", cwd="/", hostname="h")
KEPT = 6  # snapshots at a time


def tell(kind: str, text: str = "") -> None:
    """One write, so that what arrives is whole; lines are shorter than a pipe takes at once."""
    line = f"{kind} {text}\n".encode()
    assert len(line) <= 4096, "a line the pipe would take in pieces"
    os.write(1, line)


class Work:
    """What a worker does, beginning with what the one before left."""

    def __init__(self, root: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        self.store = LocalStore(root / "store", grace=0)
        self.repository = Repository.open(str(root / "objects"), create=True)
        self.copies = StoredCopies(self.store.root)
        template = root / "template"
        if not (template / "etc").exists():
            (template / "etc").mkdir(parents=True, exist_ok=True)
            (template / "etc" / "os").write_bytes(b"a template")
        self.template = self.store.adopt_template(template, "t")
        self.upper = root / f"upper-{seed}"
        self.upper.mkdir(exist_ok=True)
        self.snapshots = [self.store.read_snapshot(id) for id in self.store.snapshot_ids()]

    def run(self) -> None:
        """For ever."""
        while True:
            self.change()
            snapshot = self.capture()
            if self.choose.random() < 0.8:
                parent = self.snapshots[-1] if self.snapshots else None
                self.repository.push(TENANT, snapshot, self.copies, parent)
                tell("P", msgspec.json.encode(snapshot).decode())
            self.snapshots.append(snapshot)
            while len(self.snapshots) > KEPT:
                self.delete(self.snapshots.pop(self.choose.randrange(len(self.snapshots))))
            if self.choose.random() < 0.4:
                collect(self.repository.backend, self.repository.domain, grace=0)
                tell("G")

    def change(self) -> None:
        """Contents come from a small choice: what was collected comes back."""
        for _ in range(self.choose.randrange(1, 5)):
            name = self.upper / f"f{self.choose.randrange(10)}"
            content = random.Random(self.choose.randrange(20))
            name.write_bytes(content.randbytes(content.randrange(1, 40_000)))

    def capture(self) -> Snapshot:
        pending = self.store.capture_layer(self.upper, since=None, suspects=set())
        layers: list[LayerRef] = [self.template, pending.publish()]
        if self.snapshots and self.choose.random() < 0.5:
            before = self.choose.choice(self.snapshots).layers[1:3]
            layers = [self.template, *before, layers[1]]
        memory: MemoryRef | None = None
        if self.choose.random() < 0.3:
            staged = self.store.stage_image()
            content = random.Random(self.choose.randrange(5))
            (staged / "pages.img").write_bytes(content.randbytes(25 * 4096))
            memory = self.store.publish_image(staged, "d", "r", [])
        made = Snapshot(
            id=new_id("snp"),
            session="ses_1",
            parent=None,
            kind=SnapshotKind.AUTO,
            label=None,
            created_at=0.0,
            layers=layers,
            memory=memory,
            config=CONFIG,
            fingerprint=fingerprint(layers, memory, CONFIG),
        )
        self.store.publish_snapshot(made)
        return made

    def delete(self, snapshot: Snapshot) -> None:
        tell("D", snapshot.id)
        self.repository.delete_snapshot(TENANT, snapshot.id)
        self.store.delete_snapshot(snapshot.id)
        self.store.collect(set())


def main() -> None:
    root = Path(sys.argv[1])
    for line in sys.stdin:
        pid = os.fork()
        if pid:
            tell("W", str(pid))
            os.waitpid(pid, 0)
            tell("K")
            continue
        try:
            Work(root, int(line)).run()
        except BaseException:  # noqa: BLE001 (told, and the worker ends)
            tell("E", repr(traceback.format_exc())[-3500:])
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
