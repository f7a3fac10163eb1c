"""Reading what runsc leaves behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, ResumeFailed
from sojourn.model.sessions import Limits
from sojourn.node.isolation import gvisor_state
from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.gvisor_config import oci_config
from sojourn.node.isolation.gvisor_host import Supervisors

ID = "sbx_" + "0" * 24


def test_short_state_directory_is_used_as_it_is() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # that of pytest may be long
        state = Path(short, "s")
        assert gvisor_state.open_state(state) in (state, state.resolve())


def test_long_state_directory_gets_a_stable_short_name(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    short = gvisor_state.open_state(long)
    try:
        assert len(str(short)) <= 64
        assert short.resolve() == long
        assert gvisor_state.open_state(long) == short
        other = gvisor_state.open_state(tmp_path / ("y" * 100))
        other_target = other.resolve()
        other.unlink()
        assert other != short and other_target == tmp_path / ("y" * 100)
        short.unlink()
        short.symlink_to(tmp_path)
        with pytest.raises(HostUnfit):
            gvisor_state.open_state(long)
    finally:
        short.unlink(missing_ok=True)


def test_state_files_are_told_apart_exactly(tmp_path: Path) -> None:
    longer = ID + "1"
    for name in (ID, longer):
        for suffix in ("state", "lock"):
            (tmp_path / f"{name}_sandbox:{name}.{suffix}").touch()
        (tmp_path / f"runsc-{name}.sock").touch()
    (tmp_path / "supervisors").mkdir()
    (tmp_path / "unrelated.txt").touch()
    assert gvisor_state.known_sandboxes(tmp_path) == {ID, longer}
    gvisor_state.remove_state_files(tmp_path, ID)
    assert gvisor_state.known_sandboxes(tmp_path) == {longer}
    gvisor_state.remove_state_files(tmp_path, ID)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"sandbox":null}', b'{"sandbox":{"pid":"x"},"goferPid":0}', b"\xff"],
)
def test_broken_state_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{ID}_sandbox:{ID}.state").write_bytes(content)
    assert gvisor_state.recorded_pids(tmp_path, ID) == set()


def test_state_file_names_both_processes(tmp_path: Path) -> None:
    record = {"goferPid": 20, "sandbox": {"pid": 30}}
    (tmp_path / f"{ID}_sandbox:{ID}.state").write_text(json.dumps(record))
    assert gvisor_state.recorded_pids(tmp_path, ID) == {20, 30}


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", None),
        ("\n\n", None),
        ("panic: it broke\n\ngoroutine 1 [running]:\nmain.main()", "panic: it broke"),
        ("W line\nfatal error: out of memory\nmore", "fatal error: out of memory"),
        ('{"msg":"first","level":"error"}\n{"msg":"last\\nstack"}\n', "last"),
        ("I0101 fine\nW0101 error: no such file\n", "error: no such file"),
        ("only words", "only words"),
    ],
)
def test_telling_line(log: str, line: str | None) -> None:
    assert gvisor_state.telling_line(log) == line


def test_bundle_is_found_in_either_spelling() -> None:
    assert gvisor_state.bundle_of(["runsc", "--bundle=/a/b", "x"]) == Path("/a/b")
    assert gvisor_state.bundle_of(["runsc", "run", "-bundle", "/a/b", "x"]) == Path("/a/b")
    assert gvisor_state.bundle_of(["runsc", "-bundle"]) is None
    assert gvisor_state.bundle_of([]) is None


def test_stopped_tasks_are_told_from_running_ones() -> None:
    stopped = "goroutine 1 [x]:\nkernel.(*Task).doStop(0x1)\nkernel.(*Task).run(0x1, 0x2)"
    running = "goroutine 2 [x]:\nplatform.Switch()\nkernel.(*Task).run(0x1, 0x2)"
    other = "goroutine 3 [x]:\nurpc.serve()"
    assert gvisor_state.all_tasks_stopped(f"{other}\n\n{stopped}")
    assert not gvisor_state.all_tasks_stopped(f"{stopped}\n\n{running}\n\n{other}")
    assert not gvisor_state.all_tasks_stopped(other)


def test_version_of_a_missing_runsc_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(HostUnfit) as caught:
        gvisor_state.version(tmp_path / "runsc")
    assert "SOJOURN_RUNSC" in caught.value.next_step


def test_configuration_is_the_same_for_the_same_specification() -> None:
    spec = SandboxSpec(
        sandbox=ID,
        directory=Path("/d"),
        root=Path("/d/root"),
        control=Path("/d/control"),
        supervisor=Path("/s"),
        argv=["--max-processes", "5"],
        env={"A": "1"},
        hostname="h",
        limits=Limits(memory_bytes=1024**3),
    )
    config = oci_config(spec, Path("/kept"))
    assert config == oci_config(spec, Path("/kept"))
    assert config["process"]["env"] == ["A=1"]
    supervisor = ["/run/sojourn/supervisor", "--own-network"]
    assert config["process"]["args"] == [*supervisor, "--max-processes", "5"]
    targets = [mount["destination"] for mount in config["mounts"]]
    assert targets.index("/run") < targets.index("/run/sojourn/node")
    assert targets.index("/dev") < targets.index("/dev/shm")
    sources = {mount["source"] for mount in config["mounts"]}
    assert "/kept" in sources and "/s" not in sources


class TestSupervisors:
    def test_copies_outlive_the_original(self, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_bytes(b"one")
        kept = Supervisors(tmp_path / "kept")
        first = kept.keep(program)
        assert kept.keep(program) == first
        program.unlink()
        program.write_bytes(b"other")
        second = kept.keep(program)
        assert (first.read_bytes(), second.read_bytes()) == (b"one", b"other")
        assert first.stat().st_mtime_ns == second.stat().st_mtime_ns == 0
        image = tmp_path / "image"
        image.mkdir()
        kept.attach(image, first.name)
        assert Supervisors(tmp_path / "kept").of_image(image, program) == first

    def test_an_image_carries_its_supervisor_to_another_node(self, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_bytes(b"one")
        here = Supervisors(tmp_path / "here")
        image = tmp_path / "image"
        image.mkdir()
        here.attach(image, here.keep(program).name)
        program.unlink()
        program.write_bytes(b"other")

        there = Supervisors(tmp_path / "there")
        found = there.of_image(image, program)
        assert found.read_bytes() == b"one" and found.parent == tmp_path / "there"

        (image / "supervisor.bin").unlink()
        (image / "supervisor.bin").write_bytes(b"forged")
        with pytest.raises(ResumeFailed):
            Supervisors(tmp_path / "elsewhere").of_image(image, program)

    def test_note_cannot_lead_elsewhere(self, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_bytes(b"one")
        kept = Supervisors(tmp_path / "kept")
        (tmp_path / "supervisor").write_text("../program")
        with pytest.raises(ResumeFailed):
            kept.of_image(tmp_path, program)

    def test_missing_program_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(ResumeFailed, match="missing"):
            Supervisors(tmp_path / "kept").keep(tmp_path / "missing")
