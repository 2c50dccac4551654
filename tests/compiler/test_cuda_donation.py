"""Donated memory on a real CUDA device: a cache that each step writes into, with CuPy and torch arrays and those of
dnnc. `make gpu` runs these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from donation_cases import CASES, many

import dnnc
import dnnc.array as xp
from dnnc.backends.cuda import graph as cuda_graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
ROWS, WIDTH = 512, 128
RNG = np.random.default_rng(5)
W = (RNG.standard_normal((64, WIDTH)) * 0.1).astype(np.float32)


def step(past: Any, pos: Any, x: Any) -> Any:
    """A token's row goes into the cache at its place, and is compared with all rows."""
    row = x @ xp.asarray(W)
    present = xp.where((xp.arange(ROWS) == pos)[:, None], row, past)
    s = xp.exp(present @ row[0] * 0.1)
    return {"present": present, "y": (s / xp.sum(s)) @ present}


def shifted(past: Any, pos: Any, x: Any) -> Any:
    """The same for a cache whose rows move up, so that the result is copied in the end."""
    row = x @ xp.asarray(W) + xp.astype(pos, xp.float32) * 0
    present = xp.concat([past[1:], row])
    s = xp.exp(present @ row[0] * 0.1)
    return {"present": present, "y": (s / xp.sum(s)) @ present}


def expected(fn: Any, past: Array, pos: int, x: Array) -> tuple[Array, Array]:
    row = (x.astype(np.float64) @ W).astype(np.float64)
    present = np.where((np.arange(ROWS) == pos)[:, None], row, past) if fn is step else np.concatenate([past[1:], row])
    s = np.exp(present @ row[0] * 0.1)
    return present, (s / s.sum()) @ present


def compiled(fn: Any) -> Any:
    specs = [dnnc.Spec((ROWS, WIDTH)), dnnc.Spec((), "int64"), dnnc.Spec((1, 64))]
    return dnnc.compile(fn, inputs=specs, donate={"past": "result_present"}, target="cuda")


def close(got: Any, want: Array) -> None:
    np.testing.assert_allclose(got.get() if hasattr(got, "get") else np.asarray(got), want, rtol=2e-3, atol=2e-3)


def inputs() -> tuple[Array, list[Array]]:
    return np.zeros((ROWS, WIDTH), np.float32), [RNG.standard_normal((1, 64)).astype(np.float32) for _ in range(5)]


@pytest.mark.parametrize("fn", [step, shifted], ids=["in place", "copied"])
@pytest.mark.parametrize("directly", [True, False], ids=["kernels", "graph"])
def test_a_cache_in_cupy(fn: Any, directly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cuda_graph.Frame, "direct", lambda *_: directly)
    f = compiled(fn)
    assert ("copied to the memory of its input" in str(f.report)) == (fn is shifted)
    state, xs = inputs()
    cache = cupy.asarray(state)
    pointer = cache.data.ptr
    for k, x in enumerate(xs):
        present, y = f(cache, cupy.asarray(k), cupy.asarray(x))
        state, want = expected(fn, state, k, x)
        assert present is cache and cache.data.ptr == pointer
        close(y, want)
        close(cache, state)


@pytest.mark.parametrize("fn", [step, shifted], ids=["in place", "copied"])
def test_a_cache_that_is_bound(fn: Any) -> None:
    import cupy

    f = compiled(fn)
    state, xs = inputs()
    cache, pos, x0, y = (
        cupy.asarray(state),
        cupy.asarray(0),
        cupy.empty((1, 64), np.float32),
        cupy.empty(WIDTH, np.float32),
    )
    for results in ([cache, y], [cupy.empty_like(cache), y]):
        call = f.bind([cache, pos, x0], results)
        for k, x in enumerate(xs):
            pos.fill(k)
            x0.set(x)
            call()
            call.check()
            state, want = expected(fn, state, k, x)
            close(y, want)
            close(cache, state)
            close(results[0], state)


@pytest.mark.parametrize("fn", [step, shifted], ids=["in place", "copied"])
def test_a_cache_in_numpy(fn: Any) -> None:
    f = compiled(fn)
    state, xs = inputs()
    cache, mine = state.copy(), np.zeros((ROWS, WIDTH), np.float32)
    y, x0, pos = np.empty(WIDTH, np.float32), np.empty((1, 64), np.float32), np.array(0)
    call = f.bind([mine, pos, x0], [mine, y])
    for k, x in enumerate(xs):
        present, first = f(cache, np.array(k), x)
        assert present is cache
        pos[...], x0[...] = k, x
        call()
        state, want = expected(fn, state, k, x)
        for a, b in ((cache, state), (mine, state), (first, want), (y, want)):
            close(a, b)


