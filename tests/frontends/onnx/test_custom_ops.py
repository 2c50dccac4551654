"""Operators of custom ONNX domains: `custom_ops` of compile, load, tune, grad and the command line."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import dnnc
import dnnc.array as xp
from dnnc.cli.models import Job, custom_ops, open_model
from dnnc.ir import te

MODEL = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[N, 8] x) => (float[N, 8] y) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
  a = Relu(x)
  b = my.domain.Scaled ATTRIBUTES (a, w)
  y = Tanh(b)
}"""
SPLIT = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[4, 6] x, float[6] w) => (float[4, 2] low, float[4, K] high) <int64 at = {2}> {
  low, high = my.domain.Halves (x, , at)
}"""
RESHAPED = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[2, 8] x, int64[2] shape) => (float[A, B] y) {
  a = my.domain.Twice (x)
  y = Reshape (a, shape)
}"""
TEXT = """
def Scaled(N: dim, C: dim, x: f32[N, C], w: f32[C], y: f32[N, C]):
    for i in range(N):
        for j in range(C):
            y[i, j] = x[i, j] * w[j] * 0.5 + 1.0
"""
NAME = "my.domain::Scaled"
W = np.arange(1, 9, dtype=np.float32)


def scaled(x: Any, w: Any, *, alpha: float = 0.5) -> Any:
    return x * w * alpha + 1


def twice(x: Any) -> Any:
    return x * 2


def model(text: str = MODEL, attributes: str = "") -> onnx.ModelProto:
    return parser.parse_model(text.replace("ATTRIBUTES", attributes))


def data(rows: int = 5, alpha: float = 0.5) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
    return x, np.tanh(np.maximum(x, 0) * W * np.float32(alpha) + 1)


@pytest.mark.parametrize("definition", [scaled, TEXT, dnnc.custom_op("Scaled", TEXT)], ids=["function", "text", "op"])
def test_an_operator_is_fused_with_its_neighbours(definition: Any) -> None:
    f = dnnc.compile(model(), custom_ops={NAME: definition}, dims={"N": 5})
    x, want = data()
    np.testing.assert_allclose(f(x), want, rtol=1e-6)
    assert len(f.report.programs[0].kernels) == 1
    assert any("Scaled" in str(loc) for n in f.graph.nodes() for loc in n.locs), "nodes name the ONNX node"


def test_attributes_are_keywords_and_override_defaults() -> None:
    f = dnnc.compile(model(attributes="<alpha = 0.25>"), custom_ops={NAME: scaled})
    for rows in (3, 0, 7):
        x, want = data(rows, 0.25)
        np.testing.assert_allclose(f(x), want, rtol=1e-6)


def test_left_out_inputs_several_outputs_and_constants() -> None:
    seen = []

    def halves(x: Any, none: Any, at: Any) -> Any:
        seen.append(none)
        return x[:, : int(at)], x[:, int(at) :]  # a small constant of the model has a value while the model is read

    f = dnnc.compile(model(SPLIT), custom_ops={"my.domain::Halves": halves})
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    low, high = f(x, np.zeros(6, np.float32))
    np.testing.assert_array_equal(low, x[:, :2])
    np.testing.assert_array_equal(high, x[:, 2:])
    assert seen and seen[0] is None


def test_a_definition_takes_the_place_of_a_function_of_the_model() -> None:
    whole = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[3] x) => (float[3] y) { y = my.domain.Twice (x) }
