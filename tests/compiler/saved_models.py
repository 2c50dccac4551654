"""Models that tests save and load, and inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.parser

NET = """def net(x: f32[2, 3, 12, 12], i: i64[4], *, w: f32[24, 3, 3, 3], b: f32[24], v: f32[24, 24, 3, 3],
    m: f32[24, 33], e: f32[9, 33]):
    a = relu(conv(x, w, b, pads=(1, 1, 1, 1)))
    c = add(conv(a, v, pads=(1, 1, 1, 1)), a)
    h = gelu(matmul(reduce_mean(max_pool(c, kernel=(2, 2), strides=(2, 2)), axes=(2, 3)), m))
    t = gather(e, i, axis=0)
    return softmax(matmul(h, transpose(t, perm=(1, 0)))), argmax(h, axis=1), cast(cumsum(t, axis=1), to=f16)"""
ROWS = (
    "def rows(x: f32[N, 4], y: f32[2*N, 4], *, w: f32[4, 40]):\n"
    "    return softmax(matmul(concat(x, y, axis=0), w)), reduce_sum(y, axes=(1,))"
)
MODELS = {
    "several outputs": NET,
    "views": "def g(x: f32[2, 3]):\n    r = relu(x)\n    return reshape(r, shape=(3, 2)), x, reshape(x, shape=(6,)), "
    "r, r",
    "constants only": "def g(*, c: f32[3, 40], d: f32[2] = [1.0, 2.0]):\n    return relu(c), d",
    "nothing to compute": "def g(x: i64[0, 3]):\n    return x",
    "halves": "def g(x: f16[5, 24], y: bf16[5, 24], *, wh: f16[24, 32], wb: bf16[24, 32]):\n    return matmul(x, wh), "
    "add(matmul(y, wb), 1.0)",
    "integers": "def g(x: i8[5, 24], b: bool[5, 24], *, wi: i8[24, 24]):\n    return where(b, x, neg(x)), "
    "matmul(cast(x, to=i32), cast(wi, to=i32)), logical_not(b)",
}
RNG = np.random.default_rng(0)
CONSTANTS: dict[str, Any] = {
    "c": RNG.standard_normal((3, 40), np.float32),
    "wh": RNG.standard_normal((24, 32)).astype(np.float16),
    "wb": RNG.standard_normal((24, 32)).astype(ml_dtypes.bfloat16),
    "wi": RNG.integers(-9, 9, (24, 24)).astype(np.int8),
}


def arrays(graph: Any, dims: dict[str, int] | None = None) -> list[Any]:
    rng = np.random.default_rng(0)
    out = []
    for v in graph.inputs:
        shape = [d if isinstance(d, int) else eval(str(d), dict(dims or {})) for d in v.type.shape]
        out.append(
            (rng.standard_normal(shape) * 2 if v.type.dtype.is_float else rng.integers(0, 2, shape)).astype(
                v.type.dtype.numpy
            )
        )
    return out


def linear(rows: Any, external: Path | None = None) -> onnx.ModelProto:
    """Rows times a matrix that is large enough to lie outside of the protobuf."""
    w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    h = onnx.helper
    t = onnx.numpy_helper.from_array(w, "w")
    if external is not None:
        (external / "w.bin").write_bytes(t.raw_data)
        t.ClearField("raw_data")
        t.data_location = onnx.TensorProto.EXTERNAL
        t.external_data.add(key="location", value="w.bin")
    nodes = [h.make_node("MatMul", ["the x", "w"], ["h"], "first"), h.make_node("Relu", ["h"], ["the y"], "second")]
    f32 = onnx.TensorProto.FLOAT
    g = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("the x", f32, [rows, 16])],
        [h.make_tensor_value_info("the y", f32, [rows, 32])],
        [t],
    )
    return h.make_model(g, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
