"""E2B sandboxes over their life, by the unmodified SDK: time, pauses, lists, snapshots, code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException
from e2b_code_interpreter import AsyncSandbox as AsyncCodeSandbox
from e2b_code_interpreter import Sandbox as CodeSandbox

from sojourn.client import Sojourn
from sojourn.errors import SessionNotFound
from sojourn.server.e2b.ids import sandbox_id, session_id
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module", autouse=True)
def variables(shared_server: ServerProcess) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_URL", shared_server.url)
        patch.setenv("E2B_SANDBOX_URL", shared_server.url)
        patch.setenv("E2B_API_KEY", shared_server.token)
        yield


@pytest.fixture
def box() -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=600)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def code() -> Iterator[CodeSandbox]:
    made = CodeSandbox.create(timeout=600)
    yield made
    made.kill()


def ends(box: Any) -> float:
    return float(box.get_info().end_at.timestamp() - time.time())


# -- time ---------------------------------------------------------------------------------------


def test_time_is_counted_from_now(box: Sandbox) -> None:
    assert 500 < ends(box) <= 600
    box.set_timeout(100)
    assert 50 < ends(box) <= 100
    # Connecting never takes time away.
    Sandbox.connect(box.sandbox_id, timeout=10)
    assert 50 < ends(box) <= 100
    Sandbox.connect(box.sandbox_id, timeout=1000)
    assert 900 < ends(box) <= 1000
    with pytest.raises(SandboxException):
        box.set_timeout(0)


def test_at_the_end_it_is_killed_unless_it_was_to_be_paused() -> None:
    kills = Sandbox.create(timeout=60)
    pauses = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause"})
    handle = kills.commands.run("sleep 300", background=True, timeout=0)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            handle.wait()
        except SandboxException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pauses.files.write("kept", "x")
    for box in (kills, pauses):
        box.set_timeout(1)
    eventually(lambda: not kills.is_running() and not pauses.is_running())
    waiting.join(20)
    assert [type(error).__mro__[1] for error in ended] == [TimeoutException]
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info(kills.sandbox_id)
    assert pauses.get_info().state is SandboxState.PAUSED
    again = Sandbox.connect(pauses.sandbox_id, timeout=300)
    assert again.files.read("kept") == "x"
    assert again.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
    again.kill()


def test_a_paused_sandbox_is_never_reaped(box: Sandbox) -> None:
    box.set_timeout(2)
    box.pause()
    time.sleep(2.5)  # past what was its end, and a look at deadlines later
    assert box.get_info().state is SandboxState.PAUSED
    woken = Sandbox.connect(box.sandbox_id, timeout=120)
    assert 60 < ends(woken) <= 120
    assert woken.commands.run("echo well").stdout == "well\n"


def test_traffic_wakes_where_that_was_asked_for() -> None:
    box = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.commands.run("echo 1 > /tmp/memory")
    box.pause()
    assert box.commands.run("cat /tmp/memory").stdout == "1\n"
    assert 0 < ends(box) <= 300
    box.pause()
    assert box.files.read("/tmp/memory") == "1\n"
    box.kill()


def test_pausing_and_connecting_at_once_comes_to_rest(box: Sandbox) -> None:
    box.files.write("kept", "x")
    for _ in range(3):
        pausing = threading.Thread(target=box.pause)
        pausing.start()
        # Connected to is connected to: it runs, whatever was under way, unless a later pause came.
        woken = Sandbox.connect(box.sandbox_id)
        pausing.join()
        if not woken.is_running():
            woken = Sandbox.connect(box.sandbox_id)
        assert woken.files.read("kept") == "x"


def test_a_pause_without_memory(box: Sandbox) -> None:
    box.commands.run("echo 1 > kept; sleep 300 & echo $! > pid")
    assert box.pause(keep_memory=False) is True
    woken = Sandbox.connect(box.sandbox_id)
    assert woken.files.read("kept") == "1\n"
    with pytest.raises(CommandExitException):
        woken.commands.run("kill -0 $(cat pid)")


def test_a_stream_ends_with_its_sandbox() -> None:
    box = Sandbox.create()
    handle = box.commands.run("sleep 300", background=True, timeout=0)
    box.kill()
    with pytest.raises(TimeoutException) as raised:
        handle.wait()
    assert "was not found" in str(raised.value)
    with pytest.raises(TimeoutException):
        box.commands.run("echo no")
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(box.sandbox_id)
    with pytest.raises(SandboxNotFoundException):
        box.pause()


# -- lists --------------------------------------------------------------------------------------


def test_lists_by_page_state_and_metadata(shared_server: ServerProcess) -> None:
    mark = {"list": "a b&c=ä"}
    boxes = [
        Sandbox.create(metadata=mark | {"number": str(number)}, timeout=300) for number in range(4)
    ]
    boxes[3].pause()

    def listed(**query: Any) -> list[str]:
        order = query.pop("order", None)
        limit = query.pop("limit", None)
        pages = Sandbox.list(SandboxQuery(metadata=mark, **query), limit=limit, order=order)
        found = []
        while pages.has_next:
            page = pages.next_items()
            assert limit is None or len(page) <= limit
            found += [info.sandbox_id for info in page]
        return found

    ids = [box.sandbox_id for box in boxes]
    assert listed() == ids[::-1]
    assert listed(limit=2) == listed(limit=1) == ids[::-1]
    assert listed(limit=3, order="asc") == ids
    assert listed(state=[SandboxState.PAUSED]) == [ids[3]]
    assert listed(state=[SandboxState.RUNNING]) == ids[2::-1]
    assert listed(template="other") == []
    info = boxes[3].get_info()
    assert info.metadata == mark | {"number": "3"}
    assert (info.template_id, info.state) == ("base", SandboxState.PAUSED)
    # They are sessions, and the other way round.
    with shared_server.client() as client:
        session = client.sessions.get(str(session_id(ids[0])))
        assert session.exec("whoami").stdout == b"root\n"
        own = client.sessions.create(labels={"list": "own"})
        assert [
            info.sandbox_id
            for info in Sandbox.list(SandboxQuery(metadata={"list": "own"})).next_items()
        ] == [sandbox_id(own.id)]
        box = Sandbox.connect(sandbox_id(own.id))
        assert box.commands.run("whoami").stdout == "user\n"
        # Whoever connects to a session that has no end does not give it one.
        assert own.info.lifetime_deadline is None
        box.kill()
        with pytest.raises(SessionNotFound):
            client.sessions.get(own.id)
    for box in boxes:
        box.kill()


def test_what_a_sandbox_may_reach_is_as_it_was_asked(shared_server: ServerProcess) -> None:
    everything = ["0.0.0.0/0"]
    asked: list[tuple[dict[str, Any], str, list[str]]] = [
        ({}, "none", []),
        ({"allow_internet_access": False}, "none", []),
        ({"allow_internet_access": True}, "open", []),
        (
            {"network": {"deny_out": everything, "allow_out": ["*.a.example", "8.8.8.8"]}},
            "allowlist",
            ["*.a.example", "8.8.8.8/32"],
        ),
    ]
    with shared_server.client() as client:
        for options, mode, listed in asked:
            box = Sandbox.create(timeout=60, **options)
            session = client.sessions.get(str(session_id(box.sandbox_id)))
            assert session.info.network.mode == mode
            network = box.get_info().network
            assert network is not None and network.get("allow_out") == listed
            if mode == "none" and not options:
                box.update_network({"allow_out": ["b.example"], "deny_out": everything})
                assert session.refresh().network.rules[0].domains == ["b.example"]
                box.update_network({"allow_internet_access": False})
                assert session.refresh().network.mode == "none"
            box.kill()


def test_a_repeated_key_makes_one_sandbox() -> None:
    first = Sandbox.create(idempotency_key="made-once", metadata={"key": "1"})
    again = Sandbox.create(idempotency_key="made-once", metadata={"key": "1"})
    assert again.sandbox_id == first.sandbox_id
    with pytest.raises(SandboxException) as raised:
        Sandbox.create(idempotency_key="made-once", metadata={"key": "2"})
    assert raised.value.status_code == 409
    first.kill()
    with pytest.raises(SandboxException) as raised:
        Sandbox.create(idempotency_key="made-once", metadata={"key": "1"})
    assert raised.value.status_code == 404


# -- snapshots and forks ------------------------------------------------------------------------


def test_forks_go_their_own_ways(box: Sandbox) -> None:
    handle = box.commands.run("sleep 300", background=True, timeout=0)
    box.files.write("who", "parent")
    children = box.fork(count=2, timeout=120)
    assert len({child.sandbox_id for child in [box, *children]}) == 3
    for number, child in enumerate(children):
        assert child.files.read("who") == "parent"
        child.files.write("who", str(number))
        assert handle.pid in {one.pid for one in child.commands.list()}
        assert 60 < ends(child) <= 120
    assert [child.files.read("who") for child in children] == ["0", "1"]
    assert box.files.read("who") == "parent"
    for child in children:
        child.kill()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.fork("ses-" + "0" * 24)


def test_a_snapshot_outlives_its_sandbox() -> None:
    box = Sandbox.create(envs={"FROM": "source"}, timeout=300)
    box.files.write("state", "1")
    handle = box.commands.run("sleep 300", background=True, timeout=0)
    taken = box.create_snapshot(name="outlives")
    assert taken.names == ["outlives"]
    box.files.write("state", "2")
    files_only = box.create_snapshot(mode="filesystem")
    assert files_only.names == []
    assert {one.snapshot_id for one in box.list_snapshots().next_items()} == {
        taken.snapshot_id,
        files_only.snapshot_id,
    }
    box.kill()
    for name in (taken.snapshot_id, "outlives"):
        made = Sandbox.create(name, envs={"OWN": "yes"}, metadata={"a": "b"})
        assert made.files.read("state") == "1"
        assert handle.pid in {one.pid for one in made.commands.list()}
        assert made.commands.run("echo $FROM $OWN").stdout == "source yes\n"
        info = made.get_info()
        assert (info.metadata, info.template_id) == ({"a": "b"}, name)
        made.kill()
    made = Sandbox.create(files_only.snapshot_id)
    assert made.files.read("state") == "2" and not made.commands.list()
    made.kill()
    # Snapshots are no sandboxes.
    known = [info.sandbox_id for info in Sandbox.list().next_items()]
    assert taken.snapshot_id not in known
    for one in (taken, files_only):
        assert Sandbox.delete_snapshot(one.snapshot_id) is True
        assert Sandbox.delete_snapshot(one.snapshot_id) is False
    with pytest.raises(SandboxException):
        Sandbox.create("outlives")


# -- code ---------------------------------------------------------------------------------------


def test_code_gives_results_output_and_errors(code: CodeSandbox) -> None:
    seen: list[str] = []
    execution = code.run_code(
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 41\nx + 1",
        on_stdout=lambda message: seen.append(message.line),
    )
    assert (execution.text, execution.execution_count) == ("42", 1)
    assert execution.logs.stdout == ["out\n"] == seen and execution.logs.stderr == ["err\n"]
    assert code.run_code("x += 1; x").text == "42"
    error = code.run_code("1/0").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1/0" in error.traceback
    shown = code.run_code(
        "class Rich:\n"
        "    def _repr_html_(self): return '<b>r</b>'\n"
        "    def _repr_png_(self): return b'png'\n"
        "    def __repr__(self): return 'rich'\n"
        "display(5)\nRich()"
    ).results
    assert [(one.text, one.html, one.png, one.is_main_result) for one in shown] == [
        ("5", None, None, False),
        ("rich", "<b>r</b>", "cG5n", True),
    ]
    assert code.run_code("None").results == []
    env = "import os; os.environ.get('ONLY_ONCE')"
    assert code.run_code(env, envs={"ONLY_ONCE": "1"}).text == "'1'"
    assert code.run_code(env).text is None
    with pytest.raises(SandboxException, match="no variable"):
        code.run_code(env, envs={"A=B": "1"})
    assert code.run_code("import os; os.getcwd()").text == "'/home/user'"


def test_variables_are_set_for_one_piece_of_code_alone(code: CodeSandbox) -> None:
    code.run_code("import os, time\ndef who(): return os.environ.get('WHO')")

    def one(number: int) -> str | None:
        envs = {"WHO": str(number)} if number % 2 else {}
        return code.run_code("before = who(); time.sleep(0.02); before, who()", envs=envs).text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert found == [str((str(n), str(n)) if n % 2 else (None, None)) for n in range(8)]


def test_contexts_are_apart(code: CodeSandbox) -> None:
    one, two = code.create_code_context(), code.create_code_context(cwd="/tmp")
    assert (two.language, two.cwd) == ("python", "/tmp")
    code.run_code("mine = 1", context=one)
    assert code.run_code("mine", context=two).error is not None
    assert code.run_code("import os; os.getcwd()", context=two).text == "'/tmp'"
    assert {one.id, two.id} <= {context.id for context in code.list_code_contexts()}
    code.restart_code_context(one)
    assert code.run_code("mine", context=one).error is not None
    code.remove_code_context(one)
    assert one.id not in {context.id for context in code.list_code_contexts()}
    with pytest.raises(NotFoundException):
        code.run_code("1", context=one)
    with pytest.raises(SandboxException):
        code.run_code("1", language="r")
    with pytest.raises(SandboxException):
        code.create_code_context(cwd="/there/is/none")


def test_code_that_takes_too_long_keeps_nobody_waiting(code: CodeSandbox) -> None:
    code.run_code("kept = 1")
    with pytest.raises(TimeoutException):
        code.run_code("while True: pass", timeout=1)
    assert code.run_code("kept").text == "1"


def test_code_through_a_pause(code: CodeSandbox) -> None:
    context = code.create_code_context()
    code.run_code("held = [1, 2]", context=context)
    code.pause()
    woken = CodeSandbox.connect(code.sandbox_id, timeout=600)
    assert woken.run_code("held", context=context).text == "[1, 2]"


def test_code_that_a_pause_interrupts_is_no_result(code: CodeSandbox) -> None:
    ended: list[BaseException] = []
    context = code.create_code_context()

    def work() -> None:
        try:
            long = "import os, time; open('/tmp/begun', 'w')\nwhile not os.path.exists('/tmp/end'):"
            code.run_code(long + " time.sleep(0.02)", context=context, envs={"ONCE": "1"})
        except SandboxException as error:
            ended.append(error)

    working = threading.Thread(target=work)
    working.start()
    eventually(lambda: code.files.exists("/tmp/begun"))
    code.pause()
    working.join(20)
    assert [type(error) for error in ended] == [TimeoutException]
    woken = CodeSandbox.connect(code.sandbox_id, timeout=600)
    # It goes on where it was; what is run next waits for it, and has none of its variables.
    woken.files.write("/tmp/end", "")
    assert woken.run_code("os.environ.get('ONCE')", context=context).results == []
    # Who wants its context for something else has it begin anew.
    woken.restart_code_context(context)
    assert woken.run_code("1", context=context).text == "1"


def test_the_asynchronous_interpreter(code: CodeSandbox) -> None:
    async def use() -> None:
        box = await AsyncCodeSandbox.connect(code.sandbox_id)
        assert (await box.run_code("6 * 7")).text == "42"
        context = await box.create_code_context()
        assert (await box.run_code("a = 1; a", context=context)).text == "1"
        await box.restart_code_context(context)
        assert context.id in {one.id for one in await box.list_code_contexts()}
        await box.remove_code_context(context)
        with pytest.raises(NotFoundException):
            await box.run_code("a", context=context)

    asyncio.run(use())


# -- who may ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(shared_server: ServerProcess) -> str:
    with shared_server.client() as client:
        return str(client.tokens.create("stranger").token)


def test_keys_and_names_that_are_wrong(stranger: str) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="wrong")
    with pytest.raises(SandboxException) as raised:
        Sandbox.create("no-such-template")
    assert raised.value.status_code == 404
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nonsense")
    for options in (
        {"volume_mounts": {"/mnt": "volume"}},
        {"network": {"rules": {"a.example": [{"transform": {"headers": {"a": "b"}}}]}}},
        {"lifecycle": {"on_timeout": {"action": "pause", "mode": "filesystem"}}},
    ):
        with pytest.raises(SandboxException) as raised:
            Sandbox.create(**options)
        assert raised.value.status_code == 501


def test_another_tenant_sees_nothing(box: Sandbox, stranger: str) -> None:
    known = box.sandbox_id
    for call in (
        lambda: Sandbox.connect(known, api_key=stranger),
        lambda: Sandbox.get_info(known, api_key=stranger),
        lambda: Sandbox.pause(known, api_key=stranger),
        lambda: Sandbox.set_timeout(known, 10, api_key=stranger),
        lambda: Sandbox.fork(known, api_key=stranger),
        lambda: Sandbox.create_snapshot(known, api_key=stranger),
        lambda: Sandbox.get_metrics(known, api_key=stranger),
        lambda: Sandbox.update_network(known, {}, api_key=stranger),
    ):
        with pytest.raises(SandboxNotFoundException):
            call()
    assert Sandbox.kill(known, api_key=stranger) is False
    assert Sandbox.list(api_key=stranger).next_items() == []
    taken = box.create_snapshot()
    assert Sandbox.delete_snapshot(taken.snapshot_id, api_key=stranger) is False
    with pytest.raises(SandboxException):
        Sandbox.create(taken.snapshot_id, api_key=stranger)
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True


AGENT_ROUTES = [
    ("GET", "/health"),
    ("GET", "/files?path=/etc/hostname"),
    ("POST", "/files?path=/tmp/x"),
    ("POST", "/execute"),
    ("GET", "/contexts"),
    ("POST", "/contexts"),
    ("DELETE", "/contexts/default"),
    ("POST", "/contexts/default/restart"),
    *(
        ("POST", f"/process.Process/{method}")
        for method in (
            *("Start", "Connect", "List", "Update", "SendInput", "StreamInput", "SendSignal"),
            "CloseStdin",
        )
    ),
    *(
        ("POST", f"/filesystem.Filesystem/{method}")
        for method in (
            *("Stat", "MakeDir", "Move", "ListDir", "Remove", "WatchDir", "CreateWatcher"),
            *("GetWatcherEvents", "RemoveWatcher"),
        )
    ),
]


def test_only_its_own_token_opens_a_sandbox(
    box: Sandbox, shared_server: ServerProcess, stranger: str
) -> None:
    other = Sandbox.create(api_key=stranger)
    token = other.connection_config.sandbox_headers["X-Access-Token"]
    with httpx.Client(base_url=shared_server.url) as http:
        for method, path in AGENT_ROUTES:
            for name in (box.sandbox_id, "ses-" + "0" * 24, "nonsense"):
                headers = {"E2b-Sandbox-Id": name}
                assert http.request(method, path, headers=headers).status_code == 401, path
                for wrong in (token, shared_server.token, "nonsense"):
                    answer = http.request(method, path, headers=headers | {"X-Access-Token": wrong})
                    assert answer.status_code == 404, (path, wrong)
        # The token of ports opens code, as the SDK uses it, and nothing else.
        headers = {
            "E2b-Sandbox-Id": box.sandbox_id,
            "E2B-Traffic-Access-Token": str(box.traffic_access_token),
        }
        assert http.get("/contexts", headers=headers).status_code == 200
        assert http.get("/files?path=/etc/hostname", headers=headers).status_code == 401
    other.kill(api_key=stranger)


def test_many_asynchronous_sandboxes() -> None:
    async def use() -> None:
        boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(5)))
        await asyncio.gather(
            *(box.files.write("number", str(number)) for number, box in enumerate(boxes))
        )
        results = await asyncio.gather(*(box.commands.run("cat number") for box in boxes))
        assert [result.stdout for result in results] == list("01234")
        assert all(await asyncio.gather(*(box.kill() for box in boxes)))

    asyncio.run(use())


def test_a_restart_of_the_server_changes_nothing(server: ServerProcess) -> None:
    def point() -> dict[str, Any]:
        return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.token}

    box = Sandbox.create(timeout=600, **point())
    handle = box.commands.run("sleep 1; head -c 30000000 /dev/zero; touch done", background=True)
    signed = box.download_url("/etc/hostname")
    old = server.url
    server.restart()
    again = Sandbox.connect(box.sandbox_id, **point())
    token = box.connection_config.sandbox_headers["X-Access-Token"]
    assert again.connection_config.sandbox_headers["X-Access-Token"] == token
    assert httpx.get(signed.replace(old, server.url)).status_code == 200
    assert handle.pid in {one.pid for one in again.commands.list()}
    # Nobody reads its output; it is not held back for that.
    eventually(lambda: again.files.exists("done"))
    again.kill()


def test_the_client_of_the_api_is_not_disturbed(client: Sojourn) -> None:
    assert client.status().sessions is not None


# -- ports --------------------------------------------------------------------------------------


def test_every_port_has_an_address(box: Sandbox) -> None:
    box.files.write("site/index.html", "served inside")
    box.commands.run("cd site && exec python3 -m http.server 8000", background=True, timeout=0)
    host = box.get_host(8000)
    assert host.startswith(f"8000-{box.sandbox_id}.localhost:")

    def get(where: str) -> httpx.Response:
        # Names below localhost are not looked up everywhere.
        number = where.rpartition(":")[2]
        return httpx.get(f"http://127.0.0.1:{number}/index.html", headers={"Host": where})

    assert get(host).text == "served inside"
    assert get(host.replace(box.sandbox_id, "ses-" + "0" * 24)).status_code == 404
    # A paused sandbox is not woken unless it was made so.
    box.pause()
    assert get(host).status_code == 503
    Sandbox.connect(box.sandbox_id)
    assert get(host).text == "served inside"


def test_output_nobody_reads_holds_nothing_back_after_a_wake_by_a_port() -> None:
    box = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.commands.run(
        "python3 -m http.server 8000 & while [ ! -e /tmp/go ]; do sleep 0.05; done;"
        " head -c 40000000 /dev/zero; touch done; wait",
        background=True,
        timeout=0,
    )
    host = box.get_host(8000)
    address = f"http://127.0.0.1:{host.rpartition(':')[2]}/"
    assert httpx.get(address, headers={"Host": host}, timeout=60).status_code == 200
    box.pause()
    # Woken by the port alone; no client of the SDK's asks anything until it is done.
    assert httpx.get(address, headers={"Host": host}, timeout=60).status_code == 200
    with Sojourn(url=box.connection_config.api_url, token=box.connection_config.api_key) as own:
        session = own.sessions.get(str(session_id(box.sandbox_id)))
        session.exec(["touch", "/tmp/go"])
        eventually(lambda: session.exec(["test", "-e", "/home/user/done"]).ok, timeout=60)
    box.kill()


def test_ports_of_other_sessions_stay_closed(box: Sandbox, client: Sojourn) -> None:
    own = client.sessions.create()
    host = box.get_host(8000).replace(box.sandbox_id, sandbox_id(own.id))
    number = host.rpartition(":")[2]
    answer = httpx.get(f"http://127.0.0.1:{number}/", headers={"Host": host})
    assert answer.status_code == 404
    own.delete()


def test_a_request_at_a_port_wakes_where_that_was_asked_for() -> None:
    box = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
    host = box.get_host(8000)
    address = f"http://127.0.0.1:{host.rpartition(':')[2]}/"
    assert httpx.get(address, headers={"Host": host}).status_code == 200
    box.pause()
    assert httpx.get(address, headers={"Host": host}, timeout=60).status_code == 200
    assert box.get_info().state is SandboxState.RUNNING
    box.kill()
