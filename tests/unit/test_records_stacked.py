"""Layers stacked on each other."""

from __future__ import annotations

from sojourn.model import LayerRef
from sojourn.node.records import stacked

A, B, C = (LayerRef(id=name, bytes=1, entries=1) for name in "abc")


def test_a_layer_that_comes_again_stands_only_on_top() -> None:
    assert stacked([A, B], C) == [A, B, C]
    assert stacked([A, B, C], B) == [A, C, B]
    assert stacked([A, B], B) == [A, B]
