"""Gradients of ONNX models and graphs by names, and their check by differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import dnnc
from dnnc.bound import of_graph
from dnnc.gradients.check import STEPS, Loss, Point, directional, dot_test, draw, groups_of, judge, unexplained
from dnnc.gradients.models import grad_of_model, read_onnx
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse

HEAD = '<ir_version: 8, opset_import: ["" : 18]> '


def model(text, weights=(), **given):
    """A model with random weights of these shapes, scaled by fan-in, and given initializers."""
    rng = np.random.default_rng(0)
    m = parser.parse_model(HEAD + text)
    for name, shape in dict(weights).items():
        a = rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))
        m.graph.initializer.append(numpy_helper.from_array(a.astype(np.float32), name))
    m.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in given.items())
    return m


def mlp():
    return model(
        """mlp (float[5,8] x, int64[5] labels) => (float loss, float[5,3] logits) {
        a = Gemm <transB = 1> (x, w1, b1)  h = Tanh (a)  logits = Gemm <transB = 1> (h, w2, b2)
        p = LogSoftmax <axis = 1> (logits)  loss = NegativeLogLikelihoodLoss (p, labels) }""",
        {"w1": (16, 8), "b1": (16,), "w2": (3, 16), "b2": (3,)},
    )


def block():
    return model(
        """block (float[2,6,16] x) => (float[2,6,16] y) {
        n = LayerNormalization <axis = -1> (x, g1, c1)
        qkv = MatMul (n, wqkv)  q0, k0, v0 = Split <axis = -1, num_outputs = 3> (qkv)
        q1 = Reshape (q0, heads)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
        k1 = Reshape (k0, heads)  k = Transpose <perm = [0, 2, 3, 1]> (k1)
        v1 = Reshape (v0, heads)  v = Transpose <perm = [0, 2, 1, 3]> (v1)
        s = MatMul (q, k)  s2 = Div (s, root)  p = Softmax <axis = -1> (s2)  o = MatMul (p, v)
        o1 = Transpose <perm = [0, 2, 1, 3]> (o)  o2 = Reshape (o1, back)  o3 = MatMul (o2, wo)  h = Add (x, o3)
        m = LayerNormalization <axis = -1> (h, g2, c2)  u = MatMul (m, w1)  e = Erf (u)  d = MatMul (e, w2)
        y = Add (h, d) }""",
        {
            "g1": (16,), "c1": (16,), "wqkv": (16, 48), "wo": (16, 16), "g2": (16,), "c2": (16,), "w1": (16, 32),
            "w2": (32, 16),
        },
        heads=np.array([0, 0, 4, 4]),
        back=np.array([2, 6, 16]),
        root=np.float32(2),
    )  # fmt: skip


def conv_net():
    return model(
        """conv (float[2,3,12,12] x) => (float[2,5] y) {
        a = Conv <pads = [1,1,1,1], kernel_shape = [3,3]> (x, w1, b1)
        n = BatchNormalization (a, scale, shift, mean, var)  r = Relu (n)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
        c = Conv <group = 4, kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]> (p, w2)
        s = Sigmoid (c)  m = Mul (c, s)  g = GlobalAveragePool (m)  f = Flatten (g)
        y = Gemm <transB = 1> (f, w3, b3) }""",
        {
            "w1": (8, 3, 3, 3), "b1": (8,), "scale": (8,), "shift": (8,), "mean": (8,), "w2": (12, 2, 3, 3),
            "w3": (5, 12), "b3": (5,),
        },
        var=np.linspace(0.5, 1.5, 8, dtype=np.float32),
    )  # fmt: skip


def arrays_for(graph, seed=1):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 3, v.type.shape)
        if v.type.dtype.is_int
        else rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy)
        for v in graph.inputs
    ]


# --- what a model's gradient is ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_by_weights_and_inputs():
    """The gradient of cross entropy by logits is softmax minus one-hot, over the batch."""
    g = grad_of_model(mlp(), ["w2", "b2", "x"], of="loss", value=True)
    assert [v.name for v in g.outputs] == ["loss", "logits", "grad_w2", "grad_b2", "grad_x"]
    x, labels = arrays_for(g)
    f = dnnc.compile(g)
    _, logits, gw2, gb2, gx = f(x, labels)
    p = np.exp(logits - logits.max(1, keepdims=True))
    delta = (p / p.sum(1, keepdims=True) - np.eye(3)[labels]) / 5
    w = {t.name: numpy_helper.to_array(t) for t in mlp().graph.initializer}
    h = np.tanh(x @ w["w1"].T + w["b1"])
    np.testing.assert_allclose(gb2, delta.sum(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gw2, delta.T @ h, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gx, ((delta @ w["w2"]) * (1 - h * h)) @ w["w1"], rtol=1e-4, atol=1e-6)


def test_weights_may_be_bound():
    """A weight is a constant of the gradient's graph, which `parameters=` makes replaceable."""
    m = model(
        "g (float[2,3] x) => (float y) { s = Mul (x, w)  t = Sin (s)  y = ReduceSum <keepdims = 0> (t) }", {"w": (3,)}
    )
    g = grad_of_model(m, "w")
    x, w = arrays_for(g)[0], np.array([0.3, -0.2, 0.9], np.float32)
    f = dnnc.compile(g, parameters={"w": w})
    np.testing.assert_allclose(f(x), (np.cos(x * w) * x).sum(0), rtol=1e-5)
    w[:] = 2 * w
    f.refit()
    np.testing.assert_allclose(f(x), (np.cos(x * w) * x).sum(0), rtol=1e-5)


