"""Outputs that a right kernel may give where its error is over the plain bound: the second look of the kernel check.

In: the group of a kernel as a graph, the inputs of the check, sampled outputs of the kernel and of the float64
reference. Out: the worst output that rounding does not explain, or None. An output over the plain bound is right if:

- it is within the bound of the reference in the graph's own types, an integer equal to it: a sum of masks overflows in
  float32 and not in float64;
- it is in reach of the float64 reference, whose inputs and intermediate values are perturbed by their rounding errors:
  a float within twice the largest change, beyond a pole or at a NaN that a perturbation meets; an integer between the
  smallest and the largest result;
- it is an index of an extreme element whose value differs from the extreme by no more than the rounding errors of both.
  Where perturbations leave two equal values equal, the values are exact, and the rule for ties decides between them.

(Mixed forward-backward error; Higham, "Accuracy and Stability of Numerical Algorithms", section 1.5.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dnnc.ir.dtype import DType, from_numpy
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.interp import Precision, run_at
from dnnc.ir.op import Trait
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.tolerances import EPS, C, bound

TRIALS = (
    6,
    12,
    24,
)  # perturbations after which outputs are judged; the later ones where earlier ones do not explain them
# rounding errors of an element of a value within a group, which is summed or computed by an op of up to so many ulp
ON_THE_WAY = 4.0
OF_OPERAND = "of_operand"  # names of inputs of a loose graph that are errors relative to the operand of their node
POOL = 65521  # random numbers of an input, a prime so that no stride meets a period
STEPS = (1, 7, 61, 509, 4093, 32749)  # from the longest axis on: neighbours along any axis have errors of their own
GAP = (
    2.0**-40
)  # of the largest output; outputs below it have a bound of their own: cancellation of float32 ends at 2^-24
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """A check's outputs: the kernel's `got`, the reference's `want` at `points` [n, rank], on `arrays`.

    `loose` is the graph with further inputs, the relative errors of values within the group. `k` is the length of the
    longest reduction, `operands` the dtype to which operands of products are rounded ("" for none).
    """

    graph: Graph
    loose: Graph
    arrays: list[Array]
    points: Array
    got: Array
    want: Array
    dtype: DType
    k: int
    operands: str


@dataclass(frozen=True)
class Refusal:
    """An output that no rounding explains: its number in the sample and the error that it may have."""

    index: int
    limit: float


def reference(graph: Graph, arrays: list[Array], points: Array, precision: Precision = "float64") -> Array:
    """The output at the points, in float64 or in the types of the graph."""
    with np.errstate(all="ignore"):
        return np.asarray(run_at(graph, arrays, [points], precision=precision)[0]).reshape(-1)


def errors(got: Array, want: Array) -> Array:
    """Absolute differences; equal infinities and NaN against NaN count as none, NaN against a number as infinite."""
    got = got.astype(np.float64) if got.dtype.kind != "c" else got
    same = (got == want) | (np.isnan(got) & np.isnan(want)) if got.dtype.kind in "fc" else got == want
    with np.errstate(all="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    return np.where(np.isnan(error), np.inf, error)


def bounds(dtype: DType, k: int, want: Array, operands: str) -> Array:
    """Return each output's plain bound; outputs far below the largest (as scores by -3e38 masks) scale with it."""
    limit = np.full(want.shape, bound(dtype, k, want, operands))
    if dtype.is_float:
        size = np.abs(want)
        small = (size > 0) & (size < GAP * np.max(size, where=np.isfinite(size), initial=0.0))
        if small.any():
            limit[small] = bound(dtype, k, want[small], operands)
    return limit


def judge(s: Sample, rng: np.random.Generator) -> Refusal | None:
    """The output of a sample that is furthest from right, or None where rounding explains all of them."""
    wrong = errors(s.got, s.want) > bounds(s.dtype, s.k, s.want, s.operands)
    if not wrong.any():
        return None
    with np.errstate(all="ignore"):
        wrong[np.argmax(np.where(np.isfinite(s.want), np.abs(s.want), -1.0))] = True  # the largest one scales bounds
    left = np.flatnonzero(wrong)
    found = _judged(replace(s, points=s.points[left], got=s.got[left], want=s.want[left]), rng)
    return None if found is None else replace(found, index=int(left[found.index]))


