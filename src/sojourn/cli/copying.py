"""`sojourn session cp`: files and trees between this machine and a session.

Guarantee: bytes, links, modes and times arrive as they were; nothing is written outside the local
target, whatever the session holds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sojourn.cli.connection import session
from sojourn.cli.output import emit, json_option, safe, say, size, working

if TYPE_CHECKING:
    from sojourn.client.sync_session import Session
    from sojourn.wire.api import TreeInfo

_REMOTE = re.compile(r"([^/:]+):(/.*)", re.DOTALL)


def parse_place(text: str) -> tuple[str | None, str]:
    """SESSION:/path, or a local path."""
    found = _REMOTE.fullmatch(text)
    return (found[1], found[2]) if found else (None, text)


@click.command(
    "cp",
    help=(
        "Copy a file or directory to (SESSION:/path) or from a session. As with cp, a directory"
        " that exists as the target gets the source into it; SOURCE/. copies what it holds."
    ),
)
@click.option("--owner", help="UID:GID inside the session for what is uploaded.")
@click.option("--owners", is_flag=True, help="Take over owners and set-id bits on download.")
@click.argument("source")
@click.argument("target")
@json_option
def copy(source: str, target: str, owner: str | None, owners: bool, as_json: bool) -> None:
    from_ref, from_path = parse_place(source)
    to_ref, to_path = parse_place(target)
    if (from_ref is None) == (to_ref is None):
        raise click.UsageError("One of SOURCE and TARGET is SESSION:/path, the other a local path.")
    with working(f"Copying {safe(source)}", quiet=as_json):
        try:
            if to_ref is not None:
                done = upload(session(to_ref), Path(from_path), from_path, to_path, owner)
            else:
                done = download(session(str(from_ref)), from_path, to_path, owners)
        except OSError as error:  # of this machine: the session's own are errors of the tree
            where = os.fsdecode(error.filename or source)
            raise click.ClickException(f"{safe(where)}: {error.strerror}") from error
    emit(done, as_json, lambda: _show(done))


def _show(done: TreeInfo) -> None:
    say(f"{done.members} files, {size(done.bytes)}")
    for name in done.skipped:
        say(f"left out (device): {safe(name)}")


def upload(target: Session, local: Path, text: str, remote: str, owner: str | None) -> TreeInfo:
    """Local to remote."""
    if not local.exists():
        raise click.BadParameter(f"{local} does not exist", param_hint="SOURCE")
    contents = text.endswith(("/.", "/./")) or text == "."
    if not contents and (remote.endswith("/") or _is_directory(target, remote)):
        remote = f"{remote.rstrip('/')}/{local.resolve().name}"
    if owner is not None and not local.is_dir():
        raise click.UsageError("--owner is for directories.")
    return target.files.upload(local, remote, owner=owner)


def _is_directory(target: Session, remote: str) -> bool:
    from sojourn.errors import FileMissing

    try:
        return target.files.stat(remote).type == "dir"
    except FileMissing:
        return False


def download(target: Session, remote: str, text: str, owners: bool) -> TreeInfo:
    """Remote to local."""
    local = Path(text)
    contents = remote.endswith(("/.", "/./"))
    name = remote.rstrip("/").rpartition("/")[2]
    if not contents and name and (text.endswith("/") or local.is_dir()):
        local = local / name
    if not local.parent.is_dir():
        raise click.BadParameter(f"{local.parent} is not a directory", param_hint="TARGET")
    return target.files.download(remote, local, owners=owners)


COMMANDS = [copy]
