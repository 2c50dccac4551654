"""Sorts where cores walk rows: against NumPy's stable sort, by digits, by counting and by groups; with ties, NaN and
signed zeros, along any axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import sequence
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import For, walk_stmts
from dnnc.ir.ops import OPS
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.lower.digits import lower_digits
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import classify

Array = np.ndarray[Any, Any]
FLOATS = ("f16", "f32", "f64")


def graph_text(dtype: str, shape: tuple[int, ...], keep: int, axis: int, descending: bool) -> str:
    sizes = ", ".join(map(str, shape))
    return (
        f"def g(x: {dtype}[{sizes}]):\n    y, i = sort(x, axis={axis}, descending={descending}, keep={keep})\n"
        "    return y, i"
    )


def drawn(dtype: str, shape: tuple[int, ...], kind: str) -> Array:
    rng = np.random.default_rng(len(kind) + sum(shape))
    x = rng.standard_normal(shape) * (1.5 if kind == "ties" else 100)
    x = np.round(x) if kind == "ties" else x
    if kind == "nan":
        x[rng.random(shape) < 0.2] = np.nan
    return (abs(x) if dtype[0] == "u" else x).astype(BY_NAME[dtype].numpy)


def places(x: Array, keep: int, axis: int, descending: bool) -> Array:
    """Of equal elements the one with the lower index comes first; NaN is the largest."""
    if descending:
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    return np.take(order, np.arange(keep), axis)


def check(dtype: str, shape: tuple[int, ...], keep: int, axis: int, descending: bool, kind: str) -> None:
    x = drawn(dtype, shape, kind)
    f = dnnc.compile(
        parse(graph_text(dtype, shape, keep, axis, descending)), target="llvm", threads=2, strict_compile=True
    )
    y, index = f(x)
    want = places(x, keep, axis, descending)
    np.testing.assert_array_equal(index, want)
    np.testing.assert_array_equal(y, np.take_along_axis(x, want, axis))


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("kind", ["plain", "ties", "nan"])
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize(
    "shape,keep",
    [
        ((3, 60), 7),
        ((2, 1000), 1),
        ((2, 300), 300),
        ((1, 5000), 5000),
        ((2, 3000), 200),
        ((1, 20011), 3),
        ((2, 70001), 100),
    ],
)
def test_rows(shape: tuple[int, int], keep: int, descending: bool, kind: str) -> None:
    check("f32", shape, keep, -1, descending, kind)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "f64", "i8", "i32", "i64", "u8", "u64"])
def test_types(dtype: str) -> None:
    for shape, keep in (((2, 700), 700), ((2, 4500), 11)):
        check(dtype, shape, keep, -1, True, "plain")
        check(dtype, shape, keep, -1, False, "ties")


@pytest.mark.slow
def test_any_axis() -> None:
    check("f32", (500, 2, 3), 5, 0, True, "ties")
    check("f32", (2, 130, 3), 130, 1, False, "plain")


@pytest.mark.slow
def test_random_shapes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        rows, n = int(rng.integers(1, 5)), int(np.exp(rng.uniform(0, 9)))
        keep = int(rng.integers(1, n + 1)) if rng.random() < 0.5 else min(n, int(rng.integers(1, 10)))
        check("f32", (rows, n), keep, -1, bool(rng.random() < 0.5), str(rng.choice(["plain", "ties", "nan"])))


def test_signed_zeros_are_equal() -> None:
    x = np.tile(np.array([0.0, -0.0], np.float32), 100)[None]
    _, index = dnnc.compile(parse(graph_text("f32", (1, 200), 200, -1, True)), target="llvm", strict_compile=True)(x)
    np.testing.assert_array_equal(index[0], np.arange(200))


def test_few_of_many_are_found_by_groups() -> None:
    by_cores, by_merging = (parse(graph_text("f32", (1, 10000), 4, -1, True)) for _ in range(2))
    decompose(by_cores, PassContext())
    decompose(by_merging, PassContext(TargetFacts(serial_rows=False)))
    assert {"sort_groups", "sort_members"} <= {n.op.name for n in by_cores.nodes()}
    names = {n.op.name for n in by_merging.nodes()}
    assert "sort_merge" in names and not names & {"sort_groups", "sort_digits"}


@pytest.mark.parametrize("rows,n,keep,low,high", [(2, 30, 30, 32, 64), (1, 9, 4, 0, 9), (3, 17, 17, 4, 30)])
def test_nest(rows: int, n: int, keep: int, low: int, high: int) -> None:
    """The naive kernel, run by the interpreter; digits that all keys share are copied."""
    g = parse(f"def g(x: u64[{rows}, {n}]):\n    y = sort_digits(x, keep={keep}, low={low}, high={high})\n    return y")
    (node,) = g.nodes()
    keys = np.random.default_rng(n).integers(0, 1 << 63, (rows, n), dtype=np.uint64) & np.uint64(0x00FF00FF_FF00FFFF)
    want = OPS["sort_digits"].reference(keys, keep=keep, low=low, high=high)  # type: ignore[misc]
    got = np.zeros((rows, keep), np.uint64)
    run_kernel(lower_digits(node).kernel, {"x0": keys, "y": got})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows,n,shared", [(4, 20000, True), (300, 100, True), (1, 20000, False), (4, 65, False)])
def test_rows_are_shared_by_their_lengths(rows: int, n: int, shared: bool) -> None:
    g = parse(f"def g(x: u64[{rows}, {n}]):\n    return sort_digits(x, keep={n})")
    target = parse_target("llvm", 2)
    p = classify(list(g.nodes()), lower_digits(next(iter(g.nodes()))))
    kernel = sequence.apply(p, dict(sequence.candidates(p, target)[0]), target)
    assert any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(kernel.entry.body)) == shared
