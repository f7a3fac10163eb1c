"""`sojourn template`: what sessions start from.

Guarantee: an image is read here, with the rights, the network and the logins of whoever types; what
is refused or cut off makes no template.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from sojourn.cli.connection import connect
from sojourn.cli.interrupts import interrupted_once
from sojourn.cli.output import emit, facts, json_option, moment, safe, size, table, working
from sojourn.wire.api import TemplateInfo


@click.group("template", help="Templates: what sessions start from.")
def template() -> None:
    """The group itself does nothing."""


def _name(one: TemplateInfo) -> str:
    return one.name if one.version is None else f"{one.name}@{one.version}"


@template.command("ls", help="List templates, with their newest versions.")
@json_option
def list_templates(as_json: bool) -> None:
    found = connect().templates.list()

    def show() -> None:
        table(
            ["NAME", "SIZE", "LAYERS", "MEMORY", "MADE", "FROM"],
            [
                (
                    _name(one),
                    size(one.bytes),
                    one.layers,
                    size(one.memory_bytes) if one.memory else "",
                    moment(one.created_at),
                    one.source,
                )
                for one in found
            ],
        )

    emit(found, as_json, show)


@template.command("show", help="Show a template: NAME (its newest version) or NAME@VERSION.")
@click.argument("ref", metavar="NAME[@VERSION]")
@json_option
def show_template(ref: str, as_json: bool) -> None:
    found = connect().templates.get(ref)
    emit(found, as_json, lambda: _show(found))


def _show(found: TemplateInfo) -> None:
    facts(
        [
            ("name", _name(found)),
            ("versions", ", ".join(map(str, found.versions)) or None),
            ("made", moment(found.created_at)),
            ("from", found.source or "the node"),
            ("digest", found.digest),
            ("size", size(found.bytes)),
            ("layers", found.layers),
            ("memory", size(found.memory_bytes) if found.memory else "none"),
            ("user", found.user),
            ("directory", found.cwd or None),
            ("entrypoint", shlex.join(found.entrypoint) or None),
            ("command", shlex.join(found.cmd) or None),
            ("starts it", "yes" if found.start else None),
            *((f"env {name}", value) for name, value in sorted(found.env.items())),
            *((f"label {name}", value) for name, value in sorted(found.labels.items())),
            ("left out", found.left_out or None),
            ("durable", moment(found.durable_at) if found.durable_at else "not yet"),
        ]
    )


@template.command(
    "build",
    help=(
        "Make a version of template NAME. FROM is oci:DIR[:TAG] (an OCI layout),"
        " docker-archive:FILE[:TAG] or oci-archive:FILE[:TAG], or REGISTRY/NAME:TAG (or @DIGEST),"
        " fetched with the logins of Docker's configuration; or --from-session SESSION: its present"
        " state, running processes included; or --file CONTAINERFILE, whose steps run in a session."
        " Prints NAME@VERSION."
    ),
)
@click.argument("name")
@click.argument("source", metavar="[FROM]", required=False)
@click.option("--from-session", metavar="SESSION", help="Make it of a session's present state.")
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), help="Build as a Containerfile says."
)
@click.option(
    "--context",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory that COPY reads.  [default: that of the file]",
)
@click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Value of an ARG.")
@click.option(
    "--network", help="What RUN reaches: none, open or allow=DOMAIN[:PORT][,...].  [none]"
)
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option("--cold", is_flag=True, help="With --from-session: files alone, no processes.")
@click.option("--start", is_flag=True, help="Sessions start the image's command by themselves.")
@click.option(
    "--platform", help="Which image of several, such as linux/arm64.  [default: this machine's]"
)
@click.option("--insecure", is_flag=True, help="Ask the registry without TLS.")
@json_option
def build(
    name: str,
    source: str | None,
    from_session: str | None,
    file: Path | None,
    context: Path | None,
    arguments: tuple[str, ...],
    network: str | None,
    no_cache: bool,
    cold: bool,
    start: bool,
    platform: str | None,
    insecure: bool,
    as_json: bool,
) -> None:
    if sum(one is not None for one in (source, from_session, file)) != 1:
        raise click.UsageError("Give one of FROM, --from-session and --file.")
    if cold and from_session is None:
        raise click.UsageError("--cold goes with --from-session.")
    client = connect()
    with (
        interrupted_once(),
        said_by_run(as_json),
        working(f"Building {safe(name)}", quiet=as_json) as renew,
    ):

        def tell(done: int, total: int | None) -> None:
            of = f" of {size(total)}" if total else ""
            renew(f"Building {name}: {size(done)}{of}")

        if from_session is not None:
            session = client.sessions.get(from_session)
            made = session.to_template(name, memory=not cold, start=start or None)
        elif file is not None:
            made = client.templates.build_file(
                name,
                file,
                context or file.parent,
                arguments=dict(_argument(one) for one in arguments),
                network=network,
                start=start,
                cache=not no_cache,
                insecure=insecure,
                on_step=lambda line, text, known: renew(
                    f"Building {name}, line {line}{' (known)' if known else ''}: {text[:60]}"
                ),
            )
        else:
            assert source is not None
            made = client.templates.build(
                name,
                source,
                start=start,
                platform=platform,
                insecure=insecure,
                on_progress=tell,
            )
    emit(made, as_json, lambda: click.echo(_name(made)))


@contextlib.contextmanager
def said_by_run(quiet: bool) -> Iterator[None]:
    """Shows what a RUN said that ended a build; as JSON it is in the error's details."""
    from sojourn.errors import ContainerfileInvalid

    try:
        yield
    except ContainerfileInvalid as error:
        output = error.details.get("output")
        if quiet or not isinstance(output, str):
            raise
        for line in output.splitlines():
            click.echo(safe(line.replace("\t", "    ")), err=True)
        raise ContainerfileInvalid(
            error.message,
            next_step="What it said last is above." if output else "It said nothing.",
            **error.details,
        ) from error


def _argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--arg is NAME=VALUE, not {text!r}.")
    return name, value


@template.command(
    "rm",
    help=(
        "Remove a version of a template, or with its name alone all of them. Sessions made from it"
        " go on."
    ),
)
@click.argument("ref", metavar="NAME[@VERSION]")
def remove(ref: str) -> None:
    connect().templates.remove(ref)
