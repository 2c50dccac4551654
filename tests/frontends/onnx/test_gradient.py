"""The operator Gradient: which part of a model it differentiates, where, and by what."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import dnnc
from dnnc.frontends.onnx import read
from dnnc.ir.graph.interp import run

HEAD = '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.preview.training" : 1]> '
X = np.array([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], np.float32)
W = np.array([[0.5, -0.4], [0.2, 0.9], [-0.7, 0.1]], np.float32)


def model(text, **initial):
    m = parser.parse_model(HEAD + text)
    m.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in initial.items())
    return m


def results(m, *arrays):
    """What the compiled model gives, which the interpreter gives too."""
    got = dnnc.compile(m)(*arrays)
    got = got if isinstance(got, tuple) else (got,)
    for a, b in zip(got, run(read(m), arrays)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return got


def gradient(inputs, outputs, **attributes):
    names = ", ".join(
        f"{k} = {v}".replace("'", '"') if isinstance(v, list) else f'{k} = "{v}"' for k, v in attributes.items()
    )
    return f"{outputs} = ai.onnx.preview.training.Gradient <{names}> ({inputs})"


def test_gradient_of_a_sum_of_elements():
    """A tensor that is differentiated counts as the sum of its elements."""
    m = model(
        "g (float[2,3] x, float[3,2] w) => (float[2,3] dx, float[3,2] dw) { h = MatMul (x, w)  y = Tanh (h) "
        + gradient("x, w", "dx, dw", xs=["x", "w"], y="y")
        + "}"
    )
    dx, dw = results(m, X, W)
    slope = 1 - np.tanh(X @ W) ** 2
    np.testing.assert_allclose(dx, slope @ W.T, rtol=1e-5)
    np.testing.assert_allclose(dw, X.T @ slope, rtol=1e-5)


def test_a_weight_is_not_folded():
    """What a weight becomes before it meets an input depends on it, though it is constant."""
    text = (
        "g (float[2,3] x) => (float[2,3] dw) { h = Mul (w, w)  t = Transpose (h)  s = MatMul (x, t)  y = ReduceSum (s) "
        + gradient("w", "dw", xs=["w"], y="y")
        + "}"
    )
    (dw,) = results(model(text, w=W.T.copy()), X)
    np.testing.assert_allclose(dw, 2 * W.T * X.sum(0), rtol=1e-5)


def test_by_a_constant_between():
    text = (
        "g (float[2,3] x) => (float[3,2] dh) { h = Exp (w)  y = MatMul (x, h) "
        + gradient("h", "dh", xs=["h"], y="y")
        + "}"
    )
    (dh,) = results(model(text, w=W), X)
    np.testing.assert_allclose(dh, np.repeat(X.sum(0)[:, None], 2, 1), rtol=1e-5)


def test_gradient_by_an_intermediate_value():
    m = model(
        "g (float[2,3] x, float[3,2] w) => (float[2,2] dh) { h = MatMul (x, w)  t = Sin (h)  y = Mul (t, h) "
        + gradient("h", "dh", xs=["h"], y="y")
        + "}"
    )
    h = X @ W
    np.testing.assert_allclose(results(m, X, W)[0], np.cos(h) * h + np.sin(h), rtol=1e-4, atol=1e-6)


def test_gradient_at_another_place():
    """Other values than those named are put in their place: the function is differentiated there."""
    m = model(
        "g (float[2,3] x, float[2,3] z, float[2,3] p) => (float[2,3] dx) { t = Mul (x, z)  y = Sin (t) "
        + gradient("p, x", "dx", xs=["x"], zs=["z"], y="y")
        + "}"
    )
    z, p = X[::-1].copy(), X + 0.25
    np.testing.assert_allclose(results(m, X, z, p)[0], np.cos(p * X) * X, rtol=1e-4, atol=1e-6)


def test_gradient_of_a_gradient():
    m = model(
        "g (float[2,3] x, float[2,3] a) => (float[2,3] dx, float[2,3] dxx, float[2,3] dxa) { s = Mul (x, x) "
        "c = Mul (s, x)  y = Mul (c, a) "
        + gradient("x, a", "dx", xs=["x"], zs=["a"], y="y")
        + gradient("x, a", "dxx, dxa", xs=["x", "a"], y="dx")
        + "}"
    )
    a = X[::-1].copy()
    dx, dxx, dxa = results(m, X, a)
    np.testing.assert_allclose(dx, 3 * X**2 * a, rtol=1e-5)
    np.testing.assert_allclose(dxx, 6 * X * a, rtol=1e-5)
    np.testing.assert_allclose(dxa, 3 * X**2, rtol=1e-5)


def test_outputs_that_nobody_asks_for():
    m = model(
        "g (float[2] x, float[2] w) => (float[2] dw) { y = Mul (x, w) "
        + gradient("x, w", ", dw", xs=["x", "w"], y="y")
        + "}"
    )
    np.testing.assert_array_equal(results(m, X[0, :2], W[0])[0], X[0, :2])


def test_zero_where_nothing_depends():
    m = model(
        "g (float[2] x, float[2] w) => (float[2] dx, float[2] dw) { y = Sin (x) "
        + gradient("x, w", "dx, dw", xs=["x", "w"], y="y")
        + "}"
    )
    x = X[0, :2]
    dx, dw = results(m, x, W[0])
    np.testing.assert_allclose(dx, np.cos(x), rtol=1e-5)
    np.testing.assert_array_equal(dw, np.zeros(2, np.float32))


def test_symbolic_sizes():
    m = model(
        'g (float["n", 3] x, float[3] w) => (float["n", 3] dx, float[3] dw) { t = Mul (x, w)  y = Sin (t) '
        + gradient("x, w", "dx, dw", xs=["x", "w"], y="y")
        + "}"
    )
    f = dnnc.compile(m)
    for rows in (2, 5):
        x, w = np.resize(X, (rows, 3)), W[:, 0]
        dx, dw = f(x, w)
        np.testing.assert_allclose(dx, np.cos(x * w) * w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(dw, (np.cos(x * w) * x).sum(0), rtol=1e-4, atol=1e-6)


def test_within_the_body_of_a_loop():
    """Newton's method for the square root of 2: each iteration differentiates x * x - 2 at its own x."""
    text = """g (float x) => (float r) {
        n = Constant <value = int64 {60}> ()
        r = Loop (n, , x) <body = b (int64 i, bool go, float p) => (bool on, float q) {
            on = Identity (go)
            s = Mul (p, p)
            f = Sub (s, two)
            GRADIENT
            step = Div (f, d)
            q = Sub (p, step)
        }>
    }""".replace("GRADIENT", gradient("p", "d", xs=["p"], y="f"))
    (r,) = results(model(text, two=np.float32(2)), np.float32(3))
    np.testing.assert_allclose(r, np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("node", "error", "says"),
    [
        (gradient("x", "d", xs=["z"], y="yy"), dnnc.ModelError, r"d \(Gradient, opset 1\).*xs names 'z', and nothing"),
        (gradient("x", "d", xs=["x"], y="yy"), dnnc.ModelError, "y names 'yy'.*did you mean 'y'"),
        (gradient("x, x", "d", xs=["x"], y="y"), dnnc.ModelError, "2 inputs; expected one for each of x"),
        (gradient("x, x", "d, e", xs=["x", "x"], y="y"), dnnc.ModelError, "name a value twice: x, x"),
        (gradient("k", "d", xs=["k"], y="y"), dnnc.GradientError, "'k' is i64.*only floats have derivatives"),
        (gradient("x", "d", xs=["x"], y="k"), dnnc.GradientError, "'k' is i64"),
        (gradient("s", "d", xs=["x"], y="y"), dnnc.ShapeError, r"'x' is f32\[2\], the input given for it f32"),
    ],
)
def test_errors_name_the_node(node, error, says):
    m = model("g (float[2] x, int64[2] k, float s) => (float[2] d) { y = Sin (x) " + node + "}")
    with pytest.raises(error, match=says):
        read(m)
