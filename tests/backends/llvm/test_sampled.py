"""Scalar products of rows that indices pick: the schedules, interpreted and native."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dnnc.backends.check import drawn
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import sampled, templates
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME, i32
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import compile_program
from dnnc.passes.schedule.problem import classify

TARGETS = ("llvm -mcpu=skylake-avx512 -threads=3", "llvm -mcpu=haswell -threads=2", "llvm -mcpu=x86-64 -threads=1")


def products(m: Any, k: Any, z: Any, d: int, dtype: str = "f32", relu: bool = False) -> Graph:
    g, t = Graph("g"), BY_NAME[dtype]
    types = ((t, (m, d)), (t, (k, d)), (i32, (z,)), (i32, (z,)))
    inputs = [g.add_input(f"x{j}", TensorType(e, s)) for j, (e, s) in enumerate(types)]
    b = Builder(g)
    y = b.csr_sampled(*inputs)
    g.outputs = [b.relu(y) if relu else y]
    return g


def draw(m: int, k: int, z: int, d: int, dtype: str = "f32", rising: bool = True) -> list[Any]:
    rng, t = np.random.default_rng(m + z), BY_NAME[dtype].numpy
    rows = rng.integers(0, m, z)
    factors = [rng.integers(-4, 5, (n, d)).astype(t) for n in (m, k)]
    return [*factors, (np.sort(rows) if rising else rows).astype(np.int32), rng.integers(0, k, z).astype(np.int32)]


@pytest.mark.family("kernels")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("d", [1, 21, 150])
def test_every_schedule_means_the_same(target: str, d: int) -> None:
    t, args, g = parse_target(target), draw(3, 9, 70, d), products(3, 9, 70, d, relu=True)
    want = run(g, args)[0]
    lowered = lower(g, list(g.nodes()), g.outputs)
    problem = replace(classify(list(g.nodes()), lowered), flops=1 << 20)
    settings = list(dict.fromkeys([*sampled.candidates(problem, t), *sampled.space(problem, t)]))
    for knobs in settings[:2]:
        kernel = sampled.apply(problem, dict(knobs), t)
        text = show_kernel(verify_kernel(kernel))
        assert show_kernel(parse_kernel(text)) == text and "parallel" in text and "hmin" in text
        out = np.full(70, np.nan, np.float32)
        buffers = [*(args[g.inputs.index(v)] for v in lowered.params[:-1]), out]
        run_kernel(kernel, {b.name: a for b, a in zip(kernel.entry.buffers, buffers)})
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_sizes_that_are_not_known(dtype: str) -> None:
    g = products(dim("M", 1, 1 << 20), dim("K", 1, 1 << 20), dim("Z", 1, 1 << 20), 20, dtype)
    f = compile(g, dims={"M": (1, 4000), "K": (1, 4000), "Z": (1, 99999)}, threads=2, strict_compile=True)
    for m, k, z, rising in ((1, 1, 1, True), (30, 50, 5000, True), (300, 900, 3000, False), (17, 900, 16, True)):
        args = draw(m, k, z, 20, dtype, rising)
        got, (want,) = f(*args), run(products(m, k, z, 20, dtype), args)
        np.testing.assert_array_equal(got, want.astype(got.dtype))
    assert len(f.programs) == 1 and "sampled" in str(f.report.programs[0].kernels[0].choice)


def test_a_check_draws_rows_of_several_elements() -> None:
    g = products(40, 30, 500, 4)
    (step,) = compile_program(g, PassContext(), templates(parse_target(TARGETS[0]))).steps
    _, _, rows, columns = drawn(np.random.default_rng(0), g, step, {}).values()
    assert len(rows) == 500 and (np.diff(rows) >= 0).all() and (rows[16:] == rows[:-16]).sum() > 100
    assert 2 < len(set(rows)) and rows.min() >= 0 and rows.max() < 40 and len(set(columns)) > 20
