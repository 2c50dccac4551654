"""Donated inputs on an interpreted CUDA device: the same pointer in and out, whichever way a call takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from donation_cases import CASES, donating, many
from one_device import GPU, one_device, there

import dnnc
import dnnc.array as xp
from dnnc import roles
from dnnc.backends.cuda import graph as cuda_graph
from dnnc.backends.cuda.interpreted import DeviceBuffer, InterpretedDevice
from dnnc.compile_graph import compile_graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.options import make_options
from dnnc.tools.accuracy import first_difference
from support.fuzz import input_dims
from support.random_graphs import random_graph

Array = np.ndarray[Any, Any]
SEEDS = range(24)
STEP = "def g(s: f32[4], x: f32[4]):\n    t: f32[4] = add(s, x)\n    return t\n"
TURN = "def g(s: f32[4, 4], x: f32[4, 4]):\n    t: f32[4, 4] = matmul(x, s)\n    return t\n"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InterpretedDevice]:
    yield from one_device(monkeypatch, tmp_path)


@pytest.fixture(params=[True, False], ids=["kernels on the caller's memory", "a recorded graph"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call does is decided by how many kernels there are, and how much would be copied; here by the test."""
    goes_directly(monkeypatch, request.param)


def goes_directly(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    if yes:
        monkeypatch.setattr(cuda_graph, "START", 0.0)
    else:
        monkeypatch.setattr(cuda_graph.Frame, "direct", lambda *_: False)


def compiled(text: str, pairs: dict[str, str], **options: Any) -> Any:
    return dnnc.compile(parse(text), donate=pairs, **{"cache": False, "target": "cuda", **options})


def close(got: Any, want: Array) -> None:
    np.testing.assert_allclose(got.get() if isinstance(got, DeviceBuffer) else got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.family("kernels")
@pytest.mark.parametrize(("text", "pairs", "in_place"), [(c[1], c[2], c[4]) for c in CASES], ids=[c[0] for c in CASES])
def test_memory_and_numbers(
    text: str, pairs: dict[str, str], in_place: str, device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = parse(text)
    f = compiled(text, pairs)
    inputs, outputs = ([v.name for v in vs] for vs in (g.inputs, g.outputs))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    want = run(g, arrays)
    for directly in (True, False):
        goes_directly(monkeypatch, directly)
        for given in (there(device, *arrays), [a.copy() for a in arrays]):
            got = many(f(*given))
            for a, w in zip(got, want, strict=True):
                close(a, w)
            for a, b in pairs.items():
                assert got[outputs.index(b)] is given[inputs.index(a)]
                close(given[inputs.index(a)], want[outputs.index(b)])
    (bound,) = f.cache.instances.values()
    elsewhere = set(pairs.values()) - set(in_place.split())
    assert {outputs[k] for k in bound.loaded().in_place} == set(pairs.values()) - elsewhere
    for name in pairs.values():
        assert (
            f"{name}: copied to the memory of its input"
            in str(f.report).replace(", ", ": copied to the memory of its input, ")
        ) == (name in elsewhere)


@pytest.mark.parametrize("text", [STEP, TURN], ids=["at once", "copied"])
@pytest.mark.parametrize("numpy", [False, True], ids=["on the device", "numpy"])
def test_buffers_of_the_caller(text: str, numpy: bool, way: None, device: InterpretedDevice) -> None:
    g = parse(text)
    f = compiled(text, {"s": "t"})
    shape = g.inputs[0].type.shape
    s, x = np.full(shape, 2, np.float32), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    want = run(g, [s, x])[0]

    def make(a: Array) -> Any:
        return a.copy() if numpy else there(device, a)[0]

    same, own, other = make(s), make(s), make(x)
    assert f.run([same, make(x)], [same]) is same
    close(same, want)
    assert f.run([own, make(x)], [other]) is other
    close(other, want)
    close(own, want)
    for into_other in (False, True):
        old, state, x0 = s, make(s), make(x)
        result = make(x) if into_other else state
        call = f.bind([state, x0], [result])
        for _ in range(3):
            old = run(g, [old, x])[0]
            call()
            call.check()
            close(state, old)
            close(result, old)


def test_memory_that_begins_where_kernels_do_not_count_on(device: InterpretedDevice) -> None:
    """Such calls, and what is bound to such memory, go through the frame's own places."""
    for text in (STEP, TURN):
        g = parse(text)
        f = compiled(text, {"s": "t"})
        shape = tuple(int(str(d)) for d in g.inputs[0].type.shape)
        n = int(np.prod(shape))
        block = device.empty((n + 1,), np.dtype(np.float32)).set(np.arange(n + 1, dtype=np.float32))
        s = device.view(block.address + 4, shape, np.dtype(np.float32), block)
        old, x = s.get(), np.ones(shape, np.float32)
        call = f.bind([s, there(device, x)[0]], [s])
        for step in (lambda: f(s, *there(device, x)), call):
            old = run(g, [old, x])[0]
            step()
            close(s, old)
        assert block.get()[0] == 0


def test_copies(device: InterpretedDevice) -> None:
    """A result computed in place is not copied; another takes one copy and one place, shared by bound calls."""
    copied: list[int] = []
    f, g = compiled(STEP, {"s": "t"}), compiled(TURN, {"s": "t"})
    device.copy = lambda to, source, n, stream: copied.append(n) if to != source else None  # type: ignore[method-assign]
    f(*there(device, *(np.ones(4, np.float32),) * 2))
    assert copied == []
    args = there(device, *(np.ones((4, 4), np.float32),) * 2)
    g(*args)
    assert copied == [64]
    before = device.allocated
    g(*args)
    assert device.allocated == before


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(seed: int, device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    g, arrays = random_graph(seed, 12)
    donate = donating(g, seed)
    names = [v.name for v in g.inputs], [f"o{k}" for k in range(len(g.outputs))]
    dims = {v.name: (v.lo, v.hi) for v in input_dims(g)}
    try:
        f: Any = compile_graph(
            g, names, make_options({"cache": False, "target": "cuda", "dims": dims, "donate": donate})
        )
    except dnnc.UnsupportedError as e:
        assert "without steps on the host" in str(e)
        return
    for directly in (True, False) if donate else ():
        goes_directly(monkeypatch, directly)
        for given in (there(device, *map(np.asarray, arrays)), [a.copy() for a in arrays]):
            got = many(f(*given))
            assert first_difference(g, arrays, [r.get() if isinstance(r, DeviceBuffer) else r for r in got]) is None
            assert all(got[k] is given[names[0].index(n)] for k, n in enumerate(donate))


def test_memory_that_comes_again(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call on the same memory records a graph that works there, and copies only the other operands."""
    goes_directly(monkeypatch, False)
    copied: list[int] = []
    copy = device.copy
    monkeypatch.setattr(
        device,
        "copy",
        lambda to, source, n, stream: (copied.append(n) if to != source else None, copy(to, source, n, stream)),
    )
    for text, size, moved in ((STEP, 4, [16]), (TURN, 16, [64, 64])):
        f, g = compiled(text, {"s": "t"}), parse(text)
        shape = g.inputs[0].type.shape
        old, x = np.ones(shape, np.float32), np.full(shape, 0.5, np.float32)
        mine, other, also = there(device, old, x, old)
        before = device.graphs
        for k in range(5):
            copied.clear()
            assert f(mine, other) is mine
            old = run(g, [old, x])[0]
            close(mine, old)
            assert copied == (moved if k else [4 * size, 4 * size, 4 * size])
        assert device.graphs == before + 2
        for s in (also, mine, also, also, mine, mine):
            want = run(g, [s.get(), x])[0]
            close(f(s, other), want)
        assert device.graphs == before + 4


def test_errors(device: InterpretedDevice) -> None:
    f = compiled(STEP, {"s": "t"})
    block = device.empty((12,), np.dtype(np.float32)).set(np.ones(12, np.float32))
    first, second, half = (device.view(block.address + at, (4,), np.dtype(np.float32), block) for at in (0, 16, 24))
    with pytest.raises(dnnc.InputError, match="input s is donated, and x lies in its memory"):
        f(first, first)
    with pytest.raises(dnnc.InputError, match="input s is donated, and x lies in its memory"):
        f.bind([second, half], [second])
    with pytest.raises(dnnc.InputError, match="output t overlaps another buffer"):
        f.run([first, second], [half])
    with pytest.raises(dnnc.InputError, match="input s is donated, but read-only: give a copy"):
        f(ReadOnly(device, (4,), np.dtype(np.float32)), first)
    with pytest.raises(dnnc.InputError, match="s is donated and lies on the device, the first input on the host"):
        compiled("def g(x: f32[4], s: f32[4]):\n    t: f32[4] = add(s, x)\n    return t\n", {"s": "t"})(
            np.ones(4, np.float32), first
        )
    with pytest.raises(dnnc.InputError, match="x is donated and lies on the host, the first input on the device"):
        compiled(STEP, {"x": "t"})(first, np.ones(4, np.float32))
    mine = np.ones(8, np.float32)
    with pytest.raises(dnnc.InputError, match="x lies in its memory"):
        f(mine[:4], mine[:4])
    with pytest.raises(dnnc.InputError, match="s: bind needs a contiguous array"):
        f.bind([mine[::2], np.ones(4, np.float32)], [np.ones(4, np.float32)])
    mine.flags.writeable = False
    with pytest.raises(dnnc.InputError, match="input s is donated, but read-only"):
        f(mine[:4], np.ones(4, np.float32))
    with pytest.raises(dnnc.InputError, match=r"the input s is f32\[4\], the output u f32\[1\]"):
        compiled(
            STEP.replace("    return t", "    u: f32[1] = reduce_sum(t, axes=(0,), keepdims=True)\n    return t, u"),
            {"s": "u"},
        )


class ReadOnly(DeviceBuffer):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "data": (self.address, True)}


def test_models_with_steps_on_the_host() -> None:
    text = (
        "n: dim[0, 4]\ndef g(s: f32[4], count: i64):\n    t: f32[4] = exp(s)\n"
        "    u: f32[n] = truncate(t, count, size=n)\n    return t, u\n"
    )
    with pytest.raises(dnnc.UnsupportedError, match="donate= is for models without steps on the host"):
        compiled(text, {"s": "t"})


def test_loops_that_the_data_ends(device: InterpretedDevice) -> None:
    text = """def g(n: i64, x: f32[6]):
    def body(k: i64, h: f32[6]):
        return mul(add(h, 1.0), 0.5)
    y: f32[6] = loop(n, None, x, body=body, carried=1)
    return y
"""
    f = compiled(text, {"x": "y"})
    x = np.arange(6, dtype=np.float32)
    for n in (0, 1, 4):
        count, mine = there(device, np.array(n), x)
        assert f(count, mine) is mine
        close(mine, run(parse(text), [np.array(n), x])[0])


def test_sizes_that_are_open(way: None, device: InterpretedDevice) -> None:
    text = "N: dim[0, 64]\ndef g(s: f32[N, 4], x: f32[N, 4]):\n    t: f32[N, 4] = add(s, x)\n    return t\n"
    f = compiled(text, {"s": "t"})
    for n in (1, 9, 0):
        s, x = (np.full((n, 4), v, np.float32) for v in (1, 2))
        mine, other = there(device, s, x)
        assert f(mine, other) is mine and (mine.get() == 3).all()
        assert f(s, x) is s and (s == 3).all()


def test_saved_checked_and_profiled(tmp_path: Path, device: InterpretedDevice) -> None:
    f = compiled(STEP, {"s": "t"}, verify="model")
    f.save(tmp_path / "m.dnnc")
    for code in (True, False):
        g = dnnc.load(tmp_path / "m.dnnc", cache=False, code=code)
        s, x = there(device, np.ones(4, np.float32), np.ones(4, np.float32))
        assert g(s, x) is s and (s.get() == 2).all()
        (bound,) = g.cache.instances.values()
        assert bound.loaded().in_place == {0}
    s = np.ones(4, np.float32)
    assert f.profile(s, s.copy(), repeats=2) and (s == 1).all()


def test_beside_parameters(device: InterpretedDevice) -> None:
    g = parse("def g(x: f32[4], w: f32[4]):\n    y: f32[4] = mul(x, w)\n    return y\n")
    w = np.full(4, 3, np.float32)
    f: Any = compile_graph(
        g,
        (["x", "w"], ["y"]),
        make_options({"cache": False, "donate": {"x": "y"}, "target": "cuda"}),
        parameters={"w": w},
    )
    (x,) = there(device, np.ones(4, np.float32))
    f.refit({"w": w})
    assert f(x) is x and (f(x).get() == 9).all()
    with pytest.raises(dnnc.InputError, match="input x is donated, and a parameter lies in its memory"):
        f(w)


# --- arrays of dnnc ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_arrays_of_dnnc_take_the_result(device: InterpretedDevice) -> None:
    """Such an array is a value; donated, it becomes the result, in its memory unless others see that."""
    f = compiled(STEP, {"s": "t"})
    s, x = (xp.asarray(np.full(4, v, np.float32), device=GPU) for v in (1, 2))
    address = s._buffer().address
    assert f(s, x) is s and s.tolist() == [3.0] * 4 and s._buffer().address == address
    late, other, shown = s + 0, s.real, Viewer(s)
    assert f(s, x) is s and s.tolist() == [5.0] * 4 and s._buffer().address != address
    assert (
        late.tolist() == other.tolist() == [3.0] * 4
        and (device.bytes_at(shown.address, 16).view(np.float32) == 3).all()
    )
    with pytest.raises(dnnc.InputError, match=r"arrays of dnnc\.array are values"):
        f.bind([s, x], [device.empty((4,), np.dtype(np.float32))])


class Viewer:
    """What another library makes of an array by its interface: it keeps the array, and sees its memory."""

    def __init__(self, a: Any) -> None:
        self.array, self.address = a, a.__cuda_array_interface__["data"][0]


@pytest.fixture
def step() -> Any:
    def step(state: Any, x: Any) -> Any:
        return {"m": state["m"] * 0.5 + x, "n": state["n"] + 1}

    return dnnc.jit(step, donate="state", cache=False)


def start() -> dict[str, Any]:
    return {"m": xp.zeros((4, 4), dtype=xp.float32, device=GPU), "n": xp.asarray(np.int64(0), device=GPU)}


X = np.ones((4, 4), np.float32)


def test_states_of_a_jitted_function(step: Any, way: None) -> None:
    x = xp.asarray(X, device=GPU)
    state = first = step(start(), x)
    address = state["m"]._buffer().address
    for _ in range(3):
        state = step(state, x)
    assert state["m"]._buffer().address == address and state["m"].device == GPU
    assert float(state["m"][0, 0]) == 1.875 and int(state["n"]) == 4
    for use in (lambda a: a + 1, lambda a: a.numpy(), lambda a: a.__dlpack__(), lambda a: a.__cuda_array_interface__):
        with pytest.raises(
            dnnc.InputError, match=r"this array was donated to step as state\.m, and its memory holds a result of it"
        ):
            use(first["m"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "see", [lambda a: a + 0, lambda a: a.real, lambda a: a[1:], lambda a: xp.reshape(a, (16,)), Viewer]
)
def test_what_others_see_is_copied(see: Any, step: Any, device: InterpretedDevice) -> None:
    x = xp.asarray(X, device=GPU)
    state = step(start(), x)
    seen = see(state["m"])
    result = step(state, x)
    assert float(result["m"][0, 0]) == 1.5
    del result, state
    if isinstance(seen, Viewer):
        assert (device.bytes_at(seen.address, 64).view(np.float32) == 1).all()
    else:
        assert (seen.numpy() == 1).all()


@pytest.mark.parametrize("place", ["compile_graph", "load"])
def test_an_error_that_is_stored_keeps_no_arrays(
    place: str, device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By compiling, or by the first run of a program."""
    kept = []
    of, name = (roles, place) if place == "compile_graph" else (device, place)
    own = getattr(of, name)

    def storing(*args: Any, **options: Any) -> Any:
        try:
            raise ValueError
        except ValueError as e:
            kept.append(e)  # its frame refers to those of the callers
        return own(*args, **options)

    monkeypatch.setattr(of, name, storing)
    f = dnnc.jit(lambda s, x: s * 0.5 + x, donate="s", cache=False)
    s, x = (xp.asarray(np.ones((8, 8), np.float32), device=GPU) for _ in range(2))
    address = s._buffer().address
    for _ in range(3):
        s = f(s, x)
        assert s._buffer().address == address
    assert kept


def test_memory_of_another_library(step: Any, device: InterpretedDevice) -> None:
    x = xp.asarray(X, device=GPU)
    mine, count = there(device, np.zeros((4, 4), np.float32), np.array(0))
    step({"m": mine, "n": count}, x)
    assert (mine.get() == 1).all() and count.get() == 1
    with pytest.raises(dnnc.InputError, match=r"step: state\.m is donated, but read-only"):
        step({"m": ReadOnly(device, (4, 4), np.dtype(np.float32)), "n": count}, x)


def test_numpy_arrays_of_a_function_for_a_device() -> None:
    f = dnnc.jit(lambda s, x: (s * 0.5 + x, xp.sum(x)), donate="s", target="cuda", cache=False)
    mine = np.zeros((4, 4), np.float32)
    f(mine, X)
    f(mine, X)
    assert (mine == 1.5).all()
