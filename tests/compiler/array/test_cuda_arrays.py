"""Arrays on a real CUDA device: numbers against NumPy, streams, memory, and the libraries that share arrays. What needs
no device stands in test_device_arrays.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_samples import ALL, FLOATS, sample

import dnnc
import dnnc.array as xp
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.ir.errors import InputError, TargetError

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def check(got: Any, expected: Any, ulps: float = 64.0) -> None:
    assert isinstance(got, xp.Array) and got.device == GPU
    a, b = got.numpy(), np.asarray(expected)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{a.dtype} {a.shape} instead of {b.dtype} {b.shape}"
    eps = float(np.finfo(b.dtype).eps) if b.dtype.kind in "fc" else 0.0
    np.testing.assert_allclose(a, b, rtol=ulps * eps, atol=ulps * eps)


def there(a: Any) -> Any:
    return xp.asarray(a, device=GPU)


def busy(seconds: float = 0.05) -> Any:
    """Keep CuPy's current stream at work; what it writes is 1 only at the end."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(float* x, long long n) { long long t = clock64(); while (clock64() - t < n); '
        "*x = 1; }",
        "spin",
    )
    x = cupy.zeros(4, cupy.float32)
    spin((1,), (1,), (x, np.int64(seconds * 1.7e9)))
    return x


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_every_type(dtype: str) -> None:
    a, b = sample(dtype, (7, 33), seed=1), sample(dtype, (33,), seed=2)
    x, y = there(a), there(b)
    check(x, a)
    check(x * y, a * b)
    check(x == y, a == b)
    check(xp.where(x == y, x, y), np.where(a == b, a, b))
    check(xp.astype(x, xp.float64) if a.dtype.kind != "c" else x, a.astype("float64") if a.dtype.kind != "c" else a)
    check(xp.concat([x, x]), np.concatenate([a, a]))
    check(x[::2, 3], a[::2, 3])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (300, 1000), (1 << 20,), (3, 5, 7, 11)])
def test_chains_and_reductions(dtype: str, shape: tuple[int, ...]) -> None:
    a = sample(dtype, shape, seed=3)
    x = there(a)
    check(xp.tanh(2 * x + 1) * xp.exp(-x) + x, np.tanh(2 * a + 1) * np.exp(-a) + a, ulps=256)
    wide = a.astype("float64")
    check(xp.sum(x, axis=-1), wide.sum(-1).astype(dtype), ulps=8 * shape[-1] ** 0.5)
    check(xp.max(x), a.max())
    check(xp.argmin(x, axis=0), a.argmin(0))
    v = xp.mean(xp.square(x - xp.mean(x, axis=-1, keepdims=True)), axis=-1)
    check(v, wide.var(-1).astype(dtype), ulps=1024)


def test_other_functions() -> None:
    a, b = sample("float32", (64, 96), seed=4), sample("float32", (96, 32), seed=5)
    x, y = there(a), there(b)
    check(x @ y, (a.astype("float64") @ b).astype("float32"), ulps=2048)
    check(xp.sort(x, axis=1), np.sort(a, axis=1))
    check(xp.cumulative_sum(x, axis=1), a.astype("float64").cumsum(1).astype("float32"), ulps=1024)
    check(xp.vecdot(x[0], x[1]), np.vdot(a[0].astype("float64"), a[1]).astype("float32"), ulps=2048)
    check(xp.fft.fft(x[:, :32], axis=1), np.fft.fft(a[:, :32], axis=1).astype("complex64"), ulps=1024)
    check(xp.linalg.cholesky(there(np.eye(3) * 4)), np.eye(3) * 2)
    check(xp.nonzero(x > 0)[0], np.nonzero(a > 0)[0])
    check(xp.permute_dims(x, (1, 0)), a.T)
    check(xp.take(x, there(np.array([3, -1, 0])), axis=0), a[[3, -1, 0]])


def test_keys() -> None:
    a = sample("float32", (40, 30, 8), seed=6)
    x = there(a)
    for key in (3, -1, (2, 3), (1, 2, 3), (slice(None), 5), (slice(1, 40, 3), slice(None, None, -1)), (Ellipsis, 2)):
        check(x[key], a[key])
    y, b = there(a), a.copy()
    for key, value in ((3, 1.0), ((slice(None), 2), 5.0), ((slice(0, 9, 2), 1, 3), 7.0)):
        y[key] = value
        b[key] = value
    y[1] = x[2] * 2
    b[1] = a[2] * 2
    check(y, b)


