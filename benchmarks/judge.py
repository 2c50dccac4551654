"""When the outputs of a model count as right, on any device.

Floats are compared by their largest error over the largest expected number. A quantized model rounds to 8 bits in
between: two engines that sum in another order fall on neighbouring steps here and there, so nearly all elements, not
all, have to lie within one step. Where a code that falls on the other side of a tie early on moves everything behind
it, that holds for no two right evaluations; so a quantized model is judged at inputs where it holds for evaluations of
the reference that differ by roundings alone (`steady`), which are chosen before our result is known. Where no draw is
such, a result may be as far from the nearest right evaluation as these are from one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper

from dnnc.tools.peers import error

Array = np.ndarray[Any, Any]
LEVELS = 256  # of 8 bits
SHARE = 0.99  # of a quantized model's elements, within one step
FAR = 0.1  # no element of a quantized model may be off by more
STEADY = (1 + SHARE) / 2  # of the elements of right evaluations, so that ours may add some
DRAWS, SHAKEN = 8, 3  # inputs that are tried, and evaluations beside the first of each


def largest_error(got: Sequence[Array], want: Sequence[Array]) -> float:
    """Over all outputs; infinite where their number, a shape or a special value differs."""
    return (
        max((error(np.asarray(g), np.asarray(w)) for g, w in zip(got, want)), default=0.0)
        if len(got) == len(want)
        else float("inf")
    )


def share_within_a_step(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The share of elements that are at most one step of 8 bits away, in the output where it is lowest."""
    shares = [1.0]
    for g, w in zip(got, want):
        x, y = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if x.shape != y.shape:
            return 0.0
        finite = np.isfinite(y)
        near = np.abs(x[finite] - y[finite]) <= step_of(y[finite]) * (1 + 1e-5)
        shares.append(float(np.mean(near)) if near.size else 1.0)
    return min(shares)


def step_of(x: Array) -> float:
    """The distance of neighbouring numbers where there are at most 256 of them; else what 8 bits with a sign make of
    the largest one.
    """
    levels = np.unique(x)
    if 1 < levels.size <= LEVELS:
        return float(np.diff(levels).min())
    return float(np.abs(x).max(initial=0.0)) * 2 / (LEVELS - 2)


def is_right(largest: float, share: float, bound: float, quantized: bool) -> bool:
    """By `largest_error` and `share_within_a_step`; `bound`: of the largest error of a model in floats."""
    return largest <= FAR and share >= SHARE if quantized else largest <= bound


# --- inputs at which a quantized model can be judged ------------------------------------------------------------------

Inputs = Mapping[str, Array]
Evaluate = Callable[[ModelProto, Inputs], Sequence[Array]]


@dataclass(frozen=True)
class Evaluations:
    """Right outputs at `inputs`: first those of the model as it is, then of models that are off by roundings. `share`
    of the elements of each lies within a step of the first.
    """

    inputs: Inputs
    outputs: Sequence[Sequence[Array]]
    share: float

    def accept(self, got: Sequence[Array]) -> bool:
        """Are these outputs right?"""
        want = self.outputs[0]
        if is_right(largest_error(got, want), share_within_a_step(got, want), 0.0, quantized=True):
            return True
        if self.share >= STEADY or np.isinf(largest_error(got, want)):
            return False
        apart = max(distance(a, b) for a, b in combinations(self.outputs, 2))
        return min(distance(got, o) for o in self.outputs) <= apart


def steady(model: ModelProto, draw: Callable[[int], Inputs], evaluate: Evaluate) -> Evaluations:
    """Evaluations at the first inputs that `draw` makes of a seed at which they agree, else where they agree best."""
    others = [shaken(model, k) for k in range(SHAKEN)]
    tried: list[Evaluations] = []
    for seed in range(DRAWS):
        inputs = draw(seed)
        outputs = [evaluate(model, inputs)]
        outputs += [evaluate(m, off_by_one_unit(inputs, k)) for k, m in enumerate(others)]
        share = min(share_within_a_step(o, outputs[0]) for o in outputs[1:])
        tried.append(Evaluations(inputs, outputs, share))
        if share >= STEADY:
            break
    return max(tried, key=lambda e: e.share)


def distance(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The root of the mean square of the error, over that of an output: the largest of all outputs."""
    pairs = [(np.asarray(g, np.float64), np.asarray(w, np.float64)) for g, w in zip(got, want)]
    return max(float(np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30)) for g, w in pairs if w.size)


def shaken(model: ModelProto, seed: int = 0) -> ModelProto:
    """The model with its float weights and scales off by one unit in the last place."""
    out = ModelProto()
    out.CopyFrom(model)
    for t in out.graph.initializer:
        a = numpy_helper.to_array(t)
        if a.dtype.kind == "f" and a.size:
            t.CopyFrom(numpy_helper.from_array(off_by_one_unit({"": a}, seed)[""], t.name))
    return out


def off_by_one_unit(inputs: Inputs, seed: int = 0) -> dict[str, Array]:
    """Float arrays moved by one unit in the last place up or down; others, zeros and infinities as they are."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, a in inputs.items():
        if a.dtype.kind == "f":
            up = rng.random(a.shape) < 0.5
            moved = np.where(up, np.nextafter(a, a.dtype.type(np.inf)), np.nextafter(a, a.dtype.type(-np.inf)))
            out[name] = np.where((a == 0) | ~np.isfinite(a), a, moved)
        else:
            out[name] = a
    return out
