"""Cheap values are computed in each kernel that reads them, where that reads no more memory."""

from __future__ import annotations

import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.repeat import repeat_shared

STEP = """def g(y: f32[64, 512], w: f32[64, 64], m: f32[1, 512]):
    d = sub(y, m)
    s = reduce_sum(mul(d, d), axes=(1,), keepdims=True)
    z = mul(d, matmul(w, s))
    return z"""


def repeated(text: str, donated: dict[int, int] | None = None) -> tuple[Graph, list[str]]:
    """The graph after the pass, and the values that its kernels store."""
    g = parse(text)
    g.donated = donated or {}
    repeat_shared(g, PassContext())
    verify(g)
    return g, [v.name for group in plan_fusion(g).groups for v in group.outputs]


def test_a_difference_is_computed_in_both_kernels_that_read_it() -> None:
    g, stored = repeated(STEP)
    subs = [n for n in g.nodes() if n.op.name == "sub"]
    assert len(subs) == 2 and not {n.output.name for n in subs} & set(stored)
    assert {v.name for n in subs for v in n.inputs if v is not None} == {"y", "m"}


@pytest.mark.parametrize(
    "before, after",
    [
        ("m: f32[1, 512]", "m: f32[64, 512]"),  # two arrays of its size
        ("sub(y, m)", "sub(erf(y), m)"),  # takes long
        ("return z", "return z, d"),  # a result
        ("512]", "64]"),  # small
    ],
)
def test_what_costs_more_is_kept(before: str, after: str) -> None:
    g, stored = repeated(STEP.replace(before, after))
    assert [n.op.name for n in g.nodes()].count("sub") == 1 and "d" in stored


def test_the_memory_of_a_donated_input_is_not_read_longer() -> None:
    text = STEP.replace("return z", "return z, add(y, m)")
    assert "d" not in repeated(text)[1] and "d" in repeated(text, {1: 0})[1]
