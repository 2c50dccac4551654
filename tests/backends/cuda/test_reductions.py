"""Schedules of reductions: who shares a row's work."""

from __future__ import annotations

import pytest

from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program

H200 = GpuTarget()
WHOLE = [
    "mean_variance_norm(x, axes=(1, 2, 3))",
    "mean_variance_norm(x, axes=(2, 3))",
    "softmax(x, axis=3)",
    "softmax(x, axis=1)",
    "sub(x, reduce_max(x, axes=(1, 3), keepdims=True))",
]


@pytest.mark.family("kernels")
@pytest.mark.parametrize("norm", WHOLE)
def test_rows_across_memory_have_many_threads(norm: str) -> None:
    """Images behind convolutions have their channels last: few rows, which are read across memory."""
    g = parse(
        f"def g(v: f32[3, 40, 45, 45], w: f32[40, 40, 1, 1]):\n    x = conv(v, w)\n    y = {norm}\n"
        "    return conv(y, w), conv(relu(y), w)"
    )
    made = compile_program(g, PassContext(facts(H200, "standard")), templates(H200))
    for s in made.kernels:
        reduces = any(Trait.REDUCTION in n.op.traits for n in s.group.nodes)
        if reduces and s.group.kind != "contraction":
            assert s.choice.template == "reduce", show_kernel(s.kernel)
