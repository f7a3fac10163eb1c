"""`sojourn export` and `sojourn import`: sessions as files.

Guarantee: a file that is there after `export` is a whole archive, and what it prints tells it from
any other; `import` makes one new session or nothing. `-` is standard output or input; a pipe or
device is written to as it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import emit, facts, json_option, safe, size, working
from sojourn.cli.stores import read_secret

if TYPE_CHECKING:
    from sojourn.client.sync_session import Session
    from sojourn.wire.api import ArchiveInfo, SessionInfo

_KEY_HELP = (
    "File with the secret that encrypts the archive (16 bytes or more; `openssl rand -hex 32` makes"
    " one). [SOJOURN_ARCHIVE_KEY_FILE, or the secret itself in SOJOURN_ARCHIVE_KEY]"
)


def _secret(file: Path | None) -> bytes | None:
    return read_secret(file, "SOJOURN_ARCHIVE_KEY_FILE", "SOJOURN_ARCHIVE_KEY", field="key_file")


def _source(ref: str) -> tuple[Session, str | None]:
    """The session to export, and the snapshot where that is meant: SESSION, SESSION@SNAPSHOT or the
    id of a snapshot."""
    from sojourn.errors import SnapshotNotFound

    sessions = connect().sessions
    name, at, snapshot = ref.partition("@")
    if at:
        return sessions.get(name), snapshot
    if not ref.startswith("snp_"):
        return sessions.get(ref), None
    for session in sessions.list():
        if any(one.id == ref for one in session.history()):
            return session, ref
    raise SnapshotNotFound(f"no session has snapshot {ref}", snapshot=ref)


def _told(renew: Callable[[str], None], what: str) -> Callable[[int, int | None], None]:
    def tell(done: int, total: int | None) -> None:
        of = f" of {size(total)}" if total else ""
        renew(f"{what}: {size(done)}{of}")

    return tell


@click.command(
    "export",
    help=(
        "Write SESSION with its whole history to an archive, or one snapshot: SESSION@SNAPSHOT (id"
        " or label) or a snapshot's id. Of a session that runs the present state is taken first."
        " Prints the archive's digest, which `sojourn import --expect` compares. The archive holds"
        " the session's files, memory and environment: encrypt it if these are secret."
    ),
)
@click.argument("source", metavar="SESSION|SNAPSHOT")
@click.argument("file", type=click.Path(dir_okay=False, readable=False, allow_dash=True))
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False), help=_KEY_HELP)
@json_option
def export(source: str, file: str, key_file: Path | None, as_json: bool) -> None:
    key = _secret(key_file)
    if file == "-" and sys.stdout.isatty():
        raise click.UsageError("An archive is not written to a terminal.")
    session, snapshot = _source(source)
    with working(f"Exporting {safe(source)}", quiet=as_json) as renew:
        told = _told(renew, f"Exporting {source}")
        if file == "-":
            done = session.export(sys.stdout.buffer, snapshot, key, on_progress=told)
            sys.stdout.buffer.flush()
            # Standard output holds the archive; the digest goes where people look.
            click.echo(done.digest, err=True)
            return
        done = session.export(file, snapshot, key, on_progress=told)
    emit(done, as_json, lambda: _show_export(done))


def _show_export(done: ArchiveInfo) -> None:
    facts(
        [
            ("digest", done.digest),
            ("fingerprint", done.fingerprint),
            ("snapshot", done.snapshot),
            ("snapshots", done.snapshots),
            ("size", size(done.bytes)),
            ("encrypted", "yes" if done.encrypted else "no"),
        ]
    )


@click.command(
    "import",
    help=(
        "Make a session of an archive, suspended where it was exported; `sojourn session resume`"
        " lets it go on. Of an archive that is damaged or forged nothing is kept. Prints"
        " the session's id."
    ),
)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--name", help="Name of the session, in place of the archive's.")
@click.option("--expect", metavar="DIGEST", help="Take only the archive whose export printed this.")
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False), help=_KEY_HELP)
@json_option
def import_(
    file: str, name: str | None, expect: str | None, key_file: Path | None, as_json: bool
) -> None:
    key = _secret(key_file)
    shown = "standard input" if file == "-" else file
    with working(f"Importing {safe(shown)}", quiet=as_json) as renew:
        source = sys.stdin.buffer if file == "-" else file
        told = _told(renew, f"Importing {shown}")
        made = connect().sessions.import_(source, name, expect, key, on_progress=told)
    emit(made.info, as_json, lambda: _show_import(made.info))


def _show_import(made: SessionInfo) -> None:
    click.echo(made.id)
