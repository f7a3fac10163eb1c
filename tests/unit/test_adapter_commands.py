"""What adapters keep of a command's output."""

from __future__ import annotations

import subprocess

import pytest

from sojourn.adapters import commands
from sojourn.errors import Interrupted
from sojourn.wire import stream
from sojourn.wire.guest import Output


def run(limit: int) -> commands.Run:
    return commands.Run("ses_x", "true", limit=limit)


def end(exit_code: int = 0) -> stream.Ended:
    return stream.Ended(
        process=7, exit_code=exit_code, signal=None, timed_out=False, reason=None, duration=0.1
    )


def test_each_stream_is_kept_up_to_its_limit_and_the_rest_is_counted() -> None:
    one = run(4)
    for item in (
        Output(1, 0, b"abc"),
        Output(2, 0, b"xy"),
        Output(1, 3, b"def"),
        Output(2, 2, b"z"),
    ):
        one.take(item)
    one.take(end(3))
    found = one.outcome()
    assert (found.stdout, found.stderr, found.dropped, found.exit_code) == (b"abcd", b"xyz", 2, 3)


def test_an_end_that_was_not_heard_is_no_result() -> None:
    one = run(10)
    one.take(Output(1, 0, b"abc"))
    with pytest.raises(Interrupted):
        one.outcome()


def test_the_process_is_known_as_soon_as_it_runs() -> None:
    one = run(10)
    assert one.process is None
    one.source.feed(stream.encode_started(stream.Started(9, 1)))
    assert one.process == 9


@pytest.mark.parametrize("command", ["echo o; echo e >&2; exit 4", "printf '%s' \"it's\"; false"])
def test_a_merged_command_is_the_command_with_one_stream(command: str) -> None:
    plain = subprocess.run(
        ["/bin/bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    found = subprocess.run(commands.merged(command), capture_output=True, check=False)
    assert (found.stdout, found.stderr, found.returncode) == (plain.stdout, b"", plain.returncode)


def test_labels_say_who_made_a_session_unless_they_are_given() -> None:
    assert commands.labels("swe-rex", {"a": "b"}) == {"made-by": "swe-rex", "a": "b"}
    assert commands.labels("swe-rex", {"made-by": "me"}) == {"made-by": "me"}
