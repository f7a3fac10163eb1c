"""Building a template from a Containerfile, step by step in a session.

Guarantee: each step runs in a sandbox as any command does; what it left is kept under a key over
the step, what it stands on and what it reads, so the same step is not run twice; a step that fails
makes no version. The session of the build is removed, also when a step fails or the build is
interrupted; of a client that was killed it removes itself after some idle minutes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sojourn.client import core_commands, core_files, core_sessions, core_templates
from sojourn.client.core import Content, Plan, check, new_key
from sojourn.client.core_networks import NetworkLike
from sojourn.client.core_sessions import LimitsLike
from sojourn.errors import ContainerfileInvalid, TemplateNotFound
from sojourn.images.containerfiles import Step, parse
from sojourn.images.contexts import Context
from sojourn.wire.api import ProcessInfo, SessionInfo, TemplateInfo, TemplateRequest
from sojourn.wire.guest import Output

if TYPE_CHECKING:
    from sojourn.images.sources import Sent

_TAIL = 4000
_LIFETIME = 6 * 3600.0
_IDLE = 300.0
_WAIT = 30.0
_KEPT = 64 * 1024
_FORMAT = 1

OnStep = Callable[[int, str, bool], object]
"""Called before each step with its line, what it says, and whether what it left is known."""


class Instructions(msgspec.Struct, frozen=True):
    """What to build: the text of a Containerfile, the directory that COPY reads, values of ARGs."""

    text: str
    context: Path
    arguments: Mapping[str, str] = {}


class _State(msgspec.Struct):
    """What the steps so far made of the configuration."""

    env: dict[str, str]
    user: str
    cwd: str
    entrypoint: list[str]
    cmd: list[str]
    labels: dict[str, str]
    arguments: dict[str, str]


def read(file: str | Path, context: str | Path, arguments: Mapping[str, str]) -> Instructions:
    """The instructions in a file. Raises ContainerfileInvalid."""
    path = Path(file)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ContainerfileInvalid(f"{path} cannot be read: {error}") from error
    if not Path(context).is_dir():
        raise ContainerfileInvalid(f"{context} is no directory")
    return Instructions(text, Path(context), arguments)


def base_of(instructions: Instructions) -> str:
    """What FROM names. Raises ContainerfileInvalid."""
    return parse(instructions.text, instructions.arguments).base


def present_base(name: str, sent: Sent) -> Plan[TemplateInfo | None]:
    """The template that an image which FROM names became earlier, where it is still that one."""
    try:
        found = yield from core_templates.template(name)
    except TemplateNotFound:
        return None
    return found if sent.digest is not None and found.digest == sent.digest else None


def is_image(base: str) -> bool:
    """Whether FROM names an image and no template."""
    return "/" in base or ":" in base


class Building:
    """A build under way. `run` it, and `end` it whatever came of that, an interruption too.
    `carry` makes of pieces what the transport sends."""

    def __init__(
        self,
        name: str,
        instructions: Instructions,
        base: TemplateInfo,
        *,
        network: NetworkLike | None,
        limits: LimitsLike | None,
        cache: bool,
        carry: Callable[[Iterable[bytes]], Content],
        on_step: OnStep | None,
    ) -> None:
        self._name = name
        self._steps = parse(instructions.text, instructions.arguments).steps
        self._context = Context(instructions.context)
        self._network = network
        self._limits = limits
        self._cache = cache
        self._carry = carry
        self._on_step = on_step
        self._session: str | None = None
        self._making_key: str | None = None
        self._base = base.name if base.version is None else f"{base.name}@{base.version}"
        self._reference = self._base
        self._key = _key(None, [_FORMAT, self._reference, base.layer, base.created_at])
        self._state = _State(
            env=dict(base.env),
            user=base.user,
            cwd=base.cwd,
            entrypoint=base.entrypoint,
            cmd=base.cmd,
            labels=dict(base.labels),
            arguments={},
        )

    def run(self, start: bool) -> Plan[TemplateInfo]:
        """Build and publish."""
        for step in self._steps:
            yield from self._take(step)
        ref = yield from self._running()
        request = self._request(None, f"a Containerfile on {self._base}")
        request = msgspec.structs.replace(request, start=start)
        made = yield from core_templates.from_session(ref, request, None)
        return made

    def end(self) -> Plan[None]:
        """Delete the session of the build, if there is one."""
        if self._making_key is not None:
            # The request to make it was cut off and may have arrived: the same key finds what it
            # made.
            self._session = (yield from self._make(self._making_key)).id
            self._making_key = None
        if self._session is not None:
            ref, self._session = self._session, None
            yield from core_sessions.delete(ref)

    def _take(self, step: Step) -> Plan[None]:
        state = self._state
        if step.name == "RUN":
            said = [step.words, state.arguments]
            yield from self._kept(step, said, lambda ref: self._execute(step, ref))
        elif step.name == "COPY":
            yield from self._copy(step)
        elif step.name == "WORKDIR":
            path = step.words[0]
            state.cwd = path if path.startswith("/") else f"{state.cwd.rstrip('/')}/{path}"
            yield from self._kept(
                step, [state.cwd], lambda ref: self._make_directory(ref, state.cwd)
            )
        else:
            self._configure(step)
            if self._on_step is not None:
                self._on_step(step.line, f"{step.name} {step.text}", True)

    def _configure(self, step: Step) -> None:
        state = self._state
        match step.name:
            case "ENV":
                state.env |= dict(step.pairs)
            case "ARG":
                state.arguments |= dict(step.pairs)
            case "LABEL":
                state.labels |= dict(step.pairs)
            case "USER":
                state.user = step.words[0]
            case "ENTRYPOINT":
                state.entrypoint, state.cmd = step.words, []
            case "CMD":
                state.cmd = step.words

    def _copy(self, step: Step) -> Plan[None]:
        copy = self._context.copy(step.line, step.words, self._state.cwd, step.flags.get("chmod"))
        owner = step.flags.get("chown", "0:0")
        owner = owner if ":" in owner else f"{owner}:{owner}"

        def work(ref: str) -> Plan[None]:
            yield from self._make_directory(ref, copy.into)
            yield from core_files.upload(ref, copy.into, self._carry(copy.pieces()), owner=owner)

        yield from self._kept(step, [copy.into, copy.digest, owner], work)

    # -- steps that change files ------------------------------------------------------------

    def _kept(self, step: Step, said: Any, work: Callable[[str], Plan[None]]) -> Plan[None]:
        """Do a step, unless what it left is there."""
        state = self._state
        around = [state.env, state.user, state.cwd]
        self._key = _key(self._key, [step.name, said, around])
        reference = f"{self._name}@step-{self._key}"
        known = self._cache and (yield from _exists(reference))
        if self._on_step is not None:
            self._on_step(step.line, f"{step.name} {step.text}", bool(known))
        if known:
            yield from self.end()  # a session stands where it stands: the next step starts anew
            self._reference = reference
            return
        ref = yield from self._running()
        yield from work(ref)
        request = self._request(self._key, f"line {step.line}")
        yield from core_templates.from_session(ref, request, None)
        self._reference = reference

    def _running(self) -> Plan[str]:
        """The session of the build, at the state of the last step."""
        if self._session is None:
            self._making_key = new_key()
            info = yield from self._make(self._making_key)
            self._session, self._making_key = info.id, None
        return self._session

    def _make(self, key: str) -> Plan[SessionInfo]:
        info = yield from core_sessions.create(
            template=self._reference,
            name=None,
            labels={"building": self._name},
            env=None,
            limits=self._limits,
            policy={
                "auto_snapshot": "off",
                # Of a client that was killed nobody else deletes it.
                "idle_timeout": _IDLE,
                "on_idle": "delete",
                "max_lifetime": _LIFETIME,
                "on_expiry": "delete",
            },
            network=self._network,
            driver=None,
            user="root",
            cwd="/",
            key=key,
        )
        return info

    def _execute(self, step: Step, ref: str) -> Plan[None]:
        """Run a command to its end. It is waited for in short calls, not in one as long as it runs:
        a session that no client asks about is idle, whatever runs in it."""
        state = self._state
        info = yield from core_commands.spawn(
            ref,
            step.words,
            env=state.arguments | state.env,
            cwd=state.cwd or None,
            user=state.user,
            keep=_KEPT,
        )
        while info.running:
            info = yield from core_commands.wait_once(ref, info.id, _WAIT)
        if info.exit_code != 0:
            said = yield from _said(ref, info)
            raise ContainerfileInvalid(
                f"line {step.line}: RUN ended with exit code {info.exit_code}",
                next_step="What it said is in the error's details (`output`).",
                line=step.line,
                exit_code=info.exit_code,
                output=said,
            )

    def _make_directory(self, ref: str, path: str) -> Plan[None]:
        yield from core_files.mkdir(ref, path, mode=0o755, parents=True)

    def _request(self, step: str | None, source: str) -> TemplateRequest:
        state = self._state
        return TemplateRequest(
            name=self._name,
            memory=False,
            env=state.env,
            user=state.user,
            cwd=state.cwd or None,
            entrypoint=state.entrypoint,
            cmd=state.cmd,
            labels=state.labels,
            step=step,
            source=source,
        )


def _said(ref: str, info: ProcessInfo) -> Plan[str]:
    """The end of what a process wrote, what it wrote to stderr last."""
    offsets = (info.stdout[0], info.stderr[0])
    source = core_commands.FrameSource(ref, process=info.id, offsets=offsets, follow=False)
    response = yield source.request()
    check(response)
    streams = {1: b"", 2: b""}
    for item in source.feed(response.body):
        if isinstance(item, Output):
            streams[item.stream] += item.data
    return (streams[1] + streams[2])[-_TAIL:].decode("utf-8", "replace")


def _exists(reference: str) -> Plan[bool]:
    try:
        yield from core_templates.template(reference)
    except TemplateNotFound:
        return False
    return True


def _key(before: str | None, said: Any) -> str:
    """The key of a step: over the one before and all that decides what it does."""
    text = json.dumps([before, said], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
