"""Cheap values that late readers compute again: which ones, and that nothing else lives longer for it."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.memory_plan import plan_memory
from dnnc.passes.rewrites.recompute import recompute

NET = """
def g(x: f32[128, 256], w: f32[256, 256], v: f32[256, 256]):
    h = matmul(x, w)
    d = {cheap}
    y = matmul(mul(h, tanh(d)), v)
    z = matmul(y, v)
    return {late}
"""


def changed(cheap: str, late: str) -> tuple[Graph, Graph, bool]:
    before = parse(NET.format(cheap=cheap, late=late))
    after = before.copy()
    done = recompute(after, PassContext())
    verify(after)
    return before, after, done


@pytest.mark.parametrize(
    ("cheap", "late", "expected"),
    [
        ("mul(h, 0.5)", "mul(mul(z, h), d)", True),
        ("mul(add(h, 1.0), 0.5)", "mul(mul(z, h), d)", True),  # by way of a value that nobody else reads
        ("mul(h, 0.5)", "mul(z, d)", False),  # h would have to wait in the place of d
        ("mul(h, 0.5)", "mul(mul(z, h), matmul(d, v))", False),  # a product reads memory
        ("mul(h, 0.5)", "mul(mul(z, h), d), d", False),  # a result is in memory anyway
        ("erf(h)", "mul(mul(z, h), d)", False),  # takes longer than to load it
        ("relu(matmul(h, v))", "mul(mul(z, h), d)", False),
    ],
)
def test_which_values_are_computed_again(cheap: str, late: str, expected: bool) -> None:
    before, after, done = changed(cheap, late)
    assert done == expected
    if not done:
        assert str(before) == str(after)
        return
    peaks = [plan_memory(g, plan_fusion(g)).lower_bound({}) for g in (before, after)]
    assert peaks[1] <= peaks[0] - 4 * 128 * 256
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in before.inputs]
    assert all(np.array_equal(a, b) for a, b in zip(run(before, inputs), run(after, inputs)))


def test_readers_at_several_stages_have_copies_of_their_own() -> None:
    _, after, done = changed("mul(h, 0.5)", "add(z, d), mul(matmul(add(z, d), v), mul(d, h))")
    assert done
    assert sum(n.op.name == "mul" and n.inputs[0] is not None and n.inputs[0].name == "h" for n in after.nodes()) >= 3


def test_what_is_read_again_soon_is_kept() -> None:
    g = parse(
        "def g(x: f32[128, 256], w: f32[256, 256]):\n    h = matmul(x, w)\n    d = mul(h, 0.5)\n"
        "    return mul(matmul(d, w), add(d, h))"
    )
    assert not recompute(g, PassContext())


def test_a_copy_is_computed_again_for_still_later_readers() -> None:
    before = parse(
        """def g(x: f32[128, 256], w: f32[256, 256], c: f32[128, 256]):
    h = matmul(x, w)
    a = add(h, c)
    p = matmul(matmul(a, w), w)
    u = mul(add(a, h), c)
    q = matmul(matmul(add(u, p), w), w)
    return add(add(add(mul(u, u), q), h), c)"""
    )
    after = before.copy()
    assert recompute(after, PassContext())
    verify(after)
    assert sum(n.op.name == "add" for n in after.nodes()) == sum(n.op.name == "add" for n in before.nodes()) + 3
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in before.inputs]
    assert all(np.array_equal(a, b) for a, b in zip(run(before, inputs), run(after, inputs)))
