"""What E2B's interfaces are made of, without a server: ids, tokens, messages, names, results."""

from __future__ import annotations

import asyncio
import gzip
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from e2b import get_signature
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn import errors
from sojourn.errors import (
    FileMissing,
    InvalidRequest,
    PathInvalid,
    TooLarge,
    Unauthenticated,
    Unsupported,
)
from sojourn.model import new_id
from sojourn.model.network import NetworkMode, NetworkPolicy
from sojourn.server.e2b import (
    calls,
    connect,
    contents,
    control,
    entries,
    failures,
    filesystem,
    ids,
    networks,
    users,
)
from sojourn.server.e2b.drains import TAG
from sojourn.server.e2b.interpreters import lines
from sojourn.server.e2b.processes import Input, Selector, StreamInput, ended, outputs
from sojourn.wire.code import CodeError, CodeResult
from sojourn.wire.guest import Output, ProcessState, Stat

SESSION = new_id("ses")
TOKENS = ids.Tokens(b"k" * 32)


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def gather(source: AsyncIterator[Any]) -> list[Any]:
    async def collect() -> list[Any]:
        return [item async for item in source]

    return asyncio.run(collect())


# -- ids and tokens -----------------------------------------------------------------------------


def test_a_sandbox_id_stands_for_one_session() -> None:
    sandbox = ids.sandbox_id(SESSION)
    assert ids.session_id(sandbox) == SESSION == ids.session_id(f"{sandbox}-sojourn")
    assert len(f"65535-{sandbox}") <= 63 and sandbox.replace("-", "").isalnum()
    for wrong in ("", SESSION, "ses-", sandbox + "0", sandbox.upper(), f"{sandbox}-", "../x"):
        assert ids.session_id(wrong) is None


def test_a_token_opens_one_sandbox_for_one_purpose() -> None:
    token = TOKENS.make(ids.ACCESS, "ten_a", SESSION)
    for _ in range(2):  # the second time it is known
        who = TOKENS.check(token, SESSION, ids.ACCESS)
        assert who is not None and (who.tenant, who.role) == ("ten_a", "tenant")
        assert TOKENS.check(token, SESSION, ids.TRAFFIC, ids.ACCESS) == who
    for wrong in (token + "x", token[:-1], "ten_b" + token[5:], "", "."):
        assert TOKENS.check(wrong, SESSION, ids.ACCESS) is None
    assert TOKENS.check(token, SESSION, ids.TRAFFIC) is None
    assert TOKENS.check(token, new_id("ses"), ids.ACCESS) is None
    assert TOKENS.check(token.replace("ten_a", "ten_b"), SESSION, ids.ACCESS) is None
    assert ids.Tokens(b"o" * 32).check(token, SESSION, ids.ACCESS) is None
    for wrong in ("", ".", "ten_a.", token[:-1], token + "x", "ü" + token):
        assert TOKENS.check(wrong, SESSION, ids.ACCESS) is None


@pytest.mark.parametrize("user", [None, "root"])
@pytest.mark.parametrize("seconds", [None, 60])
def test_signatures_are_those_of_the_sdk(user: str | None, seconds: int | None) -> None:
    token = TOKENS.make(ids.ACCESS, "ten_a", SESSION)
    said = get_signature("/a b/ü", "read", user, token, seconds)
    expires = None if said["expiration"] is None else str(said["expiration"])
    made = TOKENS.signature("ten_a", SESSION, "/a b/ü", "read", user or "", expires)
    assert made == said["signature"]
    assert not contents.expired(expires)
    for over in ("1", "x", "-5", "9" * 20):
        assert contents.expired(over)


def test_the_key_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    key = ids.load_key(tmp_path)
    assert ids.load_key(tmp_path) == key and len(key) == 32
    assert stat.S_IMODE((tmp_path / "e2b.key").stat().st_mode) == 0o600
    (tmp_path / "e2b.key").write_bytes(b"short")
    assert len(ids.load_key(tmp_path)) == 32
    # A server that cannot keep one serves all the same.
    assert len(ids.load_key(tmp_path / "none")) == 32
    assert [place.name for place in tmp_path.iterdir()] == ["e2b.key"]


