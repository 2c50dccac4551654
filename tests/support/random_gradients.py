"""Random differentiable graphs with loops and branches, and what checks their gradients.

A graph's pullback runs in the float64 interpreter and is compared with differences of the graph itself along random
directions; with the pushforward, by the dot-product test; and compiled, with the interpreter. A direction along which
the differences do not converge (a kink lies near) tells nothing and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir.autodiff.forward import pushforward
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import DType, f64
from dnnc.ir.errors import DnncError, GradientError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import prune
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import Trait
from dnnc.tools.shrink import Failure, shrink
from support import random_recipes as recipes
from support.random_control import branch, loop
from support.random_graphs import Array, Generator, Made

DIRECTIONS = 1
STEPS = (1e-4, 1e-5, 1e-6, 1e-7)
AGREE = 3e-5  # of differences with one step and with two, relative to the sum of all terms
RIGHT = 1e-5
LARGEST = 1e7  # of a derivative: differences cancel beyond it
RECIPES = (
    recipes._unary, recipes._activation, recipes._activation, recipes._binary, recipes._binary, recipes._diamond,
    recipes._same_shape, recipes._select, recipes._reshape, recipes._transpose, recipes._unit_dims, recipes._concat,
    recipes._slice, recipes._gather, recipes._reduce, recipes._softmax, recipes._matmul, recipes._matmul,
    recipes._gemm, recipes._cumulative, loop, loop, loop, loop, loop, branch, branch,
)  # fmt: skip
IN_TURN = (loop, branch, loop)  # each graph has one of these

counts: Counter[str] = Counter()  # of what the checks met


class Smooth(Generator):
    """Floats are f64, most of them inputs; loops with a condition have a bound."""

    bounds_all = True

    def inner(self, name: str) -> Generator:
        made = super().inner(name)
        made.__class__ = Smooth
        return made

    def dtype(self, kinds: str) -> DType:
        found = super().dtype(kinds)
        return f64 if found.is_float else found

    def source(
        self, kinds: str, shape: tuple[int, ...], dtype: DType | None = None, low: float = -2.0, high: float = 2.0
    ) -> Made:
        made = super().source(kinds, shape, f64 if dtype is not None and dtype.is_float else dtype, low, high)
        if self.around is None and made.dtype.is_float and made.value in self.graph.constants and made.exact.size > 1:
            old, made.value = made.value, self.graph.add_input(f"x{len(self.arrays)}", made.type)
            self.graph.erase_constant(old)
            self.arrays.append(made.exact)
        return made


def random_differentiable(seed: int, nodes: int = 10) -> tuple[Graph, list[Array]]:
    """A graph with float inputs and results, and arrays for its inputs. Equal seeds give equal graphs."""
    rng = np.random.default_rng([seed, 7])
    g = Smooth(rng, large=False, symbolic=seed % 5 == 4)
    g.limit = 600
    g.recipes = RECIPES

    def turn() -> None:
        for _ in range(5):
            if not any(n.op.traits & {Trait.CONTROL} for n in g.graph.nodes()):
                IN_TURN[seed % len(IN_TURN)](g)

    graph, arrays = g.make(nodes, turn)
    for body in _graphs(graph):
        for n in body.nodes():
            if "checkpoint" in n.attrs and rng.random() < 0.4:
                n.attrs = {**n.attrs, "checkpoint": int(rng.integers(1, 4))}
    return graph, arrays


def _graphs(g: Graph) -> list[Graph]:
    return [g, *(inner for n in g.nodes() for body in n.subgraphs() for inner in _graphs(body))]


def gradient_graph(graph: Graph) -> tuple[Graph, list[int], list[int], list[int]]:
    """A graph of the results, then of cotangents: it takes cotangents of float results as further inputs.

    Further results: positions of these results, of the float inputs, and of those of them that have a cotangent.
    """
    g = graph.copy()
    made = [k for k, o in enumerate(g.outputs) if o.type.dtype.is_float]
    wanted = [k for k, v in enumerate(g.inputs) if v.type.dtype.is_float]
    inputs = list(g.inputs)
    b = Builder(g)
    cotangents: dict[Value, Value] = {}
    for k in made:
        o, x = g.outputs[k], g.add_input(f"cot{k}", g.outputs[k].type)
        cotangents[o] = b.add(cotangents[o], x) if o in cotangents else x
    found = pullback(g, cotangents, [inputs[k] for k in wanted])
    g.outputs = [*g.outputs, *(c for c in found if c is not None)]
    prune(g)
    verify(g)
    return g, made, wanted, [k for k, c in zip(wanted, found) if c is not None]


def tangent_graph(graph: Graph, wanted: Sequence[int], made: Sequence[int]) -> tuple[Graph, list[int]]:
    """A graph of the results, then of tangents; and the positions of the results that have one."""
    g = graph.copy()
    inputs = [g.inputs[k] for k in wanted]
    tangents = {v: g.add_input(f"tangent_{v.name}", v.type) for v in inputs}
    found = pushforward(g, tangents, [g.outputs[k] for k in made])
    g.outputs = [*g.outputs, *(t for t in found if t is not None)]
    prune(g)
    verify(g)
    return g, [k for k, t in zip(made, found) if t is not None]


def check_gradient(graph: Graph, inputs: Sequence[Array], compiled: Any = None) -> str | None:
    """What is wrong with a graph's gradient, or None. `compiled(graph, arrays)` checks the graph of the gradient."""
    try:
        joint, made, wanted, live = gradient_graph(graph)
    except GradientError as e:
        counts["refused"] += 1
        counts[f"refused: {str(e).split(':')[0].split(' ')[0]}"] += 1
        return None
    except DnncError as e:
        return f"pullback {type(e).__name__}: {e}"
    except Exception as e:
        return f"pullback escaped {type(e).__name__}: {e}"
    if not live:
        counts["constant"] += 1
        return None
    rng = np.random.default_rng(len(graph))
    try:
        base = run(graph, inputs, "float64")
        weights = [rng.standard_normal(base[k].shape) for k in made]
        got = run(joint, [*inputs, *weights], "float64")
    except Exception as e:
        return f"interpreter {type(e).__name__}: {e}"
    if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(got, base)):
        return "values: those of the gradient's graph are others"
    slopes = dict(zip(live, got[len(base) :]))
    if any(np.isnan(a).any() for a in slopes.values()) and _meets_infinity(joint, [*inputs, *weights]):
        counts["singular"] += 1  # sqrt(x - x): PyTorch's is NaN, too
        return None
    message = None
    for _ in range(DIRECTIONS):
        direction = {k: rng.standard_normal(np.shape(inputs[k])) for k in wanted}
        message = message or _differs(graph, inputs, made, weights, slopes, direction)
    message = message or _not_adjoint(graph, inputs, made, weights, slopes, direction)
    if message is None and compiled is not None:
        found = compiled(joint, [*inputs, *weights])
        message = found and f"compiled {found}"
    return message


