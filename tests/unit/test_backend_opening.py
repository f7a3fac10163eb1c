"""URLs and variables of the object store: what they mean, and what is refused without a secret."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sojourn.errors import InvalidRequest, SojournError
from sojourn.repository.backends import opening, retrying
from sojourn.repository.backends.local import LocalBackend
from sojourn.repository.backends.objects import ObjectBackend
from sojourn.repository.backends.opening import open_backend

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}


def test_directories_are_named_by_path_or_url(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, url in {
        "a": str(tmp_path / "a"),
        "b": "b",
        "c": "~/c",
        "d d": (tmp_path / "d d").as_uri(),
        "e": f"file://localhost{tmp_path}/e",
        "f%41": str(tmp_path / "f%41"),
        "g?h#i": str(tmp_path / "g?h#i"),
        "j?k#l": (tmp_path / "j?k#l").as_uri(),
        "m\udcff": (tmp_path / "m\udcff").as_uri(),
        "n\u00fc": f"FILE://{tmp_path}/n\u00fc",
    }.items():
        backend = open_backend(url)
        assert isinstance(backend, LocalBackend)
        assert backend.url == (tmp_path / name).as_uri()
        assert (tmp_path / name).is_dir()
        assert open_backend(backend.url).url == backend.url


def test_buckets_and_memory_are_named_by_url() -> None:
    for url, shown in {
        "s3://bucket": "s3://bucket",
        "s3://bucket/": "s3://bucket",
        "s3://my.bucket-1/some/pre_fix/": "s3://my.bucket-1/some/pre_fix",
        "memory:": "memory:",
        "S3://bucket/Prefix": "s3://bucket/Prefix",
        "MEMORY:": "memory:",
    }.items():
        backend = open_backend(url, options=KEYS)
        assert isinstance(backend, ObjectBackend)
        assert backend.url == shown
        assert "AKIAEXAMPLE" not in repr(backend) + str(vars(backend))


@pytest.mark.parametrize(
    "url",
    [
        "", "s3://", "s3:bucket", "s3:///prefix", "s3://B", "s3://bucket/a//b", "s3://bucket/../x",
        "s3://bucket:80/x", "s3://wJalrXUtnFEMI@bucket/x", "s3://AKIA:wJalrXUtnFEMI@bucket",
        "s3://bucket/x?key=wJalrXUtnFEMI", "s3://bucket#wJalrXUtnFEMI", "file://host/dir",
        "file:relative", "gs://bucket", "https://wJalrXUtnFEMI@example.com/x", "http://[x",
        "a\0b", "s3://bucket/a b", "~nobody-of-this-name/store",
    ],
)  # fmt: skip
def test_other_urls_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_backend(url, options=KEYS)
    assert "wJalrXUtnFEMI" not in str(refused.value) + repr(refused.value.details)


@pytest.mark.parametrize(
    "form",
    [
        "file://{}?q=1", "file://{}?", "file://{}#x", "file://{}#", "file://host{}", "file://",
        "file:", "file://{}%00", "file://{}%00/x", "file://{}/a\tb", "file://{}/a\n",
        " file://{}", "file://{} ", "FILE:relative", "S3:bucket", "memory:{}", "memory://{}",
        "s3://bucket/x?", "s3://bucket/x#", "s3://bucket/a\tb",
    ],
)  # fmt: skip
def test_no_part_of_a_url_is_passed_over(tmp_path: Path, monkeypatch, form: str) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises(InvalidRequest):
        open_backend(form.format(tmp_path / "store"), options=KEYS)
    assert [path.name for path in tmp_path.rglob("*")] == ["cwd"]


@pytest.mark.parametrize("name", [opening.TIMEOUT, opening.PATIENCE])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e9", " "])
def test_limits_of_time_must_be_seconds(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_backend("s3://bucket", options={**KEYS, name: value})
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:9000", "ftp://host", "http://", "https://AKIA:wJalrXUtnFEMI@host", "http://[::1"],
)
def test_endpoints_are_http_and_hold_no_credentials(endpoint: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with pytest.raises(InvalidRequest) as refused:
            open_backend("s3://bucket", options={**KEYS, name: endpoint})
        assert "wJalrXUtnFEMI" not in str(refused.value)


def test_settings_that_are_not_accepted_are_not_repeated() -> None:
    for name in ("AWS_DISABLE_BULK_DELETE", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):
        with pytest.raises(SojournError) as refused:
            open_backend("s3://bucket", options={**KEYS, name: "wJalrXUtnFEMI"})
        assert "wJalrXUtnFEMI" not in str(refused.value)


def test_a_bundle_of_authorities_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SojournError) as refused:
        open_backend("s3://bucket", options={**KEYS, "AWS_CA_BUNDLE": str(tmp_path / "none")})
    assert "AWS_CA_BUNDLE" in str(refused.value)


class Clock(threading.Event):
    """Time that passes by waiting alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 1000.0
        self.pauses: list[float] = []
        monkeypatch.setattr(retrying.time, "monotonic", lambda: self.now)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self.pauses.append(timeout)
            self.now += timeout
        return self.is_set()


def test_pauses_grow_and_end_with_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    tries = retrying.Patience(total=60, first=0.1, longest=5).begin(clock)
    while tries.pause():
        assert clock.now < 1060
    assert tries.made == len(clock.pauses) + 1
    assert 12 <= len(clock.pauses) <= 40
    for number, pause in enumerate(clock.pauses):
        longest = min(0.1 * 2**number, 5)
        assert longest / 2 <= pause <= longest


def test_one_more_try_is_made_however_long_the_first_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    tries = retrying.Patience(total=1).begin(clock)
    clock.now += 100
    assert tries.pause()
    assert not tries.pause()


def test_nothing_is_waited_for_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    tries = retrying.Patience().begin(clock)
    assert tries.pause()
    clock.set()
    assert not tries.pause()
    assert len(clock.pauses) == 1
