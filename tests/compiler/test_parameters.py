"""Parameters bound by reference: replaced and changed in place without compiling, packed when they are bound, shared
where they can be.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import dnnc
import dnnc.array as xp
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.runtime.prologue import LEAST
from dnnc.compile_graph import compile_graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.options import make_options
from support.devices import install

Array = np.ndarray[Any, Any]
NET = """
def net(x: f32[1, 3, 8, 8], w: f32[16, 3, 3, 3], s: f32[16], h: f32[16], m: f32[16], v: f32[16], k: f32[16, 16, 3, 3],
    d: f32[10, 16], e: f32[10]):
    a: f32[1, 16, 8, 8] = conv(x, w, None, pads=(1, 1, 1, 1))
    b: f32[1, 16, 8, 8] = relu(batch_norm(a, s, h, m, v))
    c: f32[1, 16, 8, 8] = conv(b, k, None, pads=(1, 1, 1, 1))
    f: f32[1, 16] = reduce_mean(c, axes=(2, 3), keepdims=False)
    y: f32[1, 10] = gemm(f, d, e, trans_b=True)
    return y
"""
LOOP = """
def g(x: f32[2, 8], w: f32[8, 8]):
    def body(k: i64, s: f32[2, 8], m: f32[8, 8]):
        return tanh(matmul(s, m))
    return loop(None, None, x, w, body=body, carried=1, length=3)
