"""Conversions as arithmetic, interpreted: every code of every small format, every tie and rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import BY_NAME, DType
from dnnc.ir.expr import Expr, cast, const
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.conversions import FORMATS, is_small, narrow, rounded, to_odd, widen, widen_by_half

SMALL = [*FORMATS, "bf16", "f8e8m0"]


def apply(f: Callable[[Expr], Expr], x: Any, source: DType, to: DType) -> Any:
    """f over an array, as a kernel."""
    b = Builder()
    a, y = (Buffer(n, t, (const(len(x)),)) for n, t in (("x", source), ("y", to)))
    with b.loop("i", len(x)) as i:
        b.store(y, (i,), f(a[i]))
    kernel = verify_kernel(Kernel((Func("k", (a, y), b.block()),)))
    out = np.zeros(len(x), to.numpy)
    run_kernel(kernel, {"x": x, "y": out})
    return out


def codes(a: Any) -> Any:
    return a.view(np.uint16 if a.dtype.itemsize == 2 else np.uint8)


@pytest.mark.parametrize("name", SMALL)
def test_widen_every_code(name: str) -> None:
    t = BY_NAME[name]
    assert is_small(t)
    x = np.arange(1 << t.bits, dtype=np.uint16 if t.bits == 16 else np.uint8).view(t.numpy)
    ways = [widen] if widen_by_half(const(0, t)) is None else [widen, widen_by_half]
    for way in ways:
        np.testing.assert_array_equal(apply(way, x, t, BY_NAME["f32"]), x.astype(np.float32))


@pytest.mark.parametrize("name", SMALL)
def test_narrow_on_both_sides_of_every_tie(name: str) -> None:
    t = BY_NAME[name]
    known = np.arange(1 << t.bits, dtype=np.uint16 if t.bits == 16 else np.uint8).view(t.numpy).astype(np.float32)
    known = np.unique(known[np.isfinite(known)])
    middle = ((known[1:].astype(np.float64) + known[:-1]) / 2).astype(np.float32)
    some = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45]
    x = np.concatenate(
        [known, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)), some]
    ).astype(np.float32)
    if name == "f8e8m0":  # ml_dtypes rounds what lies just below the tie of its two smallest numbers up
        x = x[(x <= 0) | (x >= 2.0**-126) | np.isnan(x)]
    got = apply(lambda e: narrow(e, t), x, BY_NAME["f32"], t)
    with np.errstate(all="ignore"):
        want = x.astype(t.numpy)
    bad = (codes(got) != codes(want)) & ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    assert not bad.any(), f"{x[bad][:4]}: {codes(got)[bad][:4]}, expected {codes(want)[bad][:4]}"


def test_float64_to_half_rounds_once() -> None:
    """1 + 2^-11 + 2^-40 is above a tie of float16; rounded to float32 first it would be the tie, which goes down."""
    rng = np.random.default_rng(1)
    ties = 1 + (2 * np.arange(200) + 1) * 2.0**-11
    x = np.concatenate(
        [ties + d for d in (0, 2.0**-40, -(2.0**-40))]
        + [rng.standard_normal(500) * 1e-5, [1e300, -1e300, np.inf, np.nan, 1e-320]]
    )
    got = apply(lambda e: narrow(to_odd(e), BY_NAME["f16"]), x, BY_NAME["f64"], BY_NAME["f16"])
    with np.errstate(all="ignore"):
        want = x.astype(np.float16)
        twice = x.astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(got, want)
    assert (twice != want).any()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name,f", [("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("rint", np.rint)])
def test_rounding_to_integers(name: str, f: Callable[[Any], Any], dtype: str) -> None:
    t = BY_NAME[dtype]
    near = np.concatenate(
        [
            np.arange(-6, 6, 0.25),
            [2.0**22 + 0.5, 2.0**23 + 1, 2.0**31, 2.0**52 + 1, 2.0**63, 1e30, 1e-40, np.inf, np.nan, 0.0],
        ]
    )
    x = np.concatenate([near, -near]).astype(t.numpy)
    got = apply(lambda e: cast(rounded(name, e), t), x, t, t)
    np.testing.assert_array_equal(got, f(x))
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(x)], np.signbit(f(x))[~np.isnan(x)])
