"""Containerfiles: what they say, read line by line.

Guarantee: a line that is not understood, or asks for what is not done here, is refused with its
number before anything runs; nothing is left out in silence. Variables are replaced where the format
says so: not inside single quotes, and not in RUN, whose shell does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from sojourn.errors import ContainerfileInvalid

MAX_BYTES = 1024 * 1024
_INSTRUCTION = re.compile(r"(\w+)(?:\s+(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_COPY_FLAGS = {"chown", "chmod"}
_UNSUPPORTED = {
    "ADD": "Use COPY; fetch what is remote with RUN.",
    "VOLUME": "Leave it out: all files of a session are kept.",
    "EXPOSE": "Leave it out: ports of sessions are exposed, not of templates.",
    "HEALTHCHECK": "Leave it out.",
    "ONBUILD": "Write the instruction where it is to run.",
    "STOPSIGNAL": "Leave it out.",
    "SHELL": 'Name the shell in RUN ["bash", "-c", "..."].',
    "MAINTAINER": "Use LABEL.",
}


class Step(msgspec.Struct, frozen=True):
    """One instruction. `text` is what it says, `words` its arguments (`listed`: as a JSON list, so
    that no shell is meant), `pairs` its names and values, `flags` its options."""

    line: int
    name: str
    text: str
    words: list[str] = []
    listed: bool = False
    pairs: list[tuple[str, str]] = []
    flags: dict[str, str] = {}


class Containerfile(msgspec.Struct, frozen=True):
    """What is built: `base` is what FROM names, `steps` what follows."""

    base: str
    steps: list[Step]


def _refusal(line: int, message: str, next_step: str | None = None) -> ContainerfileInvalid:
    return ContainerfileInvalid(f"line {line}: {message}", next_step=next_step, line=line)


def parse(text: str, arguments: Mapping[str, str] | None = None) -> Containerfile:
    """What a Containerfile says; `arguments` are values for its ARGs. Raises
    ContainerfileInvalid."""
    if len(text) > MAX_BYTES:
        raise _refusal(1, f"the file is over {MAX_BYTES} bytes")
    parser = _Parser(arguments or {})
    for line, instruction in _instructions(text):
        parser.take(line, instruction)
    return parser.finish()


def _instructions(text: str) -> list[tuple[int, str]]:
    """Each instruction with the number of its first line: comments out, continued lines joined."""
    found: list[tuple[int, str]] = []
    held, begun = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        if not found and not held and re.match(r"#\s*escape\s*=", line, re.IGNORECASE):
            raise _refusal(number, "another escape character is not supported")
        if line.lstrip().startswith("#") or not line.strip():
            continue
        begun = begun or number
        if line.endswith("\\"):
            held += line[:-1]
            continue
        found.append((begun, (held + line).strip()))
        held, begun = "", 0
    if held.strip():
        found.append((begun, held.strip()))
    return found


class _Lexer:
    """Takes text apart as the format does: quotes, backslashes, variables."""

    def __init__(self, line: int, text: str, values: Mapping[str, str]) -> None:
        self._line = line
        self._text = text
        self._values = values
        self._at = 0

    def words(self, *, split: bool = True) -> list[str]:
        """The words, or all of it as one."""
        found: list[str] = []
        word: str | None = None
        while self._at < len(self._text):
            char = self._text[self._at]
            if split and char.isspace():
                self._at += 1
                if word is not None:
                    found.append(word)
                word = None
                continue
            word = (word or "") + self._next(char)
        return [*found, word] if word is not None else found

    def _next(self, char: str) -> str:
        self._at += 1
        if char == "'":
            end = self._text.find("'", self._at)
            if end < 0:
                raise _refusal(self._line, "a single quote is not closed")
            quoted, self._at = self._text[self._at : end], end + 1
            return quoted
        if char == '"':
            return self._double()
        if char == "\\":
            self._at += 1
            return self._text[self._at - 1 : self._at]
        return self._variable() if char == "$" else char

    def _double(self) -> str:
        found = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == '"':
                return found
            if char == "\\" and self._text[self._at : self._at + 1] in ('"', "\\", "$"):
                char = self._text[self._at]
                self._at += 1
            elif char == "$":
                char = self._variable()
            found += char
        raise _refusal(self._line, "a double quote is not closed")

    def _variable(self) -> str:
        """What stands for `$NAME`, `${NAME}`, `${NAME:-default}` or `${NAME:+other}`."""
        if self._text[self._at : self._at + 1] != "{":
            name = _NAME.match(self._text, self._at)
            if name is None:
                return "$"
            self._at = name.end()
            return self._values.get(name[0], "")
        end = self._text.find("}", self._at)
        found = re.fullmatch(
            r"([A-Za-z_][A-Za-z0-9_]*)(?::([-+])([^${]*))?", self._text[self._at + 1 : end]
        )
        if end < 0 or found is None:
            raise _refusal(self._line, "a variable is written in a way that is not supported")
        self._at = end + 1
        value = self._values.get(found[1], "")
        if found[2] == "-":
            return value or found[3]
        return (found[3] if value else "") if found[2] == "+" else value


class _Parser:
    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._given = arguments
        self._asked: set[str] = set()
        self._before: dict[str, str] = {}  # ARGs before FROM
        self._arguments: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._base: str | None = None
        self._steps: list[Step] = []
        self._handlers: dict[str, Callable[[int, str], None]] = {
            "FROM": self._take_from,
            "ARG": self._take_arg,
            "ENV": lambda line, rest: self._take_pairs(line, "ENV", rest),
            "LABEL": lambda line, rest: self._take_pairs(line, "LABEL", rest),
            "RUN": lambda line, rest: self._take_command(line, "RUN", rest),
            "CMD": lambda line, rest: self._take_command(line, "CMD", rest),
            "ENTRYPOINT": lambda line, rest: self._take_command(line, "ENTRYPOINT", rest),
            "COPY": self._take_copy,
            "WORKDIR": lambda line, rest: self._take_word(line, "WORKDIR", rest),
            "USER": lambda line, rest: self._take_word(line, "USER", rest),
        }

    def finish(self) -> Containerfile:
        """All of it was taken."""
        if self._base is None:
            raise _refusal(1, "there is no FROM")
        unknown = sorted(self._given.keys() - self._asked)
        if unknown:
            raise _refusal(1, f"there is no ARG {', '.join(unknown)}")
        return Containerfile(self._base, self._steps)

    def take(self, line: int, instruction: str) -> None:
        """Take one instruction. Raises ContainerfileInvalid."""
        found = _INSTRUCTION.fullmatch(instruction)
        if found is None:
            raise _refusal(line, f"{instruction[:60]!r} is no instruction")
        name, rest = found[1].upper(), (found[2] or "").strip()
        if name in _UNSUPPORTED:
            raise _refusal(line, f"{name} is not supported", _UNSUPPORTED[name])
        handler = self._handlers.get(name)
        if handler is None:
            raise _refusal(line, f"there is no instruction {name}")
        if self._base is None and name not in ("FROM", "ARG"):
            raise _refusal(line, f"{name} stands before FROM")
        if not rest:
            raise _refusal(line, f"{name} says nothing")
        handler(line, rest)

    def _values(self) -> dict[str, str]:
        return self._arguments | self._env if self._base is not None else self._before

    def _words(self, line: int, text: str, *, split: bool = True) -> list[str]:
        return _Lexer(line, text, self._values()).words(split=split)

    # -- instructions -----------------------------------------------------------------------

    def _take_from(self, line: int, rest: str) -> None:
        if self._base is not None:
            raise _refusal(line, "several stages are not supported", "Build one after the other.")
        words = self._words(line, rest)
        if words and words[0].startswith("--"):
            option = words[0].partition("=")[0]
            raise _refusal(line, f"FROM {option} is not supported", "Leave it out.")
        if len(words) == 3 and words[1].upper() == "AS":
            words = words[:1]
        if len(words) != 1 or not words[0]:
            raise _refusal(line, "FROM names one image or template")
        self._base = words[0]

    def _take_arg(self, line: int, rest: str) -> None:
        for word in self._words(line, rest):
            name, equals, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise _refusal(line, f"{name[:60]!r} cannot be the name of an ARG")
            self._asked.add(name)
            value = self._given.get(name)
            if value is None:
                value = default if equals else self._before.get(name)
            if value is None:
                continue
            if self._base is None:
                self._before[name] = value
            else:
                self._arguments[name] = value
                self._steps.append(Step(line, "ARG", rest, pairs=[(name, value)]))

    def _take_pairs(self, line: int, name: str, rest: str) -> None:
        first = rest.split(None, 1)
        if name == "ENV" and "=" not in first[0] and len(first) == 2:
            pairs = [(first[0], self._words(line, first[1], split=False)[0])]
        else:
            pairs = []
            for word in self._words(line, rest):
                key, equals, value = word.partition("=")
                if not equals or not key:
                    raise _refusal(line, f"{name} is written NAME=VALUE, not {word[:60]!r}")
                pairs.append((key, value))
        if name == "ENV":
            self._env |= dict(pairs)
        self._steps.append(Step(line, name, rest, pairs=pairs))

    def _take_command(self, line: int, name: str, rest: str) -> None:
        if _FLAG.match(rest):
            option = rest.split()[0].partition("=")[0]
            raise _refusal(line, f"{name} {option} is not supported", "Leave it out.")
        if "<<" in rest and re.search(r"<<-?['\"]?\w+", rest) and name == "RUN":
            raise _refusal(line, "here-documents are not supported", "Copy a script and run it.")
        words = _listed(rest)
        if words is not None:
            if not words and name == "RUN":
                raise _refusal(line, "RUN says nothing")
            self._steps.append(Step(line, name, rest, words=words, listed=True))
        else:
            self._steps.append(Step(line, name, rest, words=["/bin/sh", "-c", rest]))

    def _take_copy(self, line: int, rest: str) -> None:
        flags: dict[str, str] = {}
        while (found := _FLAG.match(rest)) is not None:
            if found[1] not in _COPY_FLAGS or not found[2]:
                raise _refusal(line, f"COPY --{found[1]} is not supported")
            flags[found[1]] = self._words(line, found[2], split=False)[0]
            rest = rest[found.end() :]
        if "<<" in rest:
            raise _refusal(line, "here-documents are not supported")
        if "chown" in flags and not re.fullmatch(r"[0-9]+(:[0-9]+)?", flags["chown"]):
            raise _refusal(line, "COPY --chown takes numbers", "Write UID:GID.")
        if "chmod" in flags and not re.fullmatch(r"[0-7]{3,4}", flags["chmod"]):
            raise _refusal(line, "COPY --chmod takes an octal mode")
        words = _listed(rest)
        words = words if words is not None else self._words(line, rest)
        if len(words) < 2:
            raise _refusal(line, "COPY names what to copy, and where to")
        for word in words[:-1]:
            if ".." in word.split("/"):
                raise _refusal(line, f"{word[:60]!r} leaves the build's directory")
        self._steps.append(Step(line, "COPY", rest, words=words, flags=flags))

    def _take_word(self, line: int, name: str, rest: str) -> None:
        word = self._words(line, rest, split=False)[0]
        if not word or "\0" in word:
            raise _refusal(line, f"{name} says nothing")
        self._steps.append(Step(line, name, rest, words=[word]))


def _listed(text: str) -> list[str] | None:
    """The words of a JSON list; None where it is none, and a shell is meant."""
    if not text.startswith("["):
        return None
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError:
        return None
