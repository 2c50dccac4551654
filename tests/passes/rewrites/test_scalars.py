"""Numbers that several kernels read."""

from __future__ import annotations

from dataclasses import replace

from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.scalars import scalars

TEXT = """def g(x: f32[64], y: f32[32], rate: f64):
    r = cast(rate, to=f32)
    h = mul(r, 0.5)
    return mul(x, h), mul(y, h)"""


def test_a_number_is_computed_where_it_is_read() -> None:
    g = parse(TEXT)
    assert len(plan_fusion(g).groups) == 3  # the number and two products
    ctx = PassContext(facts=TargetFacts(serial_rows=False))
    assert scalars(g, ctx) and not scalars(g, ctx)
    assert sum(n.op.name == "cast" for n in g.nodes()) == 2
    assert len(plan_fusion(g).groups) == 2


def test_not_where_kernels_are_calls() -> None:
    assert not scalars(parse(TEXT), PassContext(facts=replace(TargetFacts(), serial_rows=True)))
