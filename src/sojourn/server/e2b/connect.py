"""The RPC protocol of the agent inside: Connect over HTTP/1.1, messages as JSON; pure.

Guarantee: a stream is read message by message, each bounded, and always ends with a message that
says how; a message that is cut off or too large is refused. Fields that are not known are ignored,
as protobuf's JSON has it, so that newer clients are understood.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from sojourn.errors import InvalidRequest, SojournError, TooLarge, Unsupported
from sojourn.server.e2b import failures

UNARY = "application/json"
STREAM = "application/connect+json"
MAX_MESSAGE = 8 * 1024 * 1024
_END = 0x02
_COMPRESSED = 0x01

T = TypeVar("T")
_json = msgspec.json.Encoder()


def encode(message: Any) -> bytes:
    """A message as JSON; bytes become base64 as protobuf's JSON has it."""
    return _json.encode(message)


def envelope(message: Any) -> bytes:
    """One message of a stream."""
    body = _json.encode(message)
    return b"\0" + len(body).to_bytes(4, "big") + body


def end(error: dict[str, str] | None = None) -> bytes:
    """The end of a stream."""
    body = _json.encode({} if error is None else {"error": error})
    return bytes([_END]) + len(body).to_bytes(4, "big") + body


def error_object(error: SojournError, sandbox: str, *, stopping: bool = False) -> dict[str, str]:
    """A failure as RPCs carry it."""
    return {
        "code": failures.rpc_code(error),
        "message": failures.rpc_message(error, sandbox, stopping=stopping),
    }


def decode(body: bytes, kind: type[T]) -> T:
    """A message. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the message is not valid: {error}") from error


async def messages(chunks: AsyncIterator[bytes], kind: type[T]) -> AsyncIterator[T]:
    """The messages of a request's body, as they come. Raises InvalidRequest, TooLarge."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        while len(held) >= 5:
            size = int.from_bytes(held[1:5], "big")
            if size > MAX_MESSAGE:
                raise TooLarge(f"a message is over {MAX_MESSAGE} bytes", limit=MAX_MESSAGE)
            if len(held) < 5 + size:
                break
            flags, body = held[0], bytes(held[5 : 5 + size])
            del held[: 5 + size]
            if flags & _COMPRESSED:
                raise Unsupported("compressed messages are not taken", next_step="Send them plain.")
            if not flags & _END:
                yield decode(body, kind)
    if held:
        raise InvalidRequest("the last message is cut off")


async def one_message(chunks: AsyncIterator[bytes], kind: type[T]) -> T:
    """The one message of a request to a method that answers with a stream."""
    async for message in messages(chunks, kind):
        return message
    raise InvalidRequest("the request holds no message")


def timeout_seconds(header: str | None) -> float | None:
    """The deadline a client sends along, in seconds. Raises InvalidRequest."""
    if header is None:
        return None
    if not header.isascii() or not header.isdigit() or len(header) > 12:
        raise InvalidRequest(f"Connect-Timeout-Ms is no number: {header[:20]!r}")
    return int(header) / 1000 or None
