"""Sparse arrays on the CPU beside SciPy: products with vectors, matrices and sparse matrices; R-MAT and banded sets.

    python benchmarks/sparse_arrays.py [--columns 8 64] [--threads 1] [--repeats 20]

Times are medians of three alternating blocks of calls, arrays in and arrays out; SciPy has one thread. `--threads`
limits the process to so many CPUs, `--products` times these alone. CSB: compressed sparse blocks. The error is the
largest difference over the largest element, against SciPy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from timing import geometric_mean

from dnnc.array import sparse


def rmat(scale: int, degree: int, seed: int = 0) -> Any:
    """A graph of 2^scale nodes by R-MAT (0.57, 0.19, 0.19, 0.05), duplicates added up."""
    rng = np.random.default_rng(seed)
    n, count = 1 << scale, degree << scale
    row, column = np.zeros((2, count), np.int64)
    for _ in range(scale):
        part = rng.random(count)
        row = 2 * row + (part >= 0.76)
        column = 2 * column + (((part >= 0.57) & (part < 0.76)) | (part >= 0.95))
    return sp.csr_array((rng.random(count, np.float32), (row, column)), shape=(n, n))


def banded(n: int, width: int) -> Any:
    """Diagonals beside each other."""
    diagonals = [np.random.default_rng(k).random(n, np.float32) for k in range(width)]
    offsets = list(range(-(width // 2), width - width // 2))
    return sp.csr_array(sp.diags_array(diagonals, offsets=offsets, shape=(n, n), dtype=np.float32))


def even(n: int, count: int) -> Any:
    rng = np.random.default_rng(0)
    places = rng.integers(0, n, (2, count))
    return sp.csr_array((rng.random(count, np.float32), tuple(places)), shape=(n, n))


MATRICES: dict[str, Callable[[], Any]] = {
    "R-MAT 2^14, 16 a row": lambda: rmat(14, 16),
    "R-MAT 2^16, 4 a row": lambda: rmat(16, 4),
    "R-MAT 2^18, 8 a row": lambda: rmat(18, 8),
    "band of 9, 10^5": lambda: banded(100_000, 9),
    "band of 5, 10^6": lambda: banded(1_000_000, 5),
    "even, 4096, 10 %": lambda: even(4096, 1_677_721),
    "even, 2 * 10^5, 10 a row": lambda: even(200_000, 2_000_000),
}
MOST = 1 << 25  # elements of a dense factor, and products of two sparse ones


def cases(a: Any, s: Any, columns: list[int]) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, SciPy's call and ours."""
    rng = np.random.default_rng(1)
    v = rng.standard_normal(a.shape[1]).astype(np.float32)
    t, turned = a.T, s.T
    yield "A x", lambda: a @ v, lambda: (s @ v).numpy()
    yield "A^T x", lambda: t @ v, lambda: (turned @ v).numpy()
    c = s.tocsb()
    yield "A x, CSB", lambda: a @ v, lambda: (c @ v).numpy()
    yield "A^T x, CSB", lambda: t @ v, lambda: (c.T @ v).numpy()
    for n in columns:
        if n * a.shape[1] <= MOST:
            x = rng.standard_normal((a.shape[1], n)).astype(np.float32)
            yield f"A X, {n} columns", lambda x=x: a @ x, lambda x=x: (s @ x).numpy()
    if np.diff(a.indptr)[a.indices].sum() <= MOST:
        yield "A A", lambda: (a @ a).data, lambda: (s @ s).data.numpy()


def block(f: Callable[[], Any], repeats: int) -> float:
    """The median time of calls behind each other, after a pause: threads of the other side have gone to sleep."""
    time.sleep(0.04)
    f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--products", nargs="*", help='such as "A x, CSB"')
    args = parser.parse_args()
    if args.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    ratios: dict[str, list[float]] = {}
    print("| matrix | nonzeros | product | SciPy, ms | dnnc, ms | ratio | error |\n|---|---|---|---|---|---|---|")
    for name, make in MATRICES.items():
        a = make()
        a.sum_duplicates()
        s = sparse.csr_array(a)
        for what, theirs, ours in cases(a, s, args.columns):
            if args.products and what not in args.products:
                continue
            p, q = theirs(), ours()
            if what == "A A":  # whose columns may stand in other orders
                p, q = (a @ a) @ np.ones(a.shape[1], np.float32), ((s @ s) @ np.ones(a.shape[1], np.float32)).numpy()
            error = float(np.abs(p - q).max() / np.abs(p).max())
            seconds = [
                float(np.median(t)) for t in zip(*([block(f, args.repeats) for f in (theirs, ours)] for _ in "123"))
            ]
            ratios.setdefault(what, []).append(seconds[0] / seconds[1])
            times = f"{seconds[0] * 1e3:.3f} | {seconds[1] * 1e3:.3f} | {seconds[0] / seconds[1]:.2f}"
            print(f"| {name} | {a.nnz} | {what} | {times} | {error:.1e} |", flush=True)
    for what, found in ratios.items():
        print(f"{what}: {geometric_mean(found):.2f} in geometric mean, {min(found):.2f} at least")


if __name__ == "__main__":
    main()
