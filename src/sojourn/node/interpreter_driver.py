"""Runs inside the sandbox as `python3 -c <this file>`: executes pieces of code in one namespace.

Guarantee: whatever the code writes, by print, from C or from a child process, goes to the
process's own stdout and stderr unchanged; after each piece both streams carry a mark with the
token of its request, so the node knows what belongs to which request and that it has everything.

Must run on every Python 3 from 3.7 on, alone, and leave as little as possible for the code to
trip over: the code gets a `__main__` module of its own.
"""

from __future__ import annotations
import __future__

import ast
import base64
import builtins
import contextlib
import fcntl
import json
import linecache
import os
import re
import signal
import struct
import sys
import types
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARK = b"\0sojourn:"
TEXT_LIMIT = 1 << 20
BINARY_LIMIT = 32 << 20
ANSWER_LIMIT = 40 << 20
SOURCES_KEPT = 1000
COROUTINE = 0x80
MIMES = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
)


class Channel:
    """The requests and the marks, on descriptors of their own."""

    def __init__(self) -> None:
        # The code may close or redirect descriptors 0 to 2; this must not suffer.
        self.requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 200)
        self.out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 200)
        self.err = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 200)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def read(self, size: int) -> bytes:
        """Exactly so many bytes; the end of the requests is the end of the program."""
        parts = []
        while size:
            part = os.read(self.requests, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def mark(self, token: str, kind: bytes, payload: bytes = b"") -> None:
        """Put a mark on both streams, the payload on the first only."""
        head = MARK + token.encode() + kind
        write_all(self.err, head + b"00000000:")
        write_all(self.out, head + b"%08x:" % len(payload) + payload)


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def put(found: dict[str, str], mime: str, data: Any) -> None:
    """Add one form of a value, bytes as base 64."""
    if data is None:
        return
    if isinstance(data, (bytes, bytearray)):
        data = base64.b64encode(bytes(data)).decode()
    elif not isinstance(data, str):
        data = json.dumps(data)
    if len(data) <= BINARY_LIMIT:
        found[str(mime)] = data


def rich(value: Any) -> dict[str, str]:
    """The rich forms of a value by media type. A broken form is no reason to lose the others."""
    found: dict[str, str] = {}
    kind = type(value)
    if isinstance(value, type):
        return found
    bundle = getattr(kind, "_repr_mimebundle_", None)
    if callable(bundle):
        with contextlib.suppress(Exception):
            made = bundle(value)
            for mime, data in (made[0] if isinstance(made, tuple) else made).items():
                put(found, mime, data)
    for method, mime in MIMES:
        make = getattr(kind, method, None)
        if mime not in found and callable(make):
            with contextlib.suppress(Exception):
                data = make(value)
                put(found, mime, data[0] if isinstance(data, tuple) else data)
    return found


def total(found: dict[str, str]) -> int:
    """The size of all forms of a value."""
    return sum(map(len, found.values()))


def figures() -> list[str]:
    """The open figures of matplotlib, when the code has used it."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "get_fignums"):
        return []
    import io

    made = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
        if buffer.tell() <= BINARY_LIMIT:
            made.append(base64.b64encode(buffer.getvalue()).decode())
    pyplot.close("all")
    return made


def describe(error: BaseException) -> dict[str, str]:
    """An exception of the code, without the frames of this program."""
    import traceback

    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
        frames = frames.tb_next
    value, lines = "", [type(error).__name__]
    with contextlib.suppress(Exception):  # an exception whose own text fails
        told = traceback.TracebackException(type(error), error, frames)
        if told.stack and told.stack[-1].name == "interrupt":
            del told.stack[-1]  # where this program turned the signal into the exception
        lines = list(told.format())
        value = str(error)
    return {
        "name": type(error).__name__,
        "value": value[:TEXT_LIMIT],
        "traceback": "".join(lines)[-TEXT_LIMIT:],
    }


class Cells:
    """The namespace, and the pieces of code run in it."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.module
        sys.argv = [""]
        self.space = self.module.__dict__
        self.count = 0
        self.flags = 0  # of `from __future__ import`, which last
        self.future_flags = 0
        for feature in __future__.all_feature_names:
            self.future_flags |= getattr(__future__, feature).compiler_flag
        self.running = False
        self.loop: Any = None
        self.results: list[dict[str, str]] = []
        builtins.display = self.display  # type: ignore[attr-defined]

    def display(self, *values: Any) -> None:
        """Show values with their rich forms."""
        for value in values:
            found = rich(value)
            found.setdefault("text/plain", repr(value)[:TEXT_LIMIT])
            self.results.append(found)

    def interrupt(self, number: int, frame: Any) -> None:
        """SIGINT: only code can be interrupted, not the exchange with the node."""
        if self.running:
            raise KeyboardInterrupt

    def evaluate(self, tree: Any, name: str, mode: str) -> Any:
        """Run a syntax tree, with `await` at the top level where Python has it."""
        flags = self.flags | getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
        code: Any = compile(tree, name, mode, flags, True)
        self.flags |= code.co_flags & self.future_flags
        value = eval(code, self.space)
        if code.co_flags & COROUTINE:
            import asyncio

            if self.loop is None or self.loop.is_closed():
                self.loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self.loop)
            value = self.loop.run_until_complete(value)
        return value

    def execute(self, source: str, name: str) -> str | None:
        """Run a piece; the repr of its last expression."""
        tree: Any = ast.parse(source, name, "exec")
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            self.evaluate(tree, name, "exec")
        if last is None:
            return None
        value = self.evaluate(last, name, "eval")
        if value is None:
            return None
        builtins._ = value  # type: ignore[attr-defined]
        found = rich(value)
        if found:
            self.results.append(found)
        return repr(value)

    def run(self, source: str) -> dict[str, Any]:
        """Run a piece; what came of it."""
        self.count += 1
        self.results = []
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        linecache.cache.pop(f"<cell {self.count - SOURCES_KEPT}>", None)
        signal.signal(signal.SIGINT, self.interrupt)
        answer: dict[str, Any] = {"text": None, "error": None, "images": []}
        try:
            try:
                self.running = True
                text = self.execute(source, name)
                answer["images"] = figures()
            finally:
                self.running = False
            if text is not None:
                answer["truncated"] = len(text) > TEXT_LIMIT
                answer["text"] = text[:TEXT_LIMIT]
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the namespace lives on
            answer["error"] = describe(error)
        answer["results"] = self.results
        answer["count"] = self.count
        size = 0
        for kind, measure in (("images", len), ("results", total)):
            for at, one in enumerate(answer[kind]):
                size += measure(one)
                if size > ANSWER_LIMIT:
                    del answer[kind][at:]
                    answer["truncated"] = True
                    break
        return answer


def flush() -> None:
    """Push out what is buffered; the code may have closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def encode(answer: dict[str, Any]) -> bytes:
    """As JSON. Halves of UTF-16 pairs, which Python has in text and JSON has not, are written out
    as Python shows them."""
    dumped = json.dumps(answer, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda one: f"\\\\u{ord(one[0]):04x}", dumped).encode()


def serve() -> None:
    """Answer requests until there are no more."""
    me = os.getpid()
    channel = Channel()
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.environ.setdefault("MPLBACKEND", "Agg")
    warnings.filterwarnings("ignore", message=".*non-interactive.*")
    cells = Cells()
    signal.signal(signal.SIGINT, cells.interrupt)
    while True:
        (length,) = struct.unpack(">I", channel.read(4))
        request = json.loads(channel.read(length).decode())
        if request["begin"]:
            channel.mark(request["token"], b"<")
        answer = cells.run(request["code"])
        flush()
        if os.getpid() != me:
            os._exit(0)  # a child that the code forked and did not end
        channel.mark(request["token"], b">", encode(answer))


if __name__ == "__main__":
    serve()
