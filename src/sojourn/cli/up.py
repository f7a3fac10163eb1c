"""`sojourn up`: the server in the foreground.

Guarantee: standard output says `ready URL` once, when requests are answered, and nothing else;
SIGTERM and Ctrl-C stop it cleanly with exit code 0.
"""

from __future__ import annotations

from pathlib import Path

import click

from sojourn.cli.databases import database_option
from sojourn.cli.egress import egress_options
from sojourn.cli.observing import observing, observing_options
from sojourn.cli.serving import cache_bytes_option, e2b_internet_option, store_key_file_option


@click.command("up", help="Run the server until it is stopped (SIGTERM, Ctrl-C).")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory. [SOJOURN_DATA]",
)
@click.option(
    "--listen",
    envvar="SOJOURN_LISTEN",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT; port 0 takes a free one.",
)
@database_option
@click.option(
    "--store",
    "store_url",
    envvar="SOJOURN_STORE",
    help="Object store of snapshots: a directory, file:///DIR, s3://BUCKET/PREFIX, or none."
    " [SOJOURN_STORE; else `objects` in the data directory]",
)
@store_key_file_option
@cache_bytes_option
@click.option(
    "--store-collect",
    type=click.FloatRange(min=0),
    envvar="SOJOURN_STORE_COLLECT",
    default=6 * 3600.0,
    show_default=True,
    help="Seconds between two collections of the object store by this server; 0: none.",
)
@click.option(
    "--stop-seconds",
    type=click.FloatRange(min=0),
    envvar="SOJOURN_STOP_SECONDS",
    default=10.0,
    show_default=True,
    help="Most a stop waits for what is under way; the next start takes up what did not end.",
)
@click.option(
    "--ports-address",
    envvar="SOJOURN_PORTS_ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="ADDRESS or ADDRESS:PORT at which exposed ports are reached; without a port a free one"
    " that stays the same. [SOJOURN_PORTS_ADDRESS]",
)
@click.option(
    "--ports-domain",
    envvar="SOJOURN_PORTS_DOMAIN",
    default="localhost",
    show_default=True,
    help="Below this domain each exposed port has a name; https://DOMAIN or http://DOMAIN:PORT"
    " where something in front of the server answers there. [SOJOURN_PORTS_DOMAIN]",
)
@egress_options
@e2b_internet_option
@observing_options
def command(
    data: Path | None,
    listen: str,
    database: str | None,
    store_url: str | None,
    store_key_file: Path | None,
    cache_bytes: int | None,
    store_collect: float,
    stop_seconds: float,
    ports_address: str,
    ports_domain: str,
    egress_namespace: str | None,
    egress_nameservers: str | None,
    egress_private: str | None,
    egress_roots: Path | None,
    e2b_internet: bool,
    log_level: str,
    log_format: str,
    health_listen: str | None,
) -> None:
    from sojourn.cli.databases import database_location
    from sojourn.cli.stores import store_location, store_secret
    from sojourn.model.paths import data_directory
    from sojourn.server.app import run
    from sojourn.server.e2b.settings import Settings
    from sojourn.server.gateways import egress_settings
    from sojourn.server.port_settings import PortSettings
    from sojourn.server.replication import StoreSettings
    from sojourn.server.service_factory import open_service

    place = (data or data_directory()).absolute()
    settings = StoreSettings(
        url=store_location(store_url, place),
        secret=store_secret(store_key_file),
        cache_bytes=cache_bytes,
        collect_every=store_collect,
    )
    egress = egress_settings(egress_namespace, egress_nameservers, egress_private, egress_roots)
    exposed = PortSettings(address=ports_address, domain=ports_domain)
    database_at = database_location(database, place)
    with observing("sojourn", log_level, log_format):
        run(
            lambda: open_service(
                place,
                settings,
                egress,
                ports=exposed,
                database_at=database_at,
                stop_seconds=stop_seconds,
            ),
            data=place,
            address=listen,
            e2b=Settings(internet=e2b_internet),
            health=health_listen,
        )