def test_a_cache_in_torch(tmp_path: Path) -> None:
    """Out of a file, and on a stream of torch's that is not the default one."""
    import torch

    compiled(step).save(tmp_path / "step.dnnc")
    f = dnnc.load(tmp_path / "step.dnnc")
    state, xs = inputs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache = torch.zeros((ROWS, WIDTH), device="cuda")
        pointer = cache.data_ptr()
        for k, x in enumerate(xs):
            present, y = f(cache, torch.tensor(k, device="cuda"), torch.tensor(x, device="cuda"))
            state, want = expected(step, state, k, x)
            assert present is cache and cache.data_ptr() == pointer
            close(y.cpu(), want)
        close(cache.cpu(), state)


@pytest.mark.parametrize(("text", "pairs"), [(c[1], c[2]) for c in CASES], ids=[c[0] for c in CASES])
def test_small_programs(text: str, pairs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    g = parse(text)
    f = dnnc.compile(g, donate=pairs, target="cuda")
    names, outputs = ([v.name for v in vs] for vs in (g.inputs, g.outputs))
    arrays = [RNG.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    want = run(g, arrays)
    for directly in (True, False):
        monkeypatch.setattr(cuda_graph.Frame, "direct", lambda *_, yes=directly: yes)
        for given in ([cupy.asarray(a) for a in arrays], [a.copy() for a in arrays]):
            got = many(f(*given))
            for a, b in zip(got, want, strict=True):
                close(a, b)
            for n, r in pairs.items():
                assert got[outputs.index(r)] is given[names.index(n)]


@pytest.mark.parametrize("fn", [step, shifted], ids=["in place", "copied"])
def test_jit_on_arrays_of_dnnc(fn: Any) -> None:
    f = dnnc.jit(fn, donate="past")
    state, xs = inputs()
    cache = xp.asarray(state, device="cuda:0")
    pointer = cache._buffer().address
    for k, x in enumerate(xs):
        old = cache
        made = f(cache, xp.asarray(np.int64(k), device="cuda:0"), xp.asarray(x, device="cuda:0"))
        cache = made["present"]
        state, want = expected(fn, state, k, x)
        assert cache.device == "cuda:0" and cache._buffer().address == pointer
        close(made["y"].numpy(), want)
        close(cache.numpy(), state)
        with pytest.raises(dnnc.InputError, match="this array was donated to"):
            old.numpy()


def test_jit_keeps_what_others_see() -> None:
    import cupy

    f = dnnc.jit(lambda s, x: s * 0.5 + x, donate="s")
    x = xp.asarray(np.ones((64, 64), np.float32), device="cuda:0")
    for see in (cupy.asarray, cupy.from_dlpack, lambda a: a[1:], lambda a: a + 0):
        s = f(xp.asarray(np.ones((64, 64), np.float32), device="cuda:0"), x)
        seen = see(s)
        t = f(s, x)
        assert float(t[0, 0]) == 1.75
        del s, t
        assert (np.asarray(seen.get() if isinstance(seen, cupy.ndarray) else seen.numpy()) == 1.5).all()
    mine = cupy.zeros((64, 64), np.float32)
    f(mine, x)
    f(mine, x)
    assert (mine == 1.5).all()


def test_errors() -> None:
    import cupy

    f = dnnc.compile(parse(CASES[0][1]), donate={"x": "z"}, target="cuda")
    block = cupy.ones((12, 8), np.float32)
    with pytest.raises(dnnc.InputError, match="input x is donated, and y lies in its memory"):
        f(block[:4], block[2:6])
    with pytest.raises(dnnc.InputError, match="output z overlaps another buffer"):
        f.run([block[:4], block[4:8]], [block[3:7]])
    with pytest.raises(dnnc.InputError, match="x: bind needs a contiguous array"):
        f.bind([cupy.ones((8, 4), np.float32).T, block[:4]], [block[4:8]])
    with pytest.raises(dnnc.InputError, match="input x is donated, but read-only"):
        f(ReadOnly(block[:4]), block[4:8])
    with pytest.raises(dnnc.InputError, match="y is donated and lies on the host, the first input on the device"):
        dnnc.compile(parse(CASES[0][1]), donate={"y": "z"}, target="cuda")(block[:4], np.ones((4, 8), np.float32))


def test_what_is_not_contiguous_is_copied() -> None:
    import cupy

    f = dnnc.compile(parse(CASES[0][1]), donate={"x": "z"}, target="cuda")
    x = cupy.ones((8, 4), np.float32).T
    z = f(x, cupy.full((4, 8), 2, np.float32))
    assert z is not x and (x == 1).all() and (z == 3).all()


class ReadOnly:
    """An array that nobody may write to, by the interface of exchange."""

    def __init__(self, a: Any) -> None:
        told = a.__cuda_array_interface__
        self.keep, self.__cuda_array_interface__ = a, {**told, "data": (told["data"][0], True)}
