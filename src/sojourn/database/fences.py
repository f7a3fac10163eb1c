"""In whose name a database is changed, where it is one of many nodes'.

Guarantee: a job is done in the name it was given when it was queued, whoever the database writes
for by then; of an incarnation that was refused once nothing is tried again. An engine checks the
fence in the transaction itself, under a lock that whoever fences a node waits for.
"""

from __future__ import annotations

from sojourn.errors import NodeFenced
from sojourn.model.nodes import Fence


def fenced(fence: Fence) -> NodeFenced:
    """The error for a change in the name of an incarnation that does not count any more."""
    return NodeFenced(
        f"node {fence.node} is fenced: incarnation {fence.incarnation} is over",
        node=fence.node,
        incarnation=fence.incarnation,
    )


class Fences:
    """What a writer knows of its fence. Used by the event loop alone."""

    def __init__(self, fence: Fence | None = None) -> None:
        self._current = fence
        self._refused = False

    @property
    def current(self) -> Fence | None:
        """In whose name jobs are done that say nothing else."""
        return self._current

    def set(self, fence: Fence | None) -> None:
        """From now on jobs are done in this name."""
        if fence != self._current:
            self._current = fence
            self._refused = False

    def note(self, fence: Fence | None) -> None:
        """Remember that this one was refused."""
        if fence is not None and fence == self._current:
            self._refused = True

    def refusal(self, fence: Fence | None) -> NodeFenced | None:
        """The error for a job in this name that need not be tried."""
        if fence is not None and fence == self._current and self._refused:
            return fenced(fence)
        return None
