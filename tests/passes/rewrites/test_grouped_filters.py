"""Filters' gradients of narrow groups: which are joined, and that the numbers stay."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.grouped_filters import grouped_filters, together

WIDE = PassContext(TargetFacts(lanes=16))


@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "count"),
    [(4, 4, 32, 4), (8, 2, 32, 8), (16, 32, 4, 1), (24, 24, 3, 3), (24, 24, 6, 2), (1, 2, 48, 16)],
)
def test_as_many_groups_are_one_as_fill_blocks(inputs: int, outputs: int, group: int, count: int) -> None:
    assert together(inputs, outputs, group, 16) == count


@pytest.mark.parametrize(
    ("channels", "made", "group", "left"), [(32, 32, 8, 2), (6, 4, 2, 1), (16, 48, 16, 1), (24, 24, 24, 24)]
)
def test_gradients_are_what_they_were(channels: int, made: int, group: int, left: int) -> None:
    g = parse(
        f"def g(x: f32[2, {channels}, 6, 5], g: f32[2, {made}, 3, 3]):\n"
        f"    return conv_backward_filter(x, g, kernel=(3, 2), strides=(2, 2), pads=(1, 0, 1, 1), group={group})"
    )
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    arrays[0][0, -1, 2, 2] = np.inf  # of one group alone
    (want,) = run(g, arrays)
    assert grouped_filters(g, WIDE) == (left != group)
    verify(g)
    assert [n.attrs["group"] for n in g.nodes() if n.op.name == "conv_backward_filter"] == [left]
    np.testing.assert_allclose(run(g, arrays)[0], want, rtol=1e-5, atol=1e-5)