# -- messages -----------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 30))
def test_messages_come_out_as_they_went_in(parts: list[bytes], size: int) -> None:
    stream = b"".join(connect.envelope({"data": {"input": {"stdin": part}}}) for part in parts)
    found = gather(connect.messages(pieces(stream, size), StreamInput))
    assert [message.data.input.stdin for message in found] == parts


def test_messages_that_are_wrong_are_refused() -> None:
    whole = connect.envelope({"stdin": b"x"})
    for data, error in (
        (whole[:-1], InvalidRequest),
        (b"\0\0\0\0\1{", InvalidRequest),
        (b"\0\xff\xff\xff\xff", TooLarge),
        (b"\1" + whole[1:], Unsupported),
        (connect.envelope({"stdin": 1}), InvalidRequest),
    ):
        with pytest.raises(error):
            gather(connect.messages(pieces(data, 3), Input))
    with pytest.raises(InvalidRequest):
        asyncio.run(connect.one_message(pieces(b"", 1), Input))
    # What newer clients say beside is not looked at.
    assert gather(connect.messages(pieces(connect.envelope({"new": 1}), 3), Input)) == [Input()]


def test_deadlines_of_calls() -> None:
    assert connect.timeout_seconds(None) is None
    assert connect.timeout_seconds("1500") == 1.5
    assert connect.timeout_seconds("0") is None
    for wrong in ("", "-1", "1.5", "9" * 13, "²"):
        with pytest.raises(InvalidRequest):
            connect.timeout_seconds(wrong)


# -- failures -----------------------------------------------------------------------------------


def test_every_error_has_a_status_and_a_code_the_sdk_knows() -> None:
    codes = {
        *("canceled", "unknown", "invalid_argument", "deadline_exceeded", "not_found"),
        *("already_exists", "permission_denied", "resource_exhausted", "failed_precondition"),
        *("aborted", "out_of_range", "unimplemented", "internal", "unavailable", "data_loss"),
        "unauthenticated",
    }
    for kind in errors.all_errors().values():
        error = kind("why", next_step="then")
        assert 400 <= failures.api_status(error) < 600
        assert 400 <= failures.file_status(error) < 600
        assert failures.rpc_code(error) in codes
        assert failures.rpc_status(failures.rpc_code(error)) >= 400
        assert "why" in failures.rpc_message(error, "ses-1")


@pytest.mark.parametrize(
    "kind", [errors.SessionNotFound, errors.Interrupted, errors.SandboxLost, errors.WrongState]
)
def test_a_sandbox_that_does_not_run_is_said_to_be_so(kind: type[errors.SojournError]) -> None:
    told = connect.error_object(kind("it is asleep"), "ses-1")
    assert told["code"] == "unavailable" and "was not found" in told["message"]
    assert failures.file_status(kind("x")) == 502


def test_what_the_class_does_not_say() -> None:
    there = errors.FileConflict("there", rpc="already_exists")
    assert failures.rpc_code(there) == "already_exists"
    unknown = errors.CommandNotStarted("user", stage="user")
    assert failures.rpc_code(unknown) == "unauthenticated"
    assert failures.rpc_code(errors.CommandNotStarted("cwd", stage="cwd")) == "invalid_argument"
    assert failures.api_status(errors.SessionBusy("wait")) == 503


# -- processes ----------------------------------------------------------------------------------


def process(**changes: Any) -> ProcessState:
    facts: dict[str, Any] = {
        "id": 1,
        "pid": 7,
        "argv": [b"true"],
        "tag": TAG + "mine",
        "pty": False,
        "started_ns": 1,
        "ended_ns": 2,
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "reason": None,
        "out": (0, 0),
        "err": (0, 0),
    }
    return ProcessState(**facts | changes)


