"""Templates: what sessions start from, for the asynchronous client."""

from __future__ import annotations

import builtins

from sojourn.client import core_templates
from sojourn.client.async_transport import AsyncTransport
from sojourn.client.core_templates import Progress
from sojourn.wire.api import TemplateInfo


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

    async def remove(self, ref: str) -> None:
        """Remove a version (`NAME@VERSION`) or all of a template (`NAME`). Sessions that were made
        from it go on. Raises TemplateNotFound."""
        await self._transport.run(core_templates.remove(ref))
