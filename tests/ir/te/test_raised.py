"""Naive loop nests as tensor expressions: what they become, that lowering takes them back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir import te
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ParseError, ShapeError
from dnnc.ir.expr import dim
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.te import interp as te_interp
from dnnc.ir.te.raised import outputs_of, raised

LAYER = """
def layer(M: dim, N: dim, K: dim, x: f32[M, K], w: f32[K, N], b: f32[N], y: f32[M, N]):
    for i in range(M):
        for j in range(N):
            acc: f32[1] @ register
            acc[0] = 0.0
            for k in range(K):
                acc[0] = fma(x[i, k], w[k, j], acc[0])
            y[i, j] = max(acc[0] + b[j], 0.0)
"""
ROWS = """
def rows(N: dim, C: dim, x: f32[N, C], y: f32[N, C], top: f32[N]):
    for i in range(N):
        m: f32[1] @ register
        m[0] = f32(-inf)
        for r in range(C):
            m[0] = max(m[0], x[i, r])
        s: f32[1] @ register
        s[0] = 1.0
        for r in range(C):
            e: f32 = exp(x[i, r] - m[0])
            if r != 3:
                if x[i, r] < 1.0:
                    s[0] = s[0] + e
        top[i] = m[0]
        for j in range(C):
            y[i, j] = exp(x[i, j] - m[0]) / s[0]
"""
COUNT = """
def count(x: i64[4, 5], y: i64[5, 1]):
    for j in range(5):
        n: i64[1] @ register
        n[0] = 0
        for a in range(2):
            for b in range(2):
                n[0] = n[0] + 2*x[2*a + b, j] + 1
        y[j, 0] = n[0]
"""


def test_a_layer() -> None:
    kernel = parse_kernel(LAYER)
    assert [b.name for b in outputs_of(kernel)] == ["y"]
    x, w, b = te.placeholder("x", f32, (4, 6)), te.placeholder("w", f32, (6, 3)), te.placeholder("b", f32, (3,))
    (y,) = raised(kernel, [x, w, b])
    assert y.stage is not None and str(y.stage.value) == "max(acc[i0, i1] + b[i1], 0.0)"
    (acc, _) = te.stages([y])
    assert acc.stage is not None and str(acc.stage.value) == "x[i0, r2] * w[r2, i1]" and acc.stage.combine == "sum"


def test_what_nests_compute() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 7), np.float32)
    x = te.placeholder("x", f32, (3, 7))
    y, top = raised(parse_kernel(ROWS), [x])
    e = np.exp(a - a.max(1, keepdims=True).astype(np.float64))
    counted = (np.arange(7) != 3) & (a < 1)
    np.testing.assert_allclose(
        te_interp.whole(y, {x: a}), e / (1 + np.where(counted, e, 0).sum(1, keepdims=True)), rtol=1e-6
    )
    np.testing.assert_array_equal(te_interp.whole(top, {x: a}), a.max(1))
    n, m = te.placeholder("x", i64, (4, 5)), rng.integers(-9, 9, (4, 5))
    (y,) = raised(parse_kernel(COUNT), [n])
    np.testing.assert_array_equal(te_interp.whole(y, {n: m}), (2 * m + 1).sum(0)[:, None])


def test_symbolic_sizes() -> None:
    n = dim("n")
    (y,) = raised(
        parse_kernel(LAYER),
        [te.placeholder("x", f32, (n, 6)), te.placeholder("w", f32, (6, 3)), te.placeholder("b", f32, (3,))],
    )
    assert y.dims == (n, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAYER.replace("range(K)", "parallel(K)"), "of no other kind"),
        (LAYER.replace("y[i, j] =", "y[j, i] ="), "stored once, at the variables"),
        (LAYER.replace("y[i, j] =", "y[i, 0] ="), "stored once, at the variables"),
        (LAYER.replace("fma(x[i, k], w[k, j], acc[0])", "x[i, k] - acc[0]"), "combined by"),
        (
            LAYER.replace("fma(x[i, k], w[k, j], acc[0])", "acc[0] + x[i, k] * acc[0]"),
            "only operands and register buffers|combined by",
        ),
        (LAYER.replace("            acc[0] = 0.0\n", ""), "no value before the loop"),
        (LAYER.replace("f32[1] @ register", "f32[2] @ register").replace("acc[0]", "acc[1]"), "one element"),
        (LAYER.replace("range(K)", "range(i)"), "may not depend on another loop"),
        (
            LAYER.replace(
                "                acc[0] = f", "                if acc[0] < 3.0:\n                    acc[0] = f"
            ),
            "may not depend on acc itself",
        ),
        (LAYER.replace("y[i, j]", "x[i, j]").replace(", y: f32[M, N]", ""), "only operands|reads 2 arrays"),
    ],
)
def test_what_is_no_naive_nest(text: str, message: str) -> None:
    operands = [te.placeholder("x", f32, (4, 6)), te.placeholder("w", f32, (6, 3)), te.placeholder("b", f32, (3,))]
    with pytest.raises((ParseError, ShapeError), match=message):
        raised(parse_kernel(text), operands)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 6), (5, 3), (3,)), r"w is f32\[K, N\] with M=4, K=6, N=3, got \[5, 3\]"),
        (((4, 6), (6, 3)), r"reads 3 arrays \(x, w, b\), 2 are given"),
        (((4, 6, 1), (6, 3), (3,)), r"x is f32\[M, K\], got f32\[4, 6, 1\]"),
    ],
)
def test_operands_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        raised(parse_kernel(LAYER), [te.placeholder("x", f32, s) for s in shapes])
