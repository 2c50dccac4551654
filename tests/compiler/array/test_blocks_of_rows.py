"""Products of matrices of dense blocks: sizes of blocks and of the other factor, threads, the kernel itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.array import sparse
from dnnc.array.sparse import bsr
from dnnc.ir.dtype import f32, i32
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel

rng = np.random.default_rng(5)


def blocks(m: int, k: int, r: int, c: int, dtype: str = "float32") -> Any:
    """A matrix of m x k blocks of r x c whole numbers, a third of which are there; one row of blocks is empty."""
    there = rng.random((m, k)) < 0.3
    there[m // 2] = False
    return (np.kron(there, np.ones((r, c))) * rng.integers(-9, 9, (m * r, k * c))).astype(dtype)


@pytest.mark.family("kernels")
@pytest.mark.parametrize("r,c,dtype", [(4, 4, "float32"), (7, 5, "float64"), (16, 2, "float32")])
def test_products(r: int, c: int, dtype: str) -> None:
    d = blocks(9, 11, r, c, dtype)
    a = sparse.csr_array(d).tobsr((r, c))
    for n in (1, 2, 33, 200):
        x = rng.integers(-9, 9, (d.shape[1], n)).astype(dtype)
        got = a @ x
        assert got.dtype == d.dtype and (got.numpy() == d @ x).all()
    assert (a @ x[:, 0]).numpy().tolist() == (d @ x[:, 0]).tolist()
    assert ((a.T @ (d @ x)).numpy() == d.T @ (d @ x)).all() and (x.T @ a.T).numpy().tolist() == (x.T @ d.T).tolist()


def test_threads_share_rows_by_blocks() -> None:
    d = blocks(40, 40, 8, 8)
    d[:8] = 1
    a, x = sparse.csr_array(d).tobsr((8, 8)), rng.integers(-9, 9, (320, 40)).astype(np.float32)
    assert a.nnz * 40 > bsr.SERIAL_BELOW and ((a @ x).numpy() == d @ x).all()


def test_the_kernel_in_the_interpreter() -> None:
    kernel = verify_kernel(bsr.product_kernel(f32, i32, (6, 3), 4, 2))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    d = blocks(4, 5, 6, 3)
    a, x = sparse.csr_array(d).tobsr((6, 3)), rng.integers(-9, 9, (15, 23)).astype(np.float32)
    y = np.full((24, 23), np.nan, np.float32)
    run_kernel(
        kernel,
        {
            "edges": np.array([0, 1, 4]), "starts": a.indptr, "columns": a.indices, "values": a.data.numpy(), "x": x,
            "y": y, "M": 4, "K": 5, "N": 23, "Z": len(a.indices),
        },
    )  # fmt: skip
    assert (y == d @ x).all()
