"""Small ONNX models with seeded weights, as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Array = np.ndarray[Any, Any]
RESIDUAL = """
  agraph (float[N, 3, 8, 8] x) => (float[N, 5] logits) {
    a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
    r = Relu(a)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
    c = Conv<pads = [1, 1, 1, 1], group = 8>(p, w2, b2)
    s = Conv(p, w3)
    t = Add(c, s)
    u = Relu(t)
    m = GlobalAveragePool(u)
    f = Flatten(m)
    logits = Gemm(f, w4, b4)
  }
"""
TRANSFORMER = """
  agraph (float[N, 6, 16] x) => (float[N, 6, 16] y) {
    n = LayerNormalization<axis = -1>(x, g, h)
    q = MatMul(n, wq)
    k = MatMul(n, wk)
    kt = Transpose<perm = [0, 2, 1]>(k)
    s = MatMul(q, kt)
    z = Mul(s, fourth)
    p = Softmax<axis = -1>(z)
    v = MatMul(n, wv)
    o = MatMul(p, v)
    d = MatMul(o, wo)
    e = Add(d, bo)
    y = Add(e, x)
  }
"""


def model(text: str, opset: int = 21, seed: int = 0, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A model whose weights are normal numbers of these shapes, scaled by the terms of a sum."""
    rng = np.random.default_rng(seed)
    out = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>{text}')
    for name, shape in shapes.items():
        terms = max(int(np.prod(shape[1:])), 1) if len(shape) > 2 else shape[0] if len(shape) == 2 else 1
        array = (rng.standard_normal(shape) / np.sqrt(terms)).astype(np.float32)
        out.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    return out


def residual() -> onnx.ModelProto:
    """Convolutions, one of them depthwise, with a residual, pools and a product."""
    return model(RESIDUAL, w1=(8, 3, 3, 3), b1=(8,), w2=(8, 1, 3, 3), b2=(8,), w3=(8, 8, 1, 1), w4=(8, 5), b4=(5,))


def transformer(outliers: float = 1.0) -> onnx.ModelProto:
    """A block of attention behind a layer normalization; two channels of it are larger, and their weights smaller."""
    out = model(TRANSFORMER, g=(16,), h=(16,), wq=(16, 16), wk=(16, 16), wv=(16, 16), wo=(16, 16), bo=(16,))
    weights = {t.name: t for t in out.graph.initializer}
    large = np.ones(16, np.float32)
    large[[3, 7]] = outliers
    weights["g"].CopyFrom(numpy_helper.from_array(large, "g"))
    for name in ("wq", "wk", "wv"):
        w = numpy_helper.to_array(weights[name])
        weights[name].CopyFrom(numpy_helper.from_array(w / large[:, None], name))
    out.graph.initializer.append(numpy_helper.from_array(np.float32(0.25), "fourth"))
    return out


def images(count: int = 16, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)
