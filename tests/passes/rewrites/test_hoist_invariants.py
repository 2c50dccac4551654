"""What all iterations of a loop compute alike stands in front of it, packed as the body reads it."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import VerifyError
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import pass_context
from dnnc.passes.pipelines import layout
from dnnc.passes.rewrites.hoist_invariants import hoist_invariants
from support.passes import check_pass

NESTED = (
    """\
def main(x: f32[2, 3], w: f32[3, 3], b: f32[3]):
    def body(k: i64, h: f32[2, 3], w: f32[3, 3], b: f32[3]):
        def inner(j: i64, a: f32[2, 3], v: f32[3, 3], d: f32[3], *, c: f32 = 2.0):
            t: f32[3, 3] = transpose(v, perm=(1, 0))
            m: f32[2, 3] = matmul(a, t)
            e: f32[3] = mul(d, c)
            y: f32[2, 3] = add(m, e)
            return (y,)
        g: f32[2, 3] = loop(None, None, h, w, b, body=inner, carried=1, scanned=0, length=2)
        y: f32[2, 3] = add(g, b)
        return (y,)
    h: f32[2, 3] = loop(None, None, x, w, b, body=body, carried=1, scanned=0, length=4)
    return h
""",
    """\
def main(x: f32[2, 3], w: f32[3, 3], b: f32[3], *, c: f32 = 2.0):
    v0: f32[3, 3] = transpose(w, perm=(1, 0))
    v1: f32[3] = mul(b, c)
    def body(k: i64, h: f32[2, 3], b: f32[3], v0: f32[3, 3], v1: f32[3]):
        def inner(j: i64, a: f32[2, 3], t: f32[3, 3], e: f32[3]):
            m: f32[2, 3] = matmul(a, t)
            y: f32[2, 3] = add(m, e)
            return (y,)
        g: f32[2, 3] = loop(None, None, h, v0, v1, body=inner, carried=1, scanned=0, length=2)
        y: f32[2, 3] = add(g, b)
        return (y,)
    h: f32[2, 3] = loop(None, None, x, b, v0, v1, body=body, carried=1, scanned=0, length=4)
    return h
""",
)
PRODUCT = """\
def main(x: f32[2, 32], w: f32[32, 32]):
    def body(k: i64, h: f32[2, 32], w: f32[32, 32]):
        m: f32[2, 32] = matmul(h, w)
        return (m,)
    h: f32[2, 32] = loop(None, None, x, w, body=body, carried=1, scanned=0, length={length})
    return h
"""


def test_invariants_leave_nested_loops() -> None:
    check_pass(hoist_invariants, *NESTED)


def test_what_grows_or_changes_stays() -> None:
    text = """\
def main(x: f32[8, 3], b: f32[3]):
    def body(k: i64, h: f32[8, 3], b: f32[3]):
        e: f32[8, 3] = expand(b, shape=(8, 3))
        y: f32[8, 3] = mul(h, e)
        return (y,)
    h: f32[8, 3] = loop(None, None, x, b, body=body, carried=1, scanned=0, length=4)
    return h
"""
    assert not hoist_invariants(parse(text), pass_context())


@pytest.mark.parametrize("length, packs", [(35, 1), (3, 0)])
def test_weights_are_packed_once_where_steps_are_many(length: int, packs: int) -> None:
    g = parse(PRODUCT.format(length=length))
    ctx = pass_context(facts=TargetFacts(lanes=16))
    layout(g, ctx)
    hoist_invariants(g, ctx)
    verify(g)
    (loop,) = [n for n in g.nodes() if n.op.name == "loop"]
    assert [n.op.name for n in g.nodes()] == ["pack"] * packs + ["loop"]
    assert [n.op.name for n in loop.attrs["body"].nodes()] == ["matmul"]


def test_a_body_reads_captured_values_as_they_lie() -> None:
    g = parse(PRODUCT.format(length=35))
    layout(g, pass_context(facts=TargetFacts(lanes=16)))
    hoist_invariants(g, pass_context())
    (loop,) = [n for n in g.nodes() if n.op.name == "loop"]
    loop.set_input(3, g.inputs[1])
    with pytest.raises(VerifyError, match="the operand is w"):
        verify(g)