def test_weights_are_not_folded():
    m = model("g (float[4,3] x) => (float[4,2] y) { t = Transpose (w)  y = MatMul (x, t) }", {"w": (2, 3)})
    g = grad_of_model(m, True, cotangent="sum")
    x = arrays_for(g)[0]
    np.testing.assert_allclose(dnnc.compile(g)(x), np.tile(x.sum(0), (2, 1)), rtol=1e-5)


def test_cotangents_of_large_outputs():
    m = model("g (float[4,3] x) => (float[4,3] y) { y = Sin (x) }")
    with pytest.raises(dnnc.InputError, match=r'y is f32\[4, 3\].*cotangent="sum".*cotangent="input"'):
        grad_of_model(m, "x")
    x, u = arrays_for(grad_of_model(m, "x", cotangent="input"))
    np.testing.assert_allclose(dnnc.compile(grad_of_model(m, "x", cotangent="sum"))(x), np.cos(x), rtol=1e-5)
    f = dnnc.compile(grad_of_model(m, "x", cotangent="input"))
    np.testing.assert_allclose(f(x=x, cotangent_y=u), u * np.cos(x), rtol=1e-5)


def test_sum_of_several_outputs():
    m = model("g (float[3] x) => (float y, float z) { a = ReduceSum <keepdims = 0> (x)  y = Exp (a)  z = Mul (a, a) }")
    x = arrays_for(grad_of_model(m, "x", of="y"))[0]
    got = dnnc.compile(grad_of_model(m, "x", of=["y", "z"]))(x)
    np.testing.assert_allclose(got, np.full(3, np.exp(x.sum()) + 2 * x.sum()), rtol=1e-4)


