"""The form of a kernel says what its nest does."""

from __future__ import annotations

import math

import pytest

from dnnc.ir.expr import extent, value
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Store, walk_stmts
from dnnc.ir.op import OpDef
from dnnc.ir.ops import FAMILIES
from dnnc.passes.base import PassContext
from dnnc.passes.lower.form import Contraction, Form, Map, Normed, Rows, Weighted
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.lower.scatter import Scattered, combine
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.program import lower_group
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.state import loops

OPS = [op for f, ops in FAMILIES.items() if f != "control" for op in ops if op.host is None and "host" not in op.traits]


def lowered(source: str) -> Lowered:
    g = parse(source)
    return lower(g, list(g.nodes()), g.outputs)


@pytest.mark.family("samples")
@pytest.mark.parametrize("op", [op for op in OPS if op.samples], ids=lambda op: op.name)
def test_forms_of_samples(op: OpDef) -> None:
    for s in op.samples:
        g = Graph("g")
        values = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
        made = Builder(g).op(op.name, *values, **dict(s.attrs))
        g.outputs = list(made) if isinstance(made, tuple) else [made]
        decompose(g, PassContext())
        for group in plan_fusion(g).groups:
            if group.kind not in ("control", "host"):
                agrees(lower_group(g, group), group.kind)


def agrees(low: Lowered, kind: str) -> None:
    form, body = low.form, low.kernel.entry.body
    there = {loop.var for loop in loops(body)}
    stores = {(s.buf, s.idx, s.value) for s in walk_stmts(body) if isinstance(s, Store)}
    assert there.issuperset(form.outer)
    assert kind != "contraction" or isinstance(form, (Contraction, Weighted))
    for r in form.reductions:
        acc = r.acc[0]
        if r.combine and not r.empty:
            assert (r.acc, acc.idx, combine(r.combine, acc, r.term)) in stores and there.issuperset(r.loops)
    if isinstance(form, Contraction):
        assert (form.store.buf, form.store.idx, form.store.value) in stores
        assert {*form.batch.loops, *form.rows.loops, *form.cols.loops} == set(form.outer)
        acc = form.acc[0]
        assert form.empty or (form.acc, acc.idx, form.update(acc, form.a.value, form.b.value)) in stores
        sizes = [value(extent(v)) or 0 for v in (*form.outer, *form.red.loops)]
        assert form.joined is None or math.prod(form.joined.sizes) == math.prod(sizes)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("def g(x: f32[6, 40]):\n    return relu(x)", Map),
        ("def g(x: f32[6, 40]):\n    return softmax(x)", Rows),
        ("def g(x: f32[6, 40], w: f32[40, 30]):\n    return relu(matmul(x, w))", Contraction),
        ("def g(x: i64[6, 40], w: i64[40, 30]):\n    return matmul(x, w)", Contraction),
        ("def g(x: f32[1, 40], s: f32[40], w: f32[40, 30]):\n    return matmul(rms_norm(x, s), w)", Normed),
        (
            "def g(q: f32[2, 7, 8], k: f32[2, 9, 8], v: f32[2, 9, 8]):\n    return attention(q, k, v, scale=0.1)",
            Weighted,
        ),
        ("def g(x: f32[9, 4], i: i64[3, 1], u: f32[3, 4]):\n    return scatter_nd(x, i, u)", Scattered),
        ("def g(x: f32[6, 40]):\n    return cumsum(x, axis=1)", Rows),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_classes(source: str, form: type[Form]) -> None:
    assert type(lowered(source).form) is form


def test_sides_of_a_convolution_as_it_is_lowered() -> None:
    form = lowered(
        "def g(x: f32[2, 8, 9, 7], w: f32[24, 4, 3, 3]):\n    return conv(x, w, pads=(1, 1, 1, 1), group=2)"
    ).form
    assert isinstance(form, Contraction) and form.swapped and form.whole
    assert form.cols.extents == (2, 9, 7) and form.batch.extents == (24,) and form.red.extents == (4, 3, 3)
    assert form.joined is not None and form.joined.sizes == (2, 12, 126, 36)


def test_a_sum_that_several_results_read() -> None:
    form = lowered("def g(x: f32[6, 40], w: f32[40, 1]):\n    return expand(matmul(x, w), shape=(6, 30))").form
    assert isinstance(form, Contraction) and not form.whole and form.joined is None
