"""Scatters by all schedules of both targets, interpreted with its checks for races and bounds, against NumPy in the order of the updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates as gpu_templates
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates as cpu_templates
from dnnc.ir.builder import Builder
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.operator.interp import run_kernel
from dnnc.ir.operator.stmt import Kernel
from dnnc.ir.operator.text import parse_kernel, show_kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.ir.ops.index import REDUCTIONS
from dnnc.ir.types import TensorType
from dnnc.passes.lower import lower
from dnnc.passes.operator.decompose import decompose
from dnnc.passes.schedule.problem import Problem, Template, classify

Array = Any
DTYPES = ("f32", "f64", "i8", "i64", "u16", "f16")


def graph(rng: np.random.Generator, reduction: str, dtype: str) -> Graph:
    """A scatter of random form: any rank, axis, width of index and number of updates, none among them."""
    g, b = Graph("g"), None
    rank = int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(1, 9, rank))
    t = BY_NAME[dtype]
    x = g.add_input("x", TensorType(t, shape))
    b = Builder(g)
    kind = BY_NAME[str(rng.choice(["i64", "i32"]))]
    if rng.random() < 0.5:
        axis = int(rng.integers(rank))
        sizes = tuple(int(rng.integers(0, 20)) if k == axis else int(rng.integers(1, n + 1)) for k, n in enumerate(shape))
        at, u = g.add_input("at", TensorType(kind, sizes)), g.add_input("u", TensorType(t, sizes))
        y = b.scatter_elements(x, at, b.neg(u) if t.is_float and rng.random() < 0.5 else u, axis=axis, reduction=reduction)
    else:
        width = int(rng.integers(1, rank + 1))
        lead = tuple(int(n) for n in rng.integers(0, 7, int(rng.integers(0, 3))))
        at, u = g.add_input("at", TensorType(kind, (*lead, width))), g.add_input("u", TensorType(t, (*lead, *shape[width:])))
        y = b.scatter_nd(b.abs(x) if t.is_float and rng.random() < 0.5 else x, at, u, reduction=reduction)
    g.outputs = [y]
    return g


def operands(rng: np.random.Generator, g: Graph) -> list[Array]:
    """Small whole numbers, whose sums are exact in every type, and indices of the smallest axis, negative ones too."""
    x = g.inputs[0]
    least = min(int(n) for n in x.type.shape)
    out = []
    for v in g.inputs:
        low, high = (-least, least) if v.name == "at" else (0, 3) if v.type.dtype.kind == "u" else (-2, 3)
        out.append(rng.integers(low, high, v.type.shape).astype(v.type.dtype.numpy))
    return out


def run(problem: Problem, kernel: Kernel, given: dict[str, Array]) -> Array:
    values = zip(problem.lowered.params, kernel.entry.buffers)
    args = {b.name: np.ascontiguousarray(given[v.name]).copy() if v.name in given else np.zeros(v.type.shape, v.type.dtype.numpy) for v, b in values}
    run_kernel(kernel, args, threads=3)
    written = problem.lowered.scattered
    assert written is not None
    return args[written.out.name]


def schedules(problem: Problem) -> list[tuple[str, Kernel]]:
    every: list[tuple[str, Template]] = [("cpu", t) for t in cpu_templates(parse_target("llvm"))] + [
        ("gpu", t) for t in gpu_templates(GpuTarget(sms=2))
    ]
    made = [(f"{where} {t.name} {k}", t.apply(problem, dict(k))) for where, t in every if t.name == "scatter" for k in t.space(problem)]
    for what, kernel in made:
        assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel), what
    return [(what, verify_kernel(decompose(k, ()))) for what, k in made]


def check(seed: int, reduction: str, dtype: str) -> int:
    from dnnc.ir.interp import run as reference

    rng = np.random.default_rng(seed)
    g = graph(rng, reduction, dtype)
    given = operands(rng, g)
    want = reference(g, given, "float64")[0]
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs[0]))
    named = {v.name: a for v, a in zip(g.inputs, given)}
    every = [("naive", verify_kernel(problem.kernel)), *schedules(problem)]
    for what, kernel in every:
        np.testing.assert_array_equal(
            run(problem, kernel, named).reshape(want.shape), want.astype(g.outputs[0].type.dtype.numpy), f"{what} {seed} {g}"
        )
    return len(every)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_scatters(reduction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.llvm.templates.scatter.SERIAL_BELOW", 0)
    assert sum(check(seed, reduction, dtype) for seed in range(3)) > 6


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_many_random_scatters(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.llvm.templates.scatter.SERIAL_BELOW", 0)
    for seed in range(100, 140):
        check(seed, reduction, DTYPES[seed % len(DTYPES)])
