"""Random sparse arrays against NumPy in float64: patterns, formats, shapes, dtypes, operations.

    python -m support.random_sparse 10000 [first seed [device]]

Each result is held to what rounding can reach: a sum of n products is off by at most (n + 1) units in the last place of
the sum of their magnitudes, in float32 where values are stored in 16 bits, and then by the rounding of the store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp
from dnnc.array import sparse
from support.seeds import main

DTYPES = ("float32", "float32", "float64", "float16", "int32", "int64")
FORMATS = (sparse.csr_array, sparse.coo_array, sparse.bsr_array, sparse.csb_array)
SIZES = (0, 1, 1, 2, 3, 5, 8, 16, 17, 31, 40, 64, 100)
WIDTHS = (1, 1, 2, 3, 8, 16, 17, 33, 64)  # few, since each is a program
Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """A matrix as dnnc has it, and in float64; `said`: what to print of it."""

    array: Any
    dense: Array
    dtype: np.dtype[Any]
    said: str


def pattern(rng: np.random.Generator, m: int, k: int) -> Array:
    """bool[m, k]: even, skewed by rows or columns, banded, one dense row, blocks, all, or nothing."""
    kind, density = rng.integers(8), rng.random() ** 2
    if kind == 0:
        return np.zeros((m, k), bool)
    if kind == 1:
        return np.ones((m, k), bool)
    if kind == 2:
        return np.abs(np.arange(m)[:, None] - np.arange(k)) <= rng.integers(4)
    if kind == 3:
        chosen = np.zeros((m, k), bool)
        chosen[rng.integers(max(m, 1)) : rng.integers(max(m, 1)) + 1] = True
        return chosen
    weights = np.ones((m, k))
    if kind in (4, 5):
        weights = rng.random(m)[:, None] ** 4 * 3 if kind == 4 else rng.random(k) ** 4 * 3
    return rng.random((m, k)) < density * weights


def numbers(rng: np.random.Generator, shape: Any, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "i":
        return rng.integers(-9, 10, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def draw(rng: np.random.Generator, m: int, k: int, dtype: np.dtype[Any]) -> Case:
    """A sparse array made in one of many ways."""
    chosen = pattern(rng, m, k)
    dense = numbers(rng, (m, k), dtype) * chosen
    rows, columns = np.nonzero(chosen)
    values, way = dense[rows, columns], int(rng.integers(4))
    kind = FORMATS[rng.integers(len(FORMATS))]
    if way == 0:
        made = kind(dense)
    elif way == 1:  # in any order
        order = rng.permutation(len(rows))
        made = kind((values[order], (rows[order], columns[order])), shape=(m, k))
    elif way == 2:  # by rows, each in any order
        order = np.lexsort((rng.random(len(rows)), rows))
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))])
        made = kind(sparse.csr_array((values[order], columns[order], starts), shape=(m, k)))
    else:  # with duplicates, which are added up
        half = values // 2 if dtype.kind == "i" else values / 2
        other = values - half
        places = np.concatenate([rows, rows]), np.concatenate([columns, columns])
        made = kind((np.concatenate([half, other]), places), shape=(m, k))
    if way == 3 and dtype.kind == "f":
        dense = np.zeros((m, k))
        np.add.at(dense, places, np.concatenate([half, other]).astype(np.float64))
        dense = dense.astype(dtype)
    if rng.random() < 0.3:
        sizes = [[d for d in range(1, n + 1) if n % d == 0][:3] for n in (m, k)]
        if all(sizes):
            made = made.tobsr(tuple(int(rng.choice(s)) for s in sizes))
    return Case(made, dense.astype(np.float64), dtype, f"{made!r}, way {way}")


def check(got: Any, want: Array, size: Array, terms: int, dtype: np.dtype[Any], what: str) -> None:
    """AssertionError unless a result is as near as rounding allows. `size`: sums of the magnitudes of terms."""
    array = (got.toarray() if isinstance(got, sparse.SparseArray) else got).numpy()
    assert array.shape == want.shape, f"{what}: shape {array.shape}, expected {want.shape}"
    assert array.dtype == dtype, f"{what}: {array.dtype}, expected {dtype}"
    error = np.abs(array.astype(np.float64) - want)
    if dtype.kind == "i":
        assert not error.any(), f"{what}: off by {error.max()}"
        return
    wide = np.finfo(np.float32 if dtype.itemsize == 2 else dtype).eps
    allowed = (terms + 2) * wide * size + (np.finfo(dtype).eps * np.abs(want) + 6e-8) * (dtype.itemsize == 2)
    assert (error <= allowed).all(), f"{what}: off by {error.max()}, allowed {allowed.flat[(error - allowed).argmax()]}"


def product(rng: np.random.Generator, c: Case) -> None:
    x = numbers(rng, (c.dense.shape[1], int(rng.choice(WIDTHS))), c.dtype)
    x = x[:, 0] if rng.random() < 0.3 else x
    size = np.abs(c.dense) @ np.abs(x.astype(np.float64))
    check(c.array @ x, c.dense @ x.astype(np.float64), size, c.dense.shape[1], c.dtype, f"{c.said} @ {x.shape}")


def left_product(rng: np.random.Generator, c: Case) -> None:
    x = numbers(rng, (int(rng.choice(WIDTHS)), c.dense.shape[0]), c.dtype)
    wide = x.astype(np.float64)
    check(x @ c.array, wide @ c.dense, np.abs(wide) @ np.abs(c.dense), len(c.dense), c.dtype, f"{x.shape} @ {c.said}")


def transposed(rng: np.random.Generator, c: Case) -> None:
    check(c.array.T, c.dense.T, np.abs(c.dense.T), 1, c.dtype, f"{c.said}.T")


def two_sparse(rng: np.random.Generator, c: Case) -> None:
    other = draw(rng, c.dense.shape[1], int(rng.choice(SIZES)), c.dtype)
    other.array = other.array.to_device(c.array.device)
    size = np.abs(c.dense) @ np.abs(other.dense)
    check(c.array @ other.array, c.dense @ other.dense, size, c.dense.shape[1], c.dtype, f"{c.said} @ {other.said}")


def elements(rng: np.random.Generator, c: Case) -> None:
    shape = tuple(n if rng.random() < 0.6 else 1 for n in c.dense.shape)
    x = numbers(rng, shape, c.dtype)
    want = c.dense * x.astype(np.float64)
    check(c.array * x, want, np.abs(want), 1, c.dtype, f"{c.said} * {shape}")
    other = draw(rng, *c.dense.shape, c.dtype)
    other.array = other.array.to_device(c.array.device)
    size = np.abs(c.dense) + np.abs(other.dense)
    check(c.array + other.array, c.dense + other.dense, size, 1, c.dtype, f"{c.said} + {other.said}")
    want = c.dense * other.dense
    check(c.array * other.array, want, np.abs(want), 1, c.dtype, f"{c.said} * {other.said}")


def onto_dense(rng: np.random.Generator, c: Case) -> None:
    x = numbers(rng, c.dense.shape, c.dtype)
    size = np.abs(c.dense) + np.abs(x.astype(np.float64))
    check(c.array + x, c.dense + x, size, 1, c.dtype, f"{c.said} + dense")


def sums(rng: np.random.Generator, c: Case) -> None:
    axis = int(rng.integers(2))
    terms = c.dense.shape[axis]
    check(c.array.sum(axis), c.dense.sum(axis), np.abs(c.dense).sum(axis), terms, c.dtype, f"sum of {c.said}")


def sampled(rng: np.random.Generator, c: Case) -> None:
    (m, k), d = c.dense.shape, int(rng.choice(WIDTHS))
    x, y = numbers(rng, (m, d), c.dtype), numbers(rng, (d, k), c.dtype)
    stored = sparse.csr_array(c.array).with_data(np.ones(sparse.csr_array(c.array).nnz)).toarray().numpy()
    p, q = x.astype(np.float64), y.astype(np.float64)
    check(sparse.sddmm(c.array, x, y), (p @ q) * stored, np.abs(p) @ np.abs(q), d, c.dtype, f"sddmm {c.said}, {d}")


def gradients(rng: np.random.Generator, c: Case) -> None:
    """Of values and the dense factor; few shapes, since each is a program."""
    if c.dtype != np.float32 or 0 in c.dense.shape or rng.random() > 0.1:
        return
    x = xp.asarray(numbers(rng, (c.dense.shape[1], 3), c.dtype), device=c.array.device)
    w = numbers(rng, (len(c.dense), 3), c.dtype)
    s = sparse.csr_array(c.array)
    factor = xp.asarray(w, device=c.array.device)
    of_a, of_x = dnnc.grad(lambda a, x: xp.sum((a @ x) * factor), argnums=(0, 1))(s, x)
    stored, p, q = s.with_data(np.ones(s.nnz)).toarray().numpy(), x.numpy().astype(np.float64), w.astype(np.float64)
    check(of_a, (q @ p.T) * stored, np.abs(q) @ np.abs(p.T), 3, c.dtype, f"gradient of {c.said}")
    size = np.abs(c.dense.T) @ np.abs(q)
    check(of_x, c.dense.T @ q, size, len(c.dense), c.dtype, f"gradient of a factor of {c.said}")


OPERATIONS: tuple[Callable[[np.random.Generator, Case], None], ...] = (
    product, product, left_product, transposed, two_sparse, elements, onto_dense, sums, sampled, gradients,
)  # fmt: skip


def run(seed: int, device: str = "cpu") -> None:
    """One matrix on a device, two operations. AssertionError or DnncError: one is wrong."""
    rng = np.random.default_rng(seed)
    m, k = (int(rng.choice(SIZES)) for _ in range(2))
    case = draw(rng, m, k, np.dtype(DTYPES[rng.integers(len(DTYPES))]))
    case.array = case.array.to_device(device)
    for _ in range(2):
        OPERATIONS[rng.integers(len(OPERATIONS))](rng, case)


if __name__ == "__main__":
    main(partial(run, device="".join(sys.argv[3:]) or "cpu"), "cases", 500, sys.argv[1:3])