"""


def contents(text: str, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        v.name: rng.uniform(0.2, 1.0, [int(str(n)) for n in v.type.shape]).astype(np.float32)
        for v in parse(text).inputs
    }


def compiled(text: str, given: dict[str, Array], **options: Any) -> Any:
    g = parse(text)
    names = [v.name for v in g.inputs]
    held = {n: a for n, a in given.items() if n != "x"}
    return compile_graph(
        g, (names, [v.name for v in g.outputs]), make_options({"cache": False, **options}), parameters=held
    )


def plain(text: str, given: dict[str, Array]) -> Array:
    """What the interpreter makes of the same arrays as inputs."""
    return dnnc.compile(parse(text), target="reference")(*given.values())  # type: ignore[no-any-return]


@pytest.mark.family("cases")
@pytest.mark.parametrize("text", [NET, LOOP], ids=["net", "loop"])
@pytest.mark.parametrize(
    "options", [{}, {"opt_level": 0}, {"opt_level": 1}, {"target": "reference"}, {"numerics": "strict"}], ids=str
)
@pytest.mark.parametrize("least", [1, LEAST], ids=["by kernels", "by NumPy"])
def test_replaced_and_changed(least: int, text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.runtime.prologue.LEAST", least)
    given = contents(text)
    f = compiled(text, given, **options)
    x = given["x"]
    assert [s.name for s in f.inputs] == ["x"] and [s.name for s in f.parameters] == [n for n in given if n != "x"]
    np.testing.assert_allclose(f(x), plain(text, given), rtol=1e-4, atol=1e-5)
    other = {n: a * np.float32(0.7) if n != "x" else a for n, a in contents(text, 1).items()} | {"x": x}
    f.refit({n: a for n, a in other.items() if n != "x"})
    np.testing.assert_allclose(f(x), plain(text, other), rtol=1e-4, atol=1e-5)
    other["w"] *= 0.5  # its owner writes into it
    f.refit()
    np.testing.assert_allclose(f(x), plain(text, other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given = contents(NET)
    f = compiled(NET, given)
    before, (native,) = f(given["x"]), f.programs

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr("dnnc.compile_program.compile_program", never)
    monkeypatch.setattr("dnnc.backends.llvm.compile.compile_text", never)
    f.refit({"w": given["w"] * 2})
    assert not np.allclose(f(given["x"]), before) and f.programs == [native]


@pytest.mark.slow
def test_packed_once_for_all_calls() -> None:
    """Norms and packing are gone from the program; it reads weights as its kernels want them."""
    given = contents(NET)
    f = compiled(NET, given)
    ops = [
        line.split("= ")[1].split("(")[0]
        for line in f.source("graph").splitlines()
        if "= " in line and "def " not in line and ":" in line
    ]
    assert "batch_norm" not in ops and "transpose" not in ops and ops.count("conv") == 2
    for _ in range(3):
        f(given["x"])
    assert f._parameters.bound == 1
    f.refit()
    f(given["x"])
    assert f._parameters.bound == 2


def test_what_is_read_as_it_is_is_shared() -> None:
    g = parse("def g(i: i64[3], e: f32[5, 4], b: f32[4]):\n    return add(gather(e, i), b)\n")
    e, b = np.ones((5, 4), np.float32), np.zeros(4, np.float32)
    f = compile_graph(g, (["i", "e", "b"], ["y"]), make_options({"cache": False}), parameters={"e": e, "b": b})
    i = np.array([0, 4, 1])
    f(i)
    table = f._parameters.table(f.programs[0])
    assert {a.ctypes.data for a in table.arrays} == {e.ctypes.data, b.ctypes.data}
    b += 3
    assert (f(i) == 4).all()  # even without refit


@pytest.mark.slow
def test_sizes_that_are_open() -> None:
    g = parse("N: dim[1, 64]\ndef g(x: f32[N, 4], w: f32[3, 4]):\n    return matmul(x, transpose(w, perm=(1, 0)))\n")
    w = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    for dims in ({}, {"N": (1, 64)}):
        f = compile_graph(g, (["x", "w"], ["y"]), make_options({"cache": False, "dims": dims}), parameters={"w": w})
        for scale in (1, 2):
            f.refit({"w": w * np.float32(scale)})
            for n in (1, 5, 9):
                x = np.ones((n, 4), np.float32)
                np.testing.assert_allclose(f(x), x @ w.T * scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"u": np.zeros(3)}, "refit: there is no parameter 'u'; there are w"),
        ({"w": np.zeros((8, 8))}, "parameter w: expected float32, got float64; convert it"),
        ({"w": np.zeros((8, 7), np.float32)}, r"parameter w: expected shape \[8, 8\], got \[8, 7\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(changed: dict[str, Array], message: str) -> None:
    given = contents(LOOP)
    f = compiled(LOOP, given)
    before = f(given["x"])
    with pytest.raises(dnnc.InputError, match=message):
        f.refit(changed)
    assert np.array_equal(f(given["x"]), before)


def test_without_parameters() -> None:
    f = dnnc.compile(parse("def g(x: f32[3]):\n    return exp(x)\n"), cache=False)
    assert f.parameters == ()
    with pytest.raises(dnnc.InputError, match="has no parameters"):
        f.refit()


@pytest.mark.slow
def test_calls_see_one_set_of_weights_or_the_other() -> None:
    """While one thread binds other weights again and again, each call of others is right for one of them."""
    given = contents(NET)
    other = {n: a * np.float32(2) for n, a in given.items() if n != "x"}
    f = compiled(NET, given)
    sides = [f(given["x"])]
    f.refit(other)
    sides.append(f(given["x"]))
    assert not np.allclose(*sides)
    wrong: list[Array] = []
    stop = threading.Event()

    def calls() -> None:
        while not stop.is_set():
            y = f(given["x"])
            if not any(np.array_equal(y, s) for s in sides):
                wrong.append(y)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for t in threads:
        t.start()
    for k in range(40):
        f.refit({n: a for n, a in given.items() if n != "x"} if k % 2 else other)
    stop.set()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
def test_saved_with_what_they_are(tmp_path: Path) -> None:
    given = contents(NET)
    f = compiled(NET, given)
    f.refit({"w": given["w"] * 2})
    f.save(tmp_path / "m.dnnc")
    np.testing.assert_allclose(dnnc.load(tmp_path / "m.dnnc", cache=False)(given["x"]), f(given["x"]), rtol=1e-4)


@pytest.mark.slow
def test_checked_as_a_whole() -> None:
    assert compiled(NET, contents(NET), verify="model").programs


@pytest.mark.slow
def test_profile_and_bind() -> None:
    given = contents(NET)
    f = compiled(NET, given)
    y = np.empty((1, 10), np.float32)
    call = f.bind([given["x"]], [y])
    call()
    np.testing.assert_array_equal(y, f(given["x"]))
    f.refit({"w": given["w"] * 3})
    call()
    np.testing.assert_array_equal(y, f(given["x"]))
    assert f.profile(given["x"], repeats=3)


# --- what users give --------------------------------------------------------------------------------------------------


def layer(params: Any, x: Any) -> Any:
    return xp.tanh(x @ params["w"] + params["b"])


def test_arguments_of_a_function() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    f = dnnc.compile(layer, inputs=[dnnc.Spec((5, 4))], parameters={"params": params}, cache=False)
    x = rng.standard_normal((5, 4), np.float32)
    assert [s.name for s in f.parameters] == ["params_w", "params_b"]
    np.testing.assert_allclose(f(x), np.tanh(x @ params["w"]), rtol=1e-5, atol=1e-6)
    f.refit({"params": {"w": params["w"] * 2, "b": params["b"] + 1}})
    np.testing.assert_allclose(f(x), np.tanh(x @ params["w"] * 2 + 1), rtol=1e-5, atol=1e-6)
    f.refit({"params_b": params["b"]})
    np.testing.assert_allclose(f(x), np.tanh(x @ params["w"] * 2), rtol=1e-5, atol=1e-6)


def test_captured_arrays() -> None:
    w = np.ones((4, 2), np.float32)
    shared = xp.asarray(w, copy=False)
    f = dnnc.compile(lambda x: x @ shared, inputs=[dnnc.Spec((5, 4))], parameters={"w": shared}, cache=False)
    x = np.ones((5, 4), np.float32)
    assert (f(x) == 4).all()
    w *= 2
    f.refit()
    assert (f(x) == 8).all()


def test_a_copy_is_no_parameter() -> None:
    w = np.ones((4, 2), np.float32)
    with pytest.raises(
        dnnc.InputError,
        match=r"parameters: w: it is no argument .* convert it outside by dnnc.array.asarray\(a, copy=False\)",
    ):
        dnnc.compile(lambda x: x @ w, inputs=[dnnc.Spec((5, 4))], parameters={"w": w}, cache=False)


MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] b = {1, 2, 3}, float one = {1},
    int64[2] s = {-1, 4}, float[4] scales = {1, 1, 1, 2}> {
    a = Reshape (x, s)
    t = Gemm (a, w, b)
    u = Mul (t, one)
    y = Relu (u)
}"""


