"""`sojourn node`: the nodes of a cluster, and being one.

Guarantee: a token is shown once and never taken from the command line where others would see it,
unless it is given so; `run` says `ready` once on standard output, when servers may send requests.
"""

from __future__ import annotations

import socket
from pathlib import Path

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import emit, json_option, labels_text, pairs, say, size, table
from sojourn.wire.nodes import NodeInfo


@click.group("node", help="Nodes: the machines of a cluster that run sessions.")
def node() -> None:
    """The group itself does nothing."""


def standing(info: NodeInfo) -> str:
    """How a node stands, in a word or two."""
    if info.lost:
        serves = "lost"
    elif info.lease_left <= 0:
        serves = "away" if info.seen_at is not None else "joined"
    else:
        return info.state
    return serves if info.state == "ready" else f"{serves}, {info.state}"


@node.command("ls", help="List the nodes.")
@json_option
def list_nodes(as_json: bool) -> None:
    found = connect().nodes.list()

    def show() -> None:
        table(
            ["NAME", "STATE", "SANDBOXES", "CPUS", "MEMORY", "LABELS", "ADDRESS", "ID"],
            [
                (
                    one.name,
                    standing(one),
                    one.used.sessions,
                    f"{one.used.cpus:g}/{one.capacity.cpus:g}",
                    f"{size(one.used.memory_bytes)}/{size(one.capacity.memory_bytes)}",
                    " ".join(filter(None, [labels_text(one.labels), *one.taints])),
                    one.address,
                    one.id,
                )
                for one in found
            ],
        )

    emit(found, as_json, show)


@node.command(
    "token",
    help="Make a token that lets one machine join, within an hour, and show how it is used.",
)
@click.option("--label", "labels", multiple=True, help="KEY=VALUE of that node. Can be repeated.")
@json_option
def token(labels: tuple[str, ...], as_json: bool) -> None:
    made = connect().nodes.token(pairs(labels, "--label"))
    emit(
        made,
        as_json,
        lambda: say(f"sojourn node join --server {made.url} --token {made.token}"),
    )


@node.command("cordon", help="Place nothing new on NODE; it keeps the sessions it has.")
@click.argument("ref", metavar="NODE")
@json_option
def cordon(ref: str, as_json: bool) -> None:
    info = connect().nodes.cordon(ref)
    emit(info, as_json, lambda: say(f"{info.name} {standing(info)}"))


@node.command("uncordon", help="Place sessions on NODE again.")
@click.argument("ref", metavar="NODE")
@json_option
def uncordon(ref: str, as_json: bool) -> None:
    info = connect().nodes.uncordon(ref)
    emit(info, as_json, lambda: say(f"{info.name} {standing(info)}"))


@node.command(
    "drain",
    help="Have NODE give all its sessions to other nodes; they go on running. `sojourn node ls`"
    " shows how many are left.",
)
@click.argument("ref", metavar="NODE")
@json_option
def drain(ref: str, as_json: bool) -> None:
    info = connect().nodes.drain(ref)
    emit(info, as_json, lambda: say(f"{info.name} {standing(info)}"))


@node.command("rm", help="Remove NODE from the cluster. It never comes back under this identity.")
@click.argument("ref", metavar="NODE")
@click.option(
    "--force",
    is_flag=True,
    help="Also while it holds sessions: they go on from what the object store has of them.",
)
def remove(ref: str, force: bool) -> None:
    connect().nodes.remove(ref, force=force)


@node.command(
    "join",
    help="Make this machine a node: a new data directory, with what `sojourn node run` needs.",
)
@click.option("--server", required=True, help="https://HOST:PORT, as `sojourn node token` shows.")
@click.option(
    "--token",
    "token",
    envvar="SOJOURN_NODE_TOKEN",
    required=True,
    help="What `sojourn node token` shows; works once. [SOJOURN_NODE_TOKEN]",
)
@click.option("--name", help="The node's name. [this machine's]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory of the node. [SOJOURN_DATA]",
)
@json_option
def join(server: str, token: str, name: str | None, data: Path | None, as_json: bool) -> None:
    from sojourn.model.paths import data_directory
    from sojourn.server.cluster.joining import join as join_cluster

    place = (data or data_directory()).absolute()
    known = name or socket.gethostname().split(".")[0]
    identity = join_cluster(place, server, token, known)
    told = {"node": identity.node, "name": identity.name, "data": str(place)}
    emit(
        told,
        as_json,
        lambda: say(f"{identity.name} joined as {identity.node}; `sojourn node run` starts it"),
    )
