"""Whole graphs as ONNX: control flow, symbolic sizes, traced functions, imports, random graphs; names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import dnnc
import dnnc.array as xp
from dnnc.export import to_onnx
from dnnc.export.graph import Refused
from dnnc.frontends.onnx import NeedsValues, from_onnx
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from support.random_graphs import random_graph

Array = np.ndarray[Any, Any]
RUNTIME = 24
BOUNDS = {8: 1e-8, 4: 3e-5, 2: 3e-2, 1: 0.3}


def elsewhere(model: onnx.ModelProto, *arrays: Array) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {i.name: a for i, a in zip(model.graph.input, arrays)}))


def assert_same(got: Any, want: Any, floats: bool = True) -> None:
    for a, w in zip(got, want, strict=True):
        assert a.shape == w.shape and a.dtype == w.dtype
        if w.dtype == object:
            assert (a == w).all()
            continue
        x, y = a.astype(np.float64), w.astype(np.float64)
        scale = max(1.0, np.abs(y[np.isfinite(y)]).max(initial=0))
        assert np.allclose(x, y, rtol=0, atol=BOUNDS[w.dtype.itemsize] * scale if floats else 0, equal_nan=True)


LOOP = """
def g(x: f32[5, 3], w: f32[3]):
    def body(k: i64, s: f32[3], row: f32[3], c: f32[3]):
        t: f32[3] = add(mul(s, c), row)
        return t, neg(t)
    (last, rows) = loop(None, None, w, x, w, body=body, carried=1, scanned=1, length=5{back}) @ (f32[3], f32[5, 3])
    return last, rows
"""


@pytest.mark.parametrize("back", ["", ", backward=(True, False)", ", backward=(True, True)"])
def test_loop(back: str) -> None:
    g = parse(LOOP.replace("{back}", back))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 3), np.float32), rng.standard_normal(3, np.float32)]
    model = to_onnx(g, opset=RUNTIME)
    assert [n.op_type for n in model.graph.node].count("Loop") == 1
    assert_same(elsewhere(model, *arrays), run(g, arrays))
    assert_same(run(from_onnx(model), arrays), run(g, arrays))


def test_branches_see_names_from_around() -> None:
    g = parse("""
def g(p: bool, x: f32[4], y: f32[4]):
    def then(a: f32[4], b: f32[4]):
        return a
    def other(a: f32[4], b: f32[4]):
        return mul(a, sub(b, [1.0, 2.0, 3.0, 4.0]))
    r: f32[4] = cond(p, x, y, then=then, other=other)
    return r
""")
    x, y = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    model = to_onnx(g, opset=RUNTIME)
    for p in (True, False):
        assert_same(elsewhere(model, np.array(p), x, y), run(g, [np.array(p), x, y]))


def test_while_loop_of_array_code() -> None:
    def root(x: Any) -> Any:
        return dnnc.while_loop(lambda s: xp.any(xp.abs(s * s - x) > 1e-4), lambda s: (s + x / s) / 2, x)

    x = np.array([2.0, 9.0, 100.0], np.float32)
    model = to_onnx(dnnc.trace(root, dnnc.Spec((3,))), opset=RUNTIME)
    assert np.allclose(elsewhere(model, x)[0], np.sqrt(x), atol=1e-3)


SYMBOLIC = """
N: dim[1, 64]
M: dim[1, 64]
def g(x: f32[N, 6], y: f32[M, 6]):
    a: f32[N + M, 6] = concat(x, y, axis=0)
    b: f32[3*N + 3*M, 2] = reshape(a, shape=(3*N + 3*M, 2))
    c: f32[N, 2] = slice(b, starts=(M, 0), steps=(1, 1), shape=(N, 2))
    d: f32[N, 6] = add(x, reshape(iota(shape=(N,), dtype=f32), shape=(N, 1)))
    e: f32[N, 6] = full(shape=(N, 6), value=2.0)
    f: f32[N + 2, 6] = pad(mul(d, e), pads=(1, 0, 1, 0))
    return c, f
"""


@pytest.mark.parametrize("sizes", [(4, 3), (1, 9)])
def test_symbolic_sizes(sizes: tuple[int, int]) -> None:
    g = parse(SYMBOLIC)
    arrays = [np.random.default_rng(k).standard_normal((n, 6), np.float32) for k, n in enumerate(sizes)]
    model = to_onnx(g, opset=RUNTIME)
    assert [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim] == ["N", ""]
    assert [d.dim_param for d in model.graph.output[1].type.tensor_type.shape.dim] == ["N + 2", ""]
    assert_same(elsewhere(model, *arrays), run(g, arrays))
    assert_same(run(from_onnx(model), arrays), run(g, arrays))


def test_traced_function() -> None:
    def layer(params: Any, x: Any) -> Any:
        h = xp.tanh(x @ params["w"] + params["b"])
        return {"h": h / xp.sum(h, axis=-1, keepdims=True), "best": xp.argmax(h, axis=-1)}

    spec = {"w": dnnc.Spec((4, 3)), "b": dnnc.Spec((3,))}
    model = to_onnx(layer, inputs=[spec, dnnc.Spec((5, 4))], opset=RUNTIME)
    assert [i.name for i in model.graph.input] == ["params_w", "params_b", "x"]
    assert [o.name for o in model.graph.output] == ["result_h", "result_best"]
    line = next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "xp.tanh(x @" in text)
    assert f"test_graphs.py:{line}" in next(n for n in model.graph.node if n.op_type == "Tanh").doc_string
    rng = np.random.default_rng(0)
    w, b, x = (rng.standard_normal(s, np.float32) for s in ((4, 3), (3,), (5, 4)))
    h = np.tanh(x @ w + b)
    got = elsewhere(model, w, b, x)
    assert np.allclose(got[0], h / h.sum(-1, keepdims=True), atol=1e-4) and (got[1] == h.argmax(-1)).all()


def test_executable_keeps_the_users_names() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] in.1, float[3] w) => (float[2, 3] out.1)
        { t = Mul (in.1, w)  out.1 = Relu (t) }"""
    source = onnx.parser.parse_model(text.replace("in.1", "in_1").replace("out.1", "out_1"))
    source.graph.input[0].name = source.graph.node[0].input[0] = "in.1"
    source.graph.output[0].name = source.graph.node[1].output[0] = "out.1"
    f = dnnc.compile(source, cache=False)
    model = to_onnx(f)
    assert [i.name for i in model.graph.input] == ["in.1", "w"] and model.graph.output[0].name == "out.1"


