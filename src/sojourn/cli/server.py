"""`sojourn server`: one of any number of servers in front of a cluster's nodes.

Guarantee: standard output says `ready URL` once, when requests are answered, and nothing else;
SIGTERM and Ctrl-C stop it cleanly with exit code 0. It needs no root and keeps nothing.
"""

from __future__ import annotations

from pathlib import Path

import click

from sojourn.cli.databases import database_option
from sojourn.cli.observing import observing, observing_options
from sojourn.cli.serving import overcommit_option, store_key_file_option


@click.command(
    "server",
    help="Serve a cluster: its clients, and the nodes that join it. Any number of servers may run"
    " beside each other; the first one makes the cluster. Ends at SIGTERM or Ctrl-C.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for what clients of this host need: the server's address and the operator's"
    " token. [SOJOURN_DATA]",
)
@click.option(
    "--listen",
    envvar="SOJOURN_LISTEN",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT for clients; port 0 takes a free one.",
)
@click.option(
    "--nodes-listen",
    envvar="SOJOURN_NODES_LISTEN",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT where nodes join, over TLS. [SOJOURN_NODES_LISTEN]",
)
@click.option(
    "--nodes-url",
    envvar="SOJOURN_NODES_URL",
    help="How nodes reach that: https://HOST:PORT. [SOJOURN_NODES_URL; else as it listens]",
)
@database_option
@click.option(
    "--store",
    "store_url",
    envvar="SOJOURN_STORE",
    help="Object store of all nodes: s3://BUCKET/PREFIX, or a directory that all of them reach."
    " [SOJOURN_STORE]",
)
@store_key_file_option
@click.option(
    "--cluster-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the cluster's key: 32 bytes, or 64 hexadecimal digits."
    " [SOJOURN_CLUSTER_KEY_FILE]",
)
@click.option(
    "--token-file",
    envvar="SOJOURN_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the operator's token, for all servers the same."
    " [SOJOURN_TOKEN_FILE; else one is made in the data directory]",
)
@click.option(
    "--ports-address",
    envvar="SOJOURN_PORTS_ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="ADDRESS or ADDRESS:PORT at which exposed ports are reached, the same at all servers;"
    " without a port a free one that stays the same. [SOJOURN_PORTS_ADDRESS]",
)
@click.option(
    "--ports-domain",
    envvar="SOJOURN_PORTS_DOMAIN",
    default="localhost",
    show_default=True,
    help="Below this domain each exposed port has a name; https://DOMAIN or http://DOMAIN:PORT"
    " where something in front of the servers answers there. [SOJOURN_PORTS_DOMAIN]",
)
@click.option(
    "--place",
    envvar="SOJOURN_PLACE",
    type=click.Choice(["spread", "pack"]),
    default="spread",
    show_default=True,
    help="Spread sessions over nodes, or fill one node before the next. [SOJOURN_PLACE]",
)
@overcommit_option
@observing_options
def command(
    data: Path | None,
    listen: str,
    nodes_listen: str,
    nodes_url: str | None,
    database: str | None,
    store_url: str | None,
    store_key_file: Path | None,
    cluster_key_file: Path | None,
    token_file: Path | None,
    ports_address: str,
    ports_domain: str,
    place: str,
    overcommit: str,
    log_level: str,
    log_format: str,
    health_listen: str | None,
) -> None:
    from sojourn.cli.databases import database_location
    from sojourn.cli.stores import read_secret, store_location, store_secret
    from sojourn.errors import InvalidRequest
    from sojourn.model.paths import data_directory
    from sojourn.server.cluster.scheduler import read_settings
    from sojourn.server.cluster.serving import ServerSettings, environment_number, run_server
    from sojourn.server.nodes.lease import LEASE_SECONDS
    from sojourn.server.port_settings import PortSettings
    from sojourn.server.secret_store import parse_key

    place_of_data = (data or data_directory()).absolute()
    key = read_secret(
        cluster_key_file, "SOJOURN_CLUSTER_KEY_FILE", "SOJOURN_CLUSTER_KEY", field="cluster_key"
    )
    if key is None:
        raise InvalidRequest(
            "a server needs the cluster's key",
            next_step="Make one (`head -c 32 /dev/urandom > cluster.key`) and give it to every"
            " server with --cluster-key-file (SOJOURN_CLUSTER_KEY_FILE).",
            field="cluster_key_file",
        )
    store = store_location(store_url, place_of_data) if store_url else None
    if store is None:
        raise InvalidRequest(
            "a cluster needs an object store that all nodes reach",
            next_step="Give --store s3://BUCKET/PREFIX, or a directory all of them share.",
            field="store",
        )
    with observing("sojourn-server", log_level, log_format):
        run_server(
            ServerSettings(
                database=database_location(database, place_of_data),
                store=store,
                store_key=store_secret(store_key_file),
                cluster_key=parse_key(key, "the cluster's key file"),
                data=place_of_data,
                listen=listen,
                nodes_listen=nodes_listen,
                nodes_url=nodes_url,
                token_file=token_file,
                health=health_listen,
                ports=PortSettings(address=ports_address, domain=ports_domain),
                placing=read_settings(place, overcommit),
                lease=environment_number("SOJOURN_NODE_LEASE", LEASE_SECONDS),
            )
        )
