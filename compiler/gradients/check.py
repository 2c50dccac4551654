"""Check the gradients of a model by numbers, in float64: what its derivative graphs say against differences.

The loss is the sum of the outputs, each element weighed by a random number. Along a random direction its derivative is
compared with central differences at several step sizes, and the tangents of the outputs (forward mode) with the
cotangents of the variables (reverse mode): <Jv, w> = <v, J'w>.

Differences tell how far they can be trusted: by how much those at neighbouring step sizes disagree. Kinks of ReLU or
max near the point show as disagreement that falls with the step; a kink at the point itself, such as ReLU at 0, as
one-sided differences that stay apart: then gradient and differences are compared at a place near by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.gradients.models import gradient_graph
from dnnc.ir.autodiff.forward import pushforward
from dnnc.ir.autodiff.reverse import zeros
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import prune
from dnnc.ir.graph.interp import run

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]

# Relative to the size of what is changed, each a tenth of another; they are tried until two neighbours agree.
STEPS = (1e-6, 1e-7, 1e-5, 1e-8, 1e-9, 1e-4)
TOLERANCE = 1e-5  # of the derivative's size: what a right derivative may differ by
TRUSTED = 4.0  # disagreements of neighbouring steps that a right derivative may be off by
UNSURE = 0.01  # of the derivative's size: when steps disagree by more, differences tell nothing
ROUNDED = 2e-6  # in proportion to the size of each variable: what float32 kernels may do to what they compute
CHANGES = 4.0  # as far as a gradient may be off, in changes by a move of that size
INFINITE = 1e6  # elements as large, beside smaller ones, stand for infinities, as those of a mask do
NEAR = 1e-3  # how far away a place near by is, in proportion to the size of each variable
DOT_TOLERANCE = 1e-9  # of forward against reverse mode, which share no differences


@dataclass(frozen=True)
class Group:
    """Variables that are changed together: positions among the inputs of the forward graph."""

    name: str
    members: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class Verdict:
    """One direction: `error` is relative to the derivative's size, `trust` how far neighbouring steps disagree.

    `kind` is "right", "kink" (one-sided differences stay apart here; near by it is right), "unsure" (differences
    disagree at all steps), or "wrong".
    """

    kind: str
    error: float
    trust: float


@dataclass(frozen=True)
class Checked:
    """A group with the worst of its directions."""

    group: Group
    verdicts: tuple[Verdict, ...]

    @property
    def worst(self) -> Verdict:
        order = ("right", "kink", "unsure", "wrong")
        return max(self.verdicts, key=lambda v: (order.index(v.kind), v.error))


class Loss:
    """The weighed sum of a graph's float outputs as a function of its float inputs, in float64, with its gradient."""

    def __init__(self, graph: Graph, weights: Sequence[Array], variables: Sequence[int] | None = None) -> None:
        """`weights`: an array for each float output. `variables`: numbers of inputs; None takes all of floats."""
        self.whole, self.weights = graph, [wide(w) for w in weights]
        self.numbers = [k for k, o in enumerate(graph.outputs) if o.type.dtype.is_float]
        floats = [k for k, v in enumerate(graph.inputs) if v.type.dtype.is_float]
        self.variables = floats if variables is None else list(variables)
        self.forward = graph.copy()
        self.forward.outputs = [self.forward.outputs[k] for k in self.numbers]
        prune(self.forward)
        outputs, by = [graph.outputs[k] for k in self.numbers], [graph.inputs[k] for k in self.variables]
        self.reverse = gradient_graph(graph, outputs, by, False, "input")

    def outputs(self, arrays: Sequence[Array]) -> list[Array]:
        return run(self.forward, arrays, precision="float64")

    def gradients(self, arrays: Sequence[Array]) -> dict[int, Array]:
        """The gradient by each variable."""
        return dict(zip(self.variables, run(self.reverse, [*arrays, *self.weights], precision="float64")))