def _judged(s: Sample, rng: np.random.Generator) -> Refusal | None:
    """The same of outputs that are not within their plain bounds."""
    limit = bounds(s.dtype, s.k, s.want, s.operands)
    error = errors(s.got, s.want)
    right = error <= limit
    rough = reference(s.graph, s.arrays, s.points, "as-is")
    if s.dtype.is_float:
        rough = rough.astype(np.float64)
        right |= errors(s.got, rough) <= bounds(s.dtype, s.k, rough, s.operands)
    elif s.dtype.kind in "iub":
        right |= s.got == rough
    arg = _arg_node(s.loose)
    if arg is not None and not right.all():
        left = np.flatnonzero(~right)
        right[left] = _near_extremes(s, arg, left, rng)
        return None if right.all() else Refusal(int(np.argmin(right)), 0.0)
    reach = _Reach(s.want)
    for trial, found in enumerate(_perturbed(s.loose, s.arrays, s.points, s.k, rng), 1):
        if right.all():
            return None
        reach.add(found)
        if trial in TRIALS:
            right |= reach.holds(s.got, limit)
    if right.all():
        return None
    worst = int(np.where(right, -1.0, np.minimum(error, np.finfo(np.float64).max) - limit).argmax())
    return Refusal(worst, float(limit[worst] + reach.spread()[worst]))


class _Reach:
    """What perturbed references give for each output."""

    def __init__(self, want: Array) -> None:
        self.want, self.found = want, [want]

    def add(self, found: Array) -> None:
        self.found.append(found)

    def spread(self) -> Array:
        """Twice the largest finite change; 0 for what is not a float."""
        if self.want.dtype.kind not in "fc":
            return np.zeros(self.want.shape)
        with np.errstate(all="ignore"):
            moved = np.abs(np.stack(self.found) - self.want)
        largest: Array = np.max(moved, axis=0, where=np.isfinite(moved), initial=0.0)
        return 2 * largest

    def holds(self, got: Array, limit: Array) -> Array:
        """Is each output in reach?"""
        found = np.stack(self.found)
        if got.dtype.kind not in "fc":
            inside: Array = (found.min(0) <= got) & (got <= found.max(0))
            return inside
        right = errors(got, self.want) <= limit + self.spread()
        right |= ((found == got) | (np.isnan(found) & np.isnan(got))).any(0)
        # Near a pole every magnitude above the smallest is in reach. The reference meets the pole, or changes its sign
        # without small values: reciprocals of numbers spread evenly around 0 have none below a quarter of their median.
        # Sums of many errors reach further and have some; then the largest is further above the median than the
        # smallest below it, as where numbers themselves pass 0 it is not.
        size = np.abs(found)
        finite = np.isfinite(size)
        least = np.min(size, axis=0, where=finite, initial=np.inf)
        pole = ~finite.all(0) & finite.any(0)
        if found.dtype.kind == "f":
            median = np.median(size, axis=0)
            largest = np.max(size, axis=0, where=finite, initial=0.0)
            with np.errstate(invalid="ignore"):  # inf * 0 where nothing is finite
                lopsided = np.sqrt(least) * np.sqrt(largest) >= 2 * median
            pole |= (found < 0).any(0) & (found > 0).any(0) & ((least >= median / 4) | lopsided)
        reached: Array = right | (pole & ~np.isnan(got) & (np.abs(got) >= least / 2))
        return reached


def _perturbed(loose: Graph, arrays: list[Array], points: Array, k: int, rng: np.random.Generator) -> Iterator[Array]:
    """Return the reference at the points for inputs off by up to C rounding errors, and its ops' own values."""
    extra = loose.inputs[len(arrays) :]
    sizes = [
        (C if v.name.startswith(OF_OPERAND) else ON_THE_WAY * math.sqrt(k)) * EPS[v.type.dtype.computed.name]
        for v in extra
    ]
    shapes = [tuple(int(str(d)) for d in v.type.shape) for v in extra]
    eps = max(
        (EPS.get(n.output.type.dtype.name, 0.0) for n in loose.nodes() if Trait.CONVERSION in n.op.traits), default=0.0
    )  # casts round inside, too
    trials = TRIALS[
        0 if any(Trait.BITS in n.op.traits for n in loose.nodes()) else -1
    ]  # stored forms have many steps: a few tell as much
    for _ in range(trials):
        shaken = [_shaken(a, rng, eps) if from_numpy(a.dtype).is_float else a for a in arrays]
        shaken += [noise(e, t, rng) for e, t in zip(sizes, shapes)]
        yield reference(loose, shaken, points)


