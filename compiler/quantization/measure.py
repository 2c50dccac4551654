"""How far outputs of a quantized model are from the float model's, and how long its layers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.errors import InputError
from dnnc.quantization.data import Feed
from dnnc.quantization.layers import Layer
from dnnc.quantization.placement import Placement
from dnnc.quantization.sixteen import owner

Array = np.ndarray[Any, Any]
SUFFIXES = ("_QuantizeLinear", "_DequantizeLinear")  # of the names of nodes that quantization adds behind values
PROFILES = 5  # of which the shortest time of each kernel counts: other processes take turns
LEAST, SHORTER = 10, 3  # calls of a profile; how many times fewer they are in those behind the first, of a second


class Difference:
    """Sums over outputs of two models.

    `error` is the largest root of sum (a - b)^2 over sum b^2 of any output, of integers the root of the share that
    differs; `agreement` the share of rows, along the last axis, whose largest number stands at the same place, and of
    integers that are equal; None where no output has integers or two numbers in a row.
    """

    def __init__(self) -> None:
        self._squares: dict[int, tuple[float, float]] = {}
        self._rows = self._same = 0

    def add(self, got: Sequence[Array], want: Sequence[Array]) -> None:
        """Compare the outputs of one call."""
        for k, (a, b) in enumerate(zip(got, want)):
            if a.shape != b.shape:
                self._squares[k] = np.inf, 1.0
                continue
            if b.dtype.kind != "f":  # places of the largest numbers, as ArgMax gives them
                e, s = self._squares.get(k, (0.0, 0.0))
                same = a == b
                self._squares[k] = e + float(same.size - same.sum()), s + same.size
                self._rows, self._same = self._rows + same.size, self._same + int(same.sum())
                continue
            a, b = a.astype(np.float64), b.astype(np.float64)
            usable = np.isfinite(b)
            with np.errstate(invalid="ignore"):
                d = np.where(usable, a - b, 0.0)
            e, s = self._squares.get(k, (0.0, 0.0))
            self._squares[k] = e + float((d**2).sum()), s + float((np.where(usable, b, 0.0) ** 2).sum())
            if b.ndim and b.shape[-1] > 1 and b.size:
                same = a.argmax(-1) == b.argmax(-1)
                self._rows, self._same = self._rows + same.size, self._same + int(same.sum())

    @property
    def error(self) -> float:
        ratios = [
            np.inf if not np.isfinite(e) else np.sqrt(e / s) if s else float(e > 0) for e, s in self._squares.values()
        ]
        return float(max(ratios, default=0.0))

    @property
    def agreement(self) -> float | None:
        return self._same / self._rows if self._rows else None


def scored(metric: Callable[[Callable[..., Any]], float], call: Callable[..., Any]) -> float:
    """What a metric says of a model. InputError where that is no number."""
    value = metric(call)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise InputError(f"the metric gave {value!r}: expected a number that is better when it is larger")
    return number


@dataclass(frozen=True)
class Times:
    """Seconds of a call, and of the kernels of each layer."""

    total: float
    layers: Mapping[str, float]


def timed(executable: Any, feed: Feed, layers: Iterable[Layer], placement: Placement | None = None) -> Times:
    """Profile calls. A kernel of several layers counts for each in equal parts; one that only quantizes a value, for
    the layers that read it.
    """
    first = executable.profile(feed)
    shorter = max(LEAST, first.repeats // SHORTER)
    profiles = [first.calls, *(executable.profile(feed, repeats=shorter).calls for _ in range(PROFILES - 1))]
    known = {x.node for x in layers}
    out, total = dict.fromkeys(known, 0.0), 0.0
    for call, *again in zip(*profiles):
        seconds = min(call.seconds, *(c.seconds for c in again))
        total += seconds
        names = [owner(part.rpartition(" (")[0]) for part in call.nodes.split("), ")]
        owners = {n for n in names if n in known}
        if not owners and placement is not None:
            values = {n[: -len(s)] for n in names for s in SUFFIXES if n.endswith(s)}
            owners = {r for v in values for r in placement.readers.get(v, ()) if r in known}
        for n in owners:
            out[n] += seconds / len(owners)
    return Times(float(total), out)