def test_large_arrays() -> None:
    """More than 2^32 bytes, and elements beyond 2^31."""
    x = xp.ones((1 << 31) + 1000, dtype=xp.int8, device=GPU) + xp.ones((), dtype=xp.int8, device=GPU)
    xp.evaluate(x)
    assert x[-1].item() == 2 and x[-1000:].tolist() == [2] * 1000
    y = xp.ones(1 << 30, dtype=xp.float32, device=GPU)
    assert xp.sum(y * 2).item() == 2.0**31


# --- order and memory -------------------------------------------------------------------------------------------------


def test_calls_do_not_wait() -> None:
    x = there(sample("float32", (1000,), seed=7))

    def calls() -> Any:
        y = x * 2 + 1
        xp.evaluate(y)
        xp.evaluate(y[3] + y[5])
        y[7] = 1.0
        xp.evaluate(y * 0.5)
        return x * 2 + 1

    calls()
    busy(0.001)
    flag = busy(0.2)
    start = time.perf_counter()
    y = calls()
    assert time.perf_counter() - start < 0.1
    assert float(flag[0]) == 1
    check(y, x.numpy() * np.float32(2) + 1)


def test_streams_wait_for_each_other() -> None:
    import cupy

    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    for _ in range(3):
        with first:
            x = xp.from_dlpack(busy())  # 1 only when the stream has come so far
            y = x + 1
            xp.evaluate(y)
        with second:
            z = y * 3
            xp.evaluate(z)
        assert (z + 0)[0].item() == 6.0
        del x, y, z


def test_memory_goes_back_to_the_pool() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    x = xp.ones((1 << 20,), dtype=xp.float32, device=GPU)
    xp.evaluate(x)

    def run(x: Any = x) -> None:
        xp.sum(xp.exp(x * 2) - x).item()

    run()
    gc.collect()
    used = pool.used_bytes()
    for _ in range(50):
        run()
    gc.collect()
    assert pool.used_bytes() == used
    del x, run
    gc.collect()
    assert pool.used_bytes() <= used - (4 << 20)


def test_no_room() -> None:
    x = xp.ones((1 << 40,), dtype=xp.float32, device=GPU)
    with pytest.raises(
        TargetError, match=r"has no room for an array of 4.4e\+03 GB: .* GB are free; give smaller sizes"
    ):
        xp.evaluate(x)
    check(xp.ones(3, device=GPU) + 1, np.full(3, 2.0))


