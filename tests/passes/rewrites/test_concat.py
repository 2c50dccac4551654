"""Concatenations brought into a form in which their operands are written in place."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.concat import place_concats
from dnnc.tools.sample_graphs import graph_of
from support.passes import check_pass

PREFIXES = (
    """\
def g(x: f32[4, 64]):
    a: f32[4, 64] = softmax(x)
    b: f32[4, 64] = softmax(a)
    ab: f32[8, 64] = concat(a, b, axis=0)
    c: f32[8, 64] = softmax(ab)
    abc: f32[16, 64] = concat(a, b, c, axis=0)
    d: f32[16, 64] = softmax(abc)
    e: f32[32, 64] = concat(a, b, c, d, axis=0)
    return softmax(e)
""",
    """\
def g(x: f32[4, 64]):
    a: f32[4, 64] = softmax(x)
    b: f32[4, 64] = softmax(a)
    ab: f32[8, 64] = concat(a, b, axis=0)
    c: f32[8, 64] = softmax(ab)
    abc: f32[16, 64] = concat(ab, c, axis=0)
    d: f32[16, 64] = softmax(abc)
    e: f32[32, 64] = concat(abc, d, axis=0)
    return softmax(e)
""",
)
COPIES = (
    """\
def g(x: f32[4, 64], y: f32[4, 64]):
    a: f32[4, 64] = softmax(x)
    c: f32[12, 64] = concat(y, a, a, axis=0)
    return softmax(c)
""",
    """\
def g(x: f32[4, 64], y: f32[64, 64]):
    a: f32[4, 64] = softmax(x)
    b: f32[64, 64] = pack(y)
    c: f32[68, 64] = concat(b, a, axis=0)
    return softmax(c)
""",
)


def test_prefixes_are_shared() -> None:
    check_pass(place_concats, *PREFIXES)


def test_the_first_part_of_an_earlier_one_is_a_slice_of_it() -> None:
    g = graph_of(
        """\
def g(x: f32[4, 64]):
    a: f32[4, 64] = softmax(x)
    b: f32[4, 64] = softmax(a)
    c: f32[4, 64] = softmax(b)
    abc: f32[12, 64] = concat(a, b, c, axis=0)
    ab: f32[8, 64] = concat(a, b, axis=0)
    bc: f32[8, 64] = concat(b, c, axis=0)
    return softmax(abc), softmax(ab), softmax(bc)
"""
    )
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    want = run(g, [x])
    assert place_concats(g, PassContext())
    names = [n.op.name for n in g.nodes()]
    assert names.count("slice") == 1 and names.count("pack") == 2  # b and c lie in the first one
    for made, exact in zip(run(g, [x]), want, strict=True):
        np.testing.assert_array_equal(made, exact)


def test_what_lies_elsewhere_is_copied() -> None:
    before = COPIES[1].replace("    b: f32[64, 64] = pack(y)\n", "").replace("concat(b,", "concat(y,")
    g = graph_of(before)
    assert place_concats(g, PassContext())
    assert [n.op.name for n in g.nodes()] == ["softmax", "pack", "concat", "softmax"]
    assert not place_concats(g, PassContext())


def test_small_ones_with_cheap_operands_stay_kernels() -> None:
    g = graph_of(COPIES[0])
    assert not place_concats(g, PassContext())


@pytest.mark.slow
@pytest.mark.parametrize("text", [PREFIXES[0], COPIES[0], COPIES[1].replace("pack(y)", "neg(y)")])
def test_numbers(text: str) -> None:
    g = graph_of(text)
    inputs = [np.random.default_rng(k).standard_normal(v.type.shape).astype(np.float32) for k, v in enumerate(g.inputs)]
    want = dnnc.compile(g, target="reference")(*inputs)
    f = dnnc.compile(g, cache=False)
    np.testing.assert_allclose(f(*inputs), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_dense_block_is_one_buffer() -> None:
    f = dnnc.compile(graph_of(PREFIXES[0]), cache=False)
    program = f.report.programs[0]
    assert not any("concat" in k.name for k in program.kernels)
    assert program.memory.arena == 32 * 64 * 4
