"""`sojourn` status and token: the server itself."""

from __future__ import annotations

import click

from sojourn.cli.connection import connect
from sojourn.cli.output import counted, emit, facts, json_option, moment, say, size, table
from sojourn.wire.api import GatewayInfo, ObjectStoreInfo


@click.command("status", help="Show the server at a glance.")
@json_option
def status(as_json: bool) -> None:
    client = connect()
    found = client.status()

    def show() -> None:
        facts(
            [
                ("server", client.url),
                ("version", found.version),
                ("node", found.node),
                ("sandboxes", found.sandboxes),
                ("disk free", size(found.disk_free_bytes)),
                ("database", found.database),
                ("node's store", size(found.store_bytes)),
                *object_store_facts(found.objects),
                ("gateway", gateway_text(found.gateway)),
                *((f"sessions {state}", n) for state, n in sorted(found.sessions.items())),
                *(
                    (f"driver {name}", ", ".join(capabilities) or "files only")
                    for name, capabilities in sorted(found.drivers.items())
                ),
            ]
        )

    emit(found, as_json, show)


def gateway_text(found: GatewayInfo | None) -> str | None:
    """How the process is that sessions reach the outside through."""
    if found is None:
        return None
    if not found.running:
        return f"not running: {found.error}" if found.error else "not needed yet"
    again = f", started again {counted(found.restarts, 'time')}" if found.restarts else ""
    serves = counted(found.sandboxes, "sandbox").replace("sandboxs", "sandboxes")
    return f"process {found.pid} since {moment(found.since)}, serves {serves}{again}"


def object_store_facts(found: ObjectStoreInfo | None) -> list[tuple[str, object]]:
    """How far the object store is behind."""
    if found is None:
        return [("object store", "none")]
    verb = "waits" if found.waiting == 1 else "wait"
    behind = f"{counted(found.waiting, 'snapshot')} {verb}, for up to {found.lag:.0f} s"
    return [
        ("object store", found.url or "yes"),
        ("note", "in the data directory: does not survive its loss" if found.in_data else None),
        ("behind", behind if found.waiting else "nothing waits"),
        ("held up by", found.error),
    ]


@click.group("token", help="Tokens of tenants; for the operator.")
def token() -> None:
    """The group itself does nothing."""


@token.command("create", help="Make a token for a tenant. It is shown this once.")
@click.argument("tenant")
@json_option
def create_token(tenant: str, as_json: bool) -> None:
    made = connect().tokens.create(tenant)
    emit(made, as_json, lambda: say(made.token or ""))


@token.command("ls", help="List tokens, without what they are.")
@json_option
def list_tokens(as_json: bool) -> None:
    found = connect().tokens.list()

    def show() -> None:
        table(
            ["ID", "TENANT", "ROLE", "MADE"],
            [(one.id, one.tenant, one.role, moment(one.created_at)) for one in found],
        )

    emit(found, as_json, show)


@token.command("revoke", help="Make a token worthless.")
@click.argument("token_id", metavar="ID")
def revoke_token(token_id: str) -> None:
    connect().tokens.revoke(token_id)