def test_symbolic_batch():
    m = model(
        'g (float["n",3] x) => (float y) { t = Mul (x, w)  s = Tanh (t)  y = ReduceSum <keepdims = 0> (s) }',
        {"w": (3,)},
    )
    g = grad_of_model(m, ["w", "x"])
    f = dnnc.compile(g)
    w = numpy_helper.to_array(m.graph.initializer[0])
    for rows in (2, 7):
        x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        slope = 1 - np.tanh(x * w) ** 2
        gw, gx = f(x)
        np.testing.assert_allclose(gw, (slope * x).sum(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gx, slope * w, rtol=1e-4, atol=1e-6)


def test_hand_built_graph_twice():
    """The gradient of a graph is a graph, of which there is a gradient: d/dx (dx sum(w x^3)) = 6 w x."""
    g = parse(
        "def net(x: f32[4], *, w: f32[4] = [1.0, 2.0, -1.0, 0.5]):\n"
        "    y = reduce_sum(mul(w, mul(x, mul(x, x))))\n"
        "    return y"
    )
    first = grad_of_model(g, "x")
    second = grad_of_model(first, "x", cotangent="sum")
    x = arrays_for(g)[0]
    w = np.array([1, 2, -1, 0.5], np.float32)
    np.testing.assert_allclose(dnnc.compile(first)(x), 3 * w * x**2, rtol=1e-5)
    np.testing.assert_allclose(dnnc.compile(second)(x), 6 * w * x, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"wrt": "w3", "of": "loss"},
            dnnc.InputError,
            "wrt: the model has no input or initializer 'w3'; it has x, labels, w1",
        ),
        ({"wrt": "w1", "of": "los"}, dnnc.InputError, "of: the model has no output 'los'; did you mean 'loss'"),
        ({"wrt": "w1"}, dnnc.InputError, "the outputs loss, logits; say which is differentiated, such as of='loss'"),
        ({"wrt": "labels", "of": "loss"}, dnnc.GradientError, r"labels is i64\[5\]: only floats have derivatives"),
        ({"wrt": ["w1", "w1"], "of": "loss"}, dnnc.InputError, "wrt names w1 twice"),
        ({"wrt": [], "of": "loss"}, dnnc.InputError, "wrt names nothing"),
        ({"wrt": "w1", "of": "loss", "cotangent": "ones"}, dnnc.InputError, "cotangent='ones': expected one of"),
    ],
)
def test_errors(arguments, error, says):
    with pytest.raises(error, match=says):
        grad_of_model(mlp(), **arguments)


def test_a_path_by_integers_is_an_error():
    text = "g (float[3] x, float[3] z) => (float y) { i = ArgMax <keepdims = 0> (x)  y = Gather (z, i) }"
    with pytest.raises(dnnc.GradientError, match=r"depends on x only through argmax at i \(ArgMax, opset 18\)"):
        grad_of_model(model(text), "x")


def test_a_weight_that_steers_shapes():
    m = model(
        'g (float[1,1,4,4] x) => (float[1,1,h,w] y) { y = Resize <mode = "linear"> (x, , scales) }'.replace(
            "[1,1,h,w]", '[1,1,"h","w"]'
        ),
        scales=np.array([1, 1, 2, 2], np.float32),
    )
    with pytest.raises(dnnc.UnsupportedError, match="cannot be differentiated by scales, whose contents steer it"):
        grad_of_model(m, ["x", "scales"], cotangent="sum")
    assert [v.name for v in grad_of_model(m, ["x"], cotangent="sum").outputs] == ["grad_x"]


# --- gradients as ONNX models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "of"), [(mlp, "loss"), (block, "y"), (conv_net, "y")])
def test_exported_gradients_run_elsewhere(make, of):
    g = grad_of_model(make(), True, of=of, value=True, cotangent=None if of == "loss" else "input")
    exported = dnnc.to_onnx(g, opset=18)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(exported.SerializeToString(), options, providers=["CPUExecutionProvider"])
    arrays = arrays_for(g)
    got = session.run(None, {v.name: a for v, a in zip(g.inputs, arrays)})
    for v, a, b in zip(g.outputs, got, run(g, arrays, precision="float64")):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=v.name)


# --- the check by differences -----------------------------------------------------------------------------------------


def point_of(m, seed=3):
    read = read_onnx(m, True)
    whole, bound = of_graph(read.graph, [read.sources[n].name for n in read.weights])
    arrays = [bound.get(v.name, a) for v, a in zip(whole.inputs, arrays_for(whole, seed))]
    rng = np.random.default_rng(seed)
    loss = Loss(whole, [rng.standard_normal(o.type.shape) for o in whole.outputs if o.type.dtype.is_float])
    return Point.at(loss, arrays)


@pytest.mark.parametrize("make", [mlp, block, conv_net])
def test_gradients_agree_with_differences(make):
    point = point_of(make())
    for checked in directional(point, groups_of(point.loss, 1), 1, 0):
        assert checked.worst.kind == "right" and checked.worst.error < 1e-6, checked
    assert dot_test(point, 0).error < 1e-12


