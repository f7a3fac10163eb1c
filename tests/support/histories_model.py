"""What a session should hold after any history: a model without a server."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field


@dataclass
class Content:
    """What is in a session at one moment.

    `files` lie on the root file system, `memory_files` on one that is in memory; `variable` is the
    interpreter's; `counted` is how far the background counter's log had come when last seen, and
    `counting` whether it goes on.
    """

    files: dict[str, str] = field(default_factory=dict)
    memory_files: dict[str, str] = field(default_factory=dict)
    variable: int | None = None
    counting: bool = False
    counted: int = 0

    def copy(self) -> Content:
        return copy.deepcopy(self)

    def without_memory(self) -> Content:
        """What a start from the files alone brings back."""
        return Content(files=dict(self.files), counted=self.counted)

    def same_as(self, other: Content) -> bool:
        """Equal but for the counter, which goes on by itself."""
        return (
            self.files == other.files
            and self.memory_files == other.memory_files
            and self.variable == other.variable
            and self.counting == other.counting
        )


@dataclass
class Point:
    """A snapshot: what it holds, and whether memory is in it."""

    content: Content
    memory: bool
    parent: str | None
    label: str | None = None

    def restored(self) -> Content:
        return self.content.copy() if self.memory else self.content.without_memory()


@dataclass
class Model:
    """One session. `points` are the snapshots of its tree, `before` is its content before the
    step under way: what a step leaves behind in a snapshot of its own is that."""

    name: str
    state: str = "running"
    now: Content = field(default_factory=Content)
    before: Content = field(default_factory=Content)
    points: dict[str, Point] = field(default_factory=dict)
    head: str = ""
    parent: Model | None = None

    @property
    def live(self) -> bool:
        return self.state in ("running", "paused")

    def wake(self) -> None:
        """A call came: it runs again."""
        if self.state == "suspended":
            self.restore(self.head)
        self.state = "running"

    def restore(self, point: str) -> None:
        """A sandbox started from a snapshot, or will."""
        self.now = self.points[point].restored()

    def go_to(self, point: str) -> None:
        """A rollback: without a sandbox only the head moves."""
        self.restore(point)
        self.head = point
        if self.live:
            self.state = "running"

    def line(self, point: str) -> dict[str, Point]:
        """A snapshot and all it descends from, as far as they are in the tree."""
        found: dict[str, Point] = {}
        next_point: str | None = point
        while next_point is not None and next_point in self.points:
            found[next_point] = self.points[next_point]
            next_point = self.points[next_point].parent
        return found

    def child(self, name: str, point: str, state: str) -> Model:
        """A fork from one of its snapshots."""
        made = Model(name, state=state, head=point, points=self.line(point), parent=self)
        made.restore(point)
        return made

    def changes(self, a: str, b: str) -> dict[str, str]:
        """How the files of one snapshot differ from another's, by content."""
        before, after = self.points[a].content.files, self.points[b].content.files
        found = {name: "removed" for name in before.keys() - after.keys()}
        found |= {name: "added" for name in after.keys() - before.keys()}
        both = before.keys() & after.keys()
        return found | {name: "changed" for name in both if before[name] != after[name]}