<domain: "my.domain", opset_import: ["" : 17]>
Twice (x) => (y) { y = Sub (x, x) }"""
    x = np.float32([1, 2, 3])
    np.testing.assert_array_equal(dnnc.compile(model(whole))(x), x * 0)
    np.testing.assert_array_equal(dnnc.compile(model(whole), custom_ops={"my.domain::Twice": twice})(x), x * 2)


def test_saved_and_pickled_models_keep_their_operators(tmp_path: Path) -> None:
    x, want = data()
    f = dnnc.compile(model(), custom_ops={NAME: scaled})
    f(x)
    f.save(tmp_path / "m.dnnc")
    for again in (
        dnnc.load(tmp_path / "m.dnnc"),
        dnnc.load(tmp_path / "m.dnnc", code=False),
        pickle.loads(pickle.dumps(f)),
    ):
        np.testing.assert_allclose(again(x), want, rtol=1e-6)
        np.testing.assert_allclose(again(data(9)[0]), data(9)[1], rtol=1e-6)
    assert pickle.loads(pickle.dumps(f))(x[:0]).shape == (0, 8)  # read again for empty inputs


def test_a_model_that_is_read_at_each_call_needs_them_when_it_is_loaded(tmp_path: Path) -> None:
    own = {"my.domain::Twice": twice}
    f = dnnc.compile(model(RESHAPED), custom_ops=own)
    x, shape = np.ones((2, 8), np.float32), np.int64([4, 4])
    f.save(tmp_path / "m.dnnc")
    for g in (f, dnnc.load(tmp_path / "m.dnnc", custom_ops=own), pickle.loads(pickle.dumps(f))):
        np.testing.assert_array_equal(g(x, shape), 2 * np.ones((4, 4)))
    with pytest.raises(dnnc.UnsupportedError, match=r'custom_ops=\{"my.domain::Twice": function'):
        dnnc.load(tmp_path / "m.dnnc")(x, shape)


def test_gradients_and_modules() -> None:
    x, want = data()
    own = {NAME: scaled}
    g = dnnc.compile(dnnc.grad(model(), wrt="w", cotangent="sum", custom_ops=own))
    slope = ((1 - want**2) * np.maximum(x, 0) * 0.5).sum(0)
    np.testing.assert_allclose(g(x), slope, rtol=1e-4)
    module = dnnc.nn.from_onnx(model(), custom_ops=own)
    np.testing.assert_allclose(np.asarray(module(xp.asarray(x))), want, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(pickle.loads(pickle.dumps(module))(xp.asarray(x))), want, rtol=1e-5)


def test_bound_weights_and_tensor_expressions() -> None:
    op = dnnc.custom_op("s", lambda x, w: te.compute(x.dims, x.dtype, lambda i, j: x[i, j] * w[j] * 0.5 + 1.0))
    f = dnnc.compile(model(), custom_ops={NAME: op}, parameters=True)
    x, want = data()
    np.testing.assert_allclose(f(x), want, rtol=1e-6)


@pytest.mark.slow
def test_a_search_reads_them() -> None:
    tuned = dnnc.tune(model(), budget=1, trials=1, dims={"N": 4}, custom_ops={NAME: scaled}, cache=False)
    x, want = data(4)
    np.testing.assert_allclose(tuned.compile()(x), want, rtol=1e-6)


class Plain:
    """Compares equal by identity, as a function does."""


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({NAME: lambda x: x}, "cannot take 3 arguments"),
        ({NAME: lambda x, w, alpha: Plain()}, "must return an array of dnnc.array or a tuple of them, got a Plain"),
        ({NAME: lambda x, w, alpha: ()}, "returns 0 arrays, but the node has 1 output"),
        ({NAME: lambda x, w, alpha: 1 // 0}, "failed: ZeroDivisionError"),
        ({NAME: lambda x, w, alpha: xp.matmul(x, x)}, "do not fit"),
        ({NAME: lambda x, w, alpha: int(x[0, 0])}, "int"),
        ({NAME: TEXT}, "has the attributes alpha, which operator IR cannot express"),
        ({NAME: "def f("}, "custom_ops['my.domain::Scaled']: line 1, column 6"),
        ({NAME: 3}, "expected a function of arrays or the text of a kernel in operator IR, got an int"),
        ({"Scaled": scaled}, "'Scaled' names no operator; expected domain::Operator"),
        ({"my.domain::": scaled}, "names no operator"),
        ({3: scaled}, "names no operator"),
        (3, "expected a mapping"),
        ({}, 'define it: custom_ops={"my.domain::Scaled": function}'),
        ({"my.domain::Other": scaled}, 'define it: custom_ops={"my.domain::Scaled": function}'),
    ],
)
def test_errors(definition: Any, message: str) -> None:
    with pytest.raises(dnnc.DnncError) as e:
        dnnc.compile(model(attributes="<alpha = 0.25>"), custom_ops=definition)
    assert message in str(e.value)
    assert type(e.value) is not dnnc.ModelError, "the fault is the definition's"


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    file = tmp_path / "ops.py"
    file.write_text(f'custom_ops = {{"{NAME}": lambda x, w: x * w * 0.5 + 1}}\n')
    job = Job(
        str(tmp_path / "m.onnx"), "llvm", ("N=5",), None, "kernels", 3, "standard", "auto", (), custom_ops=str(file)
    )
    x, want = data()
    np.testing.assert_allclose(open_model(job)(x), want, rtol=1e-6)
    for text, message in (("x = 1\n", "defines no `custom_ops`"), ("1 / 0\n", "failed: ZeroDivisionError")):
        file.write_text(text)
        with pytest.raises(dnnc.InputError, match=message):
            custom_ops(str(file))
    with pytest.raises(dnnc.InputError, match="there is no file"):
        custom_ops(str(tmp_path / "none.py"))
