"""`sojourn template`: what sessions start from.

Guarantee: an image is read here, with the rights, the network and the logins of whoever types; what
is refused or cut off makes no template.
"""

from __future__ import annotations

import shlex

import click

from sojourn.cli.connection import connect
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
            ("durable", moment(found.durable_at) if found.durable_at else "not yet"),
        ]
    )


@template.command(
    "build",
    help=(
        "Make a version of template NAME. FROM is oci:DIR[:TAG] (an OCI layout),"
        " docker-archive:FILE[:TAG] or oci-archive:FILE[:TAG], or REGISTRY/NAME:TAG (or @DIGEST),"
        " fetched with the logins of Docker's configuration; or --from-session SESSION: its present"
        " state, running processes included; or --file CONTAINERFILE. Prints NAME@VERSION."
    ),
)
@click.argument("name")
@click.argument("source", metavar="[FROM]", required=False)
@click.option("--from-session", metavar="SESSION", help="Make it of a session's present state.")
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
    cold: bool,
    start: bool,
    platform: str | None,
    insecure: bool,
    as_json: bool,
) -> None:
    if (source is None) == (from_session is None):
        raise click.UsageError("Give FROM or --from-session.")
    if cold and from_session is None:
        raise click.UsageError("--cold goes with --from-session.")
    client = connect()
    with working(f"Building {safe(name)}", quiet=as_json) as renew:
        if from_session is not None:
            session = client.sessions.get(from_session)
            made = session.to_template(name, memory=not cold, start=start or None)
        else:
            assert source is not None

            def tell(done: int, total: int | None) -> None:
                of = f" of {size(total)}" if total else ""
                renew(f"Building {name}: {size(done)}{of}")

            made = client.templates.build(
                name,
                source,
                start=start,
                platform=platform,
                insecure=insecure,
                on_progress=tell,
            )
    emit(made, as_json, lambda: click.echo(_name(made)))


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
