"""C51, C53, C54, C59, C60, C62, C64: commands are exact, whatever they do."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import CommandNotStarted, InvalidRequest
from support.servers import eventually


@pytest.fixture(scope="module")
def session(shared_server):  # type: ignore[no-untyped-def]
    """One session for the module: these tests leave nothing behind that others would see."""
    with shared_server.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        yield session
        session.delete()


# -- C51: timeouts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "sleep 1000 & wait",
        "sh -c 'sleep 1000 | sleep 1001'; echo never",
        "trap '' TERM INT HUP; while :; do sleep 1000; done",
        "python3 -c 'import os, time; os.fork(); os.fork(); time.sleep(1000)'",
        "(sleep 1000 & sleep 1000 &) ; sleep 1000",
    ],
)
def test_c51_a_timeout_ends_the_whole_group(session: Session, command: str) -> None:
    before = time.monotonic()
    done = session.exec(command, timeout=0.5)
    assert done.timed_out
    assert done.exit_code != 0
    assert time.monotonic() - before < 60
    assert eventually(lambda: session.exec("pgrep -c sleep").text == "0\n")


def test_c51_output_before_the_timeout_is_there(session: Session) -> None:
    done = session.exec("echo out; echo err >&2; sleep 1000", timeout=0.5)
    assert (done.stdout, done.stderr, done.timed_out) == (b"out\n", b"err\n", True)


def test_c51_a_child_that_keeps_the_output_open_does_not_hold_the_answer(session: Session) -> None:
    done = session.exec("setsid sleep 30 & echo started")
    assert done.text == "started\n"
    assert not done.timed_out
    session.exec("pkill sleep")


def test_c51_a_spawned_process_times_out_alike(session: Session) -> None:
    ended = session.spawn("sleep 1000 & sleep 1000", timeout=0.3).wait(30)
    assert ended.timed_out
    assert eventually(lambda: session.exec("pgrep -c sleep").text == "0\n")


# -- C53, C54: bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"a\n\nb", b"", b"\n", b"\n\n\n", b"no newline", b"\0", b"\r\n\r", bytes(range(256)), b"\xff"],
)
def test_c53_output_is_exact(session: Session, data: bytes) -> None:
    script = "import sys; sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]))"
    assert session.exec(["python3", "-c", script, data.hex()]).stdout == data
    both = script + "; sys.stderr.buffer.write(bytes.fromhex(sys.argv[1])[::-1])"
    done = session.exec(["python3", "-c", both, data.hex()])
    assert (done.stdout, done.stderr) == (data, data[::-1])


@pytest.mark.parametrize("size", [5 << 20, 50 << 20])
def test_c54_large_binary_output_is_exact(session: Session, size: int) -> None:
    script = """
import hashlib, os, sys
digest = hashlib.blake2b()
left = int(sys.argv[1])
while left:
    piece = os.urandom(min(left, 1 << 20))
    digest.update(piece)
    left -= len(piece)
    sys.stdout.buffer.write(piece)
