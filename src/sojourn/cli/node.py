"""`sojourn node`: the nodes of a cluster, and being one.

Guarantee: a token is shown once and never taken from the command line where others would see it,
unless it is given so; `run` says `ready` once on standard output, when servers may send requests.
"""

from __future__ import annotations

import socket
from pathlib import Path

import click

from sojourn.cli.connection import connect
from sojourn.cli.egress import egress_options
from sojourn.cli.observing import observing, observing_options
from sojourn.cli.output import emit, json_option, labels_text, pairs, say, size, table
from sojourn.cli.serving import cache_bytes_option, e2b_internet_option, overcommit_option
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


def in_use(info: NodeInfo) -> tuple[object, str, str]:
    """What of a node is in use, as long as it tells."""
    if info.lease_left <= 0:
        return "", "", ""
    return (
        info.used.sessions,
        f"{info.used.cpus:g}/{info.capacity.cpus:g}",
        f"{size(info.used.memory_bytes)}/{size(info.capacity.memory_bytes)}",
    )


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
                    *in_use(one),
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
    start = "sojourn node run" if data is None else f"sojourn node run --data {data}"
    emit(
        told,
        as_json,
        lambda: say(f"{identity.name} joined as {identity.node}; `{start}` starts it"),
    )


@node.command("run", help="Run this node until it is stopped (SIGTERM, Ctrl-C).")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory of the node, as it joined. [SOJOURN_DATA]",
)
@click.option(
    "--listen",
    envvar="SOJOURN_NODE_LISTEN",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT where servers reach the node, over mutual TLS. [SOJOURN_NODE_LISTEN]",
)
@click.option(
    "--address",
    envvar="SOJOURN_NODE_ADDRESS",
    help="The same as servers see it, where that is another. [SOJOURN_NODE_ADDRESS]",
)
@click.option(
    "--taint", "taints", multiple=True, help="Keep the node for sessions that tolerate TAINT."
)
@click.option(
    "--capacity",
    envvar="SOJOURN_NODE_CAPACITY",
    help="What of the machine sessions may use: cpus=N,memory=BYTES,disk=BYTES,sessions=N, each"
    " where it is not all there is. [SOJOURN_NODE_CAPACITY]",
)
@overcommit_option
@cache_bytes_option
@click.option(
    "--store-collect",
    type=click.FloatRange(min=0),
    envvar="SOJOURN_STORE_COLLECT",
    default=6 * 3600.0,
    show_default=True,
    help="Seconds between two collections of the object store by its nodes; 0: none.",
)
@egress_options
@e2b_internet_option
@observing_options
def run(
    data: Path | None,
    listen: str,
    address: str | None,
    taints: tuple[str, ...],
    capacity: str | None,
    overcommit: str,
    cache_bytes: int | None,
    store_collect: float,
    egress_namespace: str | None,
    egress_nameservers: str | None,
    egress_private: str | None,
    egress_roots: Path | None,
    e2b_internet: bool,
    log_level: str,
    log_format: str,
    health_listen: str | None,
) -> None:
    from sojourn.model.paths import data_directory
    from sojourn.server.cluster.identity import read_identity
    from sojourn.server.cluster.scheduler import read_settings
    from sojourn.server.cluster.serving import environment_number
    from sojourn.server.e2b.settings import Settings
    from sojourn.server.gateways import egress_settings
    from sojourn.server.nodes.lease import LEASE_SECONDS
    from sojourn.server.nodes.serving import RunSettings, run_node
    from sojourn.server.nodes.starting import read_capacity

    place = (data or data_directory()).absolute()
    settings = RunSettings(
        identity=read_identity(place),
        data=place,
        listen=listen,
        address=address,
        lease=environment_number("SOJOURN_NODE_LEASE", LEASE_SECONDS),
        capacity=read_capacity(capacity, place) if capacity else None,
        taints=list(taints),
        overcommit=read_settings("spread", overcommit),
        egress=egress_settings(egress_namespace, egress_nameservers, egress_private, egress_roots),
        e2b=Settings(internet=e2b_internet),
        cache_bytes=cache_bytes,
        collect_every=store_collect,
        health=health_listen,
    )
    with observing("sojourn-node", log_level, log_format):
        run_node(settings)
