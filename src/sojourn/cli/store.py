"""`sojourn store`: keeping the object store, without a server or beside one.

Guarantee: every command here follows the repository's own protocol, so it may run while servers
send, restore and collect. `check` ends with 112 when it found damage; nothing but `repair` and `gc`
changes anything, and both say what they did.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sojourn.cli.output import counted, emit, facts, json_option, safe, say, size, table, working
from sojourn.cli.stores import opened_store, opened_store_beside, store_options, store_secret

if TYPE_CHECKING:
    from sojourn.repository.checks import Problem

_SHOWN = 10  # of the sessions or snapshots a problem affects; JSON has all
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@click.group("store", help="Keep the object store: check, count, collect, repair.")
def store() -> None:
    """The group itself does nothing."""


@contextlib.contextmanager
def progress(text: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of things done on a terminal's standard error; None where there is nobody to see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- check ------------------------------------------------------------------------------------


def _part(
    _context: click.Context, _option: click.Parameter, given: str | None
) -> tuple[int, int] | None:
    if given is None:
        return None
    found = _PART.fullmatch(given)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{given!r} is not n/t with n from 1 to t")
    return int(found[1]), int(found[2])


@store.command("check")
@click.option("--read-data", is_flag=True, help="Read and compare every byte.")
@click.option(
    "--read-data-subset",
    "subset",
    metavar="N/T",
    callback=_part,
    help="Read the n-th of t parts of the packs; all parts together are all.",
)
@store_options
@json_option
def check(
    as_json: bool,
    read_data: bool,
    subset: tuple[int, int] | None,
    url: str | None,
    key_file: Path | None,
    data: Path,
) -> int:
    """Prove that the object store is whole.

    Exit code 0 when nothing is damaged, also where there are warnings, 112 when something is; each
    problem names the object, the cause, and the sessions and snapshots it affects.
    """
    from sojourn.errors import IntegrityError

    if read_data and subset is not None:
        raise click.UsageError("Give --read-data or --read-data-subset, not both.")

    def load() -> ModuleType:
        from sojourn.repository import checks

        return checks

    with (
        opened_store_beside(url, key_file, data, load) as (repository, checks),
        progress("Looking into packs", quiet=as_json) as told,
    ):
        problems = list(
            checks.check(
                repository.backend,
                repository.domain,
                read_data=read_data,
                subset=subset,
                progress=told,
            )
        )
        where = repository.url
    damaged = any(problem.severity == checks.ERROR for problem in problems)
    body = {"store": where, "damaged": damaged, "problems": problems}
    emit(body, as_json, lambda: _show_problems(where, problems))
    return IntegrityError.exit_code if damaged else 0


def _show_problems(where: str, problems: list[Problem]) -> None:
    # Names and causes are long: a table would break them into pieces nobody can copy.
    for one in problems:
        say(safe(f"{one.severity}: {one.object} (in {one.domain})"))
        say(f"    {safe(one.cause)}")
        for what, ids in (("sessions", one.sessions), ("snapshots", one.snapshots)):
            if ids:
                more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
                say(safe(f"    {what}: {' '.join(ids[:_SHOWN])}{more}"))
    errors = sum(one.severity == "error" for one in problems)
    warnings = counted(len(problems) - errors, "warning")
    if errors:
        found = counted(errors, "error") + (f", {warnings}" if errors < len(problems) else "")
        say(f"{safe(where)}: {found}. `sojourn store repair` mends what can be mended.")
    elif problems:
        say(f"{safe(where)}: no damage; {warnings}.")
    else:
        say(f"{safe(where)}: no damage found.")


# -- stats ------------------------------------------------------------------------------------


@store.command("stats")
@click.option(
    "--by",
    type=click.Choice(["tenant", "session", "snapshot"]),
    default="tenant",
    show_default=True,
    help="What the table is of.",
)
@store_options
@json_option
def stats(as_json: bool, by: str, url: str | None, key_file: Path | None, data: Path) -> None:
    """Count what tenants, sessions and snapshots take.

    ALONE is what deleting one would free, SHARED what it has in common with others, FULL what a
    restore writes. With --json all of them, whatever the table is of.
    """
    from sojourn.repository.accounting import account

    with (
        opened_store(url, key_file, data) as repository,
        working(f"Counting in {repository.url}", quiet=as_json),
    ):
        found = account(repository.backend, repository.domain)
        where = repository.url
    total = found.total

    def show() -> None:
        usages = {
            "tenant": found.tenants,
            "session": found.sessions,
            "snapshot": found.snapshots,
        }[by]
        table(
            [by.upper(), "FULL", "ALONE", "SHARED"],
            [
                (id, size(usage.logical), size(usage.unique), size(usage.shared))
                for id, usage in sorted(usages.items(), key=lambda pair: (-pair[1].unique, pair[0]))
            ],
        )
        say("")
        facts(
            [
                ("store", where),
                ("snapshots", total.snapshots),
                ("full size", size(total.logical)),
                ("different content", size(total.raw)),
                ("takes", size(total.used)),
                ("deduplication", f"{total.deduplication:.2f} times"),
                ("compression", f"{total.compression:.2f} times"),
                ("not needed", size(total.dead)),
                ("packs", f"{total.packs}, {size(total.pack_bytes)}"),
            ]
        )

    body: dict[str, Any] = {
        "store": where,
        **msgspec.to_builtins(found),
        "deduplication": total.deduplication,
        "compression": total.compression,
    }
    emit(body, as_json, show)


# -- gc ---------------------------------------------------------------------------------------


@store.command("gc")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="What is found dead is removed by a collection this much later; 0: by this one.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; tell what no snapshot needs.")
@store_options
@json_option
def gc(
    as_json: bool, grace: float, dry_run: bool, url: str | None, key_file: Path | None, data: Path
) -> None:
    """Remove what no snapshot needs, and pack anew what is mostly unused.

    It may be cut off and repeated, and run beside servers. Where something that tells what is
    needed cannot be read, nothing is removed. What is not needed of a pack that is needed by more
    than half stays.
    """
    from sojourn.repository.collection import collect

    if dry_run:
        _dry_run(as_json, url, key_file, data)
        return
    with (
        opened_store(url, key_file, data) as repository,
        working(f"Collecting in {repository.url}", quiet=as_json),
    ):
        found = collect(repository.backend, repository.domain, grace=grace)

    later = _later(grace)
    removed = f"removed by a gc {later}"
    named = f"left for uploads that may need it; waits for its grace from a gc {later} on"

    def show() -> None:
        facts(
            [
                ("snapshots kept", found.snapshots),
                ("freed", size(found.bytes)),
                ("packs removed", found.packs),
                ("layers and images removed", found.roots),
                ("packs written anew", found.rewritten),
                ("written", size(found.written_bytes)),
                ("waits for its grace", _waits(found.waiting_bytes, found.waiting_packs, removed)),
                ("not needed but new", _waits(found.young_bytes, found.young_packs, named)),
            ]
        )

    emit(found, as_json, show)


def _waits(amount: int, packs: int, what_then: str) -> str:
    if not amount:
        return size(0)
    return f"{size(amount)} in {counted(packs, 'pack')} ({what_then})"


def _later(grace: float) -> str:
    if grace == 3600:
        return "in an hour or later"
    for unit, noun in ((3600, "hour"), (60, "minute"), (1, "second")):
        if grace >= unit:
            # Rounded up: a collection that comes earlier does not remove it.
            return f"in {counted(math.ceil(grace / unit), noun)} or later"
    return "a second later"


def _dry_run(as_json: bool, url: str | None, key_file: Path | None, data: Path) -> None:
    from sojourn.repository.accounting import account

    with (
        opened_store(url, key_file, data) as repository,
        working(f"Counting in {repository.url}", quiet=as_json),
    ):
        total = account(repository.backend, repository.domain).total
    body = {"snapshots": total.snapshots, "bytes": total.pack_bytes, "dead_bytes": total.dead}

    def show() -> None:
        facts(
            [
                ("snapshots", total.snapshots),
                ("packs", size(total.pack_bytes)),
                ("not needed", size(total.dead)),
            ]
        )

    emit(body, as_json, show)


# -- repair -----------------------------------------------------------------------------------


@store.command("repair")
@click.option(
    "--from",
    "nodes",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Data directory of a node that may still have what is lost; may be repeated. [--data]",
)
@store_options
@json_option
def repair(
    as_json: bool, nodes: tuple[Path, ...], url: str | None, key_file: Path | None, data: Path
) -> int:
    """Mend what is damaged, as far as anything still has it.

    Every pack is read. Lost content is looked for in other packs, in the good parts of damaged
    ones, and in what nodes still have. What cannot be had is written down: snapshots that lack
    something say so from then on, and are listed here. Exit code 0 when all are whole, else 112.
    """
    from sojourn.errors import IntegrityError
    from sojourn.repository import repairs

    sources = [
        repairs.NodeStore(place / "store")
        for place in dict.fromkeys((*nodes, data))
        if (place / "store").is_dir()
    ]
    with (
        opened_store(url, key_file, data) as repository,
        progress("Reading packs", quiet=as_json) as told,
    ):
        found = repairs.repair(repository.backend, repository.domain, sources, progress=told)
        where = repository.url

    def show() -> None:
        facts(
            [
                ("store", where),
                ("bad packs", len(found.packs)),
                ("indexes written anew", found.indexes),
                ("chunks saved from bad packs", found.saved),
                ("layers sent again", found.layers),
                ("images sent again", found.images),
                ("snapshots sent again", found.snapshots),
                ("snapshots made whole", len(found.healed)),
                ("snapshots still damaged", len(found.damaged)),
            ]
        )
        for key in found.packs:
            say(f"bad pack: {safe(key)}")
        for damage in found.damaged:
            lost = "; ".join(damage.objects)
            say(safe(f"damaged: snapshot {damage.snapshot} of session {damage.session}: {lost}"))

    body = msgspec.to_builtins(found)
    for damage in body["damaged"]:
        del damage["chunks"]  # names of chunks: many, and of no use to anybody outside
    emit(body, as_json, show)
    return IntegrityError.exit_code if found.damaged else 0


# -- keys -------------------------------------------------------------------------------------


@store.group("key", help="The secret that opens an encrypted object store.")
def key() -> None:
    """The group itself does nothing."""


@key.command("rotate")
@click.option(
    "--new-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File with the new secret.",
)
@store_options
@json_option
def rotate(
    as_json: bool, new_key_file: Path, url: str | None, key_file: Path | None, data: Path
) -> None:
    """Change the secret. No data is read or written anew.

    The old secret opens the store until the new one is proven to; from then on servers must be
    started with the new one. Those that run go on.
    """
    from sojourn.errors import StoreKeyInvalid
    from sojourn.repository import config

    old, new = store_secret(key_file), store_secret(new_key_file)
    assert new is not None
    with opened_store(url, key_file, data) as repository:
        if old is None:
            raise StoreKeyInvalid(
                "the object store is not encrypted: there is no secret to change",
                next_step="Make an encrypted one and copy the snapshots there.",
            )
        config.rotate(repository.backend, old, new)
        where = repository.url
    body: dict[str, Any] = {"store": where, "rotated": True}
    emit(body, as_json, lambda: say(f"{safe(where)}: only the new secret opens it from now on."))
