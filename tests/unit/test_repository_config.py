"""The repository's creation and its key's rotation, cut off anywhere, raced, and lied to."""

from __future__ import annotations

import threading

import msgspec
import pytest

from sojourn.errors import (
    IntegrityError,
    InvalidRequest,
    ObjectMissing,
    SojournError,
    StoreKeyInvalid,
    StoreUnreachable,
    Unsupported,
)
from sojourn.repository import config, keys
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.keys import PLAIN, wrap_root
from sojourn.repository.sealed import CONFIG, WRAPPED, seal
from support.packs import ROOT

OLD, NEW, OTHER = b"the old secret of ours", b"the new secret of ours", b"nobody's secret at all"


@pytest.fixture(autouse=True)
def quick_secrets(monkeypatch):
    """Wrapping is slow by design; its real cost is that of the tests of keys."""
    monkeypatch.setitem(keys._SCRYPT, "n", 1 << 4)


class CutOff:
    """A backend that dies at its n-th change: before it, or after it with the answer lost."""

    def __init__(self, inner, at: int, after: bool) -> None:
        self.inner = inner
        self.left = at
        self.after = after

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _change(self, act):
        self.left -= 1
        if self.left < 0:
            raise StoreUnreachable("cut off")
        if self.left == 0:
            if self.after:
                act()
            raise StoreUnreachable("cut off")
        return act()

    def put(self, *args, **options):
        return self._change(lambda: self.inner.put(*args, **options))

    def delete(self, keys):
        for key in keys:
            self._change(lambda key=key: self.inner.delete([key]))


def keys_of(backend) -> list[str]:
    return [info.key for info in backend.list("")]


def same(a, b) -> bool:
    return a[0] == b[0] and a[1].domain("t").naming == b[1].domain("t").naming


def put_config(backend, **changes) -> None:
    fields = {
        "format": 1,
        "id": "0" * 32,
        "created_at": 1.0,
        "encrypted": False,
        "parameters": dict(config.PARAMETERS),
        "root": ROOT,
    } | changes
    backend.put("config", seal(CONFIG, msgspec.msgpack.encode(fields), PLAIN, b"config"))


@pytest.mark.parametrize("secret", [None, OLD])
def test_what_was_made_is_opened(secret):
    backend = open_backend("memory:")
    made = config.create(backend, secret)
    assert same(made, config.open_existing(backend, secret))
    assert same(made, config.create(backend, secret))
    assert made[0].encrypted == made[1].encrypted == (secret is not None)
    assert len(keys_of(backend)) == (1 if secret is None else 2)


def test_there_may_be_none():
    with pytest.raises(ObjectMissing):
        config.open_existing(open_backend("memory:"), None)


def test_the_secret_must_fit():
    backend = open_backend("memory:")
    config.create(backend, OLD)
    for secret in (None, OTHER, OLD + b"x"):
        for act in (config.open_existing, config.create):
            with pytest.raises(StoreKeyInvalid) as caught:
                act(backend, secret)
            assert "secret" not in f"{caught.value}{caught.value.details}"
    with pytest.raises(InvalidRequest):
        config.open_existing(backend, b"short")
    with pytest.raises(InvalidRequest):
        config.create(open_backend("memory:"), b"short")
    assert config.open_existing(backend, OLD + b"\n")


def test_a_secret_is_not_wasted_on_a_repository_that_is_not_encrypted():
    backend = open_backend("memory:")
    config.create(backend, None)
    with pytest.raises(StoreKeyInvalid, match="not encrypted"):
        config.open_existing(backend, OLD)
    with pytest.raises(StoreKeyInvalid, match="not encrypted"):
        config.rotate(backend, OLD, NEW)


@pytest.mark.parametrize("secret", [None, OLD])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_a_creation_that_was_cut_off_is_repeated(secret, after, at):
    backend = open_backend("memory:")
    try:
        config.create(CutOff(backend, at, after), secret)
    except StoreUnreachable:
        cut = True
    else:
        cut = False
    assert cut == (at == 1 or secret is not None)
    made = config.create(backend, secret)
    assert same(made, config.open_existing(backend, secret))


