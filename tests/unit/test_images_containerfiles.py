"""What Containerfiles say, and that what is not done is refused by its line."""

from __future__ import annotations

import pytest

from sojourn.errors import ContainerfileInvalid
from sojourn.images.containerfiles import Step, parse


def steps(text: str, **arguments: str) -> list[Step]:
    return parse(text, arguments).steps


def test_a_whole_file() -> None:
    found = parse(
        """# syntax=x
ARG BASE=debian
FROM ${BASE}@2 AS base

# a comment
ARG VERSION=1 OTHER
ENV A=1 "B=two words" C='$A' D="$A-${VERSION}" E=${NONE:-d} F=${A:+set}
ENV OLD   style value $A
RUN apt-get update && \\
    # a comment between
    apt-get install -y x$A
RUN ["/bin/echo", "$A"]
COPY --chown=1000:1000 --chmod=755 a b /app/$VERSION/
WORKDIR /app
USER agent
LABEL team=a
ENTRYPOINT ["python3"]
CMD serve --port $PORT
""",
        {"OTHER": "given"},
    )
    assert found.base == "debian@2"
    by = {step.line: step for step in found.steps}
    assert [(one.name, one.line) for one in found.steps[:2]] == [("ARG", 6), ("ARG", 6)]
    assert found.steps[1].pairs == [("OTHER", "given")]
    assert by[7].pairs == [
        *(("A", "1"), ("B", "two words"), ("C", "$A")),
        *(("D", "-1"), ("E", "d"), ("F", "")),
    ]
    assert by[8].pairs == [("OLD", "style value 1")]
    assert by[9].words == ["/bin/sh", "-c", "apt-get update &&     apt-get install -y x$A"]
    assert by[12].words == ["/bin/echo", "$A"] and by[12].listed
    assert by[13].words == ["a", "b", "/app/1/"]
    assert by[13].flags == {"chown": "1000:1000", "chmod": "755"}
    assert by[14].words == ["/app"] and by[15].words == ["agent"]
    assert by[16].pairs == [("team", "a")]
    assert by[17].words == ["python3"]
    assert by[18].words == ["/bin/sh", "-c", "serve --port $PORT"]


def test_arguments_before_from_are_for_it_alone() -> None:
    assert steps("ARG A=1\nFROM x\nENV B=$A")[0].pairs == [("B", "")]
    assert steps("ARG A=1\nFROM x\nARG A\nENV B=$A")[1].pairs == [("B", "1")]
    assert steps("FROM x\nARG A=1\nENV A=2 B=3\nENV C=$A")[-1].pairs == [("C", "2")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("RUN x", 1),
        ("FROM", 1),
        ("FROM a b", 1),
        ("FROM --platform=linux/amd64 a", 1),
        ("FROM a\nFROM b", 2),
        ("FROM a\n\n# c\nADD x /x", 4),
        ("FROM a\nVOLUME /x", 2),
        ("FROM a\nNONSENSE x", 2),
        ("FROM a\nRUN", 2),
        ("FROM a\nRUN --mount=type=cache,target=/x y", 2),
        ("FROM a\nRUN <<EOF\ntrue\nEOF", 2),
        ("FROM a\nCOPY --from=b /x /y", 2),
        ("FROM a\nCOPY x", 2),
        ("FROM a\nCOPY ../x /y", 2),
        ("FROM a\nCOPY --chown=agent x /y", 2),
        ("FROM a\nENV A", 2),
        ("FROM a\nLABEL a b", 2),
        ("FROM a\nENV A='x", 2),
        ("FROM a\nENV A=${B:?no}", 2),
        ("FROM a\nENV A=${B", 2),
        ("FROM a\nARG 1x", 2),
        ("# escape=`\nFROM a", 1),
        ("FROM a\n!", 2),
    ],
)
def test_what_is_not_done_is_refused_by_its_line(text: str, line: int) -> None:
    with pytest.raises(ContainerfileInvalid, match=f"^line {line}: ") as refused:
        parse(text)
    assert refused.value.details["line"] == line


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ContainerfileInvalid, match="NOPE"):
        parse("FROM a", {"NOPE": "1"})
