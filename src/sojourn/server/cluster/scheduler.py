"""Which node a session is placed on; pure.

Guarantee: a chosen node is ready, its lease is valid, it satisfies what the session asks of it, can
run its memory image and has room for its limits by what is known of it; whoever is refused learns
why. The same nodes and the same need give the same choice.

What is known is as old as a node's last renewal, so the node itself has the last word: it refuses
what it has no room for, and another one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sojourn.errors import InvalidRequest
from sojourn.model.nodes import Node, NodeState, Resources
from sojourn.model.sessions import Limits

NODE_LABEL = "sojourn.node/"
"""A session labelled `sojourn.node/KEY=VALUE` goes to nodes whose label KEY is VALUE."""
TOLERATION = "sojourn.toleration/"
"""A session labelled `sojourn.toleration/TAINT` may go to nodes with this taint."""


class Settings(msgspec.Struct, frozen=True):
    """How nodes are filled. Limits of sandboxes may add up to so many times what a node has, since
    few use all they may. `pack` fills one node before the next; else sessions are spread."""

    cpus: float = 8.0
    memory: float = 2.0
    disk: float = 4.0
    pack: bool = False


def read_settings(place: str, overcommit: str) -> Settings:
    """Settings from an operator's words: `spread` or `pack`, `cpus=N,memory=N,disk=N`. Raises
    InvalidRequest."""
    factors: dict[str, float] = {}
    for part in overcommit.split(","):
        name, _, value = part.strip().partition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = 0.0
        if name not in ("cpus", "memory", "disk") or not 0 < factor < 1e6:
            raise InvalidRequest(
                f"overcommit {overcommit!r} is not cpus=N,memory=N,disk=N", field="overcommit"
            )
        factors[name] = factor
    if place not in ("spread", "pack"):
        raise InvalidRequest(f"{place!r} is neither spread nor pack", field="place")
    return Settings(pack=place == "pack", **factors)


class Need(msgspec.Struct, frozen=True):
    """What a session asks of a node. `affinity` is the node that has its newest snapshot on disk;
    `runtime` and `cpu` are what its memory image needs; to `avoid` is where it was refused."""

    resources: Resources
    labels: Mapping[str, str] = {}
    affinity: str | None = None
    runtime: str | None = None
    cpu: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    only: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    """No node can take it. `full` are the ids of those that could if they had room."""

    cause: str
    full: list[str]


def need_of(limits: Limits, labels: Mapping[str, str], **more: Any) -> Need:
    """The need of a session with these limits and labels."""
    return Need(
        resources=Resources(limits.cpus, limits.memory_bytes, limits.disk_bytes, 1),
        labels=labels,
        **more,
    )


def choose(nodes: Iterable[Node], need: Need, settings: Settings) -> Node | Refusal:
    """The node for a need."""
    fitting: list[Node] = []
    full: list[Node] = []
    causes: dict[str, int] = {}
    for node in nodes:
        cause = unfit(node, need)
        if cause is None:
            if has_room(node, need.resources, settings):
                fitting.append(node)
                continue
            full.append(node)
            cause = "is full"
        causes[cause] = causes.get(cause, 0) + 1
    if not fitting:
        said = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
        full.sort(key=lambda node: (load(node, settings), node.id))
        return Refusal(said or "there is no node", [node.id for node in full])
    if need.affinity is not None:
        for node in fitting:
            if node.id == need.affinity:
                return node
    if settings.pack:
        return min(fitting, key=lambda node: (-load(node, settings), node.id))
    return min(fitting, key=lambda node: (load(node, settings), node.id))


def unfit(node: Node, need: Need) -> str | None:
    """Why a node cannot take it, whatever room it has; None: it can."""
    if node.id in need.avoid:
        return "has it or refused it"
    if need.only is not None and node.id != need.only:
        return "is not the one that was asked for"
    if node.state is not NodeState.READY:
        return f"is {node.state}"
    if node.lost or node.lease_left <= 0:
        return "does not answer"
    for key, value in need.labels.items():
        name = key.removeprefix(NODE_LABEL)
        if name != key and node.labels.get(name) != value:
            return f"is not labelled {name}={value}"
    for taint in node.taints:
        if TOLERATION + taint not in need.labels:
            return f"is kept for {taint}"
    if need.runtime is not None and node.runtime != need.runtime:
        return "has another runtime"
    if not need.cpu <= set(node.cpu):
        return "lacks features of the processor"
    return None


def has_room(node: Node, wanted: Resources, settings: Settings) -> bool:
    """Whether the limits of one more fit, as the node has told of itself."""
    return fits(node.capacity, node.used, wanted, settings)


def fits(has: Resources, used: Resources, wanted: Resources, settings: Settings) -> bool:
    """Whether what is wanted fits beside what is used. What a node does not say it has is not
    counted."""
    return all(
        limit <= 0 or taken + asked <= limit * factor + 1e-9
        for limit, taken, asked, factor in _rows(has, used, wanted, settings)
    )


def load(node: Node, settings: Settings) -> float:
    """How full a node is: the fullest of what it has, 1 when that is used up."""
    return max(
        (
            used / (limit * factor)
            for limit, used, _, factor in _rows(node.capacity, node.used, Resources(), settings)
            if limit > 0
        ),
        default=0.0,
    )


def add(node: Node, more: Resources) -> Node:
    """A node with one more sandbox on it than it has told of."""
    used = node.used
    return msgspec.structs.replace(
        node,
        used=Resources(
            used.cpus + more.cpus,
            used.memory_bytes + more.memory_bytes,
            used.disk_bytes + more.disk_bytes,
            used.sessions + more.sessions,
        ),
    )


def _rows(
    has: Resources, used: Resources, wanted: Resources, settings: Settings
) -> list[tuple[float, float, float, float]]:
    return [
        (has.cpus, used.cpus, wanted.cpus, settings.cpus),
        (has.memory_bytes, used.memory_bytes, wanted.memory_bytes, settings.memory),
        (has.disk_bytes, used.disk_bytes, wanted.disk_bytes, settings.disk),
        (has.sessions, used.sessions, wanted.sessions, 1.0),
    ]