def test_ends_are_told_in_the_words_of_the_sdk() -> None:
    def told(**changes: Any) -> dict[str, Any]:
        body = ended(process(**changes))[5:]
        found: dict[str, Any] = connect.decode(body, dict[str, Any])["event"]["end"]
        return found

    assert told() == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert told(exit_code=3)["error"] == "exit status 3"
    killed = told(exit_code=None, signal=9, reason="memory limit")
    assert (killed["exitCode"], killed["exited"]) == (-1, False)
    assert killed["error"] == "signal: killed (memory limit)"


def test_large_output_goes_in_bounded_messages() -> None:
    data = os.urandom(600_000)
    stream = outputs(Output(2, 0, data), pty=False)
    found = gather(connect.messages(pieces(stream, 100_000), dict[str, Any]))
    assert len(found) == 3 and all("stderr" in one["event"]["data"] for one in found)
    assert not outputs(Output(1, 0, b""), pty=True)


def test_processes_are_found_by_pid_or_tag() -> None:
    assert Selector(pid=7).fits(process()) and not Selector(pid=8).fits(process())
    assert Selector(tag="mine").fits(process()) and not Selector(tag="other").fits(process())
    assert not Selector().fits(process())


# -- users, paths, files ------------------------------------------------------------------------

USER = users.Account("user", 1000, 1000, "/home/user")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("", b"/home/user"),
        ("a", b"/home/user/a"),
        ("/a", b"/a"),
        ("//a", b"/a"),
        ("~", b"/home/user"),
        ("~/a", b"/home/user/a"),
        ("~other", b"/home/user/~other"),
        ("../..", b"/"),
        ("/../etc/./x", b"/etc/x"),
        ("/a/", b"/a"),
        ("ü", "/home/user/ü".encode()),
    ],
)
def test_paths_begin_at_home(path: str, place: bytes) -> None:
    assert users.place(path, USER) == place


def test_paths_without_meaning_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        users.place("a\0b", USER)


def test_accounts_are_read_as_programs_do() -> None:
    known = users.Accounts(
        b"root:x:0:0:r:/root:/bin/sh\nuser:x:1000:100::/home/user:\nbroken\nuser:x:5:5::/no:\n"
        b":x:1:1::/:\nnan:x:a:b::/:\n",
        b"root:x:0:\nusers:x:100:\nother:x:1001:a,b\n",
    )
    assert known.find("user") == users.Account("user", 1000, 100, "/home/user")
    assert (known.user(0), known.user(77), known.group(100)) == ("root", "77", "users")
    assert known.free_number() == 1002
    with pytest.raises(Unauthenticated):
        known.find("nobody")


def test_who_a_request_acts_as() -> None:
    assert users.user_of(None) == users.user_of("Bearer x") == users.user_of("Basic Og==") == "user"
    assert users.user_of("Basic cm9vdDo=") == "root"
    assert users.user_of("Basic cm9vdDo=", "query") == "query"
    with pytest.raises(InvalidRequest):
        users.user_of("Basic !")


def test_modes_are_written_as_the_sdk_expects() -> None:
    def letters(kind: str, mode: int) -> str:
        return entries.permissions(Stat(b"/x", kind, mode, 0, 0, 0, 0, 0, 1))

    assert letters("file", 0o644) == "-rw-r--r--"
    assert letters("dir", 0o755) == "drwxr-xr-x"
    assert letters("symlink", 0o777) == "Lrwxrwxrwx"
    assert letters("dir", 0o1777) == "dtrwxrwxrwx"
    assert letters("file", 0o4755) == "urwxr-xr-x"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="%\\"), min_size=1))
def test_names_in_forms_come_back(name: str) -> None:
    written = "".join(
        f"%{ord(letter):02X}" if letter == '"' or ord(letter) < 32 else letter for letter in name
    )
    assert contents.unescaped(written) == name


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=5000), st.integers(1, 700))
def test_compressed_contents_come_back(data: bytes, size: int) -> None:
    half = len(data) // 2
    packed = gzip.compress(data[:half]) + gzip.compress(data[half:])
    assert b"".join(gather(contents._gunzip(pieces(packed, size)))) == data


