"""Work of kernels that reduce rows and store several results: what a row shares is computed once, not per element."""

from __future__ import annotations

import pytest
from kernels import program

from dnnc.ir.expr import value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Block, For, If, Store
from dnnc.passes.planning.program import Step

NORMS = {
    "instance norm": "mean_variance_norm(x, axes=(2, 3))",
    "norm over channels": "mean_variance_norm(x, axes=(1,))",
    "norm of an image": "mean_variance_norm(x, axes=(1, 2, 3))",
    "softmax over channels": "softmax(x, axis=1)",
    "softmax over columns": "softmax(x, axis=3)",
    "less its mean": "sub(x, reduce_mean(x, axes=(2, 3), keepdims=True))",
}


def stores(b: Block, trips: int = 1) -> int:
    """How many elements a block stores, sums in registers among them."""
    n = 0
    for s in b:
        if isinstance(s, Store):
            n += trips * s.lanes
        elif isinstance(s, For):
            n += stores(s.body, trips * (value(s.extent) or 1))
        elif isinstance(s, If):
            n += stores(s.then, trips) + stores(s.other, trips)
    return n


@pytest.mark.family("kernels")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("image", [True, False], ids=["behind a convolution", "an input"])
def test_rows_are_reduced_once(name: str, image: bool) -> None:
    """Gradients read a norm's result, the next layer what becomes of it."""
    shape = "3, 40, 21, 21"
    given = "v: f32[{0}], w: f32[40, 40, 1, 1]" if image else "x: f32[{0}]"
    first = "    x = conv(v, w)\n" if image else ""
    text = f"def g({given.format(shape)}):\n{first}    y = {NORMS[name]}\n    z = relu(y)\n    return y, z"
    graph = parse(text)
    if image:  # results stay in the convolution's layout where the next one reads them
        text = text.replace("return y, z", "return conv(y, w), conv(z, w)")
        graph = parse(text)
    elements = 3 * 48 * 21 * 21
    for step in program(graph).steps:
        assert isinstance(step, Step)
        if step.group.kind != "contraction":
            assert sum(stores(f.body) for f in step.kernel.funcs) <= 8 * elements, step.kernel
