"""Statistics of gradients and activations beside a training step, and a watchdog that names the first bad value.

Of each value three numbers: the largest magnitude (NaN or infinite where an element is), the mean, and of 16-bit floats
the share of elements at the largest number or beyond. The program of the step reduces each value by rows, where it can
together with what else passes over the same rows: a norm of the batch, an update. A small value is copied in place of
that. Copies and the numbers of the rows are one vector, which is reduced when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.array.core import Array, array_of
from dnnc.array.elementwise import abs as absolute
from dnnc.array.lazy import Call, Lazy
from dnnc.array.manipulation import concat
from dnnc.array.statistical import max as largest
from dnnc.array.statistical import mean
from dnnc.ir.errors import NonFiniteError
from dnnc.ir.op import Cost, OpDef, Trait
from dnnc.optim.rounding import WIDE

SHORT = 1 << 15  # elements of a value that is copied: to start a kernel that reduces it takes longer
FULL = 0.99  # of the largest finite number: from there on an element counts as saturated


@dataclass(frozen=True)
class Part:
    """How a value stands in the vector of a step.

    Attributes:
        count: of its rows.
        limit: from there on a magnitude counts as saturated; None for floats of 32 bits and more.
        whole: are its elements there, in place of the numbers of rows?
    """

    count: int
    limit: float | None
    whole: bool

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self.count if self.whole else self.count * (2 if self.limit is None else 3)

    def numbers(self, found: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
        """absmax, mean and saturation, of the elements of the vector."""
        if not found.size:
            return 0.0, 0.0, 0.0
        if self.whole:
            with np.errstate(invalid="ignore"):
                size = np.abs(found)
                return (
                    size.max(),
                    found.mean(dtype=np.float64),
                    0.0 if self.limit is None else np.mean(size >= self.limit),
                )
        rows = found.reshape(-1, self.count)
        # np.max keeps NaN; numbers of 32 bits end as infinite ones: the largest magnitude tells
        return np.max(rows[0]), np.mean(rows[1]), 0.0 if self.limit is None else np.mean(rows[2])


class Parts:
    """The parts of a vector: a fixed part of a tree."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one step, by the names of values.

    Attributes:
        rows: float32[...], float64 where a value is: of each value in turn the numbers of its rows, which are largest
            magnitudes, means and saturations, or its elements.
        parts: which of these, and how many.
    """

    names: tuple[str, ...]
    rows: Any
    parts: Parts

    @cached_property
    def numbers(self) -> np.ndarray[Any, Any]:
        """float64[n, 3]: absmax, mean and saturation of each value."""
        rows = self.rows.numpy()
        ends = np.cumsum([p.size for p in self.parts.parts])
        return np.array([p.numbers(rows[e - p.size : e]) for p, e in zip(self.parts.parts, ends)], np.float64)

    def __getitem__(self, name: str) -> dict[str, float]:
        """The numbers of a value, by its name."""
        row = self.numbers[self.names.index(name)]
        return {"absmax": float(row[0]), "mean": float(row[1]), "saturation": float(row[2])}

    def first_overflow(self, gradients: bool = True) -> str | None:
        """The first value with an infinite element or NaN: activations in their order, then gradients."""
        known = len(self.names) if gradients else self.names.index("loss") + 1
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(self.rows.numpy()[: sum(p.size for p in self.parts.parts[:known])].sum()):
                return None  # one such element, or the number of its row, would make the sum so
        bad = np.flatnonzero(~np.isfinite(self.numbers[:known, 0]))
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
        self._names: list[str] = []
        self._parts: list[Part] = []

    def activations(self, loss: Array, params: Mapping[str, Array]) -> list[Array]:
        """The rows of products and convolutions behind a loss, of sums and the like none; the loss is the last one."""
        if not self.on:
            return []
        rows = []
        for name, call, x in _products(loss._parts[0], {id(a._parts[0]): n for n, a in params.items()}):
            self._names.append(name)
            rows += self._reduced(x, _rows(call, x))
        self._names.append("loss")
        return [*rows, *self._reduced(loss, ())]

    def all(self, activations: Sequence[Array], names: Sequence[str], gradients: Sequence[Array]) -> Any:
        """The names and the rows of a step; None where nothing is watched."""
        if not self.on:
            return None
        rows = [*activations, *(r for g in gradients for r in self._reduced(g, tuple(range(1, g.ndim)) or (0,)))]
        return Statistics((*self._names, *(f"gradient of {n}" for n in names)), concat(rows), Parts(self._parts))

    def _reduced(self, x: Array, axes: tuple[int, ...]) -> list[Array]:
        """Vectors of the numbers of rows, which are what lies along `axes`; a small value is copied."""
        wide = x.dtype if x.dtype.itemsize > 2 else WIDE
        limit = None if x.dtype.itemsize > 2 else FULL * float(ml_dtypes.finfo(x.dtype).max)  # type: ignore[no-untyped-call]
        if x.size <= SHORT:
            self._parts.append(Part(x.size, limit, True))
            return [x.astype(wide).reshape(-1)]
        size = absolute(x)
        found = [largest(size, axis=axes), mean(x, axis=axes)]
        if limit is not None:
            found.append(mean((size >= limit).astype(WIDE), axis=axes))
        rows = [v.astype(wide).reshape(-1) for v in found]
        self._parts.append(Part(rows[0].size, limit, False))
        return rows


def _rows(call: Call, x: Array) -> tuple[int, ...]:
    """The axes along which the result of a call is reduced; of a convolution they leave channels, as a batch norm's."""
    window = x.ndim > 2 and Trait.CONTRACTION in call.op.traits and "strides" in call.attrs
    return (0, *range(2, x.ndim)) if window else (x.ndim - 1,)


def _is_product(op: OpDef) -> bool:
    """Is it an expensive op, and no reduction? What a sum, pool or norm makes is as large as its operand lets it."""
    return op.cost is Cost.HEAVY and (Trait.CONTRACTION in op.traits or Trait.REDUCTION not in op.traits)


def _products(last: Lazy, params: Mapping[int, str]) -> list[tuple[str, Call, Array]]:
    """The results of products and other expensive calls behind a value, in the order in which they were traced, by op,
    parameter and line. `params`: names by identity.
    """
    calls: dict[Call, Lazy] = {}
    seen: set[int] = set()
    todo = [last]
    while todo:
        x = todo.pop()
        if x.call is None or id(x) in seen or id(x) in params:
            continue
        seen.add(id(x))
        if _is_product(x.call.op) and x.type.dtype.is_float:
            calls.setdefault(x.call, x)
        todo += [i for i in x.call.inputs if i is not None]
    found: dict[str, tuple[str, Call, Array]] = {}
    for call in sorted(calls, key=lambda c: c.number):
        of = next((f" of {n}" for x in call.inputs if (n := _parameter(x, params)) is not None), "")
        title = f"{call.op.name}{of} at {call.locs[0]}" if call.locs else f"{call.op.name}{of}"
        name, k = title, 1
        while name in found:
            k += 1
            name = f"{title} ({k})"
        found[name] = name, call, array_of(calls[call])
    return list(found.values())


def _parameter(x: Lazy | None, params: Mapping[int, str]) -> str | None:
    """The name of the parameter that a value is, or is a transpose, a reshape or a cast of."""
    while x is not None and id(x) not in params:
        x = x.call.inputs[0] if x.call is not None and len(x.call.inputs) == 1 else None
    return None if x is None else params[id(x)]
