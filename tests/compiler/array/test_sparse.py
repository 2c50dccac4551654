"""`dnnc.array.sparse` against SciPy and NumPy in float64: formats, products, elements, sums, gradients, wrong input."""

from __future__ import annotations

import copy
import os
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import dnnc
import dnnc.array as xp
from dnnc.array import sparse
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.array.sparse import products, spgemm
from dnnc.ir.dtype import f32, i32
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from support import random_sparse

DTYPES = ("float16", "float32", "float64", "int32", "int64")
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}
rng = np.random.default_rng(7)


def random(m: int, k: int, density: float, dtype: str = "float32") -> Any:
    """A matrix of SciPy, by rows."""
    values = rng.integers(-9, 9, (m, k)) if dtype.startswith("int") else rng.standard_normal((m, k))
    return sp.csr_array((values * (rng.random((m, k)) < density)).astype(dtype))


def close(got: Any, want: Any) -> None:
    made = (got.toarray() if isinstance(got, sparse.SparseArray) else got).numpy()
    want = np.asarray(want)
    assert made.shape == want.shape
    limit = TOLERANCE.get(made.dtype.name, 0.0) * max(1.0, float(np.abs(want).max(initial=0)))
    assert np.abs(made.astype(np.float64) - want).max(initial=0) <= limit


