"""Gradients of graphs against numbers: directional differences in float64, the dot-product test, compiled kernels.

A case is an op's sample. Its raised form has float64 in the place of each float dtype, in attributes too, so that
rounding ops are differentiable and nothing else is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from dnnc.driver import compile
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import DType, f64
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Value
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef, Sample
from dnnc.ir.ops.common import draw
from dnnc.ir.tolerances import bound, reduced
from dnnc.ir.types import TensorType
from dnnc.tools.accuracy import depth, longest_reduction, stored_type

Array = Any
STEPS = (1e-6, 1e-5, 1e-4, 1e-7)  # of differences; one that meets no kink and no pole must agree
TOLERANCE = 1e-6  # of the sum of the magnitudes that a directional derivative is made of
NOISE = 4e-16  # of a result, over the step
LEAST = 1e-4  # a cotangent smaller than that may be a sum whose terms, of size 1, cancel
ROUNDINGS = 16.0  # errors of the interpreter in the graph's dtypes that kernels may make


def raised(s: Sample) -> Sample:
    """A sample with float64 for each float dtype."""
    types = tuple(TensorType(f64, t.shape) if t.dtype.is_float else t for t in s.inputs)
    attrs = tuple((k, f64 if isinstance(v, DType) and v.is_float else v) for k, v in s.attrs)
    return Sample(types, attrs, s.domain)


def drawn(s: Sample, rng: np.random.Generator) -> list[Array]:
    """A sample's inputs; floats around a domain that is one point, since that may be a kink."""
    arrays = draw(s, int(rng.integers(1 << 30)))
    apart = s.domain[0] == s.domain[1]
    return [a + rng.uniform(-1.0, 1.0, a.shape) if apart and a.dtype.kind == "f" else a for a in arrays]


def graph_of(op: OpDef, s: Sample) -> Graph:
    """A graph of one node, whose operands are the inputs."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
    made = Builder(g).op(op, *values, **dict(s.attrs))
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    return g


def differentiable(g: Graph) -> bool:
    """Has the graph an input and an output of floats?"""
    return any(v.type.dtype.is_float for v in g.inputs) and any(v.type.dtype.is_float for v in g.outputs)


@dataclass(frozen=True)
class Gradient:
    """A graph whose inputs are another's and cotangents of its float outputs; its outputs are cotangents of inputs."""

    graph: Graph
    seeds: int  # how many cotangents go in
    of: tuple[int, ...]  # the inputs whose cotangents come out


def gradient(g: Graph) -> Gradient:
    """The gradient graph by all float inputs; GradientError where a node has no derivative."""
    g = g.copy()
    seeds = {o: g.add_input(f"w{k}", o.type) for k, o in enumerate(_distinct(g.outputs)) if o.type.dtype.is_float}
    wanted = [v for v in g.inputs if v.type.dtype.is_float and v not in seeds.values()]
    found = pullback(g, seeds, wanted)
    places = {v: k for k, v in enumerate(g.inputs)}
    kept = [(v, c) for v, c in zip(wanted, found) if c is not None]
    g.outputs = [c for _, c in kept]
    verify(g)
    return Gradient(g, len(seeds), tuple(places[v] for v, _ in kept))