def noise(size: float, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Errors of up to `size`, uniform, as a view of fewer: an element lies at the sum of its indices times `STEPS`."""
    strides = [0] * len(shape)
    for step, axis in zip(STEPS, sorted(range(len(shape)), key=lambda a: -shape[a])):
        strides[axis] = step
    n = 1 + sum(step * (d - 1) for step, d in zip(strides, shape))
    if len(shape) > len(STEPS) or n >= math.prod(shape):
        return rng.uniform(-size, size, shape)
    pool = rng.uniform(-size, size, n)
    return as_strided(pool, shape, [s * pool.itemsize for s in strides], writeable=False)


def _shaken(a: Array, rng: np.random.Generator, cast: float) -> Array:
    eps = EPS["f64"] if a.dtype == np.float64 else EPS["f32"]  # half types are computed in float32
    return a.astype(np.float64) * (1 + max(C * eps, cast) * rng.uniform(-1, 1, a.shape))


# --- indices of extreme elements --------------------------------------------------------------------------------------


def _arg_node(graph: Graph) -> Node | None:
    """The argmax or argmin whose result is the output, but for its shape and dtype."""
    n = graph.outputs[0].node
    while n is not None and n.op.traits & {Trait.VIEW, Trait.CONVERSION}:
        n = None if n.inputs[0] is None else n.inputs[0].node
    return n if n is not None and Trait.ARG in n.op.traits else None


def _near_extremes(s: Sample, arg: Node, left: Array, rng: np.random.Generator) -> Array:
    """Are the elements at the indices that the kernel gives as extreme as rounding can tell?"""
    operand = arg.inputs[0]
    assert operand is not None
    shape = tuple(int(str(d)) for d in operand.type.shape)
    axis = normalize_axis(arg.attrs.get("axis", 0), len(shape))
    sizes = tuple(int(str(d)) for d in s.loose.outputs[0].type.shape)
    at = np.ravel_multi_index(tuple(s.points[left].T), sizes) if sizes else np.zeros(len(left), np.int64)
    rows = np.stack(np.unravel_index(at, (*shape[:axis], 1, *shape[axis + 1 :])), 1).astype(np.int64)
    pairs = [rows.copy(), rows.copy()]
    index = s.got[left].astype(np.float64)
    inside = (index >= 0) & (index < shape[axis]) & (index == np.floor(index))
    pairs[0][:, axis] = np.where(inside, index, 0).astype(np.int64)
    pairs[1][:, axis] = s.want[left].astype(np.int64)
    points = np.concatenate(pairs)
    if not operand.type.dtype.is_float or operand.node is None:
        return np.zeros(len(left), bool)  # integers and inputs are exact
    graph = s.loose.copy()
    graph.outputs = [next(m for n, m in zip(s.loose.nodes(), graph.nodes()) if n is operand.node).outputs[0]]
    exact = reference(graph, [*s.arrays, *_zeros(graph, len(s.arrays))], points).reshape(2, -1)
    moved = np.zeros(exact.shape)
    tied = exact[0] == exact[1]
    for found in _perturbed(graph, s.arrays, points, s.k, rng):
        pair = found.reshape(2, -1)
        tied &= pair[0] == pair[1]
        with np.errstate(all="ignore"):
            moved = np.fmax(moved, np.abs(pair - exact))
    with np.errstate(all="ignore"):
        near = np.abs(exact[0] - exact[1]) <= 2 * moved.sum(0) + C * EPS[operand.type.dtype.computed.name] * np.abs(
            exact
        ).max(0)
    judged: Array = inside & near & ~tied
    return judged


def _zeros(graph: Graph, given: int) -> list[Array]:
    return [np.zeros(tuple(int(str(d)) for d in v.type.shape)) for v in graph.inputs[given:]]
