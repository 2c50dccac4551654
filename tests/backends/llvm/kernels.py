"""Scheduled kernels of small graphs, one or more of each template."""

from __future__ import annotations

from typing import Any

import numpy as np
from native_check import check_close, one_node

from dnnc.backends.check import draw, index_limits, physical, subgraph, unpack
from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime.link import pack
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import Expr, const, dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.shapes import concrete_shape
from dnnc.ir.target import TargetFacts
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph, Step

TARGET = parse_target("llvm -threads=2")
ROWS = """
N: dim[1, 64]
def g(x: f32[{shape}]):
    m = reduce_mean(x, axes=({axis},), keepdims=True)
    d = sub(x, m)
    return d, m, reduce_sum(mul(d, d), axes=({axis},), keepdims=False)"""


def graphs() -> dict[str, Graph]:
    out = {
        "conv": one_node("conv", ["f32 1 16 12 12", "f32 32 16 3 3"], pads=(1, 1, 1, 1)),
        "conv_odd": one_node("conv", ["f32 1 3 9 7", "f32 24 3 3 3"], pads=(1, 1, 1, 1), strides=(2, 2)),
        "conv_images": one_node("conv", ["f32 5 20 2 3", "f32 40 20 3 3"], pads=(1, 1, 1, 1)),
        "conv_images_1x1": one_node("conv", ["f32 9 32 1 1", "f32 32 32 1 1"]),
        "filters": one_node("conv_backward_filter", ["f32 2 20 3 3", "f32 2 40 3 3"], kernel=(3, 3), pads=(1, 1, 1, 1)),
        "filters_1x1": one_node("conv_backward_filter", ["f32 2 16 14 14", "f32 2 16 14 14"], kernel=(1, 1)),
        "filters_depthwise": one_node(
            "conv_backward_filter",
            ["f32 1 24 5 5", "f32 1 24 3 3"],
            kernel=(3, 3),
            strides=(2, 2),
            pads=(1, 1, 1, 1),
            group=24,
        ),
        "conv_1x1": one_node("conv", ["f32 2 32 5 5", "f32 16 32 1 1"]),
        "depthwise": one_node("conv", ["f32 1 32 7 7", "f32 32 1 3 3"], pads=(1, 1, 1, 1), group=32),
        "matmul": one_node("matmul", ["f32 20 24", "f32 24 40"]),
        "batched": one_node("matmul", ["f32 3 5 17", "f32 3 17 9"]),
        "softmax": one_node("softmax", ["f32 9 37"], axis=1),
        "softmax_outer": one_node("softmax", ["f32 9 37"], axis=0),
        "layer_norm": one_node("layer_norm", ["f32 5 50", "f32 50"]),
        "max_pool": one_node("max_pool", ["f32 1 16 9 9"], kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        "avg_pool": one_node("avg_pool", ["f32 1 3 9 9"], kernel=(3, 3), pads=(1, 1, 1, 1)),
        "add": one_node("add", ["f32 7 45", "f32 7 45"]),
        "half": one_node("mul", ["f16 3 40", "f16 40"]),
        "reduce_sum": one_node("reduce_sum", ["f32 6 83"], axes=(1,)),
        "argmax": one_node("argmax", ["f32 6 20"], axis=1),
        "argmin_across": one_node("argmin", ["f32 2 5 3 21"], axis=1),
        "pad_reflect": one_node("pad", ["f32 2 9 17 20"], pads=(0, 0, 1, 2, 0, 2, 2, 1), mode="reflect"),
        "pad_wrap": one_node("pad", ["u8 2 9 17 70"], pads=(0, 1, 1, 2, 0, 0, 2, 3), mode="wrap"),
        "transpose": one_node("transpose", ["f32 18 33"], perm=(1, 0)),
        "unpack": one_node("conv", ["f32 1 32 6 7", "f32 32 32 1 1"]),
        "gather": one_node("gather", ["f32 50 24", "i64 13"], axis=0),
        "concat": one_node("concat", ["f32 3 9", "f32 3 20"], axis=1),
        "concat_outer": one_node("concat", ["f32 2 200 40", "f32 2 5 40", "f32 2 7 40"], axis=1),
        "pad": one_node("pad", ["f32 2 30 17 20"], pads=(1, 0, 1, 2, 0, 2, 2, 1)),
        "unpack_odd": one_node("conv", ["f32 1 32 6 7", "f32 24 32 1 1"]),
        "interleave": one_node("interleave", ["f32 1 12 9 20"], strides=(2, 2), channels=3),
        "upsample": one_node(
            "resize",
            ["f32 1 3 6 20"],
            shape=(1, 3, 12, 40),
            coords=(*2 * [(1, 0, 1)], *2 * [(1, 0, 2)]),
            mode="nearest",
            rounding="floor",
        ),
        "conv_transpose": one_node("conv_transpose", ["f32 1 16 6 5", "f32 16 24 2 2"], strides=(2, 2)),
    }
    g = Graph("g")
    x, c = (g.add_input(n, TensorType(v.type.dtype, v.type.shape)) for n, v in zip("xc", out["add"].inputs))
    b = Builder(g)
    g.outputs = [b.op("add", b.op("gelu", x), c)]
    return {**out, "gelu_add": g}


def symbolic() -> dict[str, Graph]:
    n, f32 = dim("N", 1, 64), BY_NAME["f32"]
    return {
        "matmul_n": one_node("matmul", [TensorType(f32, (n, 24)), TensorType(f32, (24, 40))]),
        "matmul_k": one_node("matmul", [TensorType(f32, (5, n)), TensorType(f32, (n, 19))]),
        "softmax_n": one_node("softmax", [TensorType(f32, (4, n))], axis=1),
        "add_n": one_node("add", [TensorType(f32, (n, 5)), TensorType(f32, (5,))]),
        "conv_n": one_node(
            "conv", [TensorType(f32, (1, 16, n, 9)), TensorType(f32, (16, 16, 3, 3))], pads=(1, 1, 1, 1)
        ),
        "rows_n": parse(ROWS.format(shape="N, 24", axis=1)),
        "columns_n": parse(ROWS.format(shape="24, N", axis=0)),
        "elements_n": parse("N: dim[1, 64]\ndef g(x: f32[N, 5]):\n    y = exp(x)\n    return y, mul(y, x), neg(x)"),
    }


def program(g: Graph, target: CpuTarget = TARGET) -> ScheduledGraph:
    return compile_program(g.copy(), PassContext(TargetFacts(lanes=target.lanes)), templates(target))


def interpret(g: Graph, step: Step, n: int = 1) -> None:
    """One step of a program on random inputs, with every symbolic dim n."""
    rng = np.random.default_rng(n)
    env: dict[Expr, Expr] = {v: const(n) for v in g.dims.values()}
    inputs = {v: draw(rng, g, v, env, index_limits(step, v, env)) for v in group_inputs(step.group.nodes)}
    args: dict[str, Any] = {d.name: n for d in step.dims}
    results = {v: np.full(physical(v.type, env) or (1,), 99).astype(v.type.dtype.numpy) for v in step.group.outputs}
    for v, buf in zip(step.params, step.kernel.entry.buffers):
        args[buf.name] = pack(inputs[v], v.type).copy() if v in inputs else results[v]
    run_kernel(step.kernel, args)
    for out, result in results.items():
        got = unpack(result, out.type, concrete_shape(out.type, env), step)
        (want,) = run(subgraph(step, list(inputs), env, out), list(inputs.values()), "float64")
        check_close(np.ascontiguousarray(got), want, out.type.dtype, 300)
