"""Integers of 2 and 4 bits between fused operators: they wrap there as in memory."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse

BODIES = (
    "add(x, x)",
    "mul(x, x)",
    "max(add(x, x), x)",
    "cumsum(x, axis=0)",
    "reduce_sum(x, axes=(1,), keepdims=True)",
    "reduce_max(add(x, x), axes=(0,), keepdims=True)",
    "reduce_min(mul(x, x), axes=(0, 1), keepdims=False)",
    "matmul(x, x)",
    "transpose(add(x, x), perm=(1, 0))",
)


@pytest.mark.family("cases")
@pytest.mark.parametrize("cpu", ["", " -mcpu=x86-64"])
@pytest.mark.parametrize("t", ["i4", "u4", "i2", "u2"])
def test_they_wrap(t: str, cpu: str) -> None:
    """A fused cast reads what would have been stored: 7 + 7 of four bits is -2 and not 14."""
    lo, hi = BY_NAME[t].range
    x = np.random.default_rng(0).integers(lo, hi + 1, (17, 17)).astype(BY_NAME[t].numpy)
    wrapped = 0
    for body in BODIES:
        g = parse(f"def f(x: {t}[17, 17]):\n    v = {body}\n    y = cast(v, to=f32)\n    return y\n")
        want = run(g, [x])[0]
        np.testing.assert_array_equal(compile(g, target=f"llvm{cpu}", cache=False, threads=1)(x), want, body)
        wide = run(
            parse(f"def f(x: i64[17, 17]):\n    v = {body}\n    y = cast(v, to=f32)\n    return y\n"),
            [x.astype(np.int64)],
        )[0]
        wrapped += not np.array_equal(wide, want)
    assert wrapped >= 6
