"""Each check of the doctor, with both outcomes; and that trying leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sojourn.cli import doctor as command
from sojourn.errors import HostUnfit, ResumeFailed, SojournError
from sojourn.node import doctor, mounts, smoke, tools
from sojourn.node.doctor import Finding, Host, State
from sojourn.node.isolation import cgroups, processes

GIB = 1024**3


class FakeHost(Host):
    """A host that is well unless told otherwise."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(Path("/data"))
        self.facts: dict[str, Any] = {
            "euid": 0,
            "kernel": "6.12.0-amd64",
            "overlay": None,
            "runsc": "release 20240729.0 at /r",
            "supervisor": "/s",
            "templates": ["debian"],
            "smoke": "went on",
            "limiting_controllers": frozenset({"cpu", "memory", "pids", "io"}),
            "program": "/usr/bin/bwrap",
            "reflink": True,
            "file_system": ("xfs", "rw,prjquota"),
            "free_bytes": 100 * GIB,
            "unshare": None,
            "now": 1.8e9,
            "clock_synchronised": True,
            "descriptors": 1_000_000,
        } | facts
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in {"facts", "asked"} or name not in object.__getattribute__(self, "facts"):
            return object.__getattribute__(self, name)

        def answer(*_: str) -> Any:
            self.asked.append(name)
            value = self.facts[name]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_good_host_is_healthy() -> None:
    findings = doctor.examine(FakeHost())
    assert {finding.state for finding in findings} == {State.OK}
    assert doctor.healthy(findings)
    assert len(by_name(findings)) == len(findings) == len(doctor.CHECKS) + 1


REFUSED = OSError(1, "Operation not permitted")

BAD: list[tuple[str, dict[str, Any], State]] = [
    ("root", {"euid": 1000}, State.FAILED),
    ("kernel", {"kernel": "4.19.0"}, State.FAILED),
    ("kernel", {"kernel": "5.9.16-x"}, State.FAILED),
    ("kernel", {"kernel": "strange"}, State.FAILED),
    ("namespaces", {"unshare": REFUSED}, State.FAILED),
    ("user namespaces", {"unshare": REFUSED}, State.FAILED),
    ("overlay", {"overlay": HostUnfit("no such file system")}, State.FAILED),
    ("overlay", {"overlay": REFUSED}, State.FAILED),
    ("runsc", {"runsc": HostUnfit("too old", next_step="do")}, State.FAILED),
    ("supervisor", {"supervisor": HostUnfit("missing", next_step="do")}, State.FAILED),
    ("template", {"templates": []}, State.FAILED),
    ("space", {"free_bytes": 1 * GIB}, State.FAILED),
    ("space", {"free_bytes": 5 * GIB}, State.NOTE),
    ("descriptors", {"descriptors": 1024}, State.FAILED),
    ("clock", {"now": 0.0}, State.FAILED),
    ("clock", {"clock_synchronised": False}, State.NOTE),
    ("cgroup", {"limiting_controllers": frozenset({"cpu"})}, State.NOTE),
    ("bubblewrap", {"program": None}, State.NOTE),
    ("reflink", {"reflink": False}, State.NOTE),
    ("project quota", {"file_system": ("ext4", "rw,usrquota")}, State.NOTE),
    ("sandbox", {"smoke": HostUnfit("the count went back", next_step="do")}, State.FAILED),
    ("sandbox", {"smoke": ResumeFailed("no boot")}, State.FAILED),
    ("sandbox", {"smoke": OSError("broken")}, State.FAILED),
]


@pytest.mark.parametrize(("name", "facts", "state"), BAD)
def test_each_lack_is_found_with_its_cure(name: str, facts: dict[str, Any], state: State) -> None:
    findings = doctor.examine(FakeHost(**facts))
    finding = by_name(findings)[name]
    assert finding.state is state
    assert finding.detail
    assert finding.cure
    assert doctor.healthy(findings) is (state is not State.FAILED)


def test_every_check_has_a_bad_case() -> None:
    names = {finding.name for finding in doctor.examine(FakeHost())}
    assert {name for name, *_ in BAD} == names


def test_a_check_that_cannot_be_made_is_a_failure_not_a_crash() -> None:
    findings = doctor.examine(FakeHost(free_bytes=OSError("gone"), file_system=OSError("gone")))
    failed = {finding.name for finding in findings if finding.state is State.FAILED}
    assert failed == {"space", "overlay", "reflink", "quota"}


