"""vmap, ops of one's own and open sizes with arrays on a CUDA device, which is the interpreter: results stay there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array import devices, lazy
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.backends.cuda import target as cuda_target
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.cuda.target import GpuTarget
from dnnc.ir import te
from dnnc.ir.expr import maximum
from support.devices import install

GPU = "cuda:0"
RNG = np.random.default_rng(71)
X, W, N = (
    RNG.standard_normal((5, 4)).astype(np.float32),
    RNG.standard_normal((4, 3)).astype(np.float32),
    np.array([0, 4, 2, 3, 1]),
)
LEAKY = dnnc.custom_op(
    "leaky", lambda x, *, slope=0.1: te.compute(x.dims, x.dtype, lambda *i: maximum(x[i], x[i] * slope))
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    def clear() -> None:
        devices.place.cache_clear()
        lazy.compiler.cache_clear()
        PROGRAMS_MADE.made.clear()

    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path))
    device = InterpretedDevice()
    install(monkeypatch, device)
    monkeypatch.setattr(cuda_target, "ask_device", lambda k=0: GpuTarget() if k == 0 else None)
    clear()
    yield
    clear()


def there(a: Any) -> Any:
    return xp.asarray(a, device=GPU)


def check(got: Any, want: Any) -> None:
    assert got.device == GPU
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


def row(x: Any, n: Any, w: Any) -> Any:
    total = dnnc.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + x[s[0] % 4]), (0, xp.zeros((), dtype=x.dtype))
    )[1]
    return LEAKY(x @ w) + 1, total, dnnc.cond(n < 4, lambda: x[n], lambda: xp.max(x))


@pytest.mark.slow
def test_vmap() -> None:
    product = X @ W
    want = (
        np.maximum(product, product * 0.1) + 1,
        [np.resize(x, k).sum() for x, k in zip(X, N)],
        [x[k] if k < 4 else x.max() for x, k in zip(X, N)],
    )
    for f in (dnnc.vmap(row, (0, 0, None)), dnnc.jit(dnnc.vmap(row, (0, 0, None)))):
        for got, w in zip(f(there(X), there(N), there(W)), want):
            check(got, w)


def test_ops_of_ones_own() -> None:
    check(LEAKY(there(X) * 2, slope=0.5), np.maximum(2 * X, X))
    with pytest.raises(dnnc.InputError, match="cuda:0"):
        dnnc.custom_op("sum2", lambda x, y: te.compute(x.dims, x.dtype, lambda *i: x[i] + y[i]))(
            there(X), xp.asarray(X)
        )


def test_open_sizes() -> None:
    f = dnnc.jit(
        lambda x: (x / x.shape[0] + xp.arange(x.shape[0], dtype=x.dtype)[:, None], xp.sum(x, axis=0)),
        dynamic={"x": {0: "n"}},
    )
    for n in (5, 2):
        for got, want in zip(f(there(X[:n])), (X[:n] / n + np.arange(n)[:, None], X[:n].sum(0))):
            check(got, want)
    assert f.traces == 1