@pytest.mark.parametrize("secrets", [(None, None), (OLD, OLD), (OLD, NEW), (None, OLD)])
def test_of_two_creators_one_wins_and_the_other_opens_what_it_made(secrets):
    backend = open_backend("memory:")
    barrier = threading.Barrier(2)

    class Slow:
        """Both have looked before either writes."""

        def __getattr__(self, name):
            return getattr(backend, name)

        def get(self, key, **options):
            try:
                return backend.get(key, **options)
            except ObjectMissing:
                if key == "config":
                    barrier.wait(20)
                raise

    answers = {}

    def run(number):
        try:
            answers[number] = config.create(Slow(), secrets[number])
        except SojournError as error:
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    failures = [answer for answer in answers.values() if isinstance(answer, Exception)]
    if secrets[0] == secrets[1]:
        assert not failures and same(answers[0], answers[1])
    else:
        assert len(failures) == 1 and isinstance(failures[0], StoreKeyInvalid)
    winner = next(n for n, answer in answers.items() if not isinstance(answer, Exception))
    assert same(config.open_existing(backend, secrets[winner]), answers[winner])
    assert len(keys_of(backend)) == (1 if secrets[winner] is None else 2)


def test_rotation_lets_the_new_secret_in_and_the_old_out():
    backend = open_backend("memory:")
    made = config.create(backend, OLD)
    config.rotate(backend, OLD, NEW + b"\n")
    assert same(made, config.open_existing(backend, NEW))
    with pytest.raises(StoreKeyInvalid):
        config.open_existing(backend, OLD)
    with pytest.raises(StoreKeyInvalid):
        config.rotate(backend, OTHER, OLD)
    with pytest.raises(InvalidRequest):
        config.rotate(backend, NEW, b"short")
    assert same(made, config.open_existing(backend, NEW))
    assert len(keys_of(backend)) == 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rotation_that_was_cut_off_leaves_a_way_in_and_is_repeated(after, at):
    backend = open_backend("memory:")
    made = config.create(backend, OLD)
    with pytest.raises(StoreUnreachable):
        config.rotate(CutOff(backend, at, after), OLD, NEW)
    opened = []
    for secret in (OLD, NEW):
        try:
            assert same(made, config.open_existing(backend, secret))
            opened.append(secret)
        except StoreKeyInvalid:
            continue
    assert opened
    config.rotate(backend, opened[0], OTHER)
    assert same(made, config.open_existing(backend, OTHER))
    for secret in (OLD, NEW):
        with pytest.raises(StoreKeyInvalid):
            config.open_existing(backend, secret)


def test_a_new_wrapping_that_is_not_stored_whole_does_not_replace_the_old():
    backend = open_backend("memory:")
    made = config.create(backend, OLD)
    [first] = [key for key in keys_of(backend) if key != "config"]

    class Lying(CutOff):
        def get(self, key, **options):
            data, version = backend.get(key, **options)
            return (data if key in {"config", first} else data[:-1] + b"?"), version

    with pytest.raises(IntegrityError):
        config.rotate(Lying(backend, 99, False), OLD, NEW)
    assert same(made, config.open_existing(backend, OLD))


def test_damage_is_told_from_a_wrong_secret():
    backend = open_backend("memory:")
    config.create(backend, OLD)
    [key] = [key for key in keys_of(backend) if key != "config"]
    whole, _ = backend.get(key)
    for bad in (whole[:-1], whole[:60] + b"?" + whole[61:], b""):
        backend.put(key, bad)
        with pytest.raises(IntegrityError) as caught:
            config.open_existing(backend, OLD)
        assert caught.value.details["object"] == key
    backend.delete([key])
    with pytest.raises(IntegrityError, match="no wrapped key"):
        config.open_existing(backend, OLD)


def test_a_damaged_key_beside_a_whole_one_is_no_hindrance():
    backend = open_backend("memory:")
    config.create(backend, OLD)
    backend.put("keys/0", b"damaged")
    assert config.open_existing(backend, OLD)
    with pytest.raises(IntegrityError) as caught:  # the damaged one may be the one for it
        config.open_existing(backend, OTHER)
    assert caught.value.details["object"] == "keys/0"
    config.rotate(backend, OLD, NEW)
    with pytest.raises(StoreKeyInvalid):
        config.open_existing(backend, OTHER)


def put_key(backend, name: str, payload: bytes) -> None:
    key = f"keys/{name}"
    backend.put(key, seal(WRAPPED, payload, PLAIN, key.encode()))