def test_a_wrong_gradient_is_found():
    point = point_of(mlp())
    off = {k: g * (1 + 1e-3 * (k == 2)) for k, g in point.gradients.items()}  # w1's by a thousandth
    wrong = Point(point.loss, point.arrays, point.here, off)
    kinds = {c.group.name: c.worst.kind for c in directional(wrong, groups_of(point.loss, 1), 1, 0)}
    assert kinds.pop("w1") == "wrong" and set(kinds.values()) == {"right"}
    assert dot_test(wrong, 0).kind == "wrong"


def test_a_kink_is_told_from_a_wrong_gradient():
    """ReLU of zeros: one-sided differences are 0 and the slope; near by the gradient is right."""
    m = model("g (float[4] x) => (float[4] y) { h = Mul (x, w)  y = Relu (h) }", {"w": (4,)})
    point = point_of(m)
    zeros = Point.at(point.loss, [np.zeros(4), point.arrays[1]])
    (x, _) = directional(zeros, groups_of(point.loss, 1), 2, 0)
    assert x.worst.kind == "kink"
    off = Point(point.loss, zeros.arrays, zeros.here, {k: g + 0.5 for k, g in zeros.gradients.items()})
    assert directional(off, groups_of(point.loss, 1), 2, 0)[1].worst.kind == "wrong"


def test_what_differences_tell():
    """Kinks near by make an error that falls with the step; a step of the function makes differences that grow."""

    def judged(quotient, derivative=1.0):
        return judge(derivative, 1.0, [(quotient(h), quotient(-h)) for h in STEPS]).kind

    assert judged(lambda h: 1 + 100 * abs(h)) == "right"
    assert judged(lambda h: 1 + 100 * abs(h), 1.001) == "wrong"
    assert judged(lambda h: 1 + 1e-12 / h) == "right"  # rounding
    assert judged(lambda h: 1 + 0.5 * (h > 0)) == "kink"
    assert judged(lambda h: 1 + 1e-3 / abs(h)) == "unsure"
    assert judge(0.0, 0.0, [(0.0, 0.0)]).kind == "right"
    # kinks lie close together: middles agree by chance, 1e-3 off, and forward and backward differences do not
    chance = dict(
        zip(STEPS, [(0.998, 1.004), (1.003, 0.999), (0.98, 1.02), (1.0004, 0.9996), (1.0, 0.9997), (0.9, 1.3)])
    )
    assert judge(1.0, 1.0, chance.values()).kind == "right"
    assert judge(1.02, 1.0, chance.values()).kind == "wrong"


def test_elements_that_stand_for_infinities_stay():
    rng = np.random.default_rng(0)
    moved = draw(rng, np.array([0.0, -1e9, 0.5, -np.inf, 2.0]))
    assert moved[1] == moved[3] == 0 and 0 < np.abs(moved[[0, 2, 4]]).max() < 10
    assert (draw(rng, np.array([1e7, -1e9])) != 0).all()


def test_rounding_near_a_kink_is_no_error():
    """Where a product is as small as rounding, either slope of ReLU is right; a wrong slope elsewhere is not."""
    m = model("g (float[64] x) => (float[64] y) { h = Sub (x, w)  y = Relu (h) }", w=np.ones(64, np.float32))
    point = point_of(m)
    x = np.where(np.arange(64) < 32, 1 + 1e-8, 2.0)
    point = Point.at(point.loss, [x, *point.arrays[1:]])
    other = point.gradients[0].copy()
    other[:32] = 0.0
    assert unexplained(point, {0: other}, {0: "off"}, 0) == {}
    assert unexplained(point, {0: other + 100}, {0: "off"}, 0) == {0: "off"}
    flat = Point.at(point.loss, [np.full(64, 2.0), *point.arrays[1:]])
    assert unexplained(flat, {0: flat.gradients[0] * 1.001}, {0: "off"}, 0) == {0: "off"}


def test_path_bytes_and_proto(tmp_path):
    m = model("g (float[3] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }")
    path = tmp_path / "m.onnx"
    onnx.save(m, str(path))
    for given in (str(path), path, m.SerializeToString(), m):
        g = grad_of_model(given, "x")
        np.testing.assert_array_equal(dnnc.compile(g)(np.zeros(3, np.float32)), np.ones(3, np.float32))