@pytest.mark.family("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 16, 37])
def test_products(dtype: str, columns: int) -> None:
    a = random(23, 31, 0.2, "float32" if dtype == "float16" else dtype)  # SciPy has no float16
    a.data = a.data.astype(np.dtype(dtype)).astype(a.data.dtype)
    x, y = (rng.integers(-9, 9, s).astype(dtype) for s in ((31, columns), (columns, 23)))
    wide = a.toarray().astype(np.float64)
    for kind in (sparse.csr_array, sparse.coo_array):
        s = kind(a, dtype=dtype)
        assert s.dtype == np.dtype(dtype) and s.nnz == a.nnz
        close(s @ x, wide @ x)
        close(y @ s, y.astype(np.float64) @ wide)
        close(s @ x[:, 0], wide @ x[:, 0])
        close(y[0] @ s, y[0] @ wide)
        close(s.T @ y.T, wide.T @ y.T)


def test_arrays_in_use_are_pickled_and_copied() -> None:
    """Whatever is kept beside them: transposes, programs, kernels."""
    a, v = random(12, 12, 0.3), rng.standard_normal(12).astype(np.float32)
    s = sparse.csr_array(a)
    for made in (s, s.tocoo(), s.tobsr((4, 4)), s.tocsb()):
        for _ in range(2):
            close(made @ v, a @ v)
            close(made.T @ v, a.T @ v)
        for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert type(other) is type(made)
            close(other @ v, a @ v)
            close(other.T @ v, a.T @ v)


def test_products_again_make_no_lazy_values(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = random(12, 9, 0.3), rng.standard_normal((9, 3)).astype(np.float32)
    s, y = sparse.csr_array(a), rng.standard_normal((12, 9)).astype(np.float32)
    for _ in range(2):
        close(s @ x, a @ x)
        close(s @ x[:, 0], a @ x[:, 0])
        close(sparse.sddmm(s, y, np.eye(9, dtype=np.float32)), (a.toarray() != 0) * y)
        monkeypatch.setattr(products, "apply", None)  # of a second time nothing is recorded


SHAPES = [(1, 1, 1.0), (1, 40, 0.5), (40, 1, 0.5), (7, 9, 0.0), (0, 5, 0.0), (5, 0, 0.0), (64, 64, 1.0)]


SEED = zlib.crc32(os.environ["DNNC_TEST_SEED"].encode())  # others every day


@pytest.mark.family("kernels")
@pytest.mark.parametrize("seed", range(SEED, SEED + 16))
def test_random_arrays(seed: int) -> None:
    random_sparse.run(seed)


@pytest.mark.parametrize("m,k,density", SHAPES)
def test_shapes_at_the_edge(m: int, k: int, density: float) -> None:
    a = random(m, k, density)
    s, d = sparse.csr_array(a), a.toarray()
    x = rng.standard_normal((k, 3)).astype(np.float32)
    close(s @ x, d @ x)
    close(x.T @ s.T, x.T @ d.T)
    close(s.sum(0), d.sum(0))
    close(s.sum(1), d.sum(1))
    close(s.T, d.T)
    assert s.tocoo().nnz == s.nnz == a.nnz


def test_factors_may_change_behind_a_product() -> None:
    a, x = random(30, 40, 0.3), rng.standard_normal((40, 3)).astype(np.float32)
    for kind in (sparse.csr_array, sparse.bsr_array, sparse.csb_array):
        s, y, v = kind(a), x.copy(), x[:, 0].copy()
        made = s @ y, s @ v, v[:30] @ s, y[:30].T.copy() @ s
        y[:], v[:] = 7, 7
        for got, want in zip(made, (a @ x, a @ x[:, 0], x[:30, 0] @ a, x[:30].T @ a)):
            close(got, want)
        assert not np.shares_memory(made[0].numpy(), y)


def test_one_dense_row_and_empty_rows() -> None:
    d = np.zeros((200, 300), np.float32)
    d[70] = rng.standard_normal(300)
    d[150, 3] = 2.0
    x = rng.standard_normal((300, 20)).astype(np.float32)
    s = sparse.csr_array(d)
    close(s @ x, d.astype(np.float64) @ x)
    close(s @ x[:, 0], d.astype(np.float64) @ x[:, 0])
    close(s.T @ np.ones(200, np.float32), d.sum(0))


def test_rows_are_shared_by_nonzeros() -> None:
    """Large enough for several threads; most nonzeros lie in a few rows."""
    sizes = np.minimum((4000 / np.arange(1, 3001)).astype(int), 900)
    rows = np.repeat(np.arange(3000), sizes)
    columns = np.concatenate([rng.choice(900, n, replace=False) for n in sizes])
    a = sp.csr_array((rng.standard_normal(len(rows)).astype(np.float32), (rows, columns)), shape=(3000, 900))
    x = rng.standard_normal((900, 24)).astype(np.float32)
    s, wide = sparse.csr_array(a), a.toarray().astype(np.float64)
    close(s @ x, wide @ x)
    close(s @ x[:, 0], wide @ x[:, 0])


def test_elements_and_sums() -> None:
    a, b = random(20, 30, 0.3), random(20, 30, 0.3)
    s, t, d, e = sparse.csr_array(a), sparse.csr_array(b), a.toarray(), b.toarray()
    full = rng.standard_normal((20, 30)).astype(np.float32)
    close(s * 2, d * 2)
    close(s / 2, d / 2)
    close(-s, -d)
    for other in (full, full[0], full[:1], full[:, :1], full[:1, :1]):
        close(s * other, d * other)
        close(other * s, d * other)
    close(s + full, d + full)
    close(full - s, full - d)
    close(s + t, d + e)
    close(s - t, d - e)
    close(s * t, d * e)
    close(s.sum(), d.sum())
    close(s.mean(), d.mean())
    close(s.mean(0), d.mean(0))
    close(s.mean(1), d.mean(1))
    close(s.with_data(xp.exp(s.data)), np.where(d != 0, np.exp(d), 0))
    assert (s + 0) is s and s.astype("float64").dtype == np.float64
    x, y = rng.standard_normal((20, 11)).astype(np.float32), rng.standard_normal((11, 30)).astype(np.float32)
    close(sparse.sddmm(s, x, y), (x @ y) * (d != 0))


@pytest.mark.family("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_two_sparse_arrays(dtype: str) -> None:
    for m, k, n, density in (
        (5, 6, 7, 0.4),
        (60, 70, 80, 0.1),
        (1, 40, 1, 1.0),
        (30, 20, 10, 0.0),
        (300, 200, 260, 0.2),
    ):
        a, b = (random(*s, density, "float32" if dtype == "float16" else dtype) for s in ((m, k), (k, n)))
        s, t = (sparse.csr_array(x, dtype=dtype) for x in (a, b))
        x, y = (z.toarray().numpy().astype(np.float64) for z in (s, t))
        c = s @ t
        assert c.shape == (m, n) and c.dtype == np.dtype(dtype)
        assert c.nnz == ((a != 0).astype(int) @ (b != 0).astype(int)).nnz  # zeros that are sums are stored
        close(c, x @ y)


def test_a_product_is_an_operand_like_others() -> None:
    """Its columns stand in the order in which they were met."""
    a, b = random(40, 30, 0.2), random(30, 50, 0.2)
    c, d = sparse.csr_array(a) @ sparse.coo_array(b), (a @ b).toarray().astype(np.float64)
    x = rng.standard_normal((50, 4)).astype(np.float32)
    close(c @ x, d @ x)
    close(c.T, d.T)
    close(c.T @ x[:40], d.T @ x[:40])
    close(c + c.T.T, 2 * d)
    close(c * sparse.csr_array(d.astype(np.float32)), d * d)
    close(c.tobsr((2, 5)), d)
    close(c @ c.T, d @ d.T)
    close(sparse.csr_array(c.to_scipy()), d)


def test_products_in_parts_and_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random(200, 90, 0.1), random(90, 150, 0.1)
    want = a.toarray().astype(np.float64) @ b.toarray()
    monkeypatch.setattr(spgemm, "SERIAL_BELOW", 1)
    for most in (1 << 28, 3000, 1):
        monkeypatch.setattr(spgemm, "AT_ONCE", most)
        close(sparse.csr_array(a) @ sparse.csr_array(b), want)
    d = np.zeros((40, 40), np.float32)
    d[39] = 1.0  # all products are of the last row
    close(sparse.csr_array(d) @ sparse.csr_array(d), d @ d)


@pytest.mark.parametrize("branches", [False, True])
def test_kernels_of_sparse_products_in_the_interpreter(branches: bool) -> None:
    """Verified, and without races between shares."""
    a, b = random(9, 8, 0.4), random(8, 7, 0.4)
    s, t = (x.astype(np.int32) for x in (a.indptr, b.indptr))
    structure = {"starts": s, "columns": a.indices, "b_starts": t, "b_columns": b.indices}
    sizes = {"M": 9, "K": 8, "N": 7, "Y": a.nnz, "Z": b.nnz}
    most = np.zeros(9, np.int64)
    kernel = verify_kernel(spgemm.bound_kernel(i32))
    run_kernel(kernel, {**sizes, **structure, "most": most})
    assert (most <= 7).all() and (most >= np.diff((a @ b).indptr)).all()
    kernel = verify_kernel(spgemm.fill_kernel(i32, f32, 2, branches))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    begins = np.array([0, most[:4].sum(), most.sum()])
    out = {"c_columns": np.zeros(most.sum(), np.int32), "c": np.zeros(most.sum(), np.float32), "counts": most.copy()}
    mark = np.full((2, 7), -1, np.int32)
    values = {"a": a.data, "b": b.data, "edges": np.array([0, 4, 9]), "begins": begins, "mark": mark}
    run_kernel(kernel, {**sizes, "C": len(out["c"]), **structure, **values, **out})
    want = (a @ b).toarray()
    assert out["counts"].tolist() == np.diff((a @ b).indptr).tolist()
    assert np.allclose(out["c"][: out["counts"][0]], want[0, out["c_columns"][: out["counts"][0]]])


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 5), (20, 30)])
def test_blocks(size: tuple[int, int]) -> None:
    a = random(20, 30, 0.1)
    d, x = a.toarray(), rng.standard_normal((30, 6)).astype(np.float32)
    s = sparse.csr_array(a).tobsr(size)
    assert s.blocksize == size and s.shape == (20, 30)
    close(s, d)
    close(s @ x, d @ x)
    close(x.T @ s.T, x.T @ d.T)
    close(sparse.bsr_array(s.to_scipy()), d)
    close(sparse.bsr_array(d, blocksize=size), d)
    close(s * 3, d * 3)


