"""Cotangents of operands of a small graph, by the interpreter in float64 or by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dnnc.driver import compile
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import from_numpy
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.types import TensorType

Array = Any
Build = Callable[..., Any]  # (b, *values) -> a value of floats


def pulled(build: Build, arrays: Sequence[Array], wanted: Sequence[int]) -> Graph:
    """The graph of cotangents of `wanted` operands. Its inputs are the operands and the result's cotangent, last."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(from_numpy(a.dtype), a.shape)) for k, a in enumerate(arrays)]
    y = build(Builder(g), *values)
    found = pullback(g, {y: g.add_input("seed", y.type)}, [values[k] for k in wanted])
    assert all(c is not None for c in found)
    g.outputs = [c for c in found if c is not None]
    verify(g)
    return g


def ops(g: Graph) -> list[str]:
    """The names of the ops that the outputs depend on, in order."""
    live = set(g.outputs)
    for n in reversed(list(g.nodes())):
        if not live.isdisjoint(n.outputs):
            live.update(v for v in n.inputs if v is not None)
    return [n.op.name for n in g.nodes() if not live.isdisjoint(n.outputs)]


def cotangents(build: Build, arrays: Sequence[Array], seed: Array, wanted: Sequence[int] = (0,)) -> list[Array]:
    """Cotangents of `wanted` operands, in float64 by the interpreter."""
    return run(pulled(build, arrays, wanted), [*arrays, seed], "float64")


def compiled(
    build: Build, arrays: Sequence[Array], seed: Array, wanted: Sequence[int] = (0,), target: str = "llvm"
) -> list[Array]:
    """Cotangents of `wanted` operands, by kernels; two runs give the same bits."""
    g = pulled(build, arrays, wanted)
    f = compile(g, target=target)
    first, second = (f(*arrays, seed) for _ in range(2))
    many = [list(x) if isinstance(x, (list, tuple)) else [x] for x in (first, second)]
    for a, b in zip(*many, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return [np.asarray(a) for a in many[0]]


WAYS = [cotangents, pytest.param(compiled, marks=pytest.mark.slow)]
TARGETS = [pytest.param(t, marks=pytest.mark.slow) for t in ("llvm", "cuda-interpreted")]


def second_differences(
    build: Build, arrays: Sequence[Array], seed: Array, by: int, of: int, step: float
) -> tuple[Any, Any]:
    """A directional derivative of a cotangent: by the pullback of the pullback, and by central differences."""
    rng = np.random.default_rng(0)
    g = pulled(build, arrays, [of])
    inputs = [*arrays, seed]
    c = g.outputs[0]
    direction = rng.standard_normal(np.shape(arrays[by]))
    outer = rng.standard_normal(c.type.shape)
    again = pullback(g, {c: g.add_input("outer", c.type)}, [g.inputs[by]])
    value = g.outputs
    assert again[0] is not None
    g.outputs = [again[0]]
    mine = float((run(g, [*inputs, outer], "float64")[0] * direction).sum())
    g.outputs = value

    def at(t: float) -> float:
        moved = [a + t * direction if k == by else a for k, a in enumerate(inputs)]
        return float((run(g, [*moved, outer], "float64")[0] * outer).sum())

    return mine, (at(step) - at(-step)) / (2 * step)
