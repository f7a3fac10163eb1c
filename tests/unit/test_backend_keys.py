"""No key leads out of the store, whatever it is made of."""

from __future__ import annotations

import os.path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sojourn.errors import InvalidRequest
from sojourn.repository.backends.object_keys import check_key, check_prefix, is_key

PIECES = st.sampled_from(
    ["a", "B9", ".", "..", "...", "", "-", "_", "#", "\0", "\n", "\\", "é", " "]
)
KEYS = st.one_of(
    st.text(max_size=40),
    st.lists(st.lists(PIECES, max_size=3).map("".join), max_size=6).map("/".join),
)


@given(KEYS)
@example("a/../../b")
@example("a\n")
@example(".clock")
def test_a_key_that_is_taken_stays_in_the_store_under_its_own_name(key: str) -> None:
    if not is_key(key):
        with pytest.raises(InvalidRequest):
            check_key(key)
        with pytest.raises(InvalidRequest):
            check_prefix(key + "/")
        return
    assert check_key(key) == key
    assert check_prefix(key + "/") == key + "/"
    assert key.isascii() and not set(key) & set("#\0\n\\ ")
    assert os.path.normpath(f"/store/{key}") == "/store/" + key


def test_keys_of_the_repository_are_taken() -> None:
    for key in (
        "config",
        "keys/0123456789abcdef",
        "ten_0123/packs/ab/" + "ab" * 32,
        "shared/tenant",
        "ten_0123/sessions/ses_01ABC-def",
    ):
        assert is_key(key)
    assert check_prefix("") == ""
