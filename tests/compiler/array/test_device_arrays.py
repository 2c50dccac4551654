"""Arrays on a CUDA device that is the interpreter: where they live, what moves them, which programs they share, what
fails without a driver.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from array_samples import sample

import dnnc
import dnnc.array as xp
from dnnc.array import devices, lazy
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.backends.cuda import backend as cuda_backend
from dnnc.backends.cuda import target as cuda_target
from dnnc.backends.cuda.interpreted import DeviceBuffer, InterpretedBackend, InterpretedDevice
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.registry import BACKENDS, open_backend
from dnnc.ir.errors import InputError, TargetError
from dnnc.ir.target import Target

GPU, OTHER = "cuda:0", "cuda:1"


def clear() -> None:
    devices.place.cache_clear()
    lazy.compiler.cache_clear()
    PROGRAMS_MADE.made.clear()


class TwoDevices(InterpretedBackend):
    """`cuda:0` and `cuda:1` are interpreters."""

    made: list[InterpretedDevice]

    @classmethod
    def of(cls, made: list[InterpretedDevice]) -> type[TwoDevices]:
        return type("Two", (cls,), {"made": made})

    def __init__(self, target: Target, threads: int | None = None) -> None:
        super().__init__(target, threads, self.made[target.device])

    @classmethod
    def device_problem(cls, number: int) -> str:
        return "" if number < 2 else "there are two"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[InterpretedDevice]]:
    """Two devices, which are interpreters."""
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path))
    made = [InterpretedDevice(), InterpretedDevice()]
    for k, d in enumerate(made):
        d.number = k
    monkeypatch.setitem(BACKENDS, "cuda", TwoDevices.of(made))
    clear()
    yield made
    clear()


def check(got: Any, expected: Any, device: str = GPU, ulps: float = 16.0) -> None:
    assert isinstance(got, xp.Array) and got.device == device
    a, b = got.numpy(), np.asarray(expected)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    eps = float(np.finfo(b.dtype).eps) if b.dtype.kind in "fc" else 0.0
    np.testing.assert_allclose(a, b, rtol=ulps * eps, atol=ulps * eps)


def compiled(run: Callable[[], Any]) -> int:
    before = PROGRAMS_MADE.compiled
    run()
    return PROGRAMS_MADE.compiled - before


def test_where_arrays_live() -> None:
    assert xp.__array_namespace_info__().devices() == ("cpu", GPU, OTHER)
    assert xp.__array_namespace_info__().default_device() == "cpu"
    for made in (xp.zeros((2, 3), device="cuda"), xp.ones(4, device=GPU), xp.arange(5, device=GPU),
    xp.arange(0, 1, 0.25, device=GPU),
                 xp.linspace(0, 1, 5, device=GPU), xp.eye(3, device=GPU), xp.full((2,), 1 + 2j, device=GPU),
                 xp.asarray([1.0, 2.0], device=GPU),
                 xp.zeros((0, 3), device=GPU), xp.fft.fftfreq(5, device=GPU)):  # fmt: skip
        assert made.device == GPU
        same = made.to_device("cpu")
        assert same.device == "cpu" and same.numpy().dtype == made.dtype
    assert xp.zeros_like(xp.ones(3, device=OTHER)).device == OTHER
    assert xp.arange(3).device == xp.asarray(1.0).device == "cpu"
    with pytest.raises(ValueError, match="expected 'cpu' or 'cuda:0'"):
        xp.zeros(3, device="tpu")


def test_expressions_are_computed_there(machine: list[InterpretedDevice]) -> None:
    a, b = sample("float32", (3, 40), seed=1), sample("float32", (40,), seed=2)
    x, y = xp.asarray(a, device=GPU), xp.asarray(b, device=GPU)
    assert machine[0].launched == 0
    check(xp.tanh(2 * x + 1) * xp.exp(-x) + y, np.tanh(2 * a + 1) * np.exp(-a) + b, ulps=64)
    assert len(PROGRAMS_MADE.last.notes) == 1
    check(xp.sum(x * x, axis=1), (a * a).sum(1), ulps=256)
    check(x @ xp.reshape(y, (40, 1)), a @ b.reshape(40, 1), ulps=1024)
    check(
        xp.mean(xp.square(x - xp.mean(x, axis=1, keepdims=True)), axis=1),
        ((a - a.mean(1, keepdims=True)) ** 2).mean(1),
        ulps=256,
    )


def test_complex_numbers() -> None:
    a = sample("complex64", (3, 5), seed=3)
    x = xp.asarray(a, device=GPU)
    check(x * x + 1j, a * a + np.complex64(1j), ulps=64)
    check(xp.abs(x), np.abs(a), ulps=64)
    check(xp.asarray(DeviceBuffer(devices.place(GPU).device, (3, 5), np.dtype(np.complex64)).set(a)) * 2, a * 2)


@pytest.mark.slow
def test_numbers_have_no_device() -> None:
    x = xp.asarray(sample("float32", (4, 5), seed=4), device=GPU)
    (x * 0.5 + np.float32(2)).numpy()
    assert compiled(lambda: check(x * 0.25 + np.float32(3), x.numpy() * np.float32(0.25) + np.float32(3))) == 0


def test_two_devices_do_not_mix() -> None:
    x = xp.ones((2, 2), device=GPU)
    for other in (xp.ones((2, 2)), xp.ones((2, 2), device=OTHER), xp.asarray(1.0), np.ones((2, 2))):
        with pytest.raises(ValueError, match=r"one operand lives on \S+, another on \S+; bring one of them over"):
            x + other
    check(x + xp.ones((2, 2)).to_device(GPU), np.full((2, 2), 2.0))
    xp.evaluate(both := xp.ones(2) + 1, x + 1)
    assert both.device == "cpu"


@pytest.mark.slow
def test_moving(machine: list[InterpretedDevice]) -> None:
    a = sample("float64", (3, 4), seed=5)
    x = xp.asarray(a)
    there = (x * 2).to_device(GPU)
    check(there, a * 2)
    check(there.to_device(OTHER), a * 2, OTHER)
    check((there + 1).to_device("cpu"), a * 2 + 1, "cpu")
    assert there.to_device("cuda") is there
    check(xp.asarray(there, device=OTHER), a * 2, OTHER)
    check(xp.astype(there, xp.float32, device=OTHER), (a * 2).astype("float32"), OTHER)
    with pytest.raises(ValueError, match="without a copy"):
        xp.asarray(there, device="cpu", copy=False)


def test_looking_is_explicit_for_numpy() -> None:
    x = xp.asarray([[1.0, 2.0]], device=GPU)
    with pytest.raises(TypeError, match=r"x\.numpy\(\)"):
        np.asarray(x)
    assert x.tolist() == [[1.0, 2.0]] and float(x[0, 1]) == 2.0 and bool(xp.all(x > 0))
    assert repr(x) == "Array([[1., 2.]])" and pickle.loads(pickle.dumps(x)).device == GPU
    assert [row.tolist() for row in x] == [[1.0, 2.0]]


@pytest.mark.slow
def test_programs_are_kept(machine: list[InterpretedDevice]) -> None:
    x = xp.asarray(sample("float32", (6, 6), seed=6), device=GPU)

    def run() -> None:
        (xp.exp(x) + 1).numpy()

    assert compiled(run) == 1 and compiled(run) == 0
    launched, allocated = machine[0].launched, machine[0].allocated
    run()
    assert machine[0].launched == launched + 1 and machine[0].allocated == allocated


@pytest.mark.slow
def test_elementwise_programs_serve_all_shapes() -> None:
    def run(*shape: int) -> None:
        a = sample("float32", shape, seed=17)
        b = sample("int8", shape, seed=18)
        x, y = xp.asarray(a, device=GPU), xp.asarray(b, device=GPU)
        check(xp.tanh(x * x) + 0.25, np.tanh(a * a) + np.float32(0.25))
        check(xp.where(y > 2, x, -x), np.where(b > 2, a, -a))

    run(4, 5)
    for shape in ((3,), (1, 1), (2, 3, 4), (1000,), (129, 131)):
        assert compiled(lambda shape=shape: run(*shape)) == 0  # type: ignore[misc]


@pytest.mark.slow
def test_another_process_finds_plans_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    a = sample("float32", (6, 6), seed=6)

    def run(f: Callable[[Any], Any]) -> None:
        clear()  # as in another process
        check(f(xp.asarray(a, device=GPU)), f(a), ulps=64)

    for f in (lambda v: abs(v) + 1, lambda v: v @ v):
        run(f)
    monkeypatch.setattr(
        "dnnc.backends.cuda.interpreted.TextCompiler.compile", lambda *_: pytest.fail("its code is in the cache")
    )
    monkeypatch.setattr(
        "dnnc.passes.planning.program.try_schedules", lambda *_: pytest.fail("its schedule is in the cache")
    )
    for f in (lambda v: abs(v) + 1, lambda v: v @ v, lambda v: (v @ v).reshape(6, 6)):
        run(f)


@pytest.mark.slow
def test_basic_keys() -> None:
    a = sample("float32", (6, 8, 4), seed=7)
    x = xp.asarray(a, device=GPU)
    for key in (2, -1, (1, 3), (1, 3, 2), slice(2, 4), (slice(None), 3), (slice(None, None, 2), 1),
    (slice(None, None, -1), slice(1, 7, 3)),
                (Ellipsis, 0), (None, 2), slice(3, 3), (slice(4, 0, -2), 1, slice(1, 3))):  # fmt: skip
        check(x[key], a[key])
    check((x * 2)[1], a[1] * 2)
    x[0, 0].numpy()

    def loop() -> None:
        for k in range(6):
            assert x[k, 1, 3].item() == a[k, 1, 3]

    assert compiled(loop) <= 2


@pytest.mark.slow
def test_pieces_share_memory(machine: list[InterpretedDevice]) -> None:
    for device in ("cpu", GPU):
        a = sample("float32", (40, 64), seed=20)
        x = xp.asarray(a, device=device)

        def loop() -> None:
            for k in range(0, 40, 20):
                check(x[k : k + 20] * 2, a[k : k + 20] * 2, device)

        loop()
        launched = machine[0].launched
        assert compiled(loop) == 0 and machine[0].launched == launched + 2 * (device == GPU)
        y = x[:20]
        x[0] = 0.0
        check(y, a[:20], device)


@pytest.mark.slow
def test_writing() -> None:
    a = sample("float32", (6, 8), seed=8)
    v = sample("float32", (2, 8), seed=9)
    for key, value in ((1, 5.0), ((2, 3), 7.0), (slice(1, 3), v), ((slice(None), 2), v[0, :6]),
    (slice(None, None, 2), 0.0), ((slice(4, 0, -2), 1), v[0, :2]),
                       (slice(None), 1.0), (slice(2, 2), 3.0), ((slice(None, None, -3), slice(None)), v)):  # fmt: skip
        x, b = xp.asarray(a, device=GPU), a.copy()
        x[key] = xp.asarray(value, device=GPU) if isinstance(value, np.ndarray) else value
        b[key] = value
        check(x, b)
    x, b = xp.asarray(a, device=GPU), a.copy()
    x[x > 0] += 1.0
    b[b > 0] += 1.0
    check(x, b)


@pytest.mark.slow
def test_index_arrays_and_their_errors(machine: list[InterpretedDevice]) -> None:
    a = sample("float32", (5, 3), seed=10)
    x = xp.asarray(a, device=GPU)
    check(x[[0, 2, 4]], a[[0, 2, 4]])
    k = xp.asarray([4, -1, 0], device=GPU)
    check(xp.take(x, k, axis=0), a[[4, -1, 0]])
    check(x[x[:, 0] > 0], a[a[:, 0] > 0])
    far = xp.take(x, k + 3, axis=0)
    xp.evaluate(far)  # nobody waits
    with pytest.raises(InputError, match="an index read at run time, 7, lies outside of its axis"):
        (x + 1).numpy()
    check(x + 1, a + 1)
    f = dnnc.jit(lambda v, i: xp.take(v, i, axis=0))
    check(f(x, k), a[[4, -1, 0]])
    f(x, k + 3)
    with pytest.raises(InputError, match="an index read at run time, 7, lies outside of its axis"):
        x.numpy()
    check(x, a)


@pytest.mark.slow
def test_what_runs_on_the_host_comes_back() -> None:
    a = np.array([[3.0, 1.0], [1.0, 2.0]])
    x = xp.asarray(a, device=GPU)
    for got, expected in ((xp.nonzero(x > 1)[0], np.nonzero(a > 1)[0]), (xp.unique_values(x), np.unique(a)),
    (xp.linalg.cholesky(x), np.linalg.cholesky(a)),
                          (xp.repeat(x, xp.asarray([1, 2], device=GPU), axis=0), a[[0, 1, 1]]),
                          (xp.linalg.svdvals(x), np.linalg.svd(a)[1])):  # fmt: skip
        check(got, expected)
    check(xp.isnan(xp.asarray([1, 2], device=GPU)), [False, False])
    check(xp.linalg.matrix_power(x, 0), np.eye(2))


def test_arrays_of_other_libraries(machine: list[InterpretedDevice]) -> None:
    a = sample("float32", (4, 4), seed=11)
    buffer = DeviceBuffer(machine[1], (4, 4), np.dtype(np.float32)).set(a)
    copied, shared = xp.asarray(buffer), xp.from_dlpack(buffer)
    buffer.set(a + 1)
    check(copied, a, OTHER)
    check(shared, a + 1, OTHER)
    check(xp.asarray(buffer, device="cpu"), a + 1, "cpu")
    told = shared.__cuda_array_interface__
    assert told["data"][0] == buffer.address and told["shape"] == (4, 4) and told["typestr"] == "<f4"
    assert shared.__dlpack_device__() == (2, 1) and xp.ones(2).__dlpack_device__() == (1, 0)
    assert not hasattr(xp.ones(2), "__cuda_array_interface__")
    assert np.from_dlpack(copied, device="cpu").tolist() == a.tolist()


@pytest.mark.slow
def test_jit_runs_where_the_arguments_are(machine: list[InterpretedDevice]) -> None:
    shift = xp.asarray(np.float32(3))

    @dnnc.jit
    def f(x: Any, y: Any) -> Any:
        ones = xp.ones(x.shape[0], dtype=xp.float32, device=x.device)  # where the arguments of a call live
        return xp.exp(x) @ y + ones[:, None] * shift, {"s": xp.sum(x)}

    a, b = sample("float32", (3, 4), seed=12), sample("float32", (4, 5), seed=13)
    for device in ("cpu", GPU, OTHER):
        z, more = f(xp.asarray(a, device=device), xp.asarray(b, device=device))
        check(z, np.exp(a) @ b + 3, device, ulps=256)
        check(more["s"], a.sum(), device, ulps=64)
    assert f.traces == 3
    buffer = DeviceBuffer(machine[0], (3, 4), np.dtype(np.float32)).set(a)
    check(f(buffer, xp.asarray(b, device=GPU))[0], np.exp(a) @ b + 3, ulps=256)
    assert f.traces == 3
    with pytest.raises(InputError, match="one operand lives on"):
        f(xp.asarray(a, device=GPU), xp.asarray(b))


@pytest.mark.slow
def test_control_flow() -> None:
    a = sample("float32", (4,), seed=14)
    x = xp.asarray(a, device=GPU)
    k, y = dnnc.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))
    check(y, a * 8)
    assert int(k) == 3
    check(dnnc.cond(xp.sum(x) > 1e6, lambda v: v, lambda v: -v, x), -a)
    last, _ = dnnc.scan(lambda s, r: (s + r, s * r), xp.asarray(np.float32(1), device=GPU), x)
    check(last, np.float32(1) + a.sum(dtype=np.float32), ulps=64)

    @dnnc.jit
    def f(v: Any) -> Any:
        return dnnc.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, v))[1]

    check(f(x), a * 8)
    check(dnnc.vmap(lambda v: f(v))(x), a * 8)  # a program with a loop
    check(
        dnnc.vmap(lambda u, v: xp.sum(u * v), in_axes=(None, 0))(x, xp.reshape(x, (2, 2))[:, :1] * x),
        (a.reshape(2, 2)[:, :1] * a) @ a,
        ulps=64,
    )


@pytest.mark.slow
def test_kernels_of_ones_own() -> None:
    a = sample("float32", (3, 4), seed=15)
    x = xp.asarray(a, device=GPU)
    square = dnnc.elementwise_kernel("T x, T y", "T z", "z = (x - y) * (x - y)", "square")
    norm = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
    check(square(x, 1.0), (a - 1) ** 2)
    check(norm(x, axis=1), np.sqrt((a * a).sum(1)), ulps=64)


def test_compiled_functions_take_and_give_arrays() -> None:
    a = sample("float32", (3, 4), seed=16)
    f = dnnc.compile(lambda x: xp.exp(x) + 1, inputs=[dnnc.Spec((3, 4))], target="cuda", cache=False)
    check(f(xp.asarray(a, device=GPU)), np.exp(a) + 1)


@pytest.mark.slow
def test_models_are_started_on_the_callers_memory_or_recorded(machine: list[InterpretedDevice]) -> None:
    def deep(x: Any) -> Any:
        for _ in range(9):
            x = xp.cumulative_sum(x, axis=0) * 0.5
        return x

    a = sample("float32", (3, 4), seed=19)
    expected = a.astype("float64")
    for _ in range(9):
        expected = expected.cumsum(0) * 0.5
    for f, graphs in ((deep, 1), (lambda x: deep(x[:, :2]), 1), (lambda x: xp.exp(x), 0)):
        before = machine[0].graphs
        run = dnnc.jit(f)
        for _ in range(2):
            got = run(xp.asarray(a, device=GPU)).numpy()
        if f is deep:
            np.testing.assert_allclose(got, expected, rtol=1e-5)
        assert machine[0].graphs == before + graphs


def test_models_take_arrays_of_their_device() -> None:
    f = dnnc.compile(lambda x: xp.exp(x), inputs=[dnnc.Spec((3,))], target="cuda", cache=False)
    with pytest.raises(
        InputError,
        match=r"an array on cuda:1 is given to a model on cuda:0; bring it there by x\.to_device\('cuda:0'\)",
    ):
        f(xp.ones((3,), dtype=xp.float32, device=OTHER))
    ones = xp.ones((3,), dtype=xp.float32, device=GPU)
    check(f(ones), np.exp(np.ones(3, np.float32)))
    with pytest.raises(InputError, match="are values, nobody writes to them"):
        f.run([ones], [xp.zeros((3,), dtype=xp.float32, device=GPU)])


@pytest.mark.slow
def test_expressions_compile_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    f = dnnc.compile(
        lambda x: xp.tanh(2 * x + 1) * xp.exp(-x) + x,
        inputs=[dnnc.Spec((1 << 20,))],
        target="cuda -arch=sm_90a",
        cache=False,
    )
    assert f.source("cuda").count("__global__") == 1


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a millisecond or two, which no call should."""
    monkeypatch.undo()
    asked: list[int] = []
    for module in (cuda_target, cuda_backend):
        monkeypatch.setattr(module, "ask_device", lambda k=0: asked.append(k) or GpuTarget())
    monkeypatch.setattr(cuda_backend, "open_device", lambda k: InterpretedDevice())
    backend = open_backend("cuda")
    before = len(asked)
    assert len({backend.device() for _ in range(3)}) == 1 and len(asked) == before + 1


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    clear()
    assert xp.__array_namespace_info__().devices() == ("cpu",)
    with pytest.raises(TargetError, match=r"device='cuda:0': .*devices\(\) lists what is here"):
        xp.zeros(3, device="cuda").numpy()
