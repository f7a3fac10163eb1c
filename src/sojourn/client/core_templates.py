"""Requests about templates, and how an image is sent.

Guarantee: images are read and fetched here, with the rights and the network of whoever asks: the
server is given a tar and reaches nothing. What is cut off on its way makes no template.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from sojourn.client.core import (
    Content,
    Plan,
    Request,
    act,
    decode,
    get,
    query_text,
    segment,
    session_path,
    verb_result,
)
from sojourn.wire.api import IMAGE_TYPE, TemplateInfo, TemplateRequest

if TYPE_CHECKING:
    from sojourn.images.sources import Sent

Progress = Callable[[int, int | None], object]
"""Called with the bytes so far, and all of them where that is known."""


def templates() -> Plan[list[TemplateInfo]]:
    """What sessions can start from."""
    found: list[TemplateInfo] = yield from get("/v1/templates", list[TemplateInfo])
    return found


def template(ref: str) -> Plan[TemplateInfo]:
    """One template."""
    found: TemplateInfo = yield from get(f"/v1/templates/{segment(ref)}", TemplateInfo)
    return found


def remove(ref: str) -> Plan[None]:
    """Remove a version or a template."""
    yield from act(b"DELETE", f"/v1/templates/{segment(ref)}")


def build(
    name: str, content: Content, tag: str | None, source: str | None, start: bool
) -> Plan[TemplateInfo]:
    """Send an image."""
    query = query_text({"tag": tag, "source": source, "start": "true" if start else None})
    headers = ((b"content-type", IMAGE_TYPE.encode()),)
    target = f"/v1/templates/{segment(name)}{query}"
    response = yield Request(b"POST", target, headers, content, timeout=None)
    info: TemplateInfo = decode(response, TemplateInfo)
    return info


def from_session(ref: str, request: TemplateRequest, wait: str | None) -> Plan[TemplateInfo]:
    """Make a template of a session."""
    path = f"{session_path(ref)}/template"
    info: TemplateInfo = yield from verb_result(TemplateInfo, b"POST", path, request, wait=wait)
    return info


def told(sent: Sent, progress: Progress | None) -> Iterator[bytes]:
    """The pieces of an image, with progress told."""
    done = 0
    for piece in sent.pieces:
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, sent.size)


async def in_threads(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces that take time to read, without holding up the event loop."""
    waiting = iter(pieces)
    while (piece := await asyncio.to_thread(next, waiting, None)) is not None:
        yield piece


def atold(sent: Sent, progress: Progress | None) -> AsyncIterator[bytes]:
    """`told`, for the other transport."""
    return in_threads(told(sent, progress))


def opened(
    source: str, platform: str | None, insecure: bool
) -> contextlib.AbstractContextManager[Sent]:
    """An image to send."""
    from sojourn.images.sources import open_source  # only where it is needed

    return open_source(source, platform=platform, insecure=insecure)


@contextlib.asynccontextmanager
async def aopened(source: str, platform: str | None, insecure: bool) -> AsyncIterator[Sent]:
    """`opened`, read in threads."""
    opening = opened(source, platform, insecure)
    sent = await asyncio.to_thread(opening.__enter__)
    try:
        yield sent
    finally:
        await asyncio.to_thread(opening.__exit__, None, None, None)
