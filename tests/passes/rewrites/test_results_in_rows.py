"""Updates of filters whose owner wants them in rows, and what stays in blocks."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.passes.rewrites.results_in_rows import results_in_rows

UPDATE = """def g(w: f32[32, 16, 3, 3], m: f32[32, 16, 3, 3], x: f32[2, 16, 6, 6], c: f32[2, 32, 6, 6], r: f32):
    y = conv(x, w, pads=(1, 1, 1, 1))
    d = conv_backward_filter(x, c, kernel=(3, 3), pads=(1, 1, 1, 1))
    n = add(mul(m, r), d)
    v = sub(w, mul(n, r))
    return v, n, d, y"""
STAYS = {
    "one result of images": (
        "def g(x: f32[2, 16, 6, 6], w: f32[32, 16, 3, 3]):\n    return tanh(relu(conv(x, w, pads=(1, 1, 1, 1))))"
    ),
    "what a convolution goes on with": (
        "def g(x: f32[2, 16, 6, 6], w: f32[16, 16, 1, 1]):\n    h = relu(conv(x, w))\n    return h, conv(tanh(h), w)"
    ),
}


def laid_out(text: str) -> tuple[Graph, bool]:
    g = parse(text)
    assign_layouts(g, 16)
    changed = results_in_rows(g)
    dce(g, PassContext())
    verify(g)
    return g, changed


def packs(g: Graph) -> int:
    return sum(n.op.name == "pack" for n in g.nodes())


def test_an_update_packs_the_gradient_alone() -> None:
    g, changed = laid_out(UPDATE)
    assert changed and packs(g) == 5  # images and cotangents, filters for the convolution, its result, the gradient
    assert all(v.type.row_major for n in g.nodes() if n.op.name in ("add", "sub", "mul") for v in n.outputs)


def test_what_reads_blocks_gets_them() -> None:
    text = UPDATE.replace("return v, n, d, y", "z = conv(x, n, pads=(1, 1, 1, 1))\n    return v, n, d, mul(v, n), z")
    g, changed = laid_out(text)
    assert changed
    (conv,) = (n for n in g.nodes() if n.op.name == "conv")
    assert conv.inputs[1] is not None and not conv.inputs[1].type.row_major


@pytest.mark.parametrize("name", STAYS)
def test_stays_in_blocks(name: str) -> None:
    assert not laid_out(STAYS[name])[1]


@pytest.mark.slow
def test_same_numbers() -> None:
    g = parse(UPDATE)
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    for got, want in zip(dnnc.compile(g.copy(), cache=False)(*xs), run(g, xs, "float64"), strict=True):
        assert np.abs(got - want).max() < 1e-4
