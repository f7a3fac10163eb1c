"""`sojourn session network` and `effects`: what a session reaches, and what left it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sojourn.cli.connection import session
from sojourn.cli.output import counted, emit, facts, json_option, moment, safe, table

if TYPE_CHECKING:
    from sojourn.model.network import Denial, Effect, NetworkPolicy, NetworkRule
    from sojourn.wire.api import EffectInfo, EffectsLeft

_TOLD = 3
_MOST_BYTES = 1 << 20


def network_text(policy: NetworkPolicy) -> str:
    """A policy for people, in one line."""
    if policy.mode == "open":
        return "open: every public address"
    if policy.mode == "none" or not policy.rules:
        return "none"
    names = [name for rule in policy.rules for name in (*rule.domains, *rule.cidrs)]
    more = "" if len(names) <= 5 else f" and {len(names) - 5} more"
    return f"{', '.join(names[:5])}{more}"


def _rule_text(rule: NetworkRule) -> str:
    ports = f" port {', '.join(map(str, rule.ports))}" if rule.ports else ""
    passed = "" if rule.inspect else ", TLS passed through"
    return f"{', '.join((*rule.domains, *rule.cidrs))}{ports}{passed}"


def effect_text(effect: Effect) -> str:
    """An effect for people: `POST api.example.com/orders 201 12:03:11`."""
    at = datetime.fromtimestamp(effect.began_at).astimezone().strftime("%H:%M:%S")
    port = "" if effect.port in (80, 443) else f":{effect.port}"
    how = effect.outcome if effect.status is None else effect.status
    return f"{effect.method or effect.kind} {effect.host}{port}{effect.path} {how} {at}"


def left_text(left: EffectsLeft | None) -> str | None:
    """What was left behind, for people; None where nothing was."""
    if left is None or not left.count:
        return None
    some = ", ".join(effect_text(one) for one in left.effects[:_TOLD])
    more = "" if left.count <= _TOLD else ", ..."
    return f"{counted(left.count, 'request')} that cannot be taken back: {some}{more}"


def say_left(left: EffectsLeft | None) -> None:
    """Tell what was left behind, on standard error: it is no part of a command's result."""
    if text := left_text(left):
        click.echo(safe(text), err=True)


@click.command(
    "network",
    help="Show what a session reaches, or change it. A CHANGE is allow=TARGET[,...],"
    " deny=TARGET[,...], open, allowlist or none; what is not named stays as it is. TARGET is a"
    " domain (example.com, *.example.com) or a network, with :PORT for another port than those of"
    " the web; deny= also takes a rule's name. `none` also forgets what was allowed.",
)
@click.argument("ref", metavar="SESSION")
@click.argument("changes", metavar="[CHANGE]...", nargs=-1)
@click.option(
    "--replace",
    is_flag=True,
    help="Set the whole policy to what CHANGE says: granted secrets and bounds go, too.",
)
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    help="File with a whole policy as JSON; - reads it from standard input.",
)
@json_option
def network(
    ref: str, changes: tuple[str, ...], replace: bool, file: Path | None, as_json: bool
) -> None:
    if file is not None and (changes or replace):
        raise click.UsageError("give CHANGE or --set, not both")
    if replace and len(changes) != 1:
        raise click.UsageError("--replace takes one of none, open and allow=TARGET[,...]")
    wanted = {} if replace else network_changes(changes)
    found = session(ref)
    if file is not None:
        found.set_network(_read(file))
    elif replace:
        found.set_network(changes[0])
    elif wanted:
        found.change_network(**wanted)
    policy = found.network
    emit(policy, as_json, lambda: _show(policy))


def network_changes(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of `change_network` that words on the command line say. Raises
    click.UsageError."""
    wanted: dict[str, Any] = {}
    for word in words:
        verb, equals, rest = word.partition("=")
        targets = [one.strip() for one in rest.split(",") if one.strip()]
        if word in ("open", "allowlist", "none"):
            if wanted.setdefault("mode", word) != word:
                raise click.UsageError(f"{wanted['mode']} and {word} exclude each other")
        elif verb in ("allow", "deny") and equals and targets:
            wanted.setdefault(verb, []).extend(targets)
        else:
            raise click.UsageError(
                f"{word!r} is not allow=TARGET[,...], deny=TARGET[,...], open, allowlist or none"
            )
    return wanted


def _read(file: Path) -> NetworkPolicy:
    from sojourn.model.network import NetworkPolicy

    with click.open_file(str(file), "rb") as opened:
        text = opened.read(_MOST_BYTES)
    try:
        return msgspec.json.decode(text, type=NetworkPolicy)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="--set") from None


def _show(policy: NetworkPolicy) -> None:
    facts(
        [
            ("network", str(policy.mode)),
            *((f"rule {rule.name}", _rule_text(rule)) for rule in policy.rules),
            ("secrets", ", ".join(policy.secrets) or None),
            ("secrets in forks", "yes" if policy.secrets_in_forks else None),
            ("rollback past requests", str(policy.on_effects)),
            ("connections", policy.connections),
            ("requests per minute", policy.requests_per_minute or None),
            ("bytes per second", policy.bytes_per_second or None),
        ]
    )


@click.command(
    "effects",
    help="Show what left a session and cannot be taken back; --all also what only read; --denied"
    " what its network policy did not let out.",
)
@click.argument("ref", metavar="SESSION")
@click.option("--all", "everything", is_flag=True, help="Also requests that only read.")
@click.option("--denied", is_flag=True, help="What was refused, with the rule that decided.")
@json_option
def effects(ref: str, everything: bool, denied: bool, as_json: bool) -> None:
    if denied:
        if everything:
            raise click.UsageError("give --all or --denied, not both")
        refused = session(ref).denials()
        emit(refused, as_json, lambda: _show_denials(refused))
        return
    listed = session(ref).effects(all=everything)
    emit(listed, as_json, lambda: _show_effects(listed))


def _show_denials(refused: list[Denial]) -> None:
    table(
        ["LAST AT", "TIMES", "WHERE", "RULE", "REASON"],
        [
            (
                moment(one.last_at),
                one.count,
                f"{one.host}:{one.port}" if one.host else "others",
                one.rule,
                one.reason,
            )
            for one in refused
        ],
    )


def _show_effects(listed: list[EffectInfo]) -> None:
    table(
        ["AT", "METHOD", "WHERE", "RESULT", "RULE", "SECRETS", "AFTER SNAPSHOT"],
        [
            (
                moment(one.began_at),
                one.method or one.kind,
                f"{one.host}:{one.port}{one.path}",
                one.outcome if one.status is None else one.status,
                one.rule,
                ",".join(one.secrets),
                one.snapshot or "",
            )
            for one in listed
        ],
    )


COMMANDS = [network, effects]