def test_keys_of_creations_that_were_cut_off_are_passed_over_and_removed():
    backend = open_backend("memory:")
    foreign = wrap_root(ROOT, OLD, "1" * 32)
    for number in range(2 * config.MAX_KEYS):
        put_key(backend, str(number), foreign)
    made = config.create(backend, OLD)
    assert len(keys_of(backend)) == 2
    for number in range(2 * config.MAX_KEYS):
        put_key(backend, str(number), foreign)
    assert same(made, config.open_existing(backend, OLD))
    with pytest.raises(StoreKeyInvalid):
        config.open_existing(backend, OTHER)


def test_keys_are_not_tried_without_end(monkeypatch):
    backend = open_backend("memory:")
    made = config.create(backend, OLD)
    monkeypatch.setattr(config, "MAX_KEYS", 2)
    unfit = wrap_root(ROOT, OTHER, made[0].id)
    for number in range(3):
        put_key(backend, f"-{number}", unfit)  # listed before the one that opens
    with pytest.raises(IntegrityError, match="wrapped keys"):
        config.open_existing(backend, OLD)
    monkeypatch.setattr(config, "MAX_LISTED", 3)
    with pytest.raises(IntegrityError, match="wrapped keys"):
        config.open_existing(backend, OLD)


def test_two_rotations_at_once_leave_both_ways_in():
    backend = open_backend("memory:")
    made = config.create(backend, OLD)
    barrier = threading.Barrier(2)

    class Together:
        """Both have seen what is there before either writes."""

        def __getattr__(self, name):
            return getattr(backend, name)

        def put(self, *args, **options):
            barrier.wait(20)
            return backend.put(*args, **options)

    threads = [
        threading.Thread(target=config.rotate, args=(Together(), OLD, secret))
        for secret in (NEW, OTHER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for secret in (NEW, OTHER):
        assert same(made, config.open_existing(backend, secret))
    with pytest.raises(StoreKeyInvalid):
        config.open_existing(backend, OLD)


def test_a_rotation_during_the_opening_is_no_failure():
    backend = open_backend("memory:")
    made = config.create(backend, OLD)

    class Rotated:
        """The key that was listed goes before it is read."""

        turns = 0

        def __getattr__(self, name):
            return getattr(backend, name)

        def get(self, key, **options):
            if key != "config" and not self.turns:
                self.turns += 1
                config.rotate(backend, OLD, NEW)
            return backend.get(key, **options)

    assert same(made, config.open_existing(Rotated(), NEW))


def test_a_secret_of_newlines_rotates_to_what_opens():
    backend = open_backend("memory:")
    secret = NEW + b"\n\n"
    made = config.create(backend, OLD)
    config.rotate(backend, OLD, secret)
    assert same(made, config.open_existing(backend, secret))
    assert same(made, config.open_existing(backend, NEW + b"\n\n"))
    with pytest.raises(StoreKeyInvalid):
        config.open_existing(backend, NEW)


@pytest.mark.parametrize(
    "changes",
    [
        {"root": None},
        {"root": bytes(31)},
        {"root": b""},
        {"encrypted": True},
        {"id": 5},
        {"id": "0" * 31 + "/"},
        {"more": 1},
        {"parameters": None},
        {"format": "1"},
    ],
)
def test_an_inconsistent_configuration_is_damage(changes):
    backend = open_backend("memory:")
    put_config(backend, **changes)
    with pytest.raises(IntegrityError) as caught:
        config.open_existing(backend, None)
    assert caught.value.details["object"] == "config"
    assert ROOT.hex() not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"format": 2, "more": 1}, {"parameters": {}}, {"parameters": {"small_file": 5}}]
)
def test_a_repository_of_another_version_is_not_touched(changes):
    backend = open_backend("memory:")
    put_config(backend, **changes)
    before = backend.get("config")
    for act in (config.open_existing, config.create):
        with pytest.raises(Unsupported):
            act(backend, None)
    assert backend.get("config") == before and keys_of(backend) == ["config"]


def test_the_small_file_limit_is_the_one_that_is_recorded():
    from sojourn.repository.cutting import SMALL_FILE

    assert config.PARAMETERS["small_file"] == SMALL_FILE


def test_a_configuration_shows_no_key():
    backend = open_backend("memory:")
    put_config(backend)
    found, ring = config.open_existing(backend, None)
    assert not hasattr(found, "root")
    for shown in (repr(found), repr(ring), repr(config._read_config(backend))):
        assert repr(ROOT) not in shown and ROOT.hex() not in shown
