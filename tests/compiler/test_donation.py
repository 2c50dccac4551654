"""Donated inputs: results in their memory, at once where nothing is read after it is written, by a copy elsewhere; dead
arrays afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from donation_cases import CASES, many

import dnnc
import dnnc.array as xp
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse

Array = np.ndarray[Any, Any]


@pytest.mark.family("cases")
@pytest.mark.parametrize(("text", "pairs", "plain", "fused"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
@pytest.mark.parametrize("options", [{"opt_level": 1}, {"threads": 2}, {"target": "reference"}], ids=str)
def test_memory_and_numbers(text: str, pairs: dict[str, str], plain: str, fused: str, options: dict[str, Any]) -> None:
    g = parse(text)
    f = dnnc.compile(g, donate=pairs, cache=False, **options)
    inputs, outputs = ([v.name for v in vs] for vs in (g.inputs, g.outputs))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        arrays = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
        want = run(g, arrays)
        got = many(f(*arrays))
        for a, w in zip(got, want):
            np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5)
        for a, b in pairs.items():
            assert got[outputs.index(b)] is arrays[inputs.index(a)]
    if options.get("target"):
        return
    (bound,) = f.cache.instances.values()
    in_place = {outputs[k] for k in bound.in_place}
    assert in_place == set(filter(None, (fused if "threads" in options else plain).split()))
    for name in set(pairs.values()) - in_place:
        assert f"{name}: copied to the memory of its input" in str(f.report)


STEP = "def g(s: f32[4], x: f32[4]):\n    t: f32[4] = add(s, x)\n    return t\n"
TURN = "def g(s: f32[4, 4], x: f32[4, 4]):\n    t: f32[4, 4] = matmul(x, s)\n    return t\n"


@pytest.mark.parametrize("text", [STEP, TURN], ids=["at once", "copied"])
def test_buffers_of_the_caller(text: str) -> None:
    g = parse(text)
    f = dnnc.compile(g, donate={"s": "t"}, cache=False)
    shape = g.inputs[0].type.shape
    s, x = np.full(shape, 2, np.float32), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    want = run(g, [s, x])[0]
    same, other = s.copy(), np.empty_like(s)
    assert f.run([same, x], [same]) is same
    np.testing.assert_array_equal(same, want)
    assert f.run([s.copy(), x], [other]) is other
    np.testing.assert_array_equal(other, want)
    state = s.copy()
    call = f.bind([state, x], [state])
    for _ in range(3):
        s = run(g, [s, x])[0]
        call()
        np.testing.assert_array_equal(state, s)


def test_overlap_is_an_error() -> None:
    f = dnnc.compile(parse(STEP), donate={"s": "t"}, cache=False)
    a = np.ones(8, np.float32)
    with pytest.raises(dnnc.InputError, match="input s is donated, and x lies in its memory"):
        f(a[:4], a[:4])
    with pytest.raises(dnnc.InputError, match="overlaps another buffer"):
        f.run([a[:4], a[4:]], [a[2:6]])
    a.flags.writeable = False
    with pytest.raises(dnnc.InputError, match="input s is donated, but read-only"):
        f(a[:4], np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("donate", "message"),
    [
        ({"q": "t"}, "the model has no input 'q'"),
        ({"s": "q"}, "the model has no output 'q'"),
        ({"s": "u"}, r"the input s is f32\[4\], the output u f32\[1\]; only an output of the same type"),
        ({"s": "t", "x": "t"}, "an output can take the memory of one input"),
        (["s"], "expected a mapping"),
    ],
    ids=str,
)
def test_pairs_must_fit(donate: Any, message: str) -> None:
    text = STEP.replace("    return t", "    u: f32[1] = reduce_sum(t, axes=(0,), keepdims=True)\n    return t, u")
    with pytest.raises(dnnc.InputError, match=message):
        dnnc.compile(parse(text), donate=donate, cache=False)


@pytest.mark.slow
def test_sizes_that_are_open() -> None:
    g = parse("N: dim[1, 64]\ndef g(s: f32[N, 4], x: f32[N, 4]):\n    t: f32[N, 4] = add(s, x)\n    return t\n")
    for dims in ({}, {"N": (1, 64)}):
        f = dnnc.compile(g, donate={"s": "t"}, dims=dims, cache=False)
        for n in (1, 9):
            s, x = np.ones((n, 4), np.float32), np.ones((n, 4), np.float32)
            assert f(s, x) is s and (s == 2).all()


def test_saved_and_checked(tmp_path: Path) -> None:
    f = dnnc.compile(parse(STEP), donate={"s": "t"}, cache=False, verify="model")
    f.save(tmp_path / "m.dnnc")
    g = dnnc.load(tmp_path / "m.dnnc", cache=False)
    s = np.ones(4, np.float32)
    assert g(s, np.ones(4, np.float32)) is s and (s == 2).all()


# --- jit --------------------------------------------------------------------------------------------------------------


@dnnc.jit(donate="state", cache=False)
def step(state: Any, x: Any) -> Any:
    return {"m": state["m"] * 0.5 + x, "n": state["n"] + 1}


def start() -> dict[str, Any]:
    return {"m": xp.zeros((4, 4), dtype=xp.float32), "n": xp.asarray(np.int64(0))}


X = np.ones((4, 4), np.float32)


def test_states_of_a_jitted_function() -> None:
    state = step(start(), X)
    address = np.asarray(state["m"]).ctypes.data
    for _ in range(3):
        state = step(state, X)
    assert np.asarray(state["m"]).ctypes.data == address
    assert float(state["m"][0, 0]) == 1.875 and int(state["n"]) == 4


@pytest.mark.parametrize(
    "use",
    [lambda a: a + 1, str, np.asarray, lambda a: a.shape, lambda a: a.tolist(), lambda a: step({"m": a, "n": 0}, X)],
)
def test_a_donated_array_is_dead(use: Any) -> None:
    state = start()
    step(state, X)
    with pytest.raises(
        dnnc.InputError, match=r"this array was donated to step as state\.m, and its memory holds a result of it"
    ):
        use(state["m"])


@pytest.mark.parametrize(
    "see",
    [
        np.asarray,
        lambda a: a + 0,
        lambda a: a.real,
        lambda a: xp.asarray(a, copy=True),
        lambda a: np.asarray(a)[1:],
        lambda a: a.__dlpack__(),
    ],
)
def test_what_others_see_is_copied(see: Any) -> None:
    """A view, an expression that is not computed yet, another array of the same memory: all keep what they saw."""
    state = step(start(), X)
    seen = see(state["m"])
    result = step(state, X)
    assert float(result["m"][0, 0]) == 1.5
    if not hasattr(seen, "shape"):  # a capsule
        return
    assert (np.asarray(seen) == 1).all()


def test_memory_of_a_numpy_array() -> None:
    mine = np.zeros((4, 4), np.float32)
    step({"m": xp.asarray(mine, copy=False), "n": xp.asarray(np.int64(0))}, X)
    assert (mine == 0).all()  # an array of dnnc.array that shares it does not give it away
    step({"m": mine, "n": np.array(0)}, X)
    assert (mine == 1).all()


def test_what_no_result_fits() -> None:
    @dnnc.jit(donate="x", cache=False)
    def total(x: Any) -> Any:
        return xp.sum(x)

    with pytest.raises(dnnc.InputError, match=r"no result of total has the type of x \(f32\[4, 4\]\)"):
        total(X.copy())


def test_names_of_arguments() -> None:
    with pytest.raises(dnnc.InputError, match="donate: f has no argument y; it has x"):
        dnnc.jit(f, donate="y")
    with pytest.raises(dnnc.InputError, match="x cannot be donated and stay a parameter"):
        dnnc.jit(f, donate="x", parameters="x")


def f(x: Any) -> Any:
    return x


def test_donated_arguments_take_results_in_their_order() -> None:
    @dnnc.jit(donate=("a", "b"), cache=False)
    def f(b: Any, a: Any) -> Any:
        return b * 2.0, a * 3.0

    b, a = np.ones(64, np.float32), np.ones(64, np.float32)
    first, second = f(b, a)
    assert first[0] == b[0] == 2.0 and second[0] == a[0] == 3.0
