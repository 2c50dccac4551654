"""Tensor expressions in NumPy: every op's expression gives what its reference gives, wherever asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir import te
from dnnc.ir.dtype import boolean, f16, f32, i32, i64
from dnnc.ir.expr import cast, const, op, select
from dnnc.ir.graph.attributes import complete
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import Trait
from dnnc.ir.ops import FAMILIES
from dnnc.ir.ops.common import draw
from dnnc.ir.te import interp as te_interp


@pytest.mark.parametrize("family", FAMILIES)
def test_expressions_are_what_references_compute(family: str) -> None:
    for record in FAMILIES[family]:
        for seed, s in enumerate(
            record.samples[:5] if record.compute is not None and record.reference is not None else ()
        ):
            assert record.compute is not None and record.reference is not None
            attrs, arrays = complete(record, dict(s.attrs)), draw(s, seed)
            operands = [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(s.inputs)]
            made = record.compute(*operands, **attrs)
            raw = Trait.BITS in record.traits
            given = [
                a.astype(np.float64) if t.dtype.is_float and not raw else a if raw else a.astype(t.dtype.computed.numpy)
                for a, t in zip(arrays, s.inputs)
            ]
            want = record.reference(*given, **attrs)
            for t, w in zip(made if isinstance(made, tuple) else (made,), want if isinstance(want, tuple) else (want,)):
                got, tol = te_interp.whole(t, dict(zip(operands, arrays))), 1e-3 if t.dtype.bits < 32 else 1e-6
                np.testing.assert_allclose(got.astype(np.float64), np.asarray(w).astype(np.float64), rtol=tol, atol=tol)


def test_at_points() -> None:
    x = te.placeholder("x", f32, (40, 30))
    total = te.reduce((40,), (30,), f32, "sum", lambda i, r: x[i, r] * x[i, r])
    y = te.compute((30, 40), f32, lambda i, j: x[j, i] / call("sqrt", total[j]))
    a = np.random.default_rng(0).standard_normal((40, 30), np.float32)
    points = np.array([[0, 0], [29, 39], [3, 7], [3, 7]])
    want = (a.astype(np.float64) / np.sqrt((a.astype(np.float64) ** 2).sum(1, keepdims=True))).T
    np.testing.assert_allclose(te_interp.elements(y, {x: a}, points), want[tuple(points.T)], rtol=1e-13)


def test_what_is_left_out_is_not_evaluated() -> None:
    x, n = te.placeholder("x", f32, (5,)), te.placeholder("n", i64, (3,))
    y = te.reduce((3,), (5,), f32, "max", lambda i, r: x[r + n[i]], lambda i, r: r + n[i] < 5)
    np.testing.assert_array_equal(
        te_interp.whole(y, {x: np.arange(5, dtype=np.float32), n: np.array([0, 3, 7])}), [4, 4, -np.inf]
    )
    with pytest.raises(IndexError, match="index 9 of axis 0"):
        te_interp.whole(
            te.reduce((3,), (5,), f32, "max", lambda i, r: x[r + n[i]]),
            {x: np.zeros(5, np.float32), n: np.array([0, 3, 5])},
        )
    with pytest.raises(IndexError, match="index -1 of an axis with 5"):
        te_interp.whole(
            te.compute((3,), f32, lambda i: x[call("guard", n[i], 0, 5)]),
            {x: np.zeros(5, np.float32), n: np.array([0, 4, -1])},
        )


def test_rows_in_order_and_types() -> None:
    x = te.placeholder("x", f32, (2, 6))
    running = te.recur(
        (2, 6), f32, lambda t, i, j: x[i, j] + select(j.eq(0), const(0.0, f32), t[i, op("max", j - 1, const(0))] * 0.5)
    )
    a = np.random.default_rng(1).standard_normal((2, 6)).astype(np.float32)
    want: Any = np.zeros((2, 6))
    for k in range(6):
        want[:, k] = a[:, k] + (0.5 * want[:, k - 1] if k else 0)
    np.testing.assert_allclose(te_interp.whole(running, {x: a}), want, rtol=1e-7)
    small = te.compute((2, 6), f32, lambda i, j: cast(cast(x[i, j], f16), f32))
    np.testing.assert_array_equal(te_interp.whole(small, {x: a}), a.astype(np.float16))
    n = te.placeholder("n", i32, (3,))
    many = te.compute((3,), i32, lambda i: n[i] * n[i])
    assert te_interp.whole(many, {n: np.array([1, -3, 1 << 20], np.int32)}).tolist() == [1, 9, 0]
    assert te_interp.whole(
        te.compute((3,), boolean, lambda i: n[i] < 0), {n: np.array([1, -3, 0], np.int32)}
    ).tolist() == [False, True, False]


def test_the_form_of_expressions() -> None:
    x, s = te.placeholder("x", f32, (4, 4)), te.placeholder("s", f32, (4, 1))
    zero, one = const(0.0, f32), const(1.0, f32)

    def form(*outputs: te.Tensor) -> frozenset[Trait]:
        return te.form((x, s), outputs)

    assert form(te.compute((4, 4), f32, lambda i, j: x[i, j] * s[i, 0])) == {Trait.ELEMENTWISE}
    assert form(te.compute((4, 4), f32, lambda i, j: x[j, i])) == frozenset()
    assert form(te.compute((4, 4), f32, lambda i, j: x[i, j] + select(i.eq(j), one, zero))) == {Trait.PLACED}
    assert form(te.compute((4, 4), f32, lambda i, j: x[i, j] + cast(j, f32))) == {Trait.PLACED}
    inner = te.compute((4, 4), f32, lambda i, j: x[i, j] * cast(i, f32))
    assert form(te.compute((4, 4), f32, lambda i, j: inner[i, j] + one)) == {Trait.PLACED}
    assert form(te.reduce((4,), (4,), f32, "sum", lambda i, r: x[i, r])) == {Trait.REDUCTION}
    assert form(te.reduce((4,), (4,), f32, "sum", lambda i, r: x[i, i] + x[i, r])) == {Trait.LOOPS}
