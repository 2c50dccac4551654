"""Compressed sparse blocks: where elements are, products with a matrix and its transpose, wrong input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array import sparse
from dnnc.array.sparse import csb
from dnnc.ir.dtype import f32, u16
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel

rng = np.random.default_rng(3)


def whole(m: int, k: int, density: float, dtype: str = "float32") -> Any:
    """Whole numbers, whose sums are exact."""
    return (rng.integers(-9, 9, (m, k)) * (rng.random((m, k)) < density)).astype(dtype)


def test_places_within_blocks() -> None:
    letters = {c: n for n, c in enumerate("abcdefghij", 1)}
    d = np.zeros((6, 6), np.float32)
    for place, c in zip(("00", "10", "14", "23", "25", "43", "44", "52", "54", "55"), letters):
        d[int(place[0]), int(place[1])] = letters[c]
    a = sparse.csb_array(d, blocksize=2)
    b = a.blocks
    elements = [  # of each block: value, row and column within it
        {(float(v), int(p) >> 8, int(p) & 255) for v, p in zip(a.data.numpy()[lo:hi], b.places[lo:hi])}
        for lo, hi in zip(b.begins, b.begins[1:])
    ]
    assert elements == [
        {(1, 0, 0), (2, 1, 0)}, {(3, 1, 0)}, {(4, 0, 1)}, {(5, 0, 1)}, {(6, 0, 1), (8, 1, 0)},
        {(7, 0, 0), (9, 1, 0), (10, 1, 1)},
    ]  # fmt: skip
    assert b.by_rows.starts.tolist() == [0, 2, 4, 6] and b.by_rows.other.tolist() == [0, 2, 1, 2, 1, 2]
    assert b.by_columns.starts.tolist() == [0, 1, 3, 6] and b.by_columns.blocks.tolist() == [0, 2, 4, 1, 3, 5]
    assert a.tocsr().to_scipy().toarray().tolist() == a.to_scipy().toarray().tolist() == d.tolist()


@pytest.mark.family("kernels")
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_products_of_a_matrix_and_its_transpose(dtype: str) -> None:
    for (m, k), sizes in (((70, 90), (None, 7)), ((300, 520), (257,)), ((1, 9), (3,)), ((0, 4), (7,)), ((4, 0), (7,))):
        d = whole(m, k, 0.2, dtype)
        x, y = (rng.integers(-3, 4, n).astype(dtype) for n in (k, m))
        for size in sizes:
            a = sparse.csb_array(d, blocksize=size)
            assert a.nnz == np.count_nonzero(d) and a.T.shape == (k, m) and a.T.data is a.data
            for got, want in ((a @ x, d @ x), (a.T @ y, d.T @ y), (y @ a, y @ d), (x @ a.T, x @ d.T)):
                assert got.dtype == d.dtype and (got.numpy() == want).all()
            assert (a.toarray().numpy() == d).all() and (a.T.toarray().numpy() == d.T).all()


def test_diagonals_are_vectors() -> None:
    n = 600
    d = sum(np.diag(rng.integers(1, 9, n - abs(k)), k) for k in (-3, 0, 1, 40)).astype(np.float32)
    d[5, 5:50] = 0
    d[300, 100] = 3
    x = rng.integers(-9, 9, n).astype(np.float32)
    for size in (None, 100):
        a = sparse.csb_array(d, blocksize=size)
        assert len(a.blocks.heads) * csb.RUN + len(a.blocks.places) == a.nnz and len(a.blocks.heads) > 80
        assert ((a @ x).numpy() == d @ x).all() and ((x @ a).numpy() == x @ d).all()
    assert sparse.csb_array(d).blocksize == csb.DIAGONAL


def test_threads_share_blocks_by_elements() -> None:
    d = whole(900, 700, 0.05) + whole(900, 700, 0.9) * (np.arange(900) < 40)[:, None]
    a = sparse.csb_array(d, blocksize=32)
    x = rng.integers(-3, 4, 700).astype(np.float32)
    assert a.nnz > csb.SERIAL_BELOW
    assert ((a @ x).numpy() == d @ x).all() and ((a.T @ (d @ x)).numpy() == d.T @ (d @ x)).all()
    edges, lines = a.blocks.by_rows.shares(a.blocks.begins, 3)
    weights = np.diff(a.blocks.begins[a.blocks.by_rows.starts])[lines]
    loads = np.add.reduceat(weights, edges[:-1])
    assert sorted(lines) == list(range(29)) and loads.max() < 1.2 * loads.mean()


def test_one_dense_row_nan_and_no_element() -> None:
    d = np.zeros((400, 300), np.float32)
    d[7] = 1
    x = np.ones(300, np.float32)
    x[9] = np.nan
    made = (sparse.csb_array(d) @ x).numpy()
    assert np.isnan(made[7]) and not made[8:].any()  # zeros that are not stored hide NaN
    assert sparse.csb_array(np.array([[np.nan, 0.0]])).nnz == 1
    empty = sparse.csb_array((5, 6), dtype="float32")
    assert not (empty @ np.ones(6, np.float32)).numpy().any() and empty.T.shape == (6, 5)
    twice = sparse.csb_array(([1.0, 2.0], ([1, 1], [2, 2])), shape=(3, 4))
    assert twice.nnz == 1 and (twice @ np.array([0, 0, 1.0, 0])).numpy().tolist() == [0, 3, 0]


def test_values_change_and_have_gradients() -> None:
    d, x = whole(20, 30, 0.3), rng.integers(-3, 4, 30).astype(np.float32)
    a = sparse.csb_array(d)
    assert ((2 * a).toarray().numpy() == 2 * d).all() and ((a + a.T.T) @ x).numpy().tolist() == (2 * d @ x).tolist()
    twice = a.with_data(a.data * 2)
    assert isinstance(twice, sparse.csb_array) and (twice.T.toarray().numpy() == 2 * d.T).all()
    g = dnnc.jit(dnnc.grad(lambda a, x: xp.sum((a @ x) ** 2)))(a, xp.asarray(x))
    assert isinstance(g, sparse.csb_array) and (g.toarray().numpy() == 2 * np.outer(d @ x, x) * (d != 0)).all()


@pytest.mark.parametrize("size", [0, -1, 65537, 2.5, True, "8"])
def test_wrong_sizes_of_blocks(size: Any) -> None:
    with pytest.raises(dnnc.InputError, match="blocksize: expected a number from 1 to 65536"):
        sparse.csb_array(np.eye(3), blocksize=size)


def test_other_wrong_input() -> None:
    with pytest.raises(dnnc.InputError, match=r"col\[1\] is 9: expected a column from 0 to 4"):
        sparse.csb_array(([1.0, 1.0], ([0, 1], [0, 9])), shape=(2, 5))
    with pytest.raises(dnnc.InputError, match="matmul: expected a vector"):
        sparse.csb_array(np.eye(3)) @ np.ones(4)
    with pytest.raises(dnnc.InputError, match="with_data"):
        sparse.csb_array(np.eye(3)).with_data(np.ones(4))


@pytest.mark.parametrize("turned", [False, True])
def test_the_kernel_in_the_interpreter(turned: bool) -> None:
    kernel = verify_kernel(csb.product_kernel(f32, u16, turned, 2))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    d = whole(40, 50, 0.1) + np.eye(40, 50, dtype=np.float32)
    a = sparse.csb_array(d, blocksize=20)
    b = a.blocks
    walk = b.by_columns if turned else b.by_rows
    want = d.T if turned else d
    x = rng.integers(-3, 4, want.shape[1]).astype(np.float32)
    lines, across = (len(w.starts) - 1 for w in ((b.by_columns, b.by_rows) if turned else (b.by_rows, b.by_columns)))
    edges, order = walk.shares(b.begins, 2)
    full = np.zeros((across, 20), np.float32)
    full.reshape(-1)[: len(x)] = x
    arrays = {
        "edges": edges, "lines": order, "starts": walk.starts, "blocks": walk.blocks, "other": walk.other,
        "begins": b.begins, "runs": b.runs, "heads": b.heads, "places": b.places, "values": a.data.numpy(), "x": full,
        "y": np.full((lines, 20), np.nan, np.float32),
    }  # fmt: skip
    sizes = {
        "M": len(want), "R": lines, "C": across, "S": 20, "B": len(walk.other), "Z": a.nnz, "H": len(b.heads),
        "P": len(b.places),
    }  # fmt: skip
    run_kernel(kernel, {**arrays, **sizes})
    assert len(b.heads) and (arrays["y"].reshape(-1)[: len(want)] == want @ x).all()