def test_one_value_as_several_outputs_and_inputs_as_outputs() -> None:
    g = Graph("g")
    g = parse("def g(x: f32[3]):\n    y: f32[3] = exp(x)\n    return y, y, x\n")
    model = to_onnx(g, opset=RUNTIME)
    names = [o.name for o in model.graph.output]
    assert len(set(names)) == 3
    x = np.arange(3, dtype=np.float32)
    assert_same(elsewhere(model, x), [np.exp(x), np.exp(x), x])


def test_equal_constants_are_stored_once() -> None:
    g = parse("def g(x: f32[4]):\n    return add(mul(x, [1.0, 2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0])\n")
    assert len(to_onnx(g).graph.initializer) == 1


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    """What is read again gives the same numbers, host steps, loops and symbolic sizes included."""
    g, arrays = random_graph(seed, 10)
    try:
        again = from_onnx(to_onnx(g))
    except (Refused, NeedsValues) as e:
        assert (
            "has no form" in str(e)
            or "takes no" in str(e)
            or "depends on the data" in str(e)
            or "must be a number" in str(e)
        )
        return
    got, want = run(again, arrays), run(g, arrays)
    for a, w, v in zip(got, want, g.outputs):
        assert a.shape == w.shape and a.dtype == w.dtype
        if v.type.dtype.is_float:
            assert_same([a], [w])
        elif w.dtype != object:  # what rounding changes a little may change a comparison
            assert np.mean(a != w) <= 0.02 if w.size else True


def test_an_op_without_a_form_says_where_it_comes_from() -> None:
    def late(x: Any) -> Any:
        return xp.cumulative_prod(x)

    with pytest.raises(
        dnnc.UnsupportedError,
        match=r"cumprod at .*test_graphs\.py:\d+.* cannot be exported: opset 20 of ONNX has no CumProd; give a later",
    ):
        to_onnx(late, inputs=[dnnc.Spec((4,))], opset=20)


@pytest.mark.parametrize("opset", [17, 99, "20"])
def test_opset_must_be_known(opset: Any) -> None:
    with pytest.raises(dnnc.InputError, match="expected a number from 18 to"):
        to_onnx(parse("def g(x: f32[3]):\n    return exp(x)\n"), opset=opset)


def test_what_is_no_model() -> None:
    with pytest.raises(dnnc.InputError, match="a graph, a compiled model, a module or a function"):
        to_onnx(3)
    with pytest.raises(dnnc.InputError, match=r"needs inputs"):
        to_onnx(lambda x: x)


# --- files ------------------------------------------------------------------------------------------------------------


def test_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    model = to_onnx(parse("def g(x: f32[3]):\n    return exp(x)\n"), path, RUNTIME)
    assert onnx.load(path) == model and [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(dnnc.ModelError, match="cannot be written"):
        to_onnx(parse("def g(x: f32[3]):\n    return exp(x)\n"), tmp_path / "none" / "m.onnx")


def test_large_weights_go_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit of a protobuf lowered, as 2 GB are too much for a test."""
    monkeypatch.setattr("dnnc.export.files.LIMIT", 1 << 14)
    w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    g = Graph("g")
    x = g.add_input("x", parse("def g(x: f32[2, 64]):\n    return x\n").inputs[0].type)
    from dnnc.ir.graph.builder import Builder

    g.outputs = [Builder(g).add(Builder(g).matmul(x, g.constant(w, "w")), g.constant(np.ones(64, np.float32), "b"))]
    model = to_onnx(g, tmp_path / "m.onnx", RUNTIME)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx").stat().st_size < 2000 and (tmp_path / "m.onnx.data").stat().st_size == w.nbytes
    assert {t.name: t.data_location for t in model.graph.initializer}["w"] == onnx.TensorProto.EXTERNAL
    a = np.ones((2, 64), np.float32)
    assert_same(run(from_onnx(tmp_path / "m.onnx"), [a]), [a @ w + 1])
    with pytest.raises(dnnc.InputError, match="give a path"):
        to_onnx(g)
