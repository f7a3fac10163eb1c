"""What each tool takes, with the words a model reads.

Guarantee: the schema that is told and the check that is made come from the same type, so no call
passes that the schema forbids. Few parameters, each with a default where one makes sense.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Ref = Annotated[
    str | None,
    Meta(description="Id or name of a session. Leave it out: your own session is used."),
]
Path = Annotated[
    str, Meta(description="Absolute path inside the session.", examples=["/root/report.md"])
]
Timeout = Annotated[
    float,
    Meta(description="Seconds after which it is killed.", gt=0, le=86_400, examples=[600]),
]
SnapshotName = Annotated[
    str, Meta(description="Id or label of a snapshot, as `history` tells.", examples=["tests-pass"])
]
StreamName = Annotated[Literal["stdout", "stderr"], Meta(description="Which stream.")]
Offset = Annotated[
    int, Meta(description="Where to begin, in bytes; negative: that many before the end.")
]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all."""


class Own(Arguments, frozen=True, kw_only=True):
    """Of a tool that works on one session."""

    session: Ref = None


class Create(Arguments, frozen=True, kw_only=True):
    name: Annotated[
        str | None,
        Meta(description="A name to find it by: letters, digits, . - _", examples=["experiment"]),
    ] = None
    template: Annotated[str, Meta(description="The environment it starts from.")] = "debian"


class ListSessions(Arguments, frozen=True, kw_only=True):
    state: Annotated[
        Literal["running", "paused", "suspended", "failed"] | None,
        Meta(description="Only sessions in this state."),
    ] = None
    limit: Annotated[int, Meta(description="How many at most.", ge=1, le=500)] = 50


class Named(Arguments, frozen=True, kw_only=True):
    session: Annotated[str, Meta(description="Id or name of the session.")]


class Exec(Own, frozen=True, kw_only=True):
    command: Annotated[
        str,
        Meta(
            description="Text for the shell.",
            min_length=1,
            examples=["cd /srv/app && python3 -m pytest -q"],
        ),
    ]
    cwd: Annotated[str | None, Meta(description="Directory to run it in.")] = None
    timeout: Timeout = 120.0
    background: Annotated[
        bool,
        Meta(
            description="Return at once and let it go on (servers, long builds); read it with"
            " process_output. `timeout` does not apply."
        ),
    ] = False


class RunCode(Own, frozen=True, kw_only=True):
    code: Annotated[
        str,
        Meta(
            description="Python code; the value of a last expression is the result.",
            examples=["import math\nmath.sqrt(2)"],
        ),
    ]
    timeout: Timeout = 120.0


class ExecOutput(Arguments, frozen=True, kw_only=True):
    output: Annotated[str, Meta(description="The `output` that the result named.")]
    stream: Annotated[Literal["stdout", "stderr", "value"], Meta(description="Which stream.")] = (
        "stdout"
    )
    offset: Offset = 0


class ProcessOutput(Own, frozen=True, kw_only=True):
    process: Annotated[int, Meta(description="Number of the process.")]
    stream: StreamName = "stdout"
    offset: Offset = 0
    wait: Annotated[
        float, Meta(description="Wait up to so many seconds for its end first.", ge=0, le=300)
    ] = 0.0


class ProcessKill(Own, frozen=True, kw_only=True):
    process: Annotated[int, Meta(description="Number of the process.")]
    signal: Annotated[
        Literal["KILL", "TERM", "INT", "HUP"], Meta(description="TERM lets it clean up.")
    ] = "KILL"


class FileRead(Own, frozen=True, kw_only=True):
    path: Path
    offset: Annotated[int, Meta(description="First byte to read.", ge=0)] = 0
    length: Annotated[int, Meta(description="Bytes to read at most.", ge=1, le=30_000)] = 30_000


class FileWrite(Own, frozen=True, kw_only=True):
    path: Path
    content: Annotated[str, Meta(description="All of the new content.")]
    encoding: Annotated[
        Literal["utf-8", "base64"], Meta(description="base64 for binary content.")
    ] = "utf-8"


class FileList(Own, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="Absolute path of a directory.", examples=["/root"])]


class FileDelete(Own, frozen=True, kw_only=True):
    path: Path
    recursive: Annotated[bool, Meta(description="Also a directory with all in it.")] = False


class Snapshot(Own, frozen=True, kw_only=True):
    label: Annotated[
        str | None,
        Meta(description="A word to find it by.", examples=["before-upgrade"]),
    ] = None


class History(Own, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(description="How many, the newest.", ge=1, le=500)] = 50


class Resume(Own, frozen=True, kw_only=True):
    files_only: Annotated[
        bool,
        Meta(
            description="Start from its files alone: none of its processes goes on. Only for one"
            " that was put away and whose memory cannot be restored."
        ),
    ] = False


class Rollback(Own, frozen=True, kw_only=True):
    snapshot: SnapshotName


class NetworkSet(Own, frozen=True, kw_only=True):
    network: Annotated[
        str,
        Meta(
            description="none; allow=DOMAIN[:PORT],... for these alone; or open, for every public"
            " address.",
            examples=["allow=api.example.com,*.example.org", "none"],
        ),
    ]


class Fork(Own, frozen=True, kw_only=True):
    count: Annotated[int, Meta(description="How many.", ge=1, le=100)] = 1
    snapshot: Annotated[
        str | None, Meta(description="Id or label to go on from; left out: from now.")
    ] = None


class Diff(Own, frozen=True, kw_only=True):
    before: Annotated[
        str | None,
        Meta(description="Id or label of a snapshot; left out: the one before `after`."),
    ] = None
    after: Annotated[
        str | None, Meta(description="Id or label; left out: the newest snapshot.")
    ] = None
    text: Annotated[bool, Meta(description="Also the changed lines of text files.")] = False