def groups_of(loss: Loss, inputs: int, most: int = 8) -> list[Group]:
    """Variables among the first inputs are groups by themselves, others form at most `most` groups of neighbours."""
    rest = [k for k in loss.variables if k >= inputs]
    many = min(most, len(rest))
    parts = [[k] for k in loss.variables if k < inputs]
    parts += [rest[len(rest) * k // many : len(rest) * (k + 1) // many] for k in range(many)]
    return [_group([loss.whole.inputs[k] for k in p], tuple(p)) for p in parts]


def _group(values: Sequence[Value], members: tuple[int, ...]) -> Group:
    name = values[0].name if len(values) == 1 else f"{values[0].name} .. {values[-1].name} ({len(values)})"
    return Group(name, members, sum(n for v in values if isinstance(n := v.type.size, int)))


@dataclass(frozen=True)
class Point:
    """A place at which a loss is differentiated, with its outputs and gradients there."""

    loss: Loss
    arrays: Sequence[Array]
    here: Sequence[Array]
    gradients: Mapping[int, Array]

    @staticmethod
    def at(loss: Loss, arrays: Sequence[Array]) -> Point:
        wides = [wide(a) for a in arrays]
        return Point(loss, wides, loss.outputs(wides), loss.gradients(wides))

    def moved(self, rng: np.random.Generator, size: float) -> Point:
        """A place near by: no variable of it is exactly zero, and no two are equal."""
        moved = [a + size * draw(rng, a) if k in self.loss.variables else a for k, a in enumerate(self.arrays)]
        return Point.at(self.loss, moved)

    def change(self, direction: Mapping[int, Array], step: float) -> float:
        """How much the loss grows by a step in a direction (an array for each changed input)."""
        moved = [a + step * direction[k] if k in direction else a for k, a in enumerate(self.arrays)]
        with np.errstate(all="ignore"):
            parts = zip(self.loss.weights, self.loss.outputs(moved), self.here)
            return math.fsum(float(np.sum(w * (y - x))) for w, y, x in parts)

    def quotients(self, direction: Mapping[int, Array]) -> Iterator[tuple[float, float]]:
        """Forward and backward difference quotients, step size after step size."""
        for step in STEPS:
            yield self.change(direction, step) / step, self.change(direction, -step) / -step

    def verdict(self, direction: Mapping[int, Array]) -> Verdict:
        """Compare the gradient with differences along a direction."""
        with np.errstate(all="ignore"):
            parts = [self.gradients[m] * d for m, d in direction.items()]
        derivative = math.fsum(float(np.sum(p)) for p in parts)
        size = math.sqrt(math.fsum(float(np.sum(np.square(p))) for p in parts))
        return judge(derivative, size, self.quotients(direction))


def wide(a: Array) -> Array:
    """Floats in float64."""
    a = np.asarray(a)
    return a.astype(np.float64) if a.dtype.kind == "f" or a.dtype.name == "bfloat16" else a


def draw(rng: np.random.Generator, a: Array) -> Array:
    """A random direction in proportion to the size of what is changed; elements that stand for infinities stay."""
    changed = np.abs(a) < INFINITE
    if not changed.any():
        changed = np.isfinite(a)
    size = float(np.sqrt(np.mean(np.square(a[changed])))) if changed.any() else 0.0
    return np.where(changed, rng.standard_normal(a.shape) * (size or 1.0), 0.0)


def judge(derivative: float, size: float, quotients: Iterable[tuple[float, float]]) -> Verdict:
    """Compare a directional derivative with differences.

    Neighbouring step sizes may agree by chance where kinks lie close together; forward and backward differences then
    do not. So differences are trusted as far as neither disagrees.

    Args:
        derivative: what the gradient says.
        size: of the derivative along a usual direction, which may be larger than along this one.
        quotients: (forward, backward) at one step size after the other, in the order of STEPS; as many are read as are
            needed.
    """
    seen: dict[int, tuple[float, float]] = {}  # by the exponent of the step
    trust = error = math.inf
    scale = 0.0
    for step, pair in zip(STEPS, quotients):
        middle, exponent = sum(pair) / 2, round(math.log10(step))
        scale = max(size, abs(derivative), abs(middle) if math.isfinite(middle) else 0.0)
        if scale == 0.0:
            return Verdict("right", 0.0, 0.0)
        for beside in (seen[k] for k in (exponent - 1, exponent + 1) if k in seen):
            other = sum(beside) / 2
            gap = max(abs(forward - backward) for forward, backward in (pair, beside))
            disagreement = max(abs(other - middle), gap / 2) / scale
            if disagreement < trust:
                trust, error = disagreement, min(abs(m - derivative) for m in (middle, other)) / scale
        seen[exponent] = pair
        if trust <= TOLERANCE and error <= TOLERANCE:
            return Verdict("right", error, trust)
    gaps = [abs(forward - backward) / scale for forward, backward in (seen[-7], seen[-8])]
    if min(gaps) > TOLERANCE and min(gaps) > max(gaps) / 2:
        return Verdict("kink", error, trust)
    if trust <= UNSURE and error <= TOLERANCE + TRUSTED * trust:
        return Verdict("right", error, trust)
    return Verdict("wrong" if trust <= UNSURE else "unsure", error, trust)


def directional(
    point: Point,
    groups: Sequence[Group],
    directions: int,
    seed: int,
    progress: Progress = lambda stage, done, of: None,
) -> list[Checked]:
    """Compare gradients with differences along random directions of each group.

    Where one-sided differences stay apart, the derivative is compared at a place near by.
    """
    rng = np.random.default_rng(seed)
    near = None
    out = []
    for at, g in enumerate(groups):
        verdicts = []
        for k in range(directions):
            progress("differences", at * directions + k, len(groups) * directions)
            direction = {m: draw(rng, point.arrays[m]) for m in g.members}
            verdict = point.verdict(direction)
            if verdict.kind == "kink":
                near = near or point.moved(rng, NEAR)
                again = near.verdict(direction)
                verdict = Verdict("kink" if again.kind == "right" else again.kind, again.error, again.trust)
            verdicts.append(verdict)
        out.append(Checked(g, tuple(verdicts)))
    return out


def unexplained(point: Point, got: Mapping[int, Array], reasons: Mapping[int, str], seed: int) -> dict[int, str]:
    """The reasons, by variable, why compiled gradients are off, but where the float64 gradient is as unsteady.

    Rounding puts units near a kink on its other side. So does a move of all variables by as much: what that changes of
    the float64 gradient a right one may be off by.
    """
    if not reasons:
        return {}
    near = point.moved(np.random.default_rng(seed), ROUNDED)
    left = {}
    for k, reason in reasons.items():
        with np.errstate(all="ignore"):
            change = np.abs(near.gradients[k] - point.gradients[k]).max(initial=0.0)
            off = np.abs(wide(got[k]) - point.gradients[k]).max(initial=0.0)
        if not off <= CHANGES * change:
            left[k] = reason
    return left


# --- forward against reverse mode -------------------------------------------------------------------------------------


def dot_test(point: Point, seed: int) -> Verdict:
    """<Jv, w> against <v, J'w> for one random v. GradientError: forward mode has no rule for an op."""
    rng, loss = np.random.default_rng(seed), point.loss
    forward = tangent_graph(loss.whole, loss.numbers, loss.variables)
    v = {k: draw(rng, point.arrays[k]) for k in loss.variables}
    tangents = run(forward, [*point.arrays, *v.values()], precision="float64")
    one = [w * t for w, t in zip(loss.weights, tangents)]
    two = [point.gradients[k] * v[k] for k in loss.variables]
    left, right = (math.fsum(float(np.sum(p)) for p in parts) for parts in (one, two))
    sizes = (math.sqrt(math.fsum(float(np.sum(np.square(p))) for p in parts)) for parts in (one, two))
    scale = max(*sizes, abs(left), abs(right))
    error = abs(left - right) / scale if scale else 0.0
    return Verdict("right" if error <= DOT_TOLERANCE else "wrong", error, 0.0)


def tangent_graph(graph: Graph, outputs: Sequence[int], variables: Sequence[int]) -> Graph:
    """A graph with inputs `tangent_NAME` for some inputs, which gives the tangents of some outputs (by number)."""
    made = graph.copy()
    b = Builder(made)
    tangents: dict[Value, Value] = {}
    for k in variables:
        v = made.inputs[k]
        tangents[v] = made.add_input(f"tangent_{v.name}", v.type)
    found = pushforward(made, tangents, [made.outputs[k] for k in outputs])
    made.outputs = [zeros(b, made.outputs[k].type) if t is None else t for k, t in zip(outputs, found)]
    prune(made)
    return made