def test_compressed_contents_that_are_wrong_are_refused() -> None:
    packed = gzip.compress(b"x" * 1000)
    for wrong in (packed[:-4], b"no gzip at all", b"", packed + b"rest"):
        with pytest.raises(InvalidRequest):
            gather(contents._gunzip(pieces(wrong, 7)))


# -- networks -----------------------------------------------------------------------------------


def test_a_sandbox_reaches_no_more_than_was_asked_for() -> None:
    everything = ["0.0.0.0/0"]

    def mode(
        network: dict[str, Any] | None, internet: bool | None, default: bool = False
    ) -> NetworkMode | None:
        policy = networks.wanted(network, internet, default=default)
        return None if policy is None else policy.mode

    assert mode(None, None) is None
    assert mode(None, None, True) is NetworkMode.OPEN
    assert mode(None, True) is NetworkMode.OPEN
    assert mode(None, False, True) is None
    assert mode({"denyOut": everything}, True) is None
    assert mode({"allowOut": ["a.example"], "denyOut": everything}, None) is NetworkMode.ALLOWLIST
    assert mode({"allowOut": ["a.example"], "denyOut": everything}, False) is None
    assert mode({"allowOut": ["a.example"]}, None) is NetworkMode.ALLOWLIST
    assert mode({"allowOut": everything}, None) is NetworkMode.OPEN
    policy = networks.wanted(
        {"allowOut": ["*.a.example", "8.8.8.8", "10.0.0.0/8"], "denyOut": everything},
        None,
        default=True,
    )
    assert policy is not None
    assert policy.rules[0].domains == ["*.a.example"]
    assert policy.rules[0].cidrs == ["8.8.8.8", "10.0.0.0/8"]
    assert networks.shown(policy) == {
        "allowOut": ["*.a.example", "8.8.8.8", "10.0.0.0/8"],
        "denyOut": everything,
    }
    assert networks.shown(NetworkPolicy()) == {"allowOut": [], "denyOut": everything}
    for wrong in ({"denyOut": ["8.8.8.8"]}, {"rules": {"a": []}}, {"egressProxy": {"a": 1}}):
        with pytest.raises(Unsupported):
            networks.wanted(wrong, None, default=False)
    with pytest.raises(InvalidRequest):
        networks.wanted({"allowOut": "a.example"}, None, default=False)


# -- code and lists -----------------------------------------------------------------------------


def results(result: CodeResult) -> list[dict[str, Any]]:
    found = [connect.decode(line, dict[str, Any]) for line in lines(result, 1)]
    assert found[0] == {"type": "number_of_executions", "execution_count": 1}
    assert found[-1] == {"type": "end_of_execution"}
    return found[1:-1]


def test_results_of_code() -> None:
    plain = CodeResult(text="1", stdout="o", stderr="", error=None)
    assert [one["type"] for one in results(plain)] == ["stdout", "result"]
    assert results(plain)[1] == {"type": "result", "text": "1", "is_main_result": True}
    shown_and_rich = CodeResult(
        text="r",
        stdout="",
        stderr="",
        error=None,
        images=[b"figure", b"rich"],
        results=[{"text/plain": "d"}, {"image/png": "cmljaA==", "application/json": '{"a":1}'}],
    )
    shown, rich, figure = results(shown_and_rich)
    assert (shown["text"], shown["is_main_result"]) == ("d", False)
    assert (rich["text"], rich["png"], rich["json"]) == ("r", "cmljaA==", {"a": 1})
    assert rich["is_main_result"] is True
    assert (figure["png"], figure["is_main_result"]) == ("ZmlndXJl", False)
    same = CodeResult("5", "", "", None, results=[{"text/plain": "5"}])
    assert [one["is_main_result"] for one in results(same)] == [False, True]
    failed = CodeResult(None, "", "", CodeError("E", "v", "t"), truncated=True)
    assert [one["type"] for one in results(failed)] == ["error", "stderr"]


