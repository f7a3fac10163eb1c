"""The persistent interpreter: exact output, lasting state, bounds, and loss that is told."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from sojourn.errors import CommandNotStarted, Interrupted
from sojourn.node import interpreter
from sojourn.node.interpreter import Interpreter
from sojourn.node.link import GuestLink
from sojourn.wire.guest import ProcessSpec
from support.guests import HostedSupervisor, hosted, supervisor_program  # noqa: F401


@hosted()
async def test_values_output_and_state(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    result = await python.run("x = 20\nprint('hello')\nx * 2 + 2")
    assert (result.text, result.stdout, result.stderr) == ("42", "hello\n", "")
    assert (result.execution_count, result.restarted, result.error) == (1, False, None)
    result = await python.run("import sys; sys.stderr.write('e'); x")
    assert (result.text, result.stderr, result.execution_count) == ("20", "e", 2)
    assert (await python.run("x = 1")).text is None
    assert (await python.run("None")).text is None
    assert (await python.run("")).text is None
    assert (await python.run("_ if False else 'é\\udcff'")).text == "'é\\udcff'"
    # Halves of UTF-16 pairs are no text: shown as Python writes them.
    half = await python.run("class A:\n def __repr__(s): return '\\ud800ü\\U0001f600'\nA()")
    assert half.text == "\\ud800ü😀"
    raised = (await python.run("raise ValueError('\\udcff')")).error
    assert raised is not None and raised.value == "\\udcff"
    assert (await python.run("__name__")).text == "'__main__'"
    other = await python.run("'x' in globals()", context="other")
    assert (other.text, other.execution_count) == ("False", 1)
    assert (await python.run("x")).text == "1"


@hosted()
async def test_all_output_is_caught(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    result = await python.run(
        "import os, subprocess, ctypes\n"
        "print('a')\nsubprocess.run(['sh', '-c', 'echo b; echo c >&2'])\n"
        "os.write(1, b'd\\n')\nctypes.CDLL(None).write(1, b'e\\n', 2)\nprint('f', end='')"
    )
    assert result.stdout == "a\nb\nd\ne\nf"
    assert result.stderr == "c\n"
    result = await python.run("import sys\nfor i in range(200000): print(i)")
    assert result.stdout == "".join(f"{n}\n" for n in range(200000))
    assert not result.truncated
    result = await python.run("print('x' * 12_000_000)")
    assert len(result.stdout) == interpreter.OUTPUT_LIMIT
    assert result.truncated
    result = await python.run("'y' * 3_000_000")
    assert result.truncated and result.text is not None and len(result.text) == 1 << 20
    assert (await python.run("1")).truncated is False


@hosted()
async def test_errors(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    await python.run("def f():\n    return 1 / 0")
    result = await python.run("print('before')\nf()")
    assert result.stdout == "before\n" and result.error is not None
    assert (result.error.name, result.error.value) == ("ZeroDivisionError", "division by zero")
    lines = result.error.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert '  File "<cell 1>", line 2, in f' in lines and "    return 1 / 0" in lines
    assert not any("<string>" in line for line in lines)
    for code, name in (
        ("syntax error(", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("input()", "EOFError"),
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E"),
        ("class R:\n  def __repr__(self): return 1 / 0\nR()", "ZeroDivisionError"),
    ):
        result = await python.run(code)
        assert result.error is not None and result.error.name == name, code
    assert (await python.run("f.__name__")).text == "'f'"


@hosted()
async def test_rich_forms(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    result = await python.run(
        "class R:\n"
        "  def _repr_html_(self): return '<b>x</b>'\n"
        "  def _repr_png_(self): return b'\\x89PNG'\n"
        "  def _repr_svg_(self): raise ValueError\n"
        "  def __repr__(self): return 'R'\n"
        "display(R())\nR()"
    )
    assert result.text == "R"
    assert result.images == [b"\x89PNG", b"\x89PNG"]
    assert [sorted(one) for one in result.results] == [
        ["image/png", "text/html", "text/plain"],
        ["image/png", "text/html"],
    ]
    assert result.results[1]["text/html"] == "<b>x</b>"
    # Figures, by a stand-in for matplotlib that has what is used of it.
    result = await python.run(
        "import sys, types\n"
        "class Figure:\n"
        "  def savefig(self, to, format, bbox_inches): to.write(b'figure ' + format.encode())\n"
        "pyplot = types.ModuleType('matplotlib.pyplot')\nopen_ = [1, 2]\n"
        "pyplot.get_fignums = lambda: list(open_)\npyplot.figure = lambda n: Figure()\n"
        "pyplot.close = lambda what: open_.clear()\nsys.modules['matplotlib.pyplot'] = pyplot"
    )
    assert result.images == [b"figure png"] * 2
    assert (await python.run("1")).images == []


@hosted()
async def test_await_at_the_top_level(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    result = await python.run(
        "import asyncio\nawait asyncio.sleep(0.001)\nawait asyncio.sleep(0, 5)"
    )
    assert result.text == "5"
    result = await python.run("from __future__ import annotations")
    result = await python.run("def g(x: nothing): pass\ng.__annotations__")
    assert result.text == "{'x': 'nothing'}"


@hosted()
async def test_a_timeout_interrupts(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    python = Interpreter(guest)
    await python.run("x = 5")
    result = await python.run("print('on')\nwhile True: pass", timeout=0.2)
    assert result.error is not None and result.error.name == "TimeoutError"
    assert result.stdout == "on\n"
    after = await python.run("x", timeout=20)
    assert (after.text, after.restarted) == ("5", False)


@hosted()
async def test_what_does_not_listen_is_killed_and_said_so(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    python = Interpreter(guest)
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = await python.run(deaf, timeout=0.2)
    assert result.error is not None and result.error.name == "TimeoutError"
    after = await python.run("'x' in globals()")
    assert (after.text, after.restarted) == ("False", True)
    assert (await python.run("1")).restarted is False
    result = await python.run("print('last', flush=True)\nimport os; os._exit(4)")
    assert result.error is not None and result.error.name == "InterpreterDied"
    assert "4" in result.error.value and result.stdout == "last\n"
    assert (await python.run("1")).restarted is True


@hosted()
async def test_one_that_was_killed_in_between_is_replaced(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    python = Interpreter(guest)
    await python.run("1")
    (state,) = await guest.processes()
    await guest.signal(state.id, signal.SIGKILL)
    await guest.wait(state.id)
    result = await python.run("2")
    assert (result.text, result.restarted) == ("2", True)


@hosted()
async def test_another_node_goes_on_with_it(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    """Also when a request of the former one is still at work: its answer is not ours."""
    await Interpreter(guest).run("x = 7")
    assert (await Interpreter(guest).run("x")).text == "7"
    first = asyncio.ensure_future(
        Interpreter(guest).run(
            f"import os, time\nopen({str(base / 'begun')!r}, 'w')\n"
            f"while not os.path.exists({str(base / 'go')!r}): time.sleep(0.01)\n"
            "print('theirs'); 'theirs'"
        )
    )
    while not (base / "begun").exists():
        await asyncio.sleep(0.01)
    await guest.interrupt("the server was restarted")
    with pytest.raises(Interrupted):
        await first
    second = asyncio.ensure_future(Interpreter(guest).run("print('ours'); x"))
    await guest.info()
    (base / "go").touch()
    result = await second
    assert (result.text, result.stdout, result.restarted) == ("7", "ours\n", False)


@hosted()
async def test_a_caller_that_goes_away_does_not_block_the_next(
    guest: GuestLink, _: HostedSupervisor, base: Path
) -> None:
    python = Interpreter(guest)
    await python.run("x = 1")
    first = asyncio.ensure_future(
        python.run(f"import time\nopen({str(base / 'begun')!r}, 'w')\ntime.sleep(600)")
    )
    while not (base / "begun").exists():
        await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await python.run("x")).text == "1"


@hosted()
async def test_requests_of_one_context_wait_for_each_other(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    python = Interpreter(guest)
    results = await asyncio.gather(*(python.run(f"print({n}); {n}") for n in range(20)))
    assert [(one.text, one.stdout) for one in results] == [(str(n), f"{n}\n") for n in range(20)]


@hosted()
async def test_descriptors_and_forks_of_the_code_do_no_harm(
    guest: GuestLink, _: HostedSupervisor, __: Path
) -> None:
    python = Interpreter(guest)
    result = await python.run("import os\nif os.fork() == 0: print('child')\nos.wait() and 1")
    assert (result.text, result.stdout) == ("1", "child\n")
    assert (await python.run("2")).text == "2"
    await python.run("os.close(0); os.close(1); os.close(2)")
    assert (await python.run("40 + 2")).text == "42"
    assert (await python.run("os.closerange(3, 100)")).error is None
    assert (await python.run("40 + 3")).text == "43"


@hosted()
async def test_code_of_a_pause(guest: GuestLink, _: HostedSupervisor, base: Path) -> None:
    python = Interpreter(guest)
    running = asyncio.ensure_future(
        python.run(
            f"import os, time\nopen({str(base / 'begun')!r}, 'w')\n"
            f"while not os.path.exists({str(base / 'go')!r}): time.sleep(0.01)\nprint('x' * 100000)"
        )
    )
    while not (base / "begun").exists():
        await asyncio.sleep(0.01)
    for _round in range(3):
        await guest.detach(10)
        await guest.attach(10)
    (base / "go").touch()
    assert (await running).stdout == "x" * 100000 + "\n"


@hosted()
async def test_a_session_without_python(guest: GuestLink, _: HostedSupervisor, __: Path) -> None:
    # In the supervisor's own mount namespace, every directory that may hold one becomes empty.
    for directory in (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/sbin"):
        await guest.run(ProcessSpec([b"mount", b"-t", b"tmpfs", b"none", directory]))
    hide = b"for f in /usr/bin/python3* /bin/python3*; do mount --bind /dev/null $f; done"
    await guest.run(ProcessSpec([b"/bin/sh", b"-c", hide]))
    with pytest.raises(CommandNotStarted) as caught:
        await Interpreter(guest).run("1")
    assert "python3" in caught.value.message
