"""Calls under the conditions of real use: threads, forks, odd sizes, borrowed buffers, refused arguments."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.tools.sample_graphs import graph_of

NET = """def g(x: f32[N, 16, 12, 12], *, w: f32[40, 16, 3, 3], b: f32[40], m: f32[1440, 10], c: f32[10]):
    r = relu(conv(x, w, b, pads=(1, 1, 1, 1)))
    p = max_pool(r, kernel=(2, 2), strides=(2, 2))
    f = reshape(p, shape=(N, 1440))
    return softmax(add(matmul(f, m), c))
"""


def net(low: int = 1, high: int = 64) -> Any:
    g = graph_of(NET.replace("N, 16", "2, 16").replace("shape=(N", "shape=(2"))
    constants = {v.name: a for v, a in g.constants.items()}
    return parse(f"N: dim[{low}, {high}]\n{NET}", constants)


def image(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, 16, 12, 12)).astype(np.float32)


@pytest.mark.slow
def test_one_program_serves_every_size() -> None:
    g = net()
    f = dnnc.compile(g, dims={"N": (1, 64)}, cache=False)
    for n in [1, 2, 3, 5, 7, 8, 13, 17, 64]:
        x = image(n, n)
        assert np.abs(f(x) - run(g, [x], "float64")[0]).max() < 2e-6
    assert len(f.programs) == 1
    assert len({s.text for s in f.programs[0].scheduled.steps}) == len(f.programs[0].scheduled.steps)


@pytest.mark.slow
def test_sizes_are_specialised_when_nothing_bounds_them() -> None:
    f = dnnc.compile(net(), cache=False)
    assert not f.programs
    for n in (2, 3, 2):
        assert f(image(n)).shape == (n, 10)
    assert len(f.programs) == 2


@pytest.mark.parametrize("n", [0, 65])
def test_sizes_out_of_bounds_are_refused(n: int) -> None:
    with pytest.raises(dnnc.InputError, match="N"):
        dnnc.compile(net(), dims={"N": (1, 64)}, cache=False)(image(n))


@pytest.mark.slow
def test_threads_call_one_executable_at_a_time_and_together() -> None:
    g = net()
    f = dnnc.compile(g, dims={"N": (1, 64)}, cache=False, threads=2)
    inputs = [image(n % 5 + 1, n) for n in range(8)]
    wants = [f(x) for x in inputs]
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for k in rng.integers(0, len(inputs), 150):
            if np.abs(f(inputs[k]) - wants[k]).max() > 1e-6:  # alone on its thread, a call may sum in another order
                wrong.append(int(k))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
def test_a_forked_child_and_its_parent_go_on() -> None:
    g = net()
    f = dnnc.compile(g, dims={"N": (1, 64)}, cache=False, threads=2)
    x = image(4)
    want = f(x)
    child = os.fork()
    if child == 0:
        ok = all(np.abs(f(x) - want).max() < 1e-6 for _ in range(20))
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.abs(f(x) - want).max() < 1e-6


@pytest.mark.slow
def test_one_thread_gives_the_same_as_two() -> None:
    g = net()
    x = image(5)
    one, two = (dnnc.compile(g, dims={"N": (1, 64)}, cache=False, threads=k)(x) for k in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_results_are_fresh() -> None:
    f = dnnc.compile(graph_of("def g(x: f32[3, 5]):\n    return x, x, reshape(x, shape=(15,)), relu(x)"), cache=False)
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    first = f(x)
    again = f(x)
    for a, b in zip(first, again):
        assert not any(np.shares_memory(a, y) for y in (x, b, *(z for z in first if z is not a)))
        np.testing.assert_array_equal(a.reshape(-1), np.arange(15))


def test_run_into_buffers_and_bind() -> None:
    f = dnnc.compile(graph_of("def g(x: f32[3, 5], y: f32[3, 5]):\n    return add(x, y)"), cache=False)
    x, y, out = np.ones((3, 5), np.float32), np.full((3, 5), 2, np.float32), np.empty((3, 5), np.float32)
    assert f.run([x, y], [out]) is out
    assert (out == 3).all()
    call = f.bind([x, y], [out])
    x[:] = 10
    call()
    assert (out == 12).all()
    with pytest.raises(dnnc.InputError, match="overlaps"):
        f.run([x, y], [x])
    with pytest.raises(dnnc.InputError, match=r"expected a writable contiguous array float32 \(3, 5\)"):
        f.run([x, y], [np.empty((5, 3), np.float32)])


@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ((), {}, "no array is given|2 inputs"),
        (
            (np.ones((3, 5), np.float64), np.ones((3, 5), np.float32)),
            {},
            r"input x: expected float32, got float64; convert it with .astype\('float32'\)",
        ),
        ((np.ones((3, 4), np.float32), np.ones((3, 5), np.float32)), {}, "x"),
        ((np.ones((5,), np.float32), np.ones((3, 5), np.float32)), {}, "input x: expected 2 dimensions"),
        ((), {"x": np.ones((3, 5), np.float32), "z": np.ones((3, 5), np.float32)}, "no input 'z'; its inputs are x, y"),
        ((np.ones((3, 5), np.float32),), {"x": np.ones((3, 5), np.float32)}, "given twice"),
        (({"x": np.ones((3, 5), np.float32)},), {}, "no array is given for y"),
    ],
)
def test_wrong_arguments_are_named(args: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    f = dnnc.compile(graph_of("def g(x: f32[3, 5], y: f32[3, 5]):\n    return add(x, y)"), cache=False)
    with pytest.raises(dnnc.InputError, match=message):
        f(*args, **named)


def test_what_converts() -> None:
    f = dnnc.compile(graph_of("def g(x: f32[2, 2], y: f32):\n    return mul(x, y)"), cache=False)
    want = np.array([[2, 4], [6, 8]], np.float32)
    np.testing.assert_array_equal(f([[1, 2], [3, 4]], 2.0), want)
    np.testing.assert_array_equal(f(np.array([[1, 3], [2, 4]], np.float32).T, np.float32(2)), want)
    np.testing.assert_array_equal(f({"y": 2, "x": [[1, 2], [3, 4]]}), want)


def test_an_index_outside_is_an_error_with_the_node() -> None:
    f = dnnc.compile(graph_of("def g(x: f32[4, 3], i: i64[2]):\n    return gather(x, i, axis=0)"), cache=False)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(f(x, np.array([-1, 0])), x[[-1, 0]])
    with pytest.raises(dnnc.InputError, match="gather"):
        f(x, np.array([4, 0]))
    np.testing.assert_array_equal(f(x, np.array([3, 1])), x[[3, 1]])


@pytest.mark.slow
def test_no_numpy_computes_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    g = net()
    f = dnnc.compile(g, dims={"N": (1, 64)}, cache=False)
    x = image(3)
    want = run(g, [x], "float64")[0]
    f(x)

    def refuse(*args: Any, **kw: Any) -> Any:
        raise AssertionError("NumPy computed")

    with monkeypatch.context() as m:
        for name in (
            "matmul",
            "dot",
            "add",
            "multiply",
            "maximum",
            "exp",
            "sum",
            "max",
            "einsum",
            "tensordot",
            "where",
            "pad",
            "transpose",
        ):
            m.setattr(np, name, refuse)
        got = f(x)
    assert np.abs(got - want).max() < 2e-6


@pytest.mark.slow
def test_compiling_twice_gives_the_same_texts() -> None:
    a, b = (dnnc.compile(net(), dims={"N": 3}, cache=False) for _ in range(2))
    a(image(3)), b(image(3))
    for stage in ("graph", "operator", "llvm", "asm"):
        assert a.source(stage) == b.source(stage)


@pytest.mark.slow
def test_the_second_compile_takes_kernels_from_the_cache(tmp_path: Any) -> None:
    for compiled in (True, False):
        f = dnnc.compile(net(), dims={"N": (1, 64)}, cache=tmp_path)
        f(image(2))
        assert (f.programs[0].compiled > 0) is compiled


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
def test_levels_agree(level: int) -> None:
    g = net()
    x = image(2)
    got = dnnc.compile(g, dims={"N": 2}, cache=False, opt_level=level)(x)
    assert np.abs(got - run(g, [x], "float64")[0]).max() < 2e-6


@pytest.mark.slow
def test_exposed_intermediates_and_the_reference_target() -> None:
    g = net()
    x = image(2)
    y, p = dnnc.compile(g, cache=False, outputs=["p"])(x)
    ry, rp = dnnc.compile(g, target="reference", outputs=["p"])(x)
    assert p.shape == (2, 40, 6, 6)
    assert np.abs(p - rp).max() < 1e-5 and np.abs(y - ry).max() < 1e-5
    with pytest.raises(dnnc.InputError, match="no value 'q'"):
        dnnc.compile(g, cache=False, outputs=["q"])
