"""Products of few rows with weights of 4 and 8 bits: interpreted, compiled without spills; what has no such kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.emit import emit_module
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates.contraction import decoded
from dnnc.ir.dtype import BY_NAME, bf16, f16, f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import tensor
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
TOLERANCE = {f16: 1e-3, bf16: 8e-3}


def product(m: int, k: int, n: int, kind: str, block: int, zeros: int | str | None = None, t: Any = f16) -> Graph:
    """x [m, k] times dequantized weights, and a bias. `zeros`: one for all, "each", or None."""
    g, rng = Graph("g"), np.random.default_rng(0)
    b, code = Builder(g), BY_NAME[kind]

    def codes(*shape: int) -> Any:
        return b.constant(rng.integers(code.range[0], code.range[1] + 1, shape).astype(code.numpy))

    x, q, blocks = g.add_input("x", tensor(t, m, k)), codes(k, n), -(-k // block)
    more = [codes(blocks, n)] if zeros == "each" else []
    more = [b.constant(np.full((blocks, n), zeros).astype(code.numpy))] if isinstance(zeros, int) else more
    scale = b.constant((rng.random((blocks, n)) * 0.01 + 0.005).astype(t.numpy))
    y = b.matmul(x, b.dequantize_linear(q, scale, *more, axis=0, block=block))
    g.outputs = [b.add(y, b.constant(rng.standard_normal(n).astype(t.numpy)))]
    return g


def problem(g: Graph) -> tuple[Graph, Problem]:
    """The one group that the passes leave."""
    PassManager().run(g, LEVELS[3], PassContext(facts(H200, "standard")))
    (group,) = plan_fusion(g).groups
    return g, classify(group.nodes, lower(g, group.nodes, group.outputs), g.constants)


CASES = [
    (1, 256, 64, "i4", 128, None, f16),
    (3, 256, 64, "u4", 32, 8, f16),
    (16, 384, 96, "u4", 64, "each", f16),
    (20, 128, 64, "i4", 128, None, bf16),
    (20, 256, 64, "u4", 64, "each", f16),  # codes in rings in shared memory
    (40, 768, 64, "i4", 256, None, f16),
    (1, 256, 64, "i8", 256, None, f16),
    (9, 256, 32, "u8", 64, "each", f16),
    (2, 128, 32, "i8", 64, None, bf16),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Any) -> None:
    m, k, _, _, _, _, t = case
    x = np.random.default_rng(1).standard_normal((m, k)).astype(t.numpy)
    f = dnnc.compile(product(*case), target="cuda-interpreted", cache=False)
    assert [p.choice.partition("(")[0] for p in f.report.programs[-1].kernels] == ["decoded"]
    (want,) = run(product(*case), [x], "float64")
    assert np.abs(f(x).astype(np.float64) - want).max() <= TOLERANCE[t] * np.abs(want).max()


def of_made_rows(ahead: str, m: int, t: Any, kind: str) -> Graph:
    """A product whose rows a norm makes ("rms_norm", "layer_norm"), or a gate ("gate")."""
    g, rng = Graph("g"), np.random.default_rng(0)
    b, k, n = Builder(g), 128, 64
    x = g.add_input("x", tensor(t, m, 2 * k if ahead == "gate" else k))
    if ahead == "gate":
        left, right = (b.slice(x, starts=(0, at), steps=(1, 1), shape=(m, k)) for at in (0, k))
        y = b.mul(b.mul(left, b.sigmoid(left)), right)
    else:
        weights = [b.constant((1 + 0.1 * rng.standard_normal(k)).astype(t.numpy)) for _ in range(2)]
        y = b.rms_norm(x, weights[0], axis=-1) if ahead == "rms_norm" else b.layer_norm(x, *weights, axis=-1)
    codes = b.constant(rng.integers(*BY_NAME[kind].range, (k, n)).astype(BY_NAME[kind].numpy))
    scale = b.constant((rng.random((k // 64, n)) * 0.01 + 0.005).astype(t.numpy))
    g.outputs = [b.matmul(y, b.dequantize_linear(codes, scale, axis=0, block=64))]
    return g


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("rms_norm", 1, f16, "i4"), ("layer_norm", 3, bf16, "i8"), ("gate", 2, f16, "i4")], ids=str
)
def test_rows_are_made_by_the_blocks(case: Any) -> None:
    g = of_made_rows(*case)
    x = np.random.default_rng(1).standard_normal(tuple(map(int, g.inputs[0].type.shape))).astype(case[2].numpy)
    f = dnnc.compile(of_made_rows(*case), target="cuda-interpreted", cache=False)
    assert [p.choice.partition("(")[0] for p in f.report.programs[-1].kernels] == ["decoded"]
    (want,) = run(g, [x], "float64")
    assert np.abs(f(x).astype(np.float64) - want).max() <= 2 * TOLERANCE[case[2]] * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("cols, slices, split", [(64, 2, 2), (32, 4, 1), (32, 3, 4)])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_sums_are_divided(cols: int, slices: int, split: int, stages: int) -> None:
    """Among warps and blocks of a cluster, some of which have a round less; codes on their way in registers or in
    shared memory.
    """
    g, p = problem(product(8, 640, 64, "u4", 32, 8))
    knobs = {"cols": cols, "slices": slices, "split": split, "flight": 1, "stages": stages}
    kernel = verify_kernel(decoded.apply(p, knobs, H200))
    text = show_kernel(kernel)
    assert show_kernel(parse_kernel(text)) == text
    x, y = np.random.default_rng(1).standard_normal((8, 640)).astype(np.float16), np.full((8, 64), np.nan, np.float16)
    held = {v: np.ascontiguousarray(v.type.encoding.pack(a)[0]) for v, a in g.constants.items()} | {g.inputs[0]: x}
    run_kernel(kernel, {b.name: held.get(v, y) for v, b in zip(p.lowered.params, kernel.entry.buffers)})
    (want,) = run(product(8, 640, 64, "u4", 32, 8), [x], "float64")
    assert np.abs(y.astype(np.float64) - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiled(arch: str) -> None:
    kernels = []
    cases = [(1, 4096, 4096, "u4", 128, 8, f16), (16, 4096, 4096, "u4", 128, "each", bf16), (64, 4096, 4096, "i4", 128)]
    for case in (*cases, (16, 4096, 4096, "i8", 4096, None, f16), (1, 4096, 4096, "u8", 128, "each", bf16)):
        p = problem(product(*case))[1]
        kernels += [decoded.apply(p, dict(k), FACTS[arch]) for k in decoded.candidates(p, FACTS[arch])[:1]]
    code = compile_cuda(emit_module([(k, f"k_{i}") for i, k in enumerate(kernels)], FACTS[arch]), arch)
    assert len(kernels) == 5 and code.spills == 0 and code.local_bytes == 0, code.log


@pytest.mark.parametrize(
    "case",
    [
        (65, 128, 64, "i4", 128, None, f16),  # tensor cores take longer than the weights
        (4, 128, 64, "i4", 16, None, f16),  # blocks within a step
        (4, 128, 48, "i4", 128, None, f16),
        (4, 128, 64, "i4", 128, None, f32),
    ],
    ids=str,
)
def test_others_are_floats_from_the_start(case: Any) -> None:
    g = product(*case)
    PassManager().run(g, LEVELS[3], PassContext(facts(H200, "standard")))
    assert "decode" not in [n.op.name for n in g.nodes()]