def test_pages_repeat_and_leave_out_nothing() -> None:
    class Info:
        def __init__(self, number: int) -> None:
            self.id = f"ses_{number:024d}"

    def walk(found: list[Any], lost: int | None) -> list[str]:
        seen: list[str] = []
        token: str | None = None
        while True:
            page, token = control._page(found, token, 2)
            seen += [info.id for info in page]
            if token is None:
                return seen
            if lost is not None:
                # The one a page ended with is gone before the next is asked for.
                found = [info for info in found if info.id != page[-1].id]

    newest = [Info(number) for number in range(5, 0, -1)]
    for found in (newest, newest[::-1]):
        whole = [info.id for info in found]
        assert walk(list(found), None) == whole == walk(list(found), 1)
    with pytest.raises(InvalidRequest):
        control._page([], "nonsense", 1)


# -- lists of trees -----------------------------------------------------------------------------


class Tree:
    """A guest whose every directory holds a file and a directory, so deep as a path can be."""

    def __init__(self, gone: bytes = b"") -> None:
        self._gone = gone

    async def list(self, path: bytes) -> list[Stat]:
        if path == self._gone:
            raise FileMissing("it was removed")
        if len(path) > 4096:
            raise PathInvalid("too long")
        return [stat_of(path + b"/d", "dir"), stat_of(path + b"/f", "file")]


def stat_of(path: bytes, kind: str) -> Stat:
    return Stat(path, kind, 0o644, 0, 0, 0, 0, 1, 1)


def listed(guest: Any, depth: int) -> list[bytes]:
    return [stat.path for stat in gather(filesystem._below(guest, b"/t", depth))]


def test_a_tree_is_listed_to_its_depth_however_deep() -> None:
    assert listed(Tree(), 1) == [b"/t/d", b"/t/f"]
    assert listed(Tree(), 2) == [b"/t/d", b"/t/d/d", b"/t/d/f", b"/t/f"]
    assert listed(Tree(gone=b"/t/d"), 9) == [b"/t/d", b"/t/f"]
    assert len(listed(Tree(), 2000)) == 4000
    with pytest.raises(PathInvalid):  # rather than leaving out what is deeper
        listed(Tree(), 10_000)


# -- addresses and forms ------------------------------------------------------------------------


@given(st.text(alphabet=st.sampled_from("ab=&+%2F/%c3%bc%ff%zz;?")))
def test_addresses_are_read_as_everybody_reads_them(raw: str) -> None:
    wanted = parse_qsl(raw, keep_blank_values=True, errors="surrogateescape")
    assert calls.query(raw.encode()) == dict(wanted)


def form(*parts: tuple[str, bytes]) -> bytes:
    whole = b""
    for disposition, data in parts:
        whole += f"--b\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode()
        whole += data + b"\r\n"
    return whole + b"--b--\r\n"


@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(1, 50))
def test_a_form_is_the_same_whole_and_in_pieces(files: list[bytes], size: int) -> None:
    parts = [(f'name="file"; filename="f{n}"', data) for n, data in enumerate(files)]
    body = form(('name="other"', b"no file"), *parts)

    async def in_pieces() -> list[tuple[str, bytes]]:
        found = []
        async for name, data in contents._Parts(pieces(body, size), "b"):
            found.append((name, b"".join([piece async for piece in data])))
        return found

    wanted = [(f"f{n}", data) for n, data in enumerate(files)]
    assert gather(contents._whole(body, "b")) == wanted == asyncio.run(in_pieces())
    for broken in (body[:-8], b"", b"x" + body, body.replace(b"--b--", b"--b")):
        with pytest.raises(InvalidRequest):
            gather(contents._whole(broken, "b"))