def _meets_infinity(graph: Graph, inputs: Sequence[Array]) -> bool:
    """Is a value of the graph infinite?"""
    whole = graph.copy()
    whole.outputs = [o for n in whole.nodes() for o in n.outputs if o.type.dtype.is_float]
    return any(np.isinf(a).any() for a in run(whole, inputs, "float64"))


def _differs(
    graph: Graph, inputs: Sequence[Array], made: Sequence[int], weights: Sequence[Array], slopes: Any, direction: Any
) -> str | None:
    def value(step: float) -> float:
        moved = [a + step * direction[k] if k in direction else a for k, a in enumerate(inputs)]
        out = run(graph, moved, "float64")
        return float(sum((out[k] * w).sum() for k, w in zip(made, weights)))

    terms = [a * direction[k] for k, a in slopes.items()]
    if any(np.isinf(t).any() for t in terms):
        counts["infinite slopes"] += 1
        return None
    exact = float(sum(t.sum() for t in terms))
    size = float(sum(np.abs(t).sum() for t in terms))
    found: float | None = None
    for h in STEPS:  # a kink that a long step crosses may lie beyond a short one
        try:
            middle, (ahead, far_ahead), (behind, far_behind) = value(0.0), *((value(d), value(2 * d)) for d in (h, -h))
        except (DnncError, IndexError):
            counts["moved out of the domain"] += 1
            return None
        near, far = (ahead - behind) / (2 * h), (far_ahead - far_behind) / (4 * h)
        slope = (4 * near - far) / 3
        scale = max(abs(slope), 0.05 * size, 1e-3 * max(1.0, abs(middle)))
        kink = abs(ahead - 2 * middle + behind) / h
        if abs(near - far) <= AGREE * scale and kink <= 0.05 * scale and abs(slope) <= LARGEST:
            found = slope
            if abs(exact - slope) <= RIGHT * scale:
                counts["directions"] += 1
                return None
    if found is None:
        counts["not smooth"] += 1
        return None
    return f"wrong gradient: {exact:.9g}, differences say {found:.9g}"


def _not_adjoint(
    graph: Graph, inputs: Sequence[Array], made: Sequence[int], weights: Sequence[Array], slopes: Any, direction: Any
) -> str | None:
    """<J u, w> and <u, J' w> are one number."""
    try:
        forward, have = tangent_graph(graph, list(direction), made)
        out = run(forward, [*inputs, *direction.values()], "float64")
    except Exception as e:
        return f"pushforward {type(e).__name__}: {e}"
    tangents = dict(zip(have, out[len(graph.outputs) :]))
    left = [t * weights[list(made).index(k)] for k, t in tangents.items()]
    right = [a * direction[k] for k, a in slopes.items()]
    a, b = (float(sum(t.sum() for t in ts)) for ts in (left, right))
    size = max(float(sum(np.abs(t).sum() for t in ts)) for ts in (left, right))
    if abs(a - b) <= 1e-9 * max(size, 1e-6) or not np.isfinite(size):
        return None
    return f"wrong tangent: <J u, w> is {a:.9g}, <u, J' w> {b:.9g}"


def check_seed(seed: int, nodes: int, compiled: Any = None) -> Failure | None:
    """The first failure of a seed's graph, made small."""
    graph, inputs = random_differentiable(seed, nodes)
    message = check_gradient(graph, inputs, compiled)
    if message is None:
        return None
    saved = Counter(counts)
    found = shrink(Failure(graph, inputs, {}, message), lambda g, x: check_gradient(g, x, compiled))
    counts.clear()
    counts.update(saved)
    return found
