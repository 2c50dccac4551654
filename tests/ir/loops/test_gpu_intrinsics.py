"""Warp intrinsics as NumPy computes them, against what the instruction set's manual says of each lane."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel

rng = np.random.default_rng(0)

SHUFFLE = """
def k(x: i32[64], y: i32[64]):
    for t in thread.x(64):
        y[t] = {}(x[t], {})
"""


@pytest.mark.parametrize(
    "name,operand,source",
    [
        ("shfl_up", 3, lambda lane: lane - 3 if lane >= 3 else lane),
        ("shfl_up", 0, lambda lane: lane),
        ("shfl_down", 5, lambda lane: lane + 5 if lane + 5 < 32 else lane),
        ("shfl", 7, lambda lane: 7),
        ("shfl", "31 - t % 32", lambda lane: 31 - lane),
        ("shfl_xor", 6, lambda lane: lane ^ 6),
    ],
)
def test_shuffles_stay_in_their_warp(name: str, operand: object, source: object) -> None:
    x, y = rng.integers(0, 1000, 64).astype(np.int32), np.zeros(64, np.int32)
    run_kernel(parse_kernel(SHUFFLE.format(name, operand)), {"x": x, "y": y})
    assert y.tolist() == [x[t // 32 * 32 + source(t % 32)] for t in range(64)]  # type: ignore[operator]


TF32 = """
def k(a: f32[16, 8], b: f32[8, 8], d: f32[16, 8]):
    for l in lane(32):
        acc: f32[4] @ register
        for h in unroll(2):
            acc[2*h:+2] = d[8*h + l // 4, 2*(l % 4):+2]
        left: f32[4] @ register
        for c in unroll(2):
            for h in unroll(2):
                left[2*c + h] = a[8*h + l // 4, 4*c + l % 4]
        right: f32[2] @ register
        for c in unroll(2):
            right[c] = b[4*c + l % 4, l // 4]
        acc[0:+4] = mma_m16n8k8(acc[0:+4], left[0:+4], right[0:+2])
        for h in unroll(2):
            d[8*h + l // 4, 2*(l % 4):+2] = acc[2*h:+2]
"""


def tf32(x: np.ndarray) -> np.ndarray:
    """Nearest number of 11 bits, ties away from 0."""
    m, e = np.frexp(x)
    return np.ldexp(np.sign(m) * np.floor(np.abs(m) * 2048 + 0.5) / 2048, e)


def test_a_product_in_tf32() -> None:
    a, b, d = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    want = d + tf32(a.astype(np.float64)) @ tf32(b.astype(np.float64))
    exact = d + a.astype(np.float64) @ b
    run_kernel(parse_kernel(TF32), {"a": a, "b": b, "d": d})
    np.testing.assert_allclose(d, want, atol=2e-6)
    assert np.abs(want - exact).max() > 1e-4  # the rounding shows


def test_operands_that_are_cut_off() -> None:
    """The bits behind TF32's do not count: what is left of each operand multiplied by a power of two is exact."""
    a, b, d = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    cut = [(x.view(np.int32) & -8192).view(np.float32).astype(np.float64) for x in (a, b)]
    want = d + cut[0] @ cut[1]
    text = TF32.replace("mma_m16n8k8(", "mma_m16n8k8_cut(")
    run_kernel(parse_kernel(text), {"a": a, "b": b, "d": d})
    np.testing.assert_allclose(d, want, atol=2e-6)


def test_fragments_of_words() -> None:
    """Lane 8*m + r gives row r of matrix m; lane l gets element l % 4 of row l // 4 of each of four matrices."""
    x = rng.standard_normal((16, 8)).astype(np.float32)
    y = np.zeros((32, 4), np.float32)
    text = """
def k(x: f32[16, 8], y: f32[32, 4]):
    s: f32[16, 8] @ shared
    for l in lane(32):
        for r in range(4):
            s[4*r + l // 8, l % 8] = x[4*r + l // 8, l % 8]
        syncwarp()
        y[l, 0:+4] = ldmatrix_x4(addr(s[l // 8 % 2 * 8 + l % 8, 4*(l // 16):+4]))
"""
    run_kernel(parse_kernel(text), {"x": x, "y": y})
    lane = np.arange(32)
    want = [x[k % 2 * 8 + lane // 4, k // 2 * 4 + lane % 4] for k in range(4)]
    np.testing.assert_array_equal(y, np.stack(want, -1))


def test_launches_that_overlap_mean_nothing_else() -> None:
    y = np.zeros(32, np.float32)
    text = (
        "def k(y: f32[32]):\n    for t in thread.x(32):\n        pdl_wait()\n        y[t] = 1.0\n        pdl_launch()\n"
    )
    run_kernel(parse_kernel(text), {"y": y})
    assert (y == 1).all()