def _distinct(values: Sequence[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def check_graph(g: Graph, arrays: Sequence[Array], rng: np.random.Generator) -> Gradient:
    """Compare pullbacks of a float64 graph with differences of its results, along random directions.

    The transpose of the pullback, which is the pullback in its cotangents, maps a direction v to J v: this is compared
    with the difference of each result, and <J v, w> with <v, J' w>.
    """
    made = gradient(g)
    outputs = _distinct(g.outputs)
    floats = [k for k, v in enumerate(g.inputs) if v.type.dtype.is_float]
    base = [a for a, o in zip(_values(g, arrays), outputs) if o.type.dtype.is_float]
    seeds = [np.where(np.isfinite(a), rng.standard_normal(a.shape), 0.0) for a in base]
    found = dict(zip(made.of, run(made.graph, [*arrays, *seeds], "float64")))
    for k, a in found.items():
        assert np.isfinite(a).all() or not all(np.isfinite(y).all() for y in base), f"x{k}: the gradient is {a}"
    weighed = sum(float(np.abs(y * w).sum()) for y, w in zip(base, seeds))
    for _ in range(2):
        direction = {k: rng.standard_normal(np.shape(arrays[k])) for k in floats}
        moved = cache(partial(_difference, g, arrays, direction))
        parts = [found[k] * direction[k] for k in found]
        slope = sum(float(p.sum()) for p in parts)
        size = sum(float(np.abs(p).sum()) for p in parts)
        told: list[float] = []
        for h in STEPS:
            told.append(sum(float((d * w).sum()) for d, w in zip(moved(h), seeds)))
            if abs(told[-1] - slope) <= TOLERANCE * max(size, abs(told[-1])) + NOISE / h * weighed:
                break
        else:
            raise AssertionError(f"along a direction: {told} by differences, {slope} by the pullback")
    _check_transpose(made, arrays, seeds, direction, moved, base, slope, size)
    return made


def _check_transpose(
    made: Gradient,
    arrays: Sequence[Array],
    seeds: Sequence[Array],
    direction: dict[int, Array],
    moved: Callable[[float], Sequence[Array]],
    base: Sequence[Array],
    slope: float,
    size: float,
) -> None:
    g = made.graph.copy()
    tangents = {o: g.add_input(f"v{k}", o.type) for k, o in zip(made.of, g.outputs)}
    if len(tangents) != len(made.of):
        return  # one cotangent of two operands
    back = pullback(g, tangents, g.inputs[len(arrays) : len(arrays) + made.seeds])
    g.outputs = [v for v in back if v is not None]
    verify(g)
    values = iter(run(g, [*arrays, *seeds, *(direction[k] for k in made.of)], "float64"))
    pushed = [np.zeros_like(w) if v is None else next(values) for v, w in zip(back, seeds)]
    again = sum(float((p * w).sum()) for p, w in zip(pushed, seeds))
    least = 1e-13 * sum(float(np.abs(y * w).sum()) for y, w in zip(base, seeds))
    assert abs(again - slope) <= 1e-9 * max(size, abs(slope)) + least, f"<J v, w> is {again}, <v, J' w> is {slope}"
    for k, (p, y) in enumerate(zip(pushed, base)):
        scale = float(np.abs(y).max(initial=0.0))

        def agrees(h: float, k: int = k, p: Array = p, scale: float = scale) -> bool:
            d = moved(h)[k]
            most = max(float(np.abs(a).max(initial=0.0)) for a in (p, d))
            return bool(np.abs(p - d).max(initial=0.0) <= 1e-5 * most + NOISE / h * scale)

        assert any(map(agrees, STEPS)), f"result {k}: J v is {p}, by differences {moved(STEPS[0])[k]}"


def _values(g: Graph, arrays: Sequence[Array]) -> list[Array]:
    """The distinct outputs."""
    found = dict(zip(g.outputs, run(g, arrays, "float64")))
    return list(found.values())


def _difference(g: Graph, arrays: Sequence[Array], direction: dict[int, Array], h: float) -> list[Array]:
    """Derivatives of the float outputs along a direction: central differences, extrapolated once."""

    def at(t: float) -> list[Array]:
        moved = [a + t * direction[k] if k in direction else a for k, a in enumerate(arrays)]
        return [a for a, o in zip(_values(g, moved), _distinct(g.outputs)) if o.type.dtype.is_float]

    with np.errstate(all="ignore"):
        return [
            np.where(np.isfinite(a), (8 * (a - b) - (c - d)) / (12 * h), 0.0)
            for a, b, c, d in zip(at(h), at(-h), at(2 * h), at(-2 * h))
        ]


def check_sample(op: OpDef, s: Sample, rng: np.random.Generator, order: int = 1) -> None:
    """Compare derivatives of a raised sample up to an order with differences of those before them."""
    high = raised(s)
    g = graph_of(op, high)
    arrays = drawn(high, rng)
    for k in range(order):
        if not differentiable(g):
            return
        if k + 1 < order:
            made = gradient(g)
            shapes = [a.shape for a, o in zip(_values(g, arrays), _distinct(g.outputs)) if o.type.dtype.is_float]
            g, arrays = made.graph, [*arrays, *(rng.standard_normal(t) for t in shapes)]
        else:
            check_graph(g, arrays, rng)


def check_compiled(op: OpDef, s: Sample, rng: np.random.Generator, target: str = "llvm") -> None:
    """Compare a sample's compiled gradient, in the sample's own dtypes, with that of its raised form.

    Numbers are judged as those of models are (`dnnc.tools.accuracy`): by the rounding contract, and where it is
    exceeded by what rounding alone does to the interpreter in the graph's own dtypes.
    """
    exact, made = gradient(graph_of(op, raised(s))), gradient(graph_of(op, s))
    g = made.graph
    if not g.outputs:
        return
    arrays = draw(s, int(rng.integers(1 << 30)))
    like = run(graph_of(op, s), arrays)
    kinds = _distinct(graph_of(op, s).outputs)
    seeds = [rng.standard_normal(a.shape).astype(a.dtype) for a, o in zip(like, kinds) if o.type.dtype.is_float]
    given = [*arrays, *seeds]
    wide = [a.astype(np.float64) if v.type.dtype.is_float else a for a, v in zip(given, g.inputs)]
    want = dict(zip(exact.of, run(exact.graph, wide, "float64")))
    assert set(made.of) == set(want)
    f = compile(g.copy(), target=target, threads=2, cache=False, verify=False)
    found = f(*given)
    rough: list[Array] | None = None
    form, terms = stored_type(g, None), longest_reduction(g, {})
    for i, (k, v, a) in enumerate(zip(made.of, g.outputs, found if isinstance(found, tuple) else (found,))):
        t, b = v.type.dtype, want[k]
        assert a.shape == b.shape and a.dtype == t.numpy, f"{a.dtype}{a.shape} where {t}{b.shape} was expected"
        limit = bound(t, terms, b)
        limit = max(limit, reduced(form.name, depth(g), b)) if form is not None else limit
        if _worst(a, b) <= limit:
            continue
        rough = run(g, given) if rough is None else rough
        limit += ROUNDINGS * _worst(rough[i], b)
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=LEAST))
        assert _worst(a, b) <= min(limit, 0.05 * scale), f"x{k}: off by {_worst(a, b)}, allowed {limit}: {a} for {b}"


def _worst(a: Array, b: Array) -> float:
    """The largest difference; NaN equals NaN, and infinities themselves."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(all="ignore"):
        error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))
