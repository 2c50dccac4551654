"""Winograd's convolution F(m x m, 3 x 3), as far as the representation of weights goes.

A tile of m x m results of a 3 x 3 convolution needs (m+2)^2 products instead of 9 m^2 when filters g and pieces d of
the image are transformed: y = A^T [(G g G^T) * (B^T d B)] A (Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015). G g G^T is computed once, in float64, when weights are packed: the encoding `Winograd`
says that taps lie in memory in this form. Here are G, and its inverse on filters, with which a plain nest reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir.dtype import f32
from dnnc.ir.expr import Expr, const, fma, select

Array = np.ndarray[Any, Any]
TILES = (2, 4)
TAPS = 3

# G of F(2, 3) and F(4, 3): from three taps to m + 2 points
_G = {
    2: np.array([[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]]),
    4: np.array(
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ]
    ),
}
# taps out of points, g_k = a[k] * u[5k // 2 or 3k // 2] + b[k] * u[k's partner]: the first and the last point are taps,
# the middle tap is the difference of the two points after the first
_BACK = {2: ((1.0, 1.0, 1.0), 3, -1.0, 2), 4: ((4.0, 3.0, 1.0), 5, -3.0, 1)}


def points(tile: int) -> int:
    """Points of a tile along one axis."""
    return tile + TAPS - 1


def matrix(tile: int) -> Array:
    """[points squared, taps squared]: G x G, which makes points of taps, both row by row."""
    g = _G[tile]
    return np.kron(g, g)


def weights(w: Array, tile: int) -> Array:
    """[O, C, 3, 3] -> [O, C, m+2, m+2]: G g G^T of each filter, in float64. A view with points outermost."""
    n, made = points(tile), w.shape[:2]
    taps = np.ascontiguousarray(w.reshape(-1, TAPS * TAPS).T, np.float64)
    out = np.empty((n, n, made[0] * made[1]), w.dtype)
    for row, g in zip(out, _G[tile]):
        row[:] = np.kron(g, _G[tile]) @ taps
    return out.reshape(n, n, *made).transpose(2, 3, 0, 1)


def tap(at: Callable[[Expr, Expr], Expr], tile: int, row: Expr, column: Expr) -> Expr:
    """The weight at a tap (an index in [0, 3) each), out of the points that `at(row, column)` reads."""

    def across(r: Expr) -> Expr:
        return _tap(lambda c: at(r, c), tile, column)

    return _tap(across, tile, row)


def _tap(at: Callable[[Expr], Expr], tile: int, k: Expr) -> Expr:
    first, last, other, partner = _BACK[tile]
    middle = k.eq(1)
    scale = select(k.eq(0), const(first[0], f32), select(middle, const(first[1], f32), const(first[2], f32)))
    return fma(at(k * last // 2), scale, at(k % 2 * partner) * select(middle, const(other, f32), const(0.0, f32)))
