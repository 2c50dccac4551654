"""How many decisions a quantized model would change: an estimate from few samples.

A classifier decides for the largest number of a row. Among some dozens of samples no decision may change where one of a
hundred does, so changes are not counted but expected:

    margin      the largest number of a row less the second, in the float model
    error       what quantization adds to that difference
    changes     the error exceeds the margin. Small margins are as good as equally likely up to the first quartile M of
                all, so a share of 1/4 * 1/2 * mean(min(|error| / M, 1)) of the rows changes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHARE = 0.25  # of the rows have a margin up to M
LEAST_ROWS = 8
LEAST_PROBABILITY = 1e-12


class Decisions:
    """Margins and errors of the rows of all outputs."""

    def __init__(self) -> None:
        self._margins: dict[int, list[Array]] = {}
        self._errors: dict[int, list[Array]] = {}

    def add(self, got: Sequence[Array], want: Sequence[Array]) -> None:
        """Compare the outputs of one call."""
        for k, (a, b) in enumerate(zip(got, want)):
            if b.dtype.kind == "f" and a.shape == b.shape and b.ndim and b.shape[-1] > 1 and b.size:
                margins, errors = _compared(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]))
                self._margins.setdefault(k, []).append(margins)
                self._errors.setdefault(k, []).append(errors)

    @property
    def changed(self) -> float | None:
        """The share of decisions that is expected to change, of the output where it is largest; None: no decisions."""
        found = [_expected(*rows) for rows in self._rows()]
        return max((x for x in found if x is not None), default=None)

    @property
    def rows(self) -> int:
        """With a decision, of the output that has fewest of them."""
        return min((len(m) for m, _ in self._rows()), default=0)

    @property
    def noise(self) -> float:
        """The mean square of the errors near small margins, in units of the margins; of the outputs together."""
        return float(sum(np.mean((_near(m, e) / _quartile(m)) ** 2) for m, e in self._rows() if len(m)))

    def _rows(self) -> list[tuple[Array, Array]]:
        pairs = [(np.concatenate(m), np.concatenate(self._errors[k])) for k, m in self._margins.items()]
        return [(m, e) for m, e in pairs if len(m) >= LEAST_ROWS]


def _compared(a: Array, b: Array) -> tuple[Array, Array]:
    """Margins of the rows of b, and what a differs from them by. Rows with equal or infinite numbers are left out."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if (b >= 0).all() and np.abs(b.sum(1) - 1).max() < 1e-3:  # probabilities, whose differences say little
        a, b = (np.log(np.maximum(x, LEAST_PROBABILITY)) for x in (a, b))
    rows = np.arange(len(b))
    order = np.argpartition(b, -2, axis=1)
    second, first = order[:, -2], order[:, -1]
    with np.errstate(invalid="ignore"):
        margins = b[rows, first] - b[rows, second]
        errors = a[rows, first] - a[rows, second] - margins
    usable = (margins > 0) & np.isfinite(margins)
    return margins[usable], np.where(np.isfinite(errors), errors, np.inf)[usable]


def _quartile(margins: Array) -> float:
    return float(np.quantile(margins, SHARE))


def _near(margins: Array, errors: Array) -> Array:
    """Errors of the half of the rows with the smaller margins: where a decision is sure, errors are of another size."""
    near: Array = errors[margins <= np.median(margins)]
    return near


def _expected(margins: Array, errors: Array) -> float:
    return float(SHARE / 2 * np.mean(np.minimum(np.abs(_near(margins, errors)) / _quartile(margins), 1.0)))
