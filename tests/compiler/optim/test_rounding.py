"""Stochastic rounding: to a neighbour, without bias, with the same bits on all targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.optim.rounding import stochastically_rounded

COUNT = 4096
# in units of the spacing of float16 there: normal numbers of both signs, the smallest normal one, subnormal ones
POINTS = [(1.0, 2.0**-10), (-3.5, 2.0**-9), (2.0**-14, 2.0**-24), (5 * 2.0**-24, 2.0**-24), (0.0, 2.0**-24)]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda-interpreted"])
def test_without_bias(target: str) -> None:
    rounded = dnnc.jit(lambda x, key: stochastically_rounded(x, np.dtype(np.float16), key), target=target)
    means = np.array([[value + share * step for share in (0.1, 0.5, 0.9)] for value, step in POINTS])
    x = np.repeat(means.reshape(-1).astype(np.float32), COUNT // 4 if target != "llvm" else COUNT)
    found = np.asarray(rounded(x, np.array([7, 1], np.uint32))).astype(np.float64).reshape(len(POINTS) * 3, -1)
    exact = x.reshape(found.shape)[:, 0].astype(np.float64)
    for row, mean, step in zip(found, exact, [s for _, s in POINTS for _ in range(3)]):
        low = np.floor(mean / step) * step
        assert set(np.unique(row)) == {low, low + step}
        share = (mean - low) / step
        assert abs((row.mean() - mean) / step) < 4 * np.sqrt(share * (1 - share) / row.size)
    again = np.asarray(rounded(x, np.array([7, 1], np.uint32)))
    other = np.asarray(rounded(x, np.array([7, 2], np.uint32)))
    assert np.array_equal(again.reshape(-1), found.reshape(-1)) and not np.array_equal(again, other)


@pytest.mark.slow
def test_equal_bits_on_all_targets_and_exact_numbers_stay() -> None:
    def fn(x: Any, key: Any) -> Any:
        return stochastically_rounded(x, np.dtype(np.float16), key)

    exact = np.float32([0.0, -0.0, 1.5, 65504, -6.0e-5, 2**-24, np.inf, -np.inf, np.nan])
    x = np.concatenate([exact, np.random.default_rng(0).standard_normal(200).astype(np.float32) * 1e-3])
    x[4] = np.float16(x[4])
    key = np.array([1, 2], np.uint32)
    made = [np.asarray(dnnc.jit(fn, target=t)(x, key)).view(np.uint16) for t in ("llvm", "cuda-interpreted")]
    made.append(np.asarray(fn(xp.asarray(x), xp.asarray(key))).view(np.uint16))
    nan = np.isnan(x)
    assert all(np.array_equal(m[~nan], made[0][~nan]) for m in made)
    assert np.array_equal(made[0][:8], x[:8].astype(np.float16).view(np.uint16)) and np.isnan(
        made[0].view(np.float16)[8]
    )