def test_formats_and_scipy() -> None:
    a = random(9, 12, 0.3)
    for name in ("csr", "csc", "coo", "bsr", "lil", "dok", "dia"):
        for kind in (sparse.csr_array, sparse.coo_array, sparse.bsr_array):
            s = kind(a.asformat(name))
            close(s, a.toarray())
            back = s.to_scipy()
            assert back.format == s.format and (back.toarray() == a.toarray()).all()
    s = sparse.csr_array(sp.csr_matrix(a))
    assert s.indptr.tolist() == a.indptr.tolist() and s.indices.tolist() == a.indices.tolist()
    assert (s.tocoo().row == a.tocoo().coords[0]).all() and s.format == "csr" and s.ndim == 2
    close(sparse.csr_array(xp.asarray(a.toarray())), a.toarray())
    close(sparse.csr_array((4, 6)), np.zeros((4, 6)))
    assert sparse.csr_array((4, 6), dtype="float32").dtype == np.float32


def test_unsorted_and_duplicate_elements_are_added_up() -> None:
    rows, columns = rng.integers(0, 10, 80), rng.integers(0, 8, 80)
    values = rng.standard_normal(80).astype(np.float32)
    want = np.zeros((10, 8))
    np.add.at(want, (rows, columns), values)
    s = sparse.coo_array((values, (rows, columns)), shape=(10, 8))
    close(s, want)
    assert s.nnz == np.count_nonzero(want)
    order = np.argsort(rows, kind="stable")  # rows in order, columns not
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=10))])
    close(sparse.csr_array((values[order], columns[order], starts), shape=(10, 8)), want)
    blocks = rng.standard_normal((3, 2, 4)).astype(np.float32)
    s = sparse.bsr_array((blocks, [1, 0, 1], [0, 3]), shape=(2, 8))
    close(s, np.hstack([blocks[1], blocks[0] + blocks[2]]))


