"""Channels that are removed: the smaller graph computes what the whole one does without them."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import model, residual, transformer

from dnnc.pruning.channels import Channels
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
}  # fmt: skip


def parts(proto: onnx.ModelProto) -> tuple[Model, Channels, list]:
    m = opened(proto)
    c = Channels(m)
    names = {x.weight: x.node for x in found_layers(m)[0]}
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


def built(text: str, shapes: dict) -> onnx.ModelProto:
    lines = "\n".join(line.replace(")  ", ")\n") for line in text.split("\n"))
    out = model(f"agraph {lines}", **{n: s for n, s in shapes.items()})
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
    size = [sum(t.ByteSize() for t in p.graph.initializer) for p in (m.proto, small)]
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
    assert parts(transformer())[2] == []  # residual stream and attention heads: nothing can go


def test_a_reshape_becomes_a_flattening() -> None:
    text = "(float[N, 3, 4, 4] x) => (float[N, 2] y) { a = Conv(x, w1)\n r = Reshape(a, s)\n y = Gemm(r, w2) }"
    proto = model(f"agraph {text}", w1=(4, 3, 1, 1), w2=(64, 2))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 64]), "s"))
    m, c, found = parts(proto)
    small = same_outputs(m, c, chosen(found, PruneOptions(0.5, "structured", multiple=1)))
    assert [n.op_type for n in small.graph.node] == ["Conv", "Flatten", "Gemm"]


def test_what_stays_is_a_multiple() -> None:
    text = "(float[2, 5] x) => (float[2, 3] y) { a = Gemm(x, w1)\n b = Relu(a)\n y = Gemm(b, w2) }"
    m, c, found = parts(model(f"agraph {text}", w1=(5, 40), w2=(40, 3)))
    for share, left in ((0.5, 24), (0.6, 16), (0.99, 8), (0.0, 40)):
        small = without(m, c, chosen(found, PruneOptions(share, "structured")))
        assert small.graph.initializer[0].dims[1] == left
    small = without(m, c, chosen(found, PruneOptions(0.5, "structured", scope="global", multiple=4)))
    assert small.graph.initializer[0].dims[1] == 20
