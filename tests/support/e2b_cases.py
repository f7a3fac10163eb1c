"""What a program does with a sandbox, written once for the blocking and the asynchronous SDK.

Each case is a coroutine that gets a `Box`: `box.sandbox` of one flavour, `await box(call)` for the
result of a call of either, `box.module` for classes that differ.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from e2b import (
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    TemplateException,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException

Case = Any
CASES: list[Case] = []


def case(function: Case) -> Case:
    """Add a case to the table."""
    CASES.append(function)
    return function


class Box:
    """A sandbox of one flavour of the SDK."""

    def __init__(self, sandbox: Any, classes: SimpleNamespace) -> None:
        self.sandbox = sandbox
        self.classes = classes

    async def __call__(self, call: Any) -> Any:
        return await call if inspect.isawaitable(call) else call

    async def run(self, command: str, **options: Any) -> Any:
        return await self(self.sandbox.commands.run(command, **options))

    @property
    def files(self) -> Any:
        return self.sandbox.files

    async def each(self, calls: list[Any]) -> list[Any]:
        """Results of calls made at once: coroutines, or functions in threads."""
        return await asyncio.gather(
            *(call if inspect.isawaitable(call) else asyncio.to_thread(call) for call in calls)
        )

    @property
    def blocking(self) -> bool:
        return bool(self.classes.blocking)


# -- commands -----------------------------------------------------------------------------------


@case
async def output_is_exact(box: Box) -> None:
    result = await box.run("printf 'a\\n\\nb'; printf 'e\\n\\n' >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("a\n\nb", "e\n\n", 0)
    result = await box.run("printf ''")
    assert (result.stdout, result.stderr) == ("", "")


@case
async def large_output_is_whole(box: Box) -> None:
    result = await box.run(
        "head -c 5242880 /dev/urandom > /tmp/blob; sha256sum < /tmp/blob >&2; base64 -w0 /tmp/blob"
    )
    digest = hashlib.sha256(base64.b64decode(result.stdout)).hexdigest()
    assert result.stderr.split()[0] == digest
    data = await box(box.files.read("/tmp/blob", format="bytes"))
    assert hashlib.sha256(data).hexdigest() == digest


@case
async def exit_codes_and_signals(box: Box) -> None:
    for code in (1, 7, 42, 255):
        with pytest.raises(CommandExitException) as raised:
            await box.run(f"echo out; echo err >&2; exit {code}")
        told = raised.value
        assert (told.exit_code, told.stdout, told.stderr) == (code, "out\n", "err\n")
    with pytest.raises(CommandExitException) as raised:
        await box.run("kill -9 $$")
    assert raised.value.exit_code == -1 and "killed" in str(raised.value.error)


@case
async def environment_directory_and_user(box: Box) -> None:
    result = await box.run("echo $CREATED $GIVEN; whoami; pwd; echo $HOME", envs={"GIVEN": "2"})
    assert result.stdout.split() == ["1", "2", "user", "/home/user", "/home/user"]
    result = await box.run("echo $CREATED; whoami; pwd", user="root", cwd="/tmp")
    assert result.stdout.split() == ["1", "root", "/tmp"]
    await box.run("mkdir -p below")
    assert (await box.run("pwd", cwd="below")).stdout == "/home/user/below\n"
    # Nothing of the server's own environment comes in.
    assert "SOJOURN" not in (await box.run("env")).stdout
    with pytest.raises(InvalidArgumentException):
        await box.run("pwd", cwd="/there/is/none")
    with pytest.raises(AuthenticationException):
        await box.run("whoami", user="nobody-of-this-name")


@case
async def twenty_at_once_are_isolated(box: Box) -> None:
    command = "for i in 1 2 3; do echo {0} $i; done; exit 0".format
    if box.blocking:
        calls: list[Any] = [lambda n=n: box.sandbox.commands.run(command(n)) for n in range(20)]
    else:
        calls = [box.sandbox.commands.run(command(n)) for n in range(20)]
    for number, result in enumerate(await box.each(calls)):
        assert result.stdout == f"{number} 1\n{number} 2\n{number} 3\n"


@case
async def input_and_its_end(box: Box) -> None:
    handle = await box.run("cat", background=True, stdin=True)
    await box(box.sandbox.commands.send_stdin(handle.pid, "one\n"))
    await box(box.sandbox.commands.send_stdin(handle.pid, b"two\n"))
    await box(box.sandbox.commands.close_stdin(handle.pid))
    assert (await box(handle.wait())).stdout == "one\ntwo\n"
    # Without an open input a program that reads meets the end at once.
    assert (await box.run("wc -c")).stdout.strip() == "0"


@case
async def eight_mebibytes_of_input(box: Box) -> None:
    handle = await box.run("wc -c", background=True, stdin=True)
    piece = b"x" * 262144
    commands = box.sandbox.commands
    if box.blocking:
        commands.stream_input(handle.pid, (piece for _ in range(32)))
    else:
        async with commands.stream_input(handle.pid) as stream:
            for _ in range(32):
                await stream.send(piece)
    await box(commands.close_stdin(handle.pid))
    assert int((await box(handle.wait())).stdout) == 8 * 1024 * 1024


@case
async def list_connect_and_kill(box: Box) -> None:
    commands = box.sandbox.commands
    handle = await box.run("echo begun; sleep 300", background=True)
    listed = {one.pid: one for one in await box(commands.list())}
    assert listed[handle.pid].cmd == "/bin/bash"
    assert listed[handle.pid].args == ["-l", "-c", "echo begun; sleep 300"]
    again = await box(commands.connect(handle.pid))
    assert again.pid == handle.pid
    assert await box(commands.kill(handle.pid)) is True
    with pytest.raises(CommandExitException):
        await box(again.wait())
    assert handle.pid not in {one.pid for one in await box(commands.list())}
    assert await box(commands.kill(handle.pid)) is False
    with pytest.raises(NotFoundException):
        await box(commands.send_stdin(handle.pid, "x"))
    with pytest.raises(NotFoundException):
        await box(commands.connect(4_000_000))


@case
async def a_timeout_ends_the_whole_group(box: Box) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        await box.run("echo $$ > /tmp/group; sleep 301 | sleep 302", timeout=1)
    assert time.monotonic() - began < 20
    for _ in range(100):
        left = (await box.run("cat /proc/*/cmdline | tr '\\0' ' '")).stdout
        if "sleep 301" not in left and "sleep 302" not in left:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError(left)


@case
async def a_command_goes_on_without_its_client(box: Box) -> None:
    # More than what is kept for readers: it must not be held back when nobody reads.
    handle = await box.run(
        "sleep 0.2; head -c 40000000 /dev/zero; touch /tmp/went-on", background=True, timeout=0
    )
    await box(handle.disconnect())
    for _ in range(200):
        if await box(box.files.exists("/tmp/went-on")):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("it was held back")
    await box(box.files.remove("/tmp/went-on"))


@case
async def a_terminal(box: Box) -> None:
    sandbox = box.sandbox
    seen = bytearray()
    if box.blocking:
        handle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    else:
        handle = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend, timeout=0)
    await box(sandbox.pty.resize(handle.pid, PtySize(rows=40, cols=123)))
    await box(sandbox.pty.send_stdin(handle.pid, b"stty size; tty; exit 5\n"))
    with pytest.raises(CommandExitException) as raised:
        if box.blocking:
            handle.wait(on_pty=seen.extend)
        else:
            await handle.wait()
    assert raised.value.exit_code == 5
    assert b"40 123" in seen and b"/dev/pts/" in seen


@case
async def paths_are_taken_literally(box: Box) -> None:
    names = ("it's; $(touch pwned) `x`.txt", 'quo"te\\slash ä.txt', "new\nline.txt", "-n")
    for name in names:
        path = f"/home/user/odd/{name}"
        await box(box.files.write(path, "odd"))
        assert await box(box.files.read(path)) == "odd"
        two = [{"path": path, "data": "x"}, {"path": f"{path}2", "data": "y"}]
        await box(box.files.write_files(two))
        assert await box(box.files.read(f"{path}2")) == "y"
        await box(box.files.remove(f"{path}2"))
    listed = [entry.name for entry in await box(box.files.list("/home/user/odd"))]
    assert sorted(listed) == sorted(names)
    assert not await box(box.files.exists("pwned"))
    await box(box.files.write("per%22cent", "p"))
    assert await box(box.files.read("per%22cent")) == "p"


# -- files --------------------------------------------------------------------------------------


@case
async def contents_of_every_kind(box: Box) -> None:
    data = random.Random(1).randbytes(3_000_000)
    info = await box(box.files.write("deep/er/blob", data))
    assert (info.name, info.type, info.path) == ("blob", FileType.FILE, "/home/user/deep/er/blob")
    assert await box(box.files.read("deep/er/blob", format="bytes")) == data
    gathered = bytearray()
    stream = await box(box.files.read("deep/er/blob", format="stream"))
    if box.blocking:
        for chunk in stream:
            gathered += chunk
    else:
        async for chunk in stream:
            gathered += chunk
    assert gathered == data
    await box(box.files.write("zipped", data, gzip=True))
    assert await box(box.files.read("zipped", format="bytes", gzip=True)) == data
    await box(box.files.write("text", "grüß\n"))
    assert await box(box.files.read("text")) == "grüß\n"
    await box(box.files.write("empty", b""))
    assert await box(box.files.read("empty")) == ""
    written = await box(
        box.files.write_files([{"path": f"/tmp/m{n}", "data": f"{n}" * n} for n in range(5)])
    )
    assert [one.path for one in written] == [f"/tmp/m{n}" for n in range(5)]
    assert await box(box.files.read("/tmp/m4")) == "4444"
    # What is made on the way belongs to the user too.
    owners = await box.run("stat -c %U deep deep/er deep/er/blob; touch deep/er/mine")
    assert owners.stdout.split() == ["user"] * 3
    assert (await box.run("stat -c %U /tmp/m0")).stdout == "user\n"
    await box(box.files.write("/root/secret", "x", user="root"))
    assert (await box.run("stat -c %U /root/secret", user="root")).stdout == "root\n"


@case
async def a_streamed_upload(box: Box) -> None:
    pieces = [bytes([n]) * 300_000 for n in range(20)]
    if box.blocking:
        await box(box.files.write("streamed", iter(pieces)))
    else:

        async def stream() -> Any:
            for piece in pieces:
                yield piece

        await box(box.files.write("streamed", stream()))
    assert await box(box.files.read("streamed", format="bytes")) == b"".join(pieces)


@case
async def what_files_are_like(box: Box) -> None:
    await box.run(
        "mkdir -p look/a/b; echo 12345 > look/f; chmod 640 look/f; ln -s f look/l;"
        " ln -s a look/d; ln -s gone look/x; touch look/a/b/c"
    )
    info = await box(box.files.get_info("look/f"))
    assert (info.name, info.path, info.size) == ("f", "/home/user/look/f", 6)
    assert (info.mode, info.permissions) == (0o640, "-rw-r-----")
    assert (info.owner, info.group, info.type) == ("user", "user", FileType.FILE)
    assert abs(info.modified_time.timestamp() - time.time()) < 600
    link = await box(box.files.get_info("look/l"))
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, "f")
    assert (await box(box.files.get_info("look"))).permissions == "drwxr-xr-x"
    names = [entry.name for entry in await box(box.files.list("look"))]
    assert sorted(names) == ["a", "d", "f", "l", "x"]
    deep = [entry.path for entry in await box(box.files.list("look", depth=3))]
    assert "/home/user/look/a/b/c" in deep and "/home/user/look/d/b" not in deep
    assert "/home/user/look/a/b/c" not in [
        entry.path for entry in await box(box.files.list("look", depth=2))
    ]
    assert await box(box.files.exists("look/l"))
    assert not await box(box.files.exists("look/none"))


@case
async def moving_making_removing(box: Box) -> None:
    assert await box(box.files.make_dir("made/by/us")) is True
    assert await box(box.files.make_dir("made/by/us")) is False
    assert (await box.run("stat -c %U made made/by")).stdout.split() == ["user"] * 2
    await box(box.files.write("made/one", "1"))
    await box(box.files.write("made/two", "2"))
    info = await box(box.files.rename("made/one", "made/two"))
    assert info.path == "/home/user/made/two"
    assert await box(box.files.read("made/two")) == "1"
    info = await box(box.files.rename("made/two", "made/new/place"))
    assert await box(box.files.read("made/new/place")) == "1"
    await box(box.files.remove("made"))
    assert not await box(box.files.exists("made"))
    await box(box.files.remove("made"))
    with pytest.raises(InvalidArgumentException):
        await box(box.files.remove("/"))


@case
async def files_that_are_not_there(box: Box) -> None:
    for call in (
        lambda: box.files.read("none"),
        lambda: box.files.list("none"),
        lambda: box.files.get_info("none"),
        lambda: box.files.rename("none", "other"),
        lambda: box.files.watch_dir("none", **box.classes.watching),
    ):
        with pytest.raises(FileNotFoundException):
            await box(call())
    await box(box.files.write("plain", "x"))
    for call in (
        lambda: box.files.list("plain"),
        lambda: box.files.write("plain/below", "x"),
        lambda: box.files.write("/home/user/", "x"),
        lambda: box.files.read("/home/user"),
        lambda: box.files.make_dir("plain"),
        lambda: box.files.read("/dev/zero"),
        lambda: box.files.read("/proc/self/mem"),
        lambda: box.files.watch_dir("plain", **box.classes.watching),
        lambda: box.files.list("/home", depth=0),
        lambda: box.files.write("with-metadata", "x", metadata={"a": "b"}),
    ):
        with pytest.raises((InvalidArgumentException, TemplateException)):
            await box(call())
    with pytest.raises(AuthenticationException):
        await box(box.files.read("plain", user="nobody-of-this-name"))


@case
async def names_that_are_no_text(box: Box) -> None:
    await box.run("mkdir -p bytes && cd bytes && touch $'a\\xffb' && mkdir $'d\\xfd'")
    listed = [entry.name for entry in await box(box.files.list("bytes", depth=2))]
    assert sorted(listed) == ["a\ufffdb", "d\ufffd"]
    # The SDKs cannot say such a name; an address can.
    config = box.sandbox.connection_config
    place = f"{config.api_url}/files?path=/home/user/bytes/%FE"
    headers = config.sandbox_headers | {"Content-Type": "application/octet-stream"}
    assert httpx.post(place, content=b"kept", headers=headers).status_code == 200
    assert httpx.get(place, headers=headers).content == b"kept"
    assert (await box.run("cat bytes/$'\\xfe'")).stdout == "kept"
    await box(box.files.remove("bytes"))


@case
async def accounts_as_somebody_inside_wrote_them(box: Box) -> None:
    await box.run(
        "cp /etc/passwd /tmp/passwd; printf 'odd:x:²:1::/:/bin/sh\\nbig:x:%s:1::/:/bin/sh\\n'"
        " $(head -c 9000 /dev/zero | tr '\\0' 9) >> /etc/passwd; printf '\\377:x:7:7::/:\\n'"
        " >> /etc/passwd; touch /tmp/of7; chown 7 /tmp/of7",
        user="root",
    )
    await box(box.files.write("still", "works"))
    assert (await box(box.files.get_info("still"))).owner == "user"
    assert (await box(box.files.get_info("/tmp/of7"))).owner == "lp"
    for user in ("odd", "big"):
        with pytest.raises(AuthenticationException):
            await box(box.files.read("still", user=user))
    await box.run("cat /tmp/passwd > /etc/passwd", user="root")


@case
async def links_stay_inside(box: Box) -> None:
    # What a link leads to is looked for inside the sandbox, never on the host.
    await box.run("ln -sfn /etc/passwd planted; ln -sfn / top")
    inside = await box(box.files.read("planted"))
    assert "user:x:" in inside and inside == await box(box.files.read("top/etc/passwd"))


@case
async def a_huge_sparse_file_is_streamed(box: Box) -> None:
    await box.run(
        "truncate -s 2G /tmp/sparse;"
        " printf end | dd of=/tmp/sparse bs=1 seek=1000 conv=notrunc 2>/dev/null"
    )
    stream = await box(box.files.read("/tmp/sparse", format="stream"))
    head = bytearray()
    if box.blocking:
        with stream:
            while len(head) < 3_000_000:
                head += next(stream)
    else:
        async with stream:
            while len(head) < 3_000_000:
                head += await anext(stream)
    assert head[1000:1003] == b"end" and not any(head[1003:])
    assert (await box.run("echo alive")).stdout == "alive\n"


@case
async def watching_a_directory(box: Box) -> None:
    await box(box.files.make_dir("watched/below"))
    seen: list[Any] = []
    if box.blocking:
        handle = box.files.watch_dir("watched", recursive=True, include_entry=True)
    else:
        handle = await box.files.watch_dir(
            "watched", on_event=seen.append, recursive=True, include_entry=True
        )
    await box(box.files.write("watched/below/new", "x"))
    await box.run(
        "chmod 600 watched/below/new; mv watched/below/new watched/moved; rm watched/moved"
    )
    wanted = {
        ("below/new", FilesystemEventType.CHMOD),
        ("below/new", FilesystemEventType.RENAME),
        ("moved", FilesystemEventType.CREATE),
        ("moved", FilesystemEventType.REMOVE),
    }
    for _ in range(100):
        if box.blocking:
            seen += handle.get_new_events()
        if wanted <= {(event.name, event.type) for event in seen}:
            break
        await asyncio.sleep(0.05)
    assert wanted <= {(event.name, event.type) for event in seen}, seen
    entries = [event.entry for event in seen if event.type is FilesystemEventType.CHMOD]
    assert any(entry is None or entry.name == "new" for entry in entries)
    await box(handle.stop())
    if box.blocking:
        with pytest.raises(SandboxException):
            handle.get_new_events()


@case
async def signed_addresses(box: Box) -> None:
    sandbox = box.sandbox
    await box(box.files.write("/home/user/signed file.txt", "mine"))
    get = sandbox.download_url("/home/user/signed file.txt", use_signature_expiration=60)
    assert httpx.get(get).text == "mine"
    assert httpx.get(sandbox.download_url("signed file.txt")).text == "mine"
    put = sandbox.upload_url("/home/user/up.bin", use_signature_expiration=60)
    answer = httpx.post(put, files={"file": ("whatever", b"\0\1\2")})
    assert answer.status_code == 200 and answer.json()[0]["path"] == "/home/user/up.bin"
    assert await box(box.files.read("up.bin", format="bytes")) == b"\0\1\2"
    # A signature opens this file, this way, until then.
    assert httpx.get(get.replace("signed%20file", "other")).status_code == 401
    assert httpx.get(put).status_code == 401
    assert httpx.post(get, content=b"x").status_code == 401
    assert httpx.get(get.replace("signature=v1_", "signature=v1_x")).status_code == 401
    old = sandbox.download_url("/home/user/up.bin", use_signature_expiration=-10)
    assert httpx.get(old).status_code == 401
    odd = re.sub(r"signature_expiration=\d+", "signature_expiration=%C2%B2", get)
    assert odd != get and httpx.get(odd).status_code == 401


# -- pauses -------------------------------------------------------------------------------------


@case
async def a_command_lives_through_a_pause(box: Box) -> None:
    sandbox = box.sandbox
    handle = await box.run(
        "echo $$ > /tmp/own; n=0; while [ ! -e /tmp/stop ]; do echo $((n++)); sleep 0.05; done;"
        " echo last; exit 9",
        background=True,
        timeout=0,
    )
    await box.run("while [ ! -s /tmp/own ]; do sleep 0.02; done")
    assert await box(sandbox.pause()) is True
    assert await box(sandbox.pause()) is False
    # The stream that was open ends, in the SDK's own words.
    with pytest.raises(TimeoutException) as raised:
        await box(handle.wait())
    assert "was not found" in str(raised.value)
    with pytest.raises(TimeoutException):
        await box.run("echo no")
    with pytest.raises(TimeoutException):
        await box(box.files.read("/tmp/own"))
    assert await box(sandbox.is_running()) is False
    sandbox = await box(box.classes.Sandbox.connect(sandbox.sandbox_id))
    assert await box(sandbox.is_running()) is True
    listed = [one.pid for one in await box(sandbox.commands.list())]
    assert handle.pid in listed
    again = await box(sandbox.commands.connect(handle.pid, timeout=0))
    await box(sandbox.commands.run("touch /tmp/stop"))
    with pytest.raises(CommandExitException) as ended:
        await box(again.wait())
    assert ended.value.exit_code == 9 and ended.value.stdout.endswith("last\n")
    assert (await box(sandbox.commands.run("cat /tmp/own"))).stdout.strip() == str(handle.pid)


@case
async def usage_is_told(box: Box) -> None:
    [sample] = await box(box.sandbox.get_metrics())
    assert sample.cpu_count >= 1 and sample.cpu_used_pct >= 0
    assert 0 < sample.mem_used < sample.mem_total
    assert 0 < sample.disk_used < sample.disk_total
