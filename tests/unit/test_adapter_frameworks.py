"""What adapters make of a framework's values, without a server."""

from __future__ import annotations

import subprocess

import pytest

from sojourn.errors import InvalidRequest


def test_nodes_are_known_from_looks_at_their_state() -> None:
    pytest.importorskip("langgraph.checkpoint.base", reason="needs the extra `frameworks`")
    from sojourn.adapters.langgraph_threads import begins_run, label_of, place_of, root_of

    look = {"configurable": {"thread_id": "t"}}
    run = {"configurable": {"thread_id": "t", "__pregel_runtime": object()}}
    inside = {"configurable": run["configurable"] | {"checkpoint_map": {"": "c1"}}}
    node = {
        "configurable": inside["configurable"]
        | {"__pregel_task_id": "task", "checkpoint_ns": "b:1|i:2"}
    }
    assert [begins_run(one) for one in (look, run, inside, node)] == [False, True, False, False]
    place = place_of(node)
    assert (place.thread, place.root, place.task, place.graph) == ("t", "c1", "task", "b:1")
    for one in (look, run, inside):
        with pytest.raises(InvalidRequest):
            place_of(one)
    # Writes of a graph within a graph count for the checkpoint of the whole.
    assert root_of({"configurable": {"checkpoint_id": "c0"}}) == "c0"
    assert root_of({"configurable": {"checkpoint_map": {"": "c1"}, "checkpoint_id": "d"}}) == "c1"
    assert label_of("c1", "a") != label_of("c1", "b") != label_of("c2", "b")
    assert len(label_of("1f1ecdb2-bc8b-6882-8000-de31555563af", "x" * 500)) <= 200


def test_an_archive_that_is_no_reference_of_ours_is_told_apart() -> None:
    pytest.importorskip("agents.sandbox", reason="needs the extra `frameworks`")
    from sojourn.adapters.openai_agents_session import _reference

    told = b'sojourn-snapshot:{"session": "ses_a", "snapshot": "snp_b"}'
    assert _reference(told) == {"session": "ses_a", "snapshot": "snp_b"}
    assert _reference(b"\0" * 1024) is None


def test_a_mark_is_found_in_what_came_last_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swerex", reason="needs the extra `frameworks`")
    from sojourn.adapters import swerex_runtime
    from sojourn.adapters.swerex_runtime import _MARK, _Seen

    monkeypatch.setattr(swerex_runtime, "OUTPUT_BYTES", 1000)
    seen = _Seen()
    for number in range(40_000):
        seen.feed(f"{number:06}\n".encode())
    seen.feed(b"\x01" + b"ab" * 8 + b":12\x02")
    mark = _MARK.search(seen.tail)
    assert mark is not None and (mark[1], mark[2]) == (b"ab" * 8, b"12")
    text = seen.told(exit_code=12).output
    assert text.startswith("000000\n") and text.endswith("039999\n") and "bytes left out" in text
    assert len(text) < 1000 + 2 * 64 * 1024 + 100


def test_killing_the_newest_child_leaves_the_shell_and_older_ones() -> None:
    pytest.importorskip("swerex", reason="needs the extra `frameworks`")
    from sojourn.adapters.swerex_runtime import _KILL_LAST

    script = "set -m; sleep 60 & old=$!; sleep 60 & new=$!; echo $old $new; read _; kill -9 $old"
    with subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        old, new = shell.stdout.readline().split()
        try:
            subprocess.run(["/bin/sh", "-c", _KILL_LAST, "sh", str(shell.pid)], check=False)
            states = {
                pid: subprocess.run(
                    [
                        "sh",
                        "-c",
                        f"read -r line </proc/{pid}/stat && r=${{line##*) }} && echo ${{r%% *}}",
                    ],
                    capture_output=True,
                    text=True,
                    check=False,
                ).stdout.strip()
                for pid in (old, new)
            }
            assert states[old] == "S" and states[new] in {"", "Z"}
            assert shell.poll() is None
        finally:
            shell.stdin.write("go\n")
            shell.stdin.flush()
