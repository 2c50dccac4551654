"""One kernel on one thread, bound to its buffers. What bounds its speed, independent FMAs and reading memory, is in
`dnnc.backends.llvm.ceilings`.

In: the text of a graph with one heavy node. It goes the whole way: graph passes, layout, fusion, lowering to a naive
nest, the recipe's own first choice, LLVM. Out: a function without arguments to be timed. cpu_kernels.py and
random_shapes.py measure with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.llvm.ceilings import Probe, bind
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.backends.runtime.link import pack
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program

Array = np.ndarray[Any, Any]


@dataclass
class Timed(Probe):
    """A kernel of a graph: its work (`flops`, `bytes` of operands and result), schedule, max error / scale."""

    choice: str = ""
    error: float = 0.0


def aligned(a: Array) -> Array:
    """The bytes of an array at an aligned address."""
    raw = aligned_empty(a.nbytes)
    raw[:] = a.reshape(-1).view(np.uint8)
    return raw


# --- a kernel of a graph ----------------------------------------------------------------------------------------------


def case(
    name: str, text: str, target: CpuTarget, kind: str = "contraction", dtype: str = "f32", below: int = 0
) -> Timed:
    """The kernels of a graph's groups of this kind, which all read the graph's input, packed and bound. The error
    against float64 of one that makes the graph's result is measured first.

    Args:
        name: for tables.
        text: a graph of an input `a` and perhaps constants: weights `b`, an array `x` and indices `at`, whose numbers
            are drawn here.
        target: the CPU.
        kind: of the group: "contraction", "reduction" or "scatter".
        dtype: what `f32` in the text stands for: "f16" and "bf16" are stored so, and computed in float32.
        below: where indices end.
    """
    stored = BY_NAME[dtype].numpy
    rng = np.random.default_rng(0)
    shapes = {k: [*map(int, d.split(","))] for k, d in re.findall(r"(\w+): (?:f32|i64)\[([\d, ]+)\]", text)}
    x = rng.standard_normal(shapes["a"]).astype(stored)
    constants = {"b": _weights(rng, shapes["b"]).astype(stored)} if "b" in shapes else {}
    constants |= {"x": rng.standard_normal(shapes["x"]).astype(stored)} if "x" in shapes else {}
    constants |= {"at": rng.integers(0, below, shapes["at"])} if "at" in shapes else {}
    graph = parse(text.replace("f32[", f"{dtype}["), constants)
    want = run(graph, [x], "float64")[0]
    program = compile_program(
        graph, PassContext(TargetFacts(lanes=target.lanes, rates=target.rates)), templates(target)
    )
    calls, moved, flops, choices, error = [], 0, 0, [], 0.0
    for step in (s for s in program.steps if s.group.kind == kind):
        buffers = []
        for v in step.params:
            if v in step.group.outputs:
                data = np.zeros([int(str(d)) for d in v.type.physical], stored)
            else:
                data = pack(graph.constants.get(v, x), v.type)
            moved += data.nbytes
            buffers.append(aligned(data))
        calls.append(bind(step.kernel, target, buffers))
        calls[-1]()
        flops, choices = flops + int(str(step.flops)), [*choices, str(step.choice)]
        out = step.group.outputs[-1].type
        if out.shape == want.shape:
            expected = pack(want, out).reshape(-1)
            error = float(np.abs(buffers[-1].view(stored).astype(np.float64) - expected).max() / np.abs(expected).max())

    def call() -> None:
        for one in calls:
            one()

    return Timed(name, calls[0] if len(calls) == 1 else call, flops, moved, " ".join(dict.fromkeys(choices)), error)


def whole(name: str, text: str, target: str) -> Timed:
    """A graph of one input `a` and no constants as a compiled program, for what takes several kernels; its one output
    against float64. What a call costs in Python is part of its time.
    """
    (numbers,) = re.findall(r"a: f32\[([\d, ]+)\]", text)
    x = np.random.default_rng(0).standard_normal([*map(int, numbers.split(","))]).astype(np.float32)
    graph = parse(text)
    want = np.asarray(run(graph, [x], "float64")[0])
    f = compile(graph, target=target, threads=1, cache=False)
    got = np.asarray(f(x))
    error = float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-30))
    choices = [str(k.choice) for p in f.report.programs for k in p.kernels]
    return Timed(name, lambda: f(x), 0, x.nbytes + got.nbytes, " ".join(dict.fromkeys(choices)), error)


def _weights(rng: np.random.Generator, shape: list[int]) -> Array:
    terms = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return (rng.standard_normal(shape) / np.sqrt(terms)).astype(np.float32)


def measure(items: Sequence[Probe], seconds: float) -> list[list[float]]:
    """Seconds per call; the items take turns."""
    times: list[list[float]] = [[] for _ in items]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for t, item in zip(times, items):
            start = time.perf_counter()
            item.call()
            t.append(time.perf_counter() - start)
    return times