def test_threads() -> None:
    import cupy

    a = sample("float32", (1 << 16,), seed=8)
    x = there(a)
    failed: list[BaseException] = []

    def work(k: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for j in range(30):
                    check(
                        xp.sum(x * (k + 1), axis=0) + j,
                        np.float32((a * np.float32(k + 1)).sum(dtype="float64")) + np.float32(j),
                        ulps=1 << 14,
                    )
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed[0]


def test_indices_outside_are_told_late() -> None:
    x = there(sample("float32", (5, 3), seed=9))
    k = there(np.array([1, 9]))
    y = xp.take(x, k, axis=0)
    xp.evaluate(y)
    with pytest.raises(InputError, match="an index read at run time, 9, lies outside of its axis"):
        x.numpy()
    assert x.numpy().shape == (5, 3)


def test_known_programs_cost_little() -> None:
    """A bound far above what a call takes, against recompiling or waiting by mistake."""
    x = there(sample("float32", (1000,), seed=10))

    def call(k: int) -> None:
        xp.evaluate(xp.tanh(x * (k * 0.5)) + 1)

    call(0)
    before = PROGRAMS_MADE.compiled
    start = time.perf_counter()
    for k in range(200):
        call(k)
    assert (time.perf_counter() - start) / 200 < 500e-6 and PROGRAMS_MADE.compiled == before


# --- other libraries --------------------------------------------------------------------------------------------------


def test_cupy_shares() -> None:
    import cupy

    for dtype in ALL:
        a = sample(dtype, (4, 6), seed=11)
        c = cupy.asarray(a)
        x = xp.from_dlpack(c)
        check(x, a)
        assert x.__cuda_array_interface__["data"][0] == c.data.ptr
        for again in (cupy.from_dlpack(x), cupy.asarray(x)):
            assert again.data.ptr == c.data.ptr and again.dtype == c.dtype
            np.testing.assert_array_equal(again.get(), a)
    c = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    check(xp.asarray(c.T), c.T.get())
    check(xp.from_dlpack(c[1:, 1:]), c[1:, 1:].get())
    x = xp.asarray(c)
    c[...] = 0
    assert x[1, 1].item() == 5.0
    np.testing.assert_array_equal(cupy.from_dlpack(xp.exp(x)).get(), xp.exp(x).numpy())


def test_torch_shares_on_its_stream() -> None:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        t = torch.zeros(1 << 20, device="cuda")
        for _ in range(100):
            t = t + 0.5
        x = xp.from_dlpack(t)
        assert x.__cuda_array_interface__["data"][0] == t.data_ptr()
        y = x * 2
        back = torch.from_dlpack(y)
        total = (back + 1).sum().item()  # on the stream: others do not wait for it
    assert total == 101.0 * (1 << 20)
    assert torch.from_dlpack(xp.ones(3, device=GPU)).cpu().tolist() == [1.0] * 3
    check(xp.asarray(torch.ones(2, 3, device="cuda", requires_grad=True)), np.ones((2, 3), "float32"))
    check(xp.asarray(torch.arange(6, device="cuda").reshape(2, 3).T), np.arange(6).reshape(2, 3).T)


def test_host_and_back() -> None:
    a = sample("float32", (100, 100), seed=12)
    x = xp.asarray(a).to_device("cuda") + 1
    assert np.from_dlpack(x, device="cpu").tolist() == (a + 1).tolist()
    check(x.to_device("cpu").to_device(GPU), a + 1)
    assert xp.__array_namespace_info__().devices()[:2] == ("cpu", GPU)


# --- programs of functions --------------------------------------------------------------------------------------------


def test_jit() -> None:
    import cupy

    w = sample("float32", (64, 32), seed=13)

    @dnnc.jit
    def f(x: Any, b: Any) -> Any:
        h = xp.tanh(x @ xp.asarray(w) + b)
        return {"h": h, "n": xp.sum(h * h, axis=1)}

    a, b = sample("float32", (16, 64), seed=14), sample("float32", (32,), seed=15)
    h = np.tanh(a.astype("float64") @ w + b)
    for x, y in ((there(a), there(b)), (cupy.asarray(a), cupy.asarray(b)), (there(a) + 0, there(b))):
        made = f(x, y)
        check(made["h"], h.astype("float32"), ulps=1024)
        check(made["n"], (h * h).sum(1).astype("float32"), ulps=1024)
    assert f.traces == 1


def test_jit_of_many_kernels_and_of_large_arrays() -> None:
    def deep(x: Any) -> Any:
        for _ in range(12):
            x = xp.cumulative_sum(x, axis=0) * 0.25
        return x

    for n in (64, 1 << 12):
        a = sample("float32", (n, 16), seed=16, low=0.0, high=1.0)
        expected = a.astype("float64")
        for _ in range(12):
            expected = expected.cumsum(0) * 0.25
        f = dnnc.jit(deep)
        for _ in range(3):
            np.testing.assert_allclose(f(there(a)).numpy(), expected, rtol=1e-3)


def test_loops() -> None:
    a = sample("float32", (16,), seed=17)
    x = there(a)

    def double(v: Any) -> Any:
        return dnnc.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 2), (0, v))[1]

    check(double(x), a * 32)
    check(dnnc.jit(double)(x), a * 32)
    rows = there(sample("float32", (6, 16), seed=18))

    def running(v: Any, r: Any) -> Any:
        return dnnc.scan(lambda s, y: (s + y, s * y), v, r)

    for f in (running, dnnc.jit(running)):
        last, _ = f(x, rows)
        check(last, (a + rows.numpy().sum(0, dtype="float64")).astype("float32"), ulps=256)


def test_kernels_of_ones_own() -> None:
    a = sample("float32", (30, 400), seed=19)
    x = there(a)
    f = dnnc.elementwise_kernel("T x, T y", "T z", "z = x > y ? exp(x) : x * y", "f")
    check(f(x, 0.5), np.where(a > 0.5, np.exp(a), a * np.float32(0.5)))
    norm = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
    check(norm(x, axis=1), np.sqrt((a.astype("float64") ** 2).sum(1)).astype("float32"), ulps=256)


def test_compiled_functions() -> None:
    a = sample("float32", (8, 64), seed=20)
    run: Callable[..., Any] = dnnc.compile(
        lambda x: xp.exp(x) + 1, inputs=[dnnc.Spec((8, 64))], target="cuda", cache=False
    )
    check(run(there(a)), np.exp(a) + 1)
