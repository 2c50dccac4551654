"""Channels that are removed: the smaller graph computes what the whole one does without them."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import model, residual, transformer

from dnnc.pruning.channels import Channels, analysed
from dnnc.pruning.options import PruneOptions
from dnnc.pruning.structured import chosen, families, hidden, without
from dnnc.quantization.layers import found_layers
from dnnc.quantization.onnx_graph import Model, opened

CASES = {
    "chain with a flattening": ("""
        (float[2, 3, 8, 8] x) => (float[2, 4] y) {
          a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)  b = Relu(a)  c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)
          f = Flatten(c)  y = Gemm(f, w2, b2)
        }""", dict(w1=(6, 3, 3, 3), b1=(6,), w2=(96, 4), b2=(4,)), 1),
    "residual": ("""
        (float[2, 3, 6, 6] x) => (float[2, 4] y) {
          a = Conv(x, w1)  b = Relu(a)  c = Conv(b, w2, b2)  d = Add(c, b)  e = Conv(d, w3)
          m = GlobalAveragePool(e)  f = Flatten(m)  y = Gemm<transB = 1>(f, w4)
        }""", dict(w1=(8, 3, 1, 1), w2=(8, 8, 1, 1), b2=(8,), w3=(6, 8, 3, 3), w4=(4, 6)), 2),
    "depthwise and a gate": ("""
        (float[2, 3, 6, 6] x) => (float[2, 4, 6, 6] y) {
          a = Conv(x, w1)  b = HardSwish(a)  c = Conv<group = 8, pads = [1, 1, 1, 1]>(b, w2, b2)
          m = GlobalAveragePool(c)  s = Conv(m, w3, b3)  t = Relu(s)  u = Conv(t, w4)  g = HardSigmoid(u)
          d = Mul(c, g)  y = Conv(d, w5)
        }""", dict(w1=(8, 3, 1, 1), w2=(8, 1, 3, 3), b2=(8,), w3=(4, 8, 1, 1), b3=(4,), w4=(8, 4, 1, 1),
                   w5=(4, 8, 1, 1)), 2),
    "groups and a concatenation": ("""
        (float[2, 3, 6, 6] x) => (float[2, 5, 6, 6] y) {
          a = Conv(x, w1)  b = Conv<group = 2>(a, w2)  c = Concat<axis = 1>(a, b, x)  d = Sigmoid(c)
          y = Conv(d, w3)
        }""", dict(w1=(8, 3, 1, 1), w2=(6, 4, 1, 1), w3=(5, 17, 1, 1)), 2),
    "scales, slopes and layers of vectors": ("""
        (float[2, 7, 5] x) => (float[2, 7, 3] y) {
          a = MatMul(x, w1)  b = Add(a, b1)  c = PRelu(b, p1)  d = Mul(c, s1)  e = Transpose<perm = [0, 2, 1]>(d)
          g = Relu(e)  h = Transpose<perm = [0, 2, 1]>(g)  i = MatMul(h, w2)  j = Tanh(i)  y = MatMul(j, w3)
        }""", dict(w1=(5, 12), b1=(12,), p1=(1, 12), s1=(1, 1, 12), w2=(12, 6), w3=(6, 3)), 2),
    "a mean over places": ("""
        (float[2, 3, 6, 6] x) => (float[2, 4] y) {
          a = Conv(x, w1)  b = ReduceMean<keepdims = 0>(a, axes)  y = MatMul(b, w2)
        }""", dict(w1=(8, 3, 1, 1), w2=(8, 4)), 1),
    "halves by slices, and a part by its numbers": ("""
        (float[2, 3, 6, 6] x) => (float[2, 5, 6, 6] y) {
          a = Conv(x, w1)  b = Slice(a, #0, #4, #1)  d = Slice(a, #4, #99, #1)  e = Sigmoid(d)  f = Mul(b, e)
          g = Slice(a, #-3, #8, #1, #1)  h = Gather<axis = 1>(a, #7_5_6)  k = Concat<axis = 1>(f, g, h)
          y = Conv(k, w2)
        }""", dict(w1=(8, 3, 1, 1), w2=(5, 10, 1, 1)), 2),
    "parts of several sizes, read by themselves": ("""
        (float[2, 3, 6, 6] x) => (float[2, 3, 6, 6] y) {
          a = Conv(x, w1)  b, d, e = Split<axis = -3>(a, #6_4_2)  f, g = Split<axis = 1>(b)  h = Add(f, g)
          s = Conv(d, w2)  t = Conv(e, w3)  u = Conv(h, w4)  v = Add(s, t)  y = Add(u, v)
        }""", dict(w1=(12, 3, 1, 1), w2=(3, 4, 1, 1), w3=(3, 2, 1, 1), w4=(3, 3, 1, 1)), 3),
    "a shuffle of channels between groups": ("""
        (float[2, 3, 6, 6] x) => (float[2, 3, 2, 2] y) {
          a = Conv(x, w1)  b = Conv<group = 2>(a, w2)  r = Reshape(b, #2_2_4_6_6)
          t = Transpose<perm = [0, 2, 1, 3, 4]>(r)  s = Reshape(t, #2_-1_6_6)  d = Conv<group = 8>(s, w3)
          e = Conv<group = 2>(d, w4)  y = Conv(e, w5)
        }""", dict(w1=(8, 3, 1, 1), w2=(8, 4, 1, 1), w3=(8, 1, 3, 3), w4=(4, 4, 1, 1), w5=(3, 4, 3, 3)), 3),
    "pixels out of channels, and back": ("""
        (float[2, 3, 6, 6] x) => (float[2, 3, 3, 3] y) {
          a = Conv(x, w1)  b = DepthToSpace<blocksize = 2>(a)  c = Relu(b)  d = SpaceToDepth<blocksize = 4>(c)
          y = Conv(d, w2)
        }""", dict(w1=(24, 3, 1, 1), w2=(3, 96, 1, 1)), 1),
    "pixels by reshapes, columns first": ("""
        (float[2, 3, 6, 6] x) => (float[2, 3, 12, 12] y) {
          a = Conv(x, w1)  r = Reshape(a, #0_6_2_2_6_6)  t = Transpose<perm = [0, 1, 4, 2, 5, 3]>(r)
          s = Reshape(t, #2_6_12_12)  p = DepthToSpace<blocksize = 1, mode = "CRD">(s)  y = Conv(p, w2)
        }""", dict(w1=(24, 3, 1, 1), w2=(3, 6, 1, 1)), 1),
    "heads of attention": ("""
        (float[2, 5, 8] x) => (float[2, 5, 8] y) {
          q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)  a = Add(q, b1)
          q1 = Reshape(a, #0_0_4_3)  k1 = Reshape(k, #2_5_4_3)  v1 = Reshape(v, #2_5_-1_3)
          q2 = Transpose<perm = [0, 2, 1, 3]>(q1)  k2 = Transpose<perm = [0, 2, 3, 1]>(k1)
          v2 = Transpose<perm = [0, 2, 1, 3]>(v1)
          s = MatMul(q2, k2)  p = Softmax(s)  z = MatMul(p, v2)  o = Transpose<perm = [0, 2, 1, 3]>(z)
          f = Reshape(o, #2_5_12)  y = MatMul(f, w4)
        }""", dict(w1=(8, 12), b1=(12,), w2=(8, 12), w3=(8, 12), w4=(12, 8)), 1),
    "queries, keys and values of few heads in one product": ("""
        (float[2, 5, 8] x) => (float[2, 5, 8] y) {
          a = MatMul(x, w1)  r = Reshape(a, #2_5_3_2_4)  t = Transpose<perm = [2, 0, 3, 1, 4]>(r)
          q = Gather(t, #:0)  k = Gather(t, #:1)  v = Gather(t, #:2)  i = Transpose<perm = [0, 1, 3, 2]>(k)
          s = MatMul(q, i)  p = Softmax(s)  z = MatMul(p, v)  o = Transpose<perm = [0, 2, 1, 3]>(z)
          f = Reshape(o, #2_5_8)  y = MatMul(f, w2)
        }""", dict(w1=(8, 24), w2=(8, 8)), 1),
    "transposed convolutions": ("""
        (float[2, 3, 5, 5] x) => (float[2, 3, 13, 13] y) {
          a = Conv(x, w1, b1)  b = ConvTranspose<strides = [2, 2]>(a, w2, b2)  c = PRelu(b, p)
          d = ConvTranspose<group = 6>(c, w3)  y = Conv(d, w4)
        }""", dict(w1=(8, 3, 1, 1), b1=(8,), w2=(8, 6, 3, 3), b2=(6,), p=(6, 1, 1), w3=(6, 1, 3, 3),
                   w4=(3, 6, 1, 1)), 2),
    "a gate by Unsqueeze, and normalizations of their own": ("""
        (float[2, 3, 6, 6] x) => (float[2, 3, 6, 6] y) {
          a = Conv(x, w1)  r = Relu(a)  b = BatchNormalization(r, s, o, m, v)  i = InstanceNormalization(b, s, o)
          g = ReduceMean<keepdims = 0>(i, axes)  h = MatMul(g, w2)  k = Sigmoid(h)  u = Unsqueeze(k, #-1_-2)
          e = Expand(u, #1_8_6_6)  d = Mul(i, e)  y = Conv(d, w3)
        }""", dict(w1=(8, 3, 1, 1), s=(8,), o=(8,), m=(8,), v=(8,), w2=(8, 8), w3=(3, 8, 1, 1)), 1),
    "weights that two layers share": ("""
        (float[2, 6] x) => (float[2, 6] y) {
          a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  d = Tanh(c)  e = MatMul(d, w2)  z = Gemm<transB = 1>(e, w1)
          y = Relu(z)
        }""", dict(w1=(6, 8), w2=(8, 8)), 1),
}  # fmt: skip
HELD = {
    "softmax over channels": ("""
        (float[2, 5] x) => (float[2, 3] y) { a = Gemm(x, w1)  b = Softmax(a)  y = Gemm(b, w2) }""",
        dict(w1=(5, 8), w2=(8, 3))),
    "a constant that an output shares": ("""
        (float[2, 5] x) => (float[2, 3] y, float[2, 8] z) {
          a = Gemm(x, w1, c)  y = Gemm(a, w2)  e = Gemm(x, w3)  d = Add(e, c)  z = Relu(d)
        }""", dict(w1=(5, 8), c=(8,), w2=(8, 3), w3=(5, 8))),
    "an output": ("(float[2, 5] x) => (float[2, 8] a, float[2, 3] y) { a = Gemm(x, w1)  y = Gemm(a, w2) }",
                  dict(w1=(5, 8), w2=(8, 3))),
    "a broadcast along channels": ("""
        (float[2, 5] x, float[2, 8] z) => (float[2, 3] y) { a = Gemm(x, w1)  b = Add(a, z)  y = Gemm(b, w2) }""",
        dict(w1=(5, 8), w2=(8, 3))),
    "weights that read an input too": ("""
        (float[2, 3, 6, 6] x, float[2, 8, 6, 6] z) => (float[2, 4, 6, 6] y) {
          a = Conv(x, w1)  b = Conv(a, w2)  c = Conv(z, w2)  y = Add(b, c)
        }""", dict(w1=(8, 3, 1, 1), w2=(4, 8, 1, 1))),
    "a scale by the number of channels": ("""
        (float[2, 5] x) => (float[2, 3] y) {
          a = Gemm(x, w1)  s = Shape<start = 1>(a)  c = Cast<to = 1>(s)  b = Div(a, c)  y = Gemm(b, w2)
        }""", dict(w1=(5, 8), w2=(8, 3))),
    "every second channel": ("""
        (float[2, 5] x) => (float[2, 3] y) { a = Gemm(x, w1)  b = Slice(a, #0, #8, #1, #2)  y = Gemm(b, w2) }""",
        dict(w1=(5, 8), w2=(4, 3))),
}  # fmt: skip
OPEN = {
    "shapes that are computed": """
        (float[N, 3, H, W] x) => (float[N, M, P, Q] y) {
          a = Conv(x, w1)  s = Shape(a)  n = Gather(s, #:0)  h = Slice(s, #2, #4)  n1 = Unsqueeze(n, #0)
          t = Concat<axis = 0>(n1, #2_4, h)  r = Reshape(a, t)  p = Transpose<perm = [0, 2, 1, 3, 4]>(r)
          c = Slice(s, #1, #2)  t2 = Concat<axis = 0>(n1, c, h)  f = Reshape(p, t2)
          u = Concat<axis = 0>(n1, c, #9_7)  i = Resize<mode = "nearest">(f, , , u)  y = Conv(i, w2)
        }""",
    "a number of channels by quotients": """
        (float[N, 3, H, W] x) => (float[N, M, P, Q] y) {
          a = Conv(x, w1)  s = Shape(a)  n = Slice(s, #0, #1)  c = Slice(s, #1, #2)  h = Slice(s, #2, #4)
          g = Div(c, #2)  t = Concat<axis = 0>(n, #2, g, h)  r = Reshape(a, t)  p = Transpose<perm = [0, 2, 1, 3, 4]>(r)
          k = Mul(g, #2)  t2 = Concat<axis = 0>(n, k, h)  f = Reshape(p, t2)  y = Conv(f, w2)
        }""",
}


def parts(proto: onnx.ModelProto) -> tuple[Model, Channels, list]:
    m = opened(proto)
    c = analysed(m)
    names = {x.weight: x.node for x in found_layers(m)[0]} | c.layers
    return m, c, families(m, c, names)


def same_outputs(m: Model, c: Channels, gone: set[int]) -> onnx.ModelProto:
    """The removal against weights that read none of the channels, in ONNX's reference."""
    small = without(m, c, gone)
    onnx.checker.check_model(small, full_check=True)
    whole = onnx.ModelProto()
    whole.CopyFrom(m.proto)
    for t in whole.graph.initializer:
        arrays = hidden(m, c, gone)
        if t.name in arrays:
            t.CopyFrom(onnx.numpy_helper.from_array(arrays[t.name], t.name))
    rng = np.random.default_rng(1)
    shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in m.inputs}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    got, want = (ReferenceEvaluator(p).run(None, feeds) for p in (small, whole))
    for a, b in zip(got, want):
        assert np.allclose(a, b, atol=1e-5), np.abs(a - b).max()
    return small


def _named(integers: str) -> str:
    return "i" + integers[1:].replace("-", "m").replace(":", "s")


def built(text: str, shapes: dict) -> onnx.ModelProto:
    lines = "\n".join(line.replace(")  ", ")\n") for line in text.split("\n"))
    out = model(f"agraph {re.sub('#[-:0-9_]+', lambda m: _named(m[0]), lines)}", **{n: s for n, s in shapes.items()})
    for name in set(re.findall(r"#[-:\w]+", text)):  # integers: #2_-1 a vector, #:0 a number
        value = np.array([int(k) for k in name.strip("#:").split("_")])
        array = value.reshape(()) if ":" in name else value
        out.graph.initializer.append(onnx.numpy_helper.from_array(array, _named(name)))
    for t in out.graph.initializer:
        if t.name == "v":  # variances
            t.CopyFrom(onnx.numpy_helper.from_array(np.abs(onnx.numpy_helper.to_array(t)), "v"))
    if "axes" in text:
        out.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3]), "axes"))
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drawn", [False, True])
def test_removal(name: str, drawn: bool) -> None:
    text, shapes, count = CASES[name]
    m, c, found = parts(built(text, shapes))
    assert len(found) == count
    o = PruneOptions(0.5, "structured", multiple=1)
    gone = chosen(found, o, np.random.default_rng(3) if drawn else None)
    small = same_outputs(m, c, gone)
    size = [sum(np.prod(t.dims) for t in p.graph.initializer if len(t.dims) > 1) for p in (m.proto, small)]
    assert size[1] < 0.75 * size[0]


@pytest.mark.parametrize("name", HELD)
def test_what_the_graph_needs_stays(name: str) -> None:
    m, c, found = parts(built(*HELD[name]))
    assert chosen(found, PruneOptions(0.5, "structured", multiple=1)) == set()
    same_outputs(m, c, set())
    weights = {p.tensor for p in c.places if p.role == "out"}
    assert weights and all(re.search(r"\w \([A-Z]\w+\)$|the output \w$", c.holder(w)) for w in weights)


def test_models_of_quantization() -> None:
    m, c, found = parts(residual())
    assert {n for f in found for n in f.layers} >= {"a"} and not c.places.keys() & {"logits"}
    gone = chosen(found, PruneOptions(0.5, "structured", multiple=1))
    assert gone
    same_outputs(m, c, gone)
    m, c, found = parts(transformer())  # heads go, the residual stream beside normalizations stays
    assert [f.layers for f in found] == [("k", "q"), ("v",)]
    same_outputs(m, c, chosen(found, PruneOptions(0.5, "structured")))


@pytest.mark.parametrize("name", OPEN)
def test_shapes_follow(name: str) -> None:
    m, c, found = parts(built(OPEN[name], dict(w1=(8, 3, 1, 1), w2=(5, 8, 1, 1))))
    assert len(found) == 1
    small = same_outputs(m, c, chosen(found, PruneOptions(0.5, "structured", multiple=1)))
    assert small.graph.initializer[0].dims[0] == 4


def test_a_flattening_by_reshape() -> None:
    text = "(float[N, 3, 4, 4] x) => (float[N, 2] y) { a = Conv(x, w1)\n r = Reshape(a, s)\n y = Gemm(r, w2) }"
    proto = model(f"agraph {text}", w1=(4, 3, 1, 1), w2=(64, 2))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 64]), "s"))
    m, c, found = parts(proto)
    small = same_outputs(m, c, chosen(found, PruneOptions(0.5, "structured", multiple=1)))
    assert [list(t.dims) for t in small.graph.initializer if t.name == "w2"] == [[32, 2]]


def test_what_stays_is_a_multiple() -> None:
    text = "(float[2, 5] x) => (float[2, 3] y) { a = Gemm(x, w1)\n b = Relu(a)\n y = Gemm(b, w2) }"
    m, c, found = parts(model(f"agraph {text}", w1=(5, 40), w2=(40, 3)))
    for share, left in ((0.5, 24), (0.6, 16), (0.99, 8), (0.0, 40)):
        small = without(m, c, chosen(found, PruneOptions(share, "structured")))
        assert small.graph.initializer[0].dims[1] == left
    small = without(m, c, chosen(found, PruneOptions(0.5, "structured", scope="global", multiple=4)))
    assert small.graph.initializer[0].dims[1] == 20