def test_nan_and_infinity_stay_where_they_are() -> None:
    d = np.zeros((4, 5), np.float32)
    d[0, 1], d[2, 3] = np.nan, np.inf
    s = sparse.csr_array(d)
    assert s.nnz == 2
    y = (s @ np.ones((5, 17), np.float32)).numpy()
    assert np.isnan(y[0]).all() and np.isinf(y[2]).all() and (y[[1, 3]] == 0).all()
    x = np.ones(5, np.float32)
    x[0] = np.nan  # which no stored element meets
    assert np.isfinite((s @ x).numpy()[[1, 3]]).all()


WRONG = {
    "a column beyond the matrix": lambda: sparse.csr_array(([1.0], [5], [0, 1]), shape=(1, 5)),
    "a negative column": lambda: sparse.csr_array(([1.0], [-1], [0, 1]), shape=(1, 5)),
    "a negative row": lambda: sparse.coo_array(([1.0], ([-1], [0])), shape=(2, 5)),
    "starts that fall": lambda: sparse.csr_array(([1.0, 2.0], [0, 1], [0, 2, 1, 2]), shape=(3, 5)),
    "starts that end early": lambda: sparse.csr_array(([1.0, 2.0], [0, 1], [0, 1]), shape=(1, 5)),
    "starts for another shape": lambda: sparse.csr_array(([1.0], [0], [0, 1]), shape=(3, 5)),
    "no starts": lambda: sparse.csr_array(([], [], []), shape=(0, 5)),
    "fewer values than columns": lambda: sparse.csr_array(([1.0], [0, 1], [0, 2]), shape=(1, 5)),
    "rows and columns of two lengths": lambda: sparse.coo_array(([1.0, 2.0], ([0, 1], [0])), shape=(2, 2)),
    "indices that are floats": lambda: sparse.csr_array(([1.0], [0.5], [0, 1]), shape=(1, 5)),
    "a matrix of indices": lambda: sparse.coo_array(([1.0], ([[0]], [0])), shape=(1, 5)),
    "three axes": lambda: sparse.csr_array(np.zeros((2, 2, 2))),
    "a vector": lambda: sparse.csr_array(np.zeros(3)),
    "text": lambda: sparse.csr_array("abc"),
    "complex numbers": lambda: sparse.csr_array(np.ones((2, 2), complex)),
    "truth values": lambda: sparse.csr_array(np.ones((2, 2), bool)),
    "a negative shape": lambda: sparse.csr_array((-1, 2)),
    "a shape of one size": lambda: sparse.csr_array(([1.0], [0], [0, 1]), shape=(1,)),
    "blocks that do not divide": lambda: sparse.bsr_array(np.ones((4, 6)), blocksize=(3, 2)),
    "blocks of another size": lambda: sparse.bsr_array((np.ones((1, 2, 2)), [0], [0, 1]), blocksize=(1, 2)),
    "a factor that is too short": lambda: sparse.csr_array(np.eye(3)) @ np.ones(4),
    "a left factor that is too short": lambda: np.ones((2, 4)) @ sparse.csr_array(np.eye(3)),
    "a stack of matrices": lambda: sparse.csr_array(np.eye(3)) @ np.ones((2, 3, 3)),
    "another shape to add": lambda: sparse.csr_array(np.eye(3)) + sparse.csr_array(np.eye(4)),
    "a number to add": lambda: sparse.csr_array(np.eye(3)) + 1,
    "factors of a sampled product": lambda: sparse.sddmm(sparse.csr_array(np.eye(3)), np.ones((3, 2)), np.ones((3, 2))),
    "an axis too many": lambda: sparse.csr_array(np.eye(3)).sum(2),
    "other values": lambda: sparse.csr_array(np.eye(3)).with_data(np.ones(4)),
    "as a truth value": lambda: bool(sparse.csr_array(np.eye(3))),
    "as a NumPy array": lambda: np.asarray(sparse.csr_array(np.eye(3))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_an_error_of_dnnc(name: str) -> None:
    with pytest.raises(dnnc.DnncError):
        WRONG[name]()


def test_error_names_the_index() -> None:
    with pytest.raises(dnnc.InputError, match=r"indices\[2\] is 7: expected a column from 0 to 4"):
        sparse.csr_array((np.ones(3), [0, 4, 7], [0, 1, 3]), shape=(2, 5))


# --- programs and gradients -------------------------------------------------------------------------------------------


def test_one_program_serves_all_patterns() -> None:
    x = rng.standard_normal((50, 11)).astype(np.float32)
    (sparse.csr_array(random(40, 50, 0.2)) @ x).numpy()
    before = PROGRAMS_MADE.compiled
    for m, density in ((3, 0.5), (90, 0.01), (41, 0.9)):
        a = random(m, 50, density)
        close(sparse.csr_array(a) @ x, a @ x)
    assert PROGRAMS_MADE.compiled == before


def loss(a: Any, x: Any) -> Any:
    return xp.sum(xp.tanh(a @ x))


def test_gradients_of_values_and_of_the_dense_factor() -> None:
    a = random(20, 30, 0.2)
    s, d, x = sparse.csr_array(a), a.toarray(), xp.asarray(rng.standard_normal((30, 5)).astype(np.float32))
    g = 1 - np.tanh(d @ x.numpy()) ** 2
    for f in (dnnc.grad(loss, argnums=(0, 1)), dnnc.jit(dnnc.grad(loss, argnums=(0, 1)))):
        of_a, of_x = f(s, x)
        assert isinstance(of_a, sparse.csr_array) and of_a.structure is s.structure
        close(of_a, (g @ x.numpy().T) * (d != 0))
        close(of_x, d.T @ g)
    of_t = dnnc.grad(lambda v: xp.sum(xp.sin(v @ s.T)))(x.T)
    close(of_t, np.cos(x.numpy().T @ d.T) @ d)
    s.data.requires_grad = True
    loss(s, x).backward()
    close(s.with_data(s.data.grad), (g @ x.numpy().T) * (d != 0))


def test_gradients_of_sampled_products_and_second_ones() -> None:
    a = random(8, 9, 0.4, "float64")
    s, d = sparse.csr_array(a), a.toarray()
    x, y = (xp.asarray(rng.standard_normal(n)) for n in ((8, 4), (4, 9)))
    of_x, of_y = dnnc.grad(lambda x, y: xp.sum(xp.sin(sparse.sddmm(s, x, y).data)), argnums=(0, 1))(x, y)
    m = np.cos(x.numpy() @ y.numpy()) * (d != 0)
    close(of_x, m @ y.numpy().T)
    close(of_y, x.numpy().T @ m)
    v = xp.asarray(rng.standard_normal(9))
    h = dnnc.hessian(lambda v: xp.sum((s @ v) ** 3))(v)
    close(h, 6 * d.T @ np.diag(d @ v.numpy()) @ d)


def test_gradients_of_products_of_two_sparse_arrays() -> None:
    a, b = random(12, 9, 0.3, "float64"), random(9, 10, 0.3, "float64")
    s, t, d, e = sparse.csr_array(a), sparse.csr_array(b), a.toarray(), b.toarray()

    def squares(a: Any, b: Any) -> Any:
        return xp.sum((a @ b).data ** 2)

    of_a, of_b = dnnc.jit(dnnc.grad(squares, argnums=(0, 1)))(s, t)
    close(of_a, 2 * (d @ e) @ e.T * (d != 0))
    close(of_b, 2 * d.T @ (d @ e) * (e != 0))


def test_masked_training_keeps_one_copy_of_the_weights() -> None:
    """A layer and the product with its transpose, whose gradient reaches the one array of values."""
    d = random(12, 10, 0.3).toarray()
    w, x = sparse.csr_array(d), xp.asarray(rng.standard_normal((6, 10)).astype(np.float32))

    @dnnc.jit
    def step(w: Any, x: Any) -> Any:
        def objective(w: Any) -> Any:
            return xp.mean((x - (x @ w.T) @ w) ** 2)

        value, g = dnnc.value_and_grad(objective)(w)
        return value, w.with_data(w.data - 0.02 * g.data)

    first, _ = step(w, x)
    want = np.mean((x.numpy() - x.numpy() @ d.T @ d) ** 2)
    assert float(first) == pytest.approx(want, rel=1e-4)
    for _ in range(30):
        last, w = step(w, x)
    assert float(last) < 0.9 * float(first) and w.nnz == np.count_nonzero(d)


def test_structures_are_arguments_by_identity() -> None:
    f = dnnc.jit(loss)
    x = xp.asarray(rng.standard_normal((30, 5)).astype(np.float32))
    for density in (0.1, 0.4):
        a = random(20, 30, density)
        s = sparse.csr_array(a)
        for k in (1.0, 2.0):
            assert float(f(s * k, x)) == pytest.approx(np.tanh(k * (a @ x.numpy())).sum(), rel=1e-4, abs=1e-4)