@pytest.mark.parametrize("asked", [True, ["w", "b"], ["w"]], ids=str)
def test_weights_of_an_onnx_model(asked: Any) -> None:
    model = onnx.parser.parse_model(MODEL)
    f = dnnc.compile(model, parameters=asked, cache=False)
    w = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    assert "w" in [s.name for s in f.parameters] and "one" not in [s.name for s in f.parameters]
    for n in (2, 3):
        x = np.random.default_rng(n).standard_normal((n, 4), np.float32)
        np.testing.assert_allclose(f(x), np.maximum(x @ w + [1, 2, 3], 0), rtol=1e-5, atol=1e-4)
    f.refit({"w": w * 3})
    np.testing.assert_allclose(f(x), np.maximum(x @ w * 3 + [1, 2, 3], 0), rtol=1e-5, atol=1e-4)


def test_weights_that_steer_a_model() -> None:
    """What sizes depend on cannot be bound; of all weights it is left out."""
    ones = ", ".join(["1"] * 64)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y)
        <float[4] scales = {{1, 1, 2, 2}}, float[1, 1, 8, 8] w = {{{ones}}}> {{
            u = Resize (x, , scales)  y = Mul (u, w) }}""")
    with pytest.raises(dnnc.UnsupportedError, match="the contents of scales steer it"):
        dnnc.compile(model, parameters=["scales"], cache=False)
    assert [s.name for s in dnnc.compile(model, parameters=True, cache=False).parameters] == ["w"]


def test_unknown_names() -> None:
    with pytest.raises(dnnc.InputError, match="has no initializer 'q'; it has w, b"):
        dnnc.compile(onnx.parser.parse_model(MODEL), parameters=["q"])
    with pytest.raises(dnnc.InputError, match="the graph has no 'q'"):
        dnnc.compile(parse("def g(x: f32[3]):\n    return exp(x)\n"), parameters=["q"])


def test_under_jit() -> None:
    @dnnc.jit(parameters="params", cache=False)
    def f(params: Any, x: Any) -> Any:
        return layer(params, x)

    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    x = rng.standard_normal((5, 4), np.float32)
    for scale in (1, 2):
        given = {"w": params["w"] * np.float32(scale), "b": params["b"]}
        for _ in range(3):
            np.testing.assert_allclose(f(given, x), np.tanh(x @ params["w"] * scale), rtol=1e-5, atol=1e-6)
    ((program, _),) = f._programs.values()
    assert f.traces == 1 and program.program._parameters.bound == 2
    given["w"] *= 2
    f.refit()
    np.testing.assert_allclose(f(given, x), np.tanh(x @ given["w"]), rtol=1e-5, atol=1e-6)
    shown = {"w": xp.asarray(params["w"]), "b": xp.asarray(params["b"])}
    f(shown, x)
    shown["w"][0, :] = 0.0  # another value of the array, so another binding
    np.testing.assert_allclose(f(shown, x), np.tanh(x[:, 1:] @ params["w"][1:]), rtol=1e-5, atol=1e-6)


# --- on a device ------------------------------------------------------------------------------------------------------


RECURRENT = """
def g(x: f32[4, 20], xs: f32[5, 4, 20], w: f32[20, 20]):
    def body(k: i64, h: f32[4, 20], r: f32[4, 20], u: f32[20, 20]):
        a = tanh(add(matmul(h, u), r))
        return a, mul(a, 2.0)
    (h, s) = loop(None, None, x, xs, w, body=body, carried=1, scanned=1, length=5)
    return h, s
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [NET, LOOP, RECURRENT], ids=["net", "loop", "recurrent"])
def test_on_a_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is an interpreter: programs are loaded anew with other weights, and nothing is compiled."""
    own = InterpretedDevice()
    install(monkeypatch, own)
    given = contents(text)
    g = parse(text)
    names = [v.name for v in g.inputs]
    arrays = [a for n, a in given.items() if n in ("x", "xs")]
    held = {n: a for n, a in given.items() if n not in ("x", "xs")}
    f: Any = compile_graph(
        g,
        (names, [f"y{k}" for k in range(len(g.outputs))]),
        make_options({"cache": False, "target": "cuda"}),
        parameters=held,
    )
    (native,) = f.programs

    def check(now: dict[str, Array]) -> None:
        want = dnnc.compile(parse(text), target="reference")(*(now.get(n, given[n]) for n in names))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (f(*arrays), want))):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    check(held)
    monkeypatch.setattr("dnnc.backends.cuda.backend.build", lambda *_, **__: pytest.fail("compiled"))
    other = {n: a * np.float32(0.5) for n, a in held.items()}
    f.refit(other)
    check(other)
    other["w"] *= 3
    f.refit()
    check(other)
    assert f.programs == [native]
    assert np.allclose(
        run(f.frozen(), arrays)[0], run(parse(text), [other.get(n, given[n]) for n in names])[0], atol=1e-5
    )


def test_captured_under_jit() -> None:
    """A captured array of dnnc.array that is written to has another value, which the next call binds."""
    w = xp.asarray(np.ones((4, 2), np.float32)) * 2

    @dnnc.jit(parameters={"w": w}, cache=False)
    def f(x: Any) -> Any:
        return x @ w

    x = np.ones((5, 4), np.float32)
    assert (np.asarray(f(x)) == 8).all() and (np.asarray(f(x)) == 8).all()
    w[0, :] = 0.0
    assert (np.asarray(f(x)) == 6).all()
    w += 1
    assert (np.asarray(f(x)) == 10).all() and (np.asarray(f(x[:2])) == 10).all() and f.traces == 2
    ((program, _), _) = f._programs.values()
    assert program.program._parameters.bound == 3


def test_results_do_not_overwrite_weights() -> None:
    g = parse("def g(x: f32[4], w: f32[4]):\n    y: f32[4] = mul(x, w)\n    return y\n")
    w, x = np.ones(4, np.float32), np.ones(4, np.float32)
    f = compile_graph(g, (["x", "w"], ["y"]), make_options({"cache": False, "donate": {"x": "y"}}), parameters={"w": w})
    with pytest.raises(dnnc.InputError, match="output y overlaps another buffer"):
        f.run([x], [w])
    with pytest.raises(dnnc.InputError, match="input x is donated, and a parameter lies in its memory"):
        f(w)
    assert f(x) is x