sys.stderr.write(digest.hexdigest())
"""
    done = session.exec(["python3", "-c", script, str(size)])
    assert len(done.stdout) == size
    assert hashlib.blake2b(done.stdout).hexdigest() == done.stderr.decode()


def test_c54_what_an_answer_in_json_cannot_hold_is_said(session: Session, raw) -> None:  # type: ignore[no-untyped-def]
    body = {"argv": ["head", "-c", "100000", "/dev/zero"], "max_output": 1000}
    status, answer = raw("POST", f"/v1/sessions/{session.id}/exec", body)
    assert status == 200
    assert answer["truncated"] is True
    assert len(answer["stdout"]) == 1336  # base64 of 1000 bytes
    body["max_output"] = 100000
    assert raw("POST", f"/v1/sessions/{session.id}/exec", body)[1]["truncated"] is False


def test_c54_callbacks_get_every_byte_in_order(session: Session) -> None:
    out: list[bytes] = []
    err: list[bytes] = []
    done = session.exec(
        "for i in 1 2 3; do echo $i; echo e$i >&2; sleep 0.02; done",
        on_stdout=out.append,
        on_stderr=err.append,
    )
    assert b"".join(out) == b"1\n2\n3\n"
    assert b"".join(err) == b"e1\ne2\ne3\n"
    assert done.exit_code == 0


# -- C59: standard input --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, (1 << 20) + 1, 8 << 20])
def test_c59_standard_input_ends(session: Session, size: int) -> None:
    assert session.exec("wc -c", stdin=b"x" * size, timeout=60).text.strip() == str(size)


def test_c59_standard_input_may_be_a_file_or_pieces(session: Session) -> None:
    data = b"0123456789abcdef" * (1 << 16)
    digest = hashlib.sha256(data).hexdigest()
    for source in (io.BytesIO(data), (data[at : at + 4096] for at in range(0, len(data), 4096))):
        assert session.exec("sha256sum", stdin=source, timeout=60).text.split()[0] == digest


def test_c59_a_command_that_does_not_read_does_not_hang(session: Session) -> None:
    done = session.exec("exit 3", stdin=iter([b"x" * (1 << 20)] * 8), timeout=60)
    assert done.exit_code == 3
    done = session.exec("head -c 5", stdin=iter([b"x" * (1 << 20)] * 8), timeout=60)
    assert done.stdout == b"xxxxx"


def test_c59_without_input_a_reader_sees_its_end(session: Session) -> None:
    assert session.exec("cat; echo end", timeout=60).text == "end\n"


def test_c59_an_echo_of_more_than_pipes_hold_does_not_deadlock(session: Session) -> None:
    data = bytes(range(256)) * (1 << 14)  # 4 MiB both ways
    assert session.exec("cat", stdin=data, timeout=100).stdout == data


# -- C60, C62, C64 --------------------------------------------------------------------------------


def test_c60_parallel_commands_are_isolated(session: Session) -> None:
    session.exec("for i in $(seq 20); do mkdir -p /tmp/par/$i; done")

    def one(number: int) -> None:
        done = session.exec(
            'i=0; while [ $i -lt 200 ]; do echo "$WHO $PWD $i"; i=$((i+1)); done; exit $CODE',
            env={"WHO": f"w{number}", "CODE": str(number)},
            cwd=f"/tmp/par/{number}",
            stdin=b"ignored",
        )
        assert done.exit_code == number
        assert done.text == "".join(f"w{number} /tmp/par/{number} {i}\n" for i in range(200))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(1, 21)))


@pytest.mark.slow
def test_c60_a_thousand_quick_commands(session: Session) -> None:
    rounds = 250 if os.environ.get("SOJOURN_SOAK") else 50

    def run(worker: int) -> None:
        for number in range(rounds):
            text = f"{worker}-{number}"
            assert session.exec(["echo", text]).text == text + "\n"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    # Ended commands do not pile up.
    assert len(session.processes()) < 300


@pytest.mark.parametrize(
    "word",
    ["'; touch /tmp/ran; '", "$(touch /tmp/ran)", "`touch /tmp/ran`", "a\nb", "-n", "*", '"', "\\"],
)
def test_c62_arguments_paths_and_variables_are_literal(session: Session, word: str) -> None:
    assert session.exec(["printf", "%s", word]).text == word
    assert session.exec('printf %s "$WORD"', env={"WORD": word}).text == word
    directory = f"/tmp/dir {word}"
    session.files.mkdir(directory)
    assert session.exec("pwd", cwd=directory).text == directory + "\n"
    session.files.write(f"{directory}/{word}", b"content")
    assert session.files.read(f"{directory}/{word}") == b"content"
    session.files.remove(directory, recursive=True)
    assert not session.files.exists("/tmp/ran")


def test_c62_a_user_name_is_literal(session: Session) -> None:
    for user in ("root; touch /tmp/ran", "$(touch /tmp/ran)", "../root", "nobody:$(id)", "-1"):
        with pytest.raises((CommandNotStarted, InvalidRequest)):
            session.exec("true", user=user)
    assert not session.files.exists("/tmp/ran")


def test_c64_exit_codes_are_never_lost(session: Session) -> None:
    def run(_: int) -> list[int]:
        return [session.exec("exit 7").exit_code for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        codes = [code for found in pool.map(run, range(4)) for code in found]
    assert codes == [7] * 200


@pytest.mark.parametrize("code", [0, 1, 2, 42, 126, 127, 128, 130, 137, 255])
def test_c64_every_exit_code_arrives(session: Session, code: int) -> None:
    done = session.exec(f"exit {code}")
    assert (done.exit_code, done.signal, done.timed_out) == (code, None, False)


def test_c64_deaths_by_signal_are_told_apart(session: Session) -> None:
    for name, number in (("KILL", 9), ("TERM", 15), ("SEGV", 11), ("PIPE", 13)):
        done = session.exec(f"kill -{name} $$")
        assert (done.exit_code, done.signal) == (128 + number, number)


def test_c64_exit_codes_of_many_children_at_once(session: Session) -> None:
    found = [session.spawn(f"exit {code}") for code in range(50)]
    assert [process.wait(60).exit_code for process in found] == list(range(50))


def test_c64_zombies_of_others_are_reaped(session: Session) -> None:
    session.exec("for i in $(seq 30); do (sleep 0.01 & exec true) & done; wait")

    def zombies() -> bool:
        return session.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '").text == "0\n"

    assert eventually(zombies)


# -- failing to start -----------------------------------------------------------------------------


def test_c81_a_failed_start_says_why(session: Session) -> None:
    session.exec("printf '#!/nowhere\\n' > /tmp/bad; chmod +x /tmp/bad; echo x > /tmp/plain")
    for argv, word in (
        (["/no/such/program"], "No such file"),
        (["no-such-program-in-path"], ""),
        (["/tmp/plain"], "ermission"),
        (["/tmp"], "ermission"),
        (["/tmp/bad"], "No such file"),
    ):
        with pytest.raises(CommandNotStarted) as raised:
            session.exec(argv)
        assert word in raised.value.message
        assert argv[0].rpartition("/")[2] in raised.value.message
        with pytest.raises(CommandNotStarted):
            session.spawn(argv)
    with pytest.raises(CommandNotStarted):
        session.exec("true", cwd="/no/such/directory")
    with pytest.raises(CommandNotStarted):
        session.exec("true", user="nobody-such")


def test_c81_nulls_in_a_request_do_not_mask_the_cause(session: Session, raw) -> None:  # type: ignore[no-untyped-def]
    body = {
        "argv": ["/no/such/program"],
        "shell": None,
        "argv_bytes": None,
        "cwd": None,
        "user": None,
        "timeout": None,
        "stdin": None,
    }
    status, answer = raw("POST", f"/v1/sessions/{session.id}/exec", body)
    assert (status, answer["code"]) == (422, "command_not_started")
    status, answer = raw("POST", f"/v1/sessions/{session.id}/processes", body | {"pty": None})
    assert (status, answer["code"]) == (422, "command_not_started")
    # The session serves on.
    assert session.exec("echo on").text == "on\n"


def test_streams_opened_by_many_readers_agree(session: Session) -> None:
    process = session.spawn("for i in $(seq 300); do echo line $i; done; sleep 0.2; echo end")
    found: list[bytes] = [b""] * 4

    def read(index: int) -> None:
        found[index] = b"".join(piece.data for piece in process.output())

    readers = [threading.Thread(target=read, args=(index,)) for index in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    whole = b"".join(b"line %d\n" % i for i in range(1, 301)) + b"end\n"
    assert found == [whole] * 4
    middle = len(whole) // 2
    assert b"".join(piece.data for piece in process.output(middle)) == whole[middle:]


def test_many_clients_share_a_session(shared_server, session: Session) -> None:  # type: ignore[no-untyped-def]
    clients: list[Sojourn] = [shared_server.client() for _ in range(4)]
    for number, client in enumerate(clients):
        client.sessions.get(session.id).files.write(f"/tmp/by-{number}", str(number))
    for client in clients:
        same = client.sessions.get(session.id)
        assert [same.files.read_text(f"/tmp/by-{n}") for n in range(4)] == list("0123")
        client.close()
