"""Every sample of every op record as CUDA: printed as it was lowered, and compiled as the templates schedule it."""

from __future__ import annotations

import pytest

from dnnc.backends.cuda.emit import emit_kernel, emit_module, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import FACTS
from dnnc.backends.cuda.templates import templates
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import FAMILIES
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.decompose import decompose

pytestmark = pytest.mark.family("samples")

ON_DEVICE = {
    f: [op for op in ops if op.host is None and Trait.HOST not in op.traits]
    for f, ops in FAMILIES.items()
    if f != "control"
}
WITH_KERNELS = [f for f, ops in ON_DEVICE.items() if any(op.samples for op in ops)]


def graph_of(op: OpDef, s: Sample) -> Graph:
    g = Graph("g")
    values = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
    made = Builder(g).op(op.name, *values, **dict(s.attrs))
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    return g


def lowered(op: OpDef, s: Sample) -> list[Kernel]:
    g = graph_of(op, s)
    decompose(g, PassContext())
    return [lower(g, x.nodes, x.outputs).kernel for x in plan_fusion(g).groups if x.kind not in ("control", "host")]


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_lowered_kernels_print(family: str) -> None:
    for op in ON_DEVICE[family]:
        for s in op.samples:
            for k in lowered(op, s):
                text = emit_kernel(k, "k_test", FACTS["sm_80"])
                assert text.count('extern "C" __global__') == 1 and launch_of(k).block == (1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_scheduled_kernels_compile(family: str, arch: str) -> None:
    """Without spills; library functions and rows that a thread keeps may use local memory."""
    target = FACTS[arch]
    kernels: dict[str, Kernel] = {}
    for op in ON_DEVICE[family]:
        for s in op.samples:
            for step in compile_program(graph_of(op, s), PassContext(), templates(target)).kernels:
                kernels.setdefault(show_kernel(step.kernel), step.kernel)
    assert kernels
    text = emit_module([(k, f"k{n}_{k.name}") for n, k in enumerate(kernels.values())], target)
    assert compile_cuda(text, arch).spills == 0
