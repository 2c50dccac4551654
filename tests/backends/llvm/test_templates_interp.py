"""Scheduled kernels mean what their graphs mean: the operator-IR interpreter, races and bounds included, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import graphs, program, symbolic
from native_check import check_close

from dnnc.backends.link import pack
from dnnc.backends.llvm.gate import draw, index_limits, physical, subgraph, unpack
from dnnc.backends.llvm.native import shape_of
from dnnc.ir.expr import Expr, const
from dnnc.ir.graph import Graph
from dnnc.ir.interp import run
from dnnc.ir.operator.interp import run_kernel
from dnnc.passes.lower import group_inputs
from dnnc.passes.program import Step


def interpret(g: Graph, step: Step, n: int = 1) -> None:
    """One step of a program on random inputs, with every symbolic dim n."""
    rng = np.random.default_rng(n)
    env: dict[Expr, Expr] = {v: const(n) for v in g.dims.values()}
    inputs = {v: draw(rng, g, v, env, index_limits(step, v, env)) for v in group_inputs(step.group.nodes)}
    out = step.group.output
    args: dict[str, Any] = {d.name: n for d in step.dims}
    result = np.full(physical(out.type, env), 99).astype(out.type.dtype.numpy)
    for v, buf in zip(step.params, step.kernel.entry.buffers):
        args[buf.name] = pack(inputs[v], v.type).copy() if v in inputs else result
    run_kernel(step.kernel, args)
    got = unpack(result, out.type, shape_of(out.type, env), step)
    (want,) = run(subgraph(step, list(inputs), env), list(inputs.values()), "float64")
    check_close(np.ascontiguousarray(got), want, out.type.dtype, 300)


@pytest.mark.parametrize("name", graphs())
def test_fixed_sizes(name: str) -> None:
    p = program(graphs()[name])
    for step in p.steps:
        interpret(p.graph, step)


@pytest.mark.parametrize("name", symbolic())
def test_symbolic_sizes(name: str) -> None:
    p = program(symbolic()[name])
    for n in (1, 7, 16, 33):
        for step in p.steps:
            interpret(p.graph, step, n)
