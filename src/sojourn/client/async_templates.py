"""Templates: what sessions start from, for the asynchronous client."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.client import core_templates
from sojourn.client.async_transport import AsyncTransport
from sojourn.client.core_templates import Progress
from sojourn.errors import SojournError
from sojourn.wire.api import TemplateInfo

if TYPE_CHECKING:
    from sojourn.client.core_builds import OnStep
    from sojourn.client.core_networks import NetworkLike
    from sojourn.client.core_sessions import LimitsLike


class AsyncTemplates:
    """The templates of the node and those of the token's tenant."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[TemplateInfo]:
        """What sessions can start from: the newest version of each template."""
        return await self._transport.run(core_templates.templates())

    async def get(self, ref: str) -> TemplateInfo:
        """A template by `NAME` (its newest version) or `NAME@VERSION`. Raises TemplateNotFound."""
        return await self._transport.run(core_templates.template(ref))

    async def build(
        self,
        name: str,
        source: str,
        *,
        start: bool = False,
        platform: str | None = None,
        insecure: bool = False,
        on_progress: Progress | None = None,
    ) -> TemplateInfo:
        """Make a version of a template of an image: `oci:DIR[:TAG]`, `docker-archive:FILE[:TAG]`,
        `oci-archive:FILE[:TAG]` or `REGISTRY/NAME:TAG`. It is read or fetched here, with the logins
        of Docker's configuration, and sent. `start`: sessions start the image's command by
        themselves. `platform` is the node's where that is not this machine's; `insecure` asks the
        registry without TLS.

        Raises ImageInvalid, NameTaken, RegistryRefused, StorageFull."""
        async with core_templates.aopened(source, platform, insecure) as sent:
            content = core_templates.atold(sent, on_progress)
            plan = core_templates.build(name, content, sent.tag, sent.source, start)
            return await self._transport.run(plan)

    async def build_file(
        self,
        name: str,
        file: str | Path = "Containerfile",
        context: str | Path = ".",
        *,
        arguments: Mapping[str, str] | None = None,
        network: NetworkLike | None = None,
        limits: LimitsLike | None = None,
        start: bool = False,
        cache: bool = True,
        insecure: bool = False,
        on_step: OnStep | None = None,
    ) -> TemplateInfo:
        """Make a version of a template as a Containerfile says: its steps run in a session, with
        `network` (none, unless that is given) and `limits`, and COPY reads `context`. Steps whose
        outcome is known are not run again, unless `cache` is false. FROM names a template, or an
        image as in `build`, which becomes template `NAME-base`.

        Raises ContainerfileInvalid (details.line; of a failed RUN also its output)."""
        from sojourn.client import core_builds  # only where it is needed

        instructions = core_builds.read(file, context, arguments or {})
        source = core_builds.base_of(instructions)
        if core_builds.is_image(source):
            base = await self._base(f"{name}-base", source, insecure)
        else:
            base = await self.get(source)
        building = core_builds.Building(
            name,
            instructions,
            base,
            network=network,
            limits=limits,
            cache=cache,
            carry=core_templates.in_threads,
            on_step=on_step,
        )
        try:
            made = await self._transport.run(building.run(start))
        except BaseException:  # a cancelled build, too, leaves nothing behind
            with contextlib.suppress(SojournError):  # what ended the build is what is told
                await self._transport.run(building.end())
            raise
        await self._transport.run(building.end())
        return made

    async def _base(self, name: str, source: str, insecure: bool) -> TemplateInfo:
        """The template of an image that FROM names, made anew only where the image is another."""
        from sojourn.client import core_builds  # only where it is needed

        async with core_templates.aopened(source, None, insecure) as sent:
            known = await self._transport.run(core_builds.present_base(name, sent))
            if known is not None:
                return known
            content = core_templates.atold(sent, None)
            plan = core_templates.build(name, content, sent.tag, sent.source, False)
            return await self._transport.run(plan)

    async def remove(self, ref: str) -> None:
        """Remove a version (`NAME@VERSION`) or all of a template (`NAME`). Sessions that were made
        from it go on. Raises TemplateNotFound."""
        await self._transport.run(core_templates.remove(ref))