def test_the_sandbox_is_not_tried_in_vain() -> None:
    host = FakeHost(templates=[])
    assert by_name(doctor.examine(host))["sandbox"].state is State.SKIPPED
    assert "smoke" not in host.asked
    host = FakeHost()
    assert by_name(doctor.examine(host, smoke=False))["sandbox"].state is State.SKIPPED
    assert "smoke" not in host.asked


@pytest.mark.parametrize(("facts", "code"), [({}, 0), ({"euid": 5}, 117), ({"program": None}, 0)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], code: int) -> None:
    monkeypatch.setattr(doctor, "Host", lambda data: FakeHost(**facts))
    for arguments in ([], ["--json"]):
        result = CliRunner().invoke(command.command, arguments, standalone_mode=False)
        assert result.return_value == code
        assert "bubblewrap" in result.output


# -- the state of a sandbox before and after ------------------------------------------------

GOOD = {"count": 5, "linear": True, "mapped": 5, "rows": 5, "integrity": "ok", "clock": 100.0}


def test_a_continued_state_passes() -> None:
    smoke.judge(GOOD, GOOD | {"count": 7, "mapped": 7, "rows": 7}, 100.2)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"count": 4, "mapped": 4, "rows": 4}, "went back"),
        ({"linear": False}, "gap"),
        ({"mapped": 6}, "mapped"),
        ({"rows": 4}, "rows"),
        ({"integrity": "malformed"}, "malformed"),
        ({"clock": 40.0}, "clock"),
    ],
)
def test_every_difference_is_told(after: dict[str, Any], why: str) -> None:
    with pytest.raises(HostUnfit, match=why):
        smoke.judge(GOOD, GOOD | after, 100.0)


# -- the real host --------------------------------------------------------------------------


def test_the_nearest_existing_directory_is_judged(tmp_path: Path) -> None:
    host = Host(tmp_path / "not" / "yet")
    assert host.existing() == tmp_path
    assert host.free_bytes() > 0
    assert host.file_system()[0]
    assert host.reflink() in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.privileged
def test_trying_an_overlay_leaves_nothing(tmp_path: Path) -> None:
    Host(tmp_path).overlay()
    assert list(tmp_path.iterdir()) == []
    assert mounts.mounts_under(tmp_path) == []


def assert_nothing_left(directory: Path) -> None:
    assert list(directory.iterdir()) == []
    assert mounts.mounts_under(directory) == []
    lines = [processes.command_line(pid) for pid in processes.all_pids()]
    assert [line for line in lines if any(str(directory) in word for word in line)] == []
    assert not any(path.name.startswith("sojourn-smoke-") for path in Path("/run").iterdir())
    groups = [tree / f"sojourn-smoke-{os.getpid()}-*" for tree in cgroup_tops()]
    assert [found for group in groups for found in group.parent.glob(group.name)] == []


def cgroup_tops() -> list[Path]:
    found = cgroups.detect()
    return [*found.v1.values(), *([found.v2] if found.v2 else [])]


@pytest.mark.privileged
def test_a_sandbox_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    assert "went on" in smoke.run(tmp_path)
    assert_nothing_left(tmp_path)


@pytest.mark.privileged
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('no reason')", "ended: no reason"),
        ("print('listening', flush=True); import time; time.sleep(600)", "does not answer"),
    ],
)
def test_a_sandbox_that_fails_the_check_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(smoke, "_PROGRAM", program)
    with pytest.raises(HostUnfit, match=why):
        smoke.run(tmp_path)
    assert_nothing_left(tmp_path)


@pytest.mark.privileged
def test_a_sandbox_that_does_not_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("SOJOURN_SUPERVISOR", str(broken))
    with pytest.raises(SojournError):
        smoke.run(work)
    assert_nothing_left(work)


def test_a_host_without_tools_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOJOURN_RUNSC", "SOJOURN_SUPERVISOR", "SOJOURN_TEMPLATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    findings = by_name(doctor.examine(Host(tmp_path), smoke=False))
    for name in ("runsc", "template"):
        assert findings[name].state is State.FAILED
        assert findings[name].cure == tools.SETUP_CURE
