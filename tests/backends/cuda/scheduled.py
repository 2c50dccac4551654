"""Kernels of single ops put through the generic GPU templates and interpreted: what the tests of this folder share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import TargetFacts
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Choice, Problem, classify

TARGET = GpuTarget()
GENERIC = ("map", "reduce", "scatter", "sequence", "threads")
TOLERANCE = {
    1: 0.3,
    2: 1e-2,
    4: 2e-4,
    8: 1e-10,
}  # of the largest element, by bytes of a float: sums are in another order than the naive kernel's
Array = Any


def typed(text: str) -> TensorType:
    """`f32 3 5` -> f32[3, 5]"""
    name, *dims = text.split()
    return TensorType(BY_NAME[name], tuple(map(int, dims)))


def graph_of(name: str, types: Sequence[TensorType | str], **attrs: Any) -> Graph:
    """A graph of one op, whose inputs are the graph's."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", typed(t) if isinstance(t, str) else t) for k, t in enumerate(types)]
    made = Builder(g).op(name, *values, **attrs)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    decompose(g, PassContext(TargetFacts(serial_rows=False)))
    return g


def problems(g: Graph) -> Iterator[Problem]:
    """Every node of a graph, lowered by itself."""
    for n in g.nodes():
        for out in n.outputs if n.op.compute is not None else ():
            yield classify([n], lower(g, [n], [out]))


def schedules(problem: Problem, names: Sequence[str] = GENERIC) -> Iterator[tuple[Choice, Kernel]]:
    """Every schedule that the templates of these names offer, applied and verified, its text read back."""
    for t in templates(TARGET):
        for knobs in t.candidates(problem) if t.name in names else ():
            kernel = verify_kernel(t.apply(problem, dict(knobs)))
            text = show_kernel(kernel)
            assert show_kernel(parse_kernel(text)) == text
            yield Choice(t.name, knobs), kernel


def arguments(problem: Problem) -> dict[str, Array]:
    """Random arrays for a kernel's buffers; integers stay within what indices of small arrays may be."""
    rng = np.random.default_rng(zlib.crc32(show_kernel(problem.kernel).encode()))
    out = {}
    for v, buf in zip(problem.lowered.params, problem.kernel.entry.buffers):
        shape = v.type.physical
        values = (
            rng.random(shape) * 4 - 2
            if v.type.dtype.is_float
            else rng.integers(0, 2 if v.type.dtype.kind == "b" else 3, shape)
        )
        out[buf.name] = np.ascontiguousarray(values).astype(v.type.dtype.numpy)
    return out


def check_same(problem: Problem, kernel: Kernel, what: str, slack: float = 1.0) -> None:
    """A scheduled kernel leaves in memory what the naive one does, within rounding (`slack` times that)."""
    want, got = arguments(problem), arguments(problem)
    run_kernel(problem.kernel, want)
    run_kernel(kernel, got)
    for name, w in want.items():
        g = got[name]
        if w.dtype.kind not in "fV":
            np.testing.assert_array_equal(g, w, f"{what}: {name}")
            continue
        a, b = g.astype(np.float64), w.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        scale = np.abs(b[np.isfinite(b)]).max(initial=1.0)
        with np.errstate(all="ignore"):
            bad = ~(same | (np.abs(a - b) <= slack * TOLERANCE[w.dtype.itemsize] * scale))
        assert not bad.any(), f"{what}: {name}{np.argwhere(bad)[0].tolist()} is {a[bad][0]}, naive {b[bad][0]}"


def check_all(g: Graph, names: Sequence[str] = GENERIC) -> int:
    """The first schedules of all nodes and the last; how many there were."""
    n = 0
    for p in problems(g):
        found = list(schedules(p, names))
        assert found, f"no schedule for {p.kernel.name}"
        for choice, kernel in found[:3] + found[-1:] if len(found) > 3 else found:
            check_same(p, kernel, f"{p.kernel.name} by {choice}")
            n += 1
    return n
