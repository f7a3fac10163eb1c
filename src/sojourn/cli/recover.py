"""`sojourn recover`: a data directory made anew from the object store alone."""

from __future__ import annotations

from pathlib import Path

import click

from sojourn.cli.databases import database_location, database_option
from sojourn.cli.output import emit, facts, json_option, safe, working
from sojourn.cli.stores import opened_repository, store_options


@click.command("recover")
@store_options
@database_option
@json_option
def command(
    as_json: bool, url: str | None, key_file: Path | None, data: Path, database: str | None
) -> int:
    """Make a lost data directory anew from the object store.

    Every session the store has a record of comes back suspended at its last durable snapshot;
    those a database of another machine (--database) still speaks of go on as they are there. No
    server may use the database or the data directory. Exit code 0 when everything could be read,
    112 when not; what could be read is recovered all the same.
    """
    import asyncio

    from sojourn.errors import IntegrityError
    from sojourn.server.recovery import recover

    with (
        opened_repository(url, key_file, data) as repository,
        working(f"Recovering from {repository.url}", quiet=as_json),
    ):
        found = asyncio.run(
            recover(data, repository, database_at=database_location(database, data))
        )

    def show() -> None:
        facts(
            [
                ("data directory", data),
                ("tenants", found.tenants),
                ("sessions", found.sessions),
                ("snapshots", found.snapshots),
            ]
        )
        for fault in found.faults:
            click.echo(f"lost: {safe(fault)}", err=True)

    emit(found, as_json, show)
    return IntegrityError.exit_code if found.faults else 0
