"""Products of 8-bit floats where tensor cores multiply them: scales go behind the product.

    matmul(dequantize(x, s), dequantize(w, t))   ->   mul(matmul(x, w, out_dtype=f32), s * t)

x has one scale, constant weights one or one for each column. Sums are float32 (`wgmma_kernel.py` says how).
"""

from __future__ import annotations

import numpy as np

from dnnc.ir.dtype import FLOAT8, f32
from dnnc.ir.graph import Node, Value
from dnnc.ir.shapes import normalize_axis
from dnnc.passes.rewrite import Match, Rule


def multiply_float8(m: Match) -> Value:
    """matmul(dequantize(x), dequantize(w))   ->   mul(matmul(x, w), scales)"""
    return _scaled_product(m, m.root, False, 1.0)


def multiply_and_add_float8(m: Match) -> Value:
    """gemm(dequantize(x), dequantize(w), c)   ->   add(mul(matmul(x, w), alpha * scales), beta * c)"""
    n = m.root
    m.require(not n.attrs["trans_a"], "the first operand is transposed")
    y = _scaled_product(m, n, n.attrs["trans_b"], n.attrs["alpha"])
    c, beta = n.inputs[2] if len(n.inputs) > 2 else None, n.attrs["beta"]
    if c is None or beta == 0.0:
        return y
    return m.b.add(y, c if beta == 1.0 else m.b.mul(c, beta))  # type: ignore[no-any-return]


def _scaled_product(m: Match, n: Node, turned: bool, alpha: float) -> Value:
    """The product of a node's dequantized operands, the second one perhaps transposed, in float32."""
    m.require(n.output.type.dtype is f32, "it is {}", n.output.type)
    x, w = (m.node(m.operand(n, k), "dequantize_linear") for k in (0, 1))
    m.require(not x.attrs["block"] and m.operand(x, 1).type.size == 1, "the first operand has several scales")
    q, codes, scales = m.operand(x, 0), m.constant(m.operand(w, 0)), m.constant(m.operand(w, 1))
    m.require(q.type.rank >= 2 and codes.ndim == 2, "a vector, or several matrices")
    column = int(not turned)
    along = scales.size == 1 or (scales.ndim == 1 and normalize_axis(w.attrs["axis"], 2) == column)
    m.require(along and not w.attrs["block"], "the scales are not those of columns")
    for d, v in ((x, q), (w, m.operand(w, 0))):
        zero = d.inputs[2] if len(d.inputs) > 2 else None
        m.require(v.type.dtype in FLOAT8, "{} holds no 8-bit floats", v.name)
        m.require(zero is None or not m.constant(zero).astype(np.float32).any(), "there is a zero point")
    b = m.b
    y = b.matmul(q, b.constant(np.ascontiguousarray(codes.T)) if turned else w.inputs[0], out_dtype=f32)
    factors = scales.astype(np.float32) * np.float32(alpha)
    of_columns = b.constant(factors.reshape(-1) if factors.size > 1 else factors.reshape(()))
    scale = b.reshape(m.operand(x, 1), shape=())
    scale = scale if scale.type.dtype is f32 else b.cast(scale, to=f32)
    return b.mul(y, b.mul(of_columns, scale))  # type: ignore[no-any-return]


RULES = (
    Rule(multiply_float8, ("matmul",), exact=False),
    Rule(multiply_and_add_float8, ("gemm",), exact=False),
)
