"""Loops whose bounds are loaded: the schedules of sums over rows of a sparse matrix, interpreted and native."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dnnc.backends.check import drawn
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import segments, templates
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME, i32
from dnnc.ir.errors import InputError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.count import statements
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import compile_program
from dnnc.passes.schedule.problem import classify

TARGETS = ("llvm -mcpu=skylake-avx512 -threads=3", "llvm -mcpu=haswell -threads=2")


def product(m: Any, k: Any, z: Any, n: Any, dtype: str = "f32", relu: bool = False) -> Graph:
    g, t = Graph("g"), BY_NAME[dtype]
    types = ((t, (z,)), (t, (k, n)), (i32, (m + 1,)), (i32, (z,)))
    inputs = [g.add_input(f"x{j}", TensorType(d, s)) for j, (d, s) in enumerate(types)]
    b = Builder(g)
    y = b.csr_matmul(*inputs)
    g.outputs = [b.relu(y) if relu else y]
    return g


def draw(m: int, k: int, z: int, n: int, dtype: str = "f32", seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    t = BY_NAME[dtype].numpy
    starts = np.sort(rng.integers(0, z + 1, m + 1))
    starts[0], starts[-1] = 0, z
    return [
        rng.integers(-9, 9, z).astype(t), rng.integers(-9, 9, (k, n)).astype(t), starts.astype(np.int32),
        rng.integers(0, k, z).astype(np.int32),
    ]  # fmt: skip


@pytest.mark.family("kernels")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_every_schedule_means_the_same(target: str, n: int) -> None:
    t, args = parse_target(target), draw(40, 30, 100, n)
    g = product(40, 30, 100, n, relu=True)
    want = run(g, args)[0]
    nodes = list(g.nodes())
    lowered = lower(g, nodes, g.outputs)
    problem = replace(classify(nodes, lowered), flops=1 << 20)
    settings = list(dict.fromkeys([*segments.candidates(problem, t), *segments.space(problem, t)]))
    assert len(settings) > 1
    for knobs in (None, *settings):  # None: the naive nest
        kernel = lowered.kernel if knobs is None else segments.apply(problem, dict(knobs), t)
        text = show_kernel(verify_kernel(kernel))
        assert show_kernel(parse_kernel(text)) == text and "cast_i64(x2[i" in text
        assert knobs is None or dict(knobs)["shares"] == 1 or "parallel" in text
        out = np.full((40, n), np.nan, np.float32)
        buffers = [*(args[g.inputs.index(v)] for v in lowered.params[:-1]), out]
        run_kernel(kernel, {b.name: a for b, a in zip(kernel.entry.buffers, buffers)})
        np.testing.assert_array_equal(out, want)


def test_steps_of_rows_are_counted_once() -> None:
    g = product(1000, 30, 5000, 4)
    kernel = lower(g, list(g.nodes()), g.outputs).kernel
    assert statements(kernel.entry.body, {}) < 1000 * 4 * 3 + 3 * 4 * 5000


def test_a_structure_is_drawn_for_the_check() -> None:
    g = product(40, 30, 200, 4)
    (step,) = compile_program(g, PassContext(), templates(parse_target(TARGETS[0]))).steps
    starts, rises = set(), 0
    for seed in range(9):
        inputs = drawn(np.random.default_rng(seed), g, step, {})
        _, _, s, columns = inputs.values()
        assert s[0] == 0 and s[-1] == 200 and (np.diff(s) >= 0).all()
        assert columns.min() >= 0 and columns.max() < 30
        starts.add(tuple(s))
        rises += (np.diff(s) > 0).sum()
    assert len(starts) == 9 and rises > 9 * 10


def test_columns_outside_of_the_matrix_are_an_error() -> None:
    g = product(4, 5, 6, 3)
    f = compile(g, threads=1)
    args = draw(4, 5, 6, 3)
    for wrong in (-1, 5):
        args[3][2] = wrong
        with pytest.raises(InputError):
            f(*args)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i32"])
@pytest.mark.parametrize("n", [1, 7, 33])
def test_sizes_that_are_not_known(dtype: str, n: int) -> None:
    """One program, checked on a drawn structure when it is built."""
    g = product(dim("M", 0, 1 << 20), dim("K", 1, 1 << 20), dim("Z", 1, 1 << 20), n, dtype)
    f = compile(g, dims={"M": (1, 4000), "K": (1, 4000), "Z": (1, 99999)}, threads=2, strict_compile=True)
    for m, k, z in ((1, 1, 1), (3000, 50, 20000), (17, 900, 3)):
        args = draw(m, k, z, n, dtype)
        got, (want,) = f(*args), run(product(m, k, z, n, dtype), args)
        np.testing.assert_array_equal(got, want.astype(got.dtype))
    assert len(f.programs) == 1 and "segments" in str(f.report.programs[0].kernels[0].choice)
