"""Statistics of gradients and activations beside a training step, and a watchdog that names the first bad value.

Of each value three numbers: the largest magnitude (NaN or infinite where an element is), the mean, and of 16-bit floats
the share of elements at the largest number or beyond. They are computed where the value is, by the kernels of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.array.core import Array, array_of
from dnnc.array.elementwise import abs as absolute
from dnnc.array.lazy import Call, Lazy
from dnnc.array.manipulation import stack
from dnnc.array.statistical import max as largest
from dnnc.array.statistical import mean
from dnnc.ir.errors import NonFiniteError
from dnnc.ir.op import Cost
from dnnc.optim.rounding import WIDE

FULL = 0.99  # of the largest finite number: from there on an element counts as saturated


@dataclass(frozen=True)
class Statistics:
    """The statistics of one step. `absmax`, `mean`, `saturation`: one number for each of `names`."""

    names: tuple[str, ...]
    values: Any  # float32[n, 3]

    def __getitem__(self, name: str) -> dict[str, float]:
        """The numbers of a value, by its name."""
        row = np.asarray(self.values.numpy())[self.names.index(name)]
        return {"absmax": float(row[0]), "mean": float(row[1]), "saturation": float(row[2])}

    def first_overflow(self, gradients: bool = True) -> str | None:
        """The first value with an infinite element or NaN: activations in their order, then gradients."""
        rows = self.values.numpy()
        known = len(self.names) if gradients else self.names.index("loss") + 1
        bad = np.flatnonzero(~np.isfinite(rows[:known, 0]))
        return self.names[bad[0]] if bad.size else None

    def check(self, step: int, gradients: bool = True) -> None:
        """NonFiniteError names the first value with an infinite element or NaN.

        Args:
            step: a number for the message.
            gradients: False leaves these out, as dynamic loss scaling needs it.
        """
        name = self.first_overflow(gradients)
        if name is not None:
            worst = self[name]
            raise NonFiniteError(
                f"step {step}: {name} has an element that is infinite or NaN (largest magnitude {worst['absmax']}); "
                "lower the learning rate, clip gradients (clip_norm=), or scale the loss (loss_scale=)"
            )


class Watch:
    """Adds statistics to a step that is traced. `on`: False adds nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._rows: dict[str, Array] = {}

    def activations(self, loss: Array, leaves: Sequence[Array]) -> list[Array]:
        """The rows of products and convolutions behind a loss, of sums and the like none; the loss is the last one."""
        if not self.on:
            return []
        rows = []
        for name, x in _heavy(loss._parts[0], {id(a._parts[0]) for a in leaves}):
            self._rows[name] = x
            rows.append(_row(x))
        self._rows["loss"] = loss
        return [*rows, _row(loss)]

    def all(self, activations: Sequence[Array], names: Sequence[str], gradients: Sequence[Array]) -> Any:
        """The names and the rows of a step; None where nothing is watched."""
        if not self.on:
            return None
        titles = [*self._rows, *(f"gradient of {n}" for n in names)]
        return Statistics(tuple(titles), stack([*activations, *map(_row, gradients)]))


def _row(x: Array) -> Array:
    # reductions of the same rows are one kernel, which reads the value once; images have their channels in blocks
    axes = tuple(range(1 if x.ndim == 2 else 2, x.ndim)) or None
    row = [largest(largest(absolute(x), axis=axes)).astype(WIDE), mean(mean(x, axis=axes)).astype(WIDE)]
    if x.dtype.itemsize > 2:
        return stack([*row, row[0] * 0])  # where numbers of 32 bits end, they are infinite: the largest one tells
    most = float(ml_dtypes.finfo(x.dtype).max)  # type: ignore[no-untyped-call]
    return stack([*row, mean((absolute(x) >= most * FULL).astype(WIDE))])


def _heavy(last: Lazy, leaves: set[int]) -> list[tuple[str, Array]]:
    """The results of expensive calls behind a value, in the order in which they were traced, by op and line."""
    calls: dict[Call, Lazy] = {}
    seen: set[int] = set()
    todo = [last]
    while todo:
        x = todo.pop()
        if x.call is None or id(x) in seen or id(x) in leaves:
            continue
        seen.add(id(x))
        if x.call.op.cost is Cost.HEAVY and x.type.dtype.is_float:
            calls.setdefault(x.call, x)
        todo += [i for i in x.call.inputs if i is not None]
    found: dict[str, Array] = {}
    for call in sorted(calls, key=lambda c: c.number):
        title = f"{call.op.name} at {call.locs[0]}" if call.locs else call.op.name
        name, k = title, 1
        while name in found:
            k += 1
            name = f"{title} ({k})"
        found[name] = array_of(calls[call])
    return list(found.items())
