"""Products of sparse arrays on GPUs: every schedule interpreted and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.reduction import segments
from dnnc.ir.dtype import BY_NAME, i32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
ROWS, TERMS, STORED = 40, 30, 150


def product(n: int, dtype: str = "f32", trusted: bool = True) -> Graph:
    g, t = Graph("g"), BY_NAME[dtype]
    types = ((t, (STORED,)), (t, (TERMS, n)), (i32, (ROWS + 1,)), (i32, (STORED,)))
    inputs = [g.add_input(f"x{j}", TensorType(d, s)) for j, (d, s) in enumerate(types)]
    b = Builder(g)
    g.outputs = [b.relu(b.csr_matmul(*inputs, trusted=trusted))]
    return g


def draw(n: int, dtype: str, kind: str = "random") -> list[Any]:
    """Small integers, whose sums are exact. `kind` of rows: "random", many of them empty, or "one" that has all."""
    rng, t = np.random.default_rng(n), BY_NAME[dtype].numpy
    starts = np.sort(rng.integers(0, STORED + 1, ROWS + 1))
    if kind == "one":
        starts[:] = np.arange(ROWS + 1) > 7
        starts *= STORED
    starts[0], starts[-1] = 0, STORED
    values = rng.integers(-9, 9, STORED).astype(t), rng.integers(-9, 9, (TERMS, n)).astype(t)
    return [*values, starts.astype(np.int32), rng.integers(0, TERMS, STORED).astype(np.int32)]


def problem(g: Graph) -> Problem:
    return classify(nodes := list(g.nodes()), lower(g, nodes, g.outputs))


@pytest.mark.family("kernels")
@pytest.mark.parametrize("kind", ["random", "one"])
@pytest.mark.parametrize(("n", "dtype"), [(1, "f32"), (3, "f32"), (36, "f32"), (200, "f32"), (8, "f16"), (1, "i32")])
def test_every_schedule_means_the_same(n: int, dtype: str, kind: str) -> None:
    g, args = product(n, dtype), draw(n, dtype, kind)
    want, p = run(g, args)[0], problem(g)
    every = [*segments.candidates(p, H200), *segments.space(p, H200)]
    assert len(every) > 2
    for knobs in every if kind == "random" else every[:1]:
        kernel = verify_kernel(segments.apply(p, dict(knobs), H200))
        assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
        out = np.full((ROWS, n), np.nan if dtype[0] == "f" else -1).astype(BY_NAME[dtype].numpy)
        buffers = [*(args[g.inputs.index(v)] for v in p.lowered.params[:-1]), out]
        run_kernel(kernel, {b.name: a for b, a in zip(kernel.entry.buffers, buffers)})
        np.testing.assert_array_equal(out, want, str(knobs))


@pytest.mark.parametrize("trusted", [True, False])
def test_programs_take_it(trusted: bool) -> None:
    f = dnnc.compile(product(36, trusted=trusted), target="cuda-interpreted", cache=False)
    assert f.report.programs[-1].kernels[0].choice.partition("(")[0] == "segments"
    args = draw(36, "f32")
    np.testing.assert_array_equal(f(*args), run(product(36), args)[0])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str) -> None:
    target, made = FACTS[arch], {}
    (template,) = (t for t in templates(target) if t.name == "segments")
    for k, (n, dtype) in enumerate([(1, "f32"), (1, "f64"), (64, "f32"), (64, "f16"), (200, "f64")]):
        for trusted in (True, False):
            p = problem(product(n, dtype, trusted))
            made[f"segments_{k}_{trusted:d}"] = template.apply(p, dict(template.candidates(p)[0]))
    assert all(launch_of(kernel).cached for kernel in made.values())
    texts = {s: (emit_kernel(kernel, s, target), arch) for s, kernel in made.items()}
    for symbol, c in compile_many(texts).items():
        assert c.spills == 0 and c.local_bytes == 0, f"{symbol}: {c.log}"
