"""Products of 8-bit floats: dequantized operands become codes and scales where tensor cores multiply them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.target import GpuTarget
from dnnc.ir.dtype import BY_NAME, f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.types import tensor
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.quantized import quantized

H200 = GpuTarget()
RNG = np.random.default_rng(0)


def qdq(form: str, zero: float = 0.0) -> Graph:
    g, t = Graph("g"), BY_NAME["f8e4m3fn"]
    b = Builder(g)
    x: Any = g.add_input("x", tensor(f32, 32, 256))
    s, z = b.constant(np.float32(0.02)), b.constant(np.asarray(zero).astype(t.numpy))
    x = b.dequantize_linear(b.quantize_linear(x, s, z, dtype=t), s, z)
    turned = form == "gemm"
    codes = b.constant(RNG.standard_normal((96, 256) if turned else (256, 96)).astype(t.numpy))
    w = b.dequantize_linear(codes, b.constant(RNG.random(96, np.float32)), axis=1 - turned)
    c = b.constant(RNG.standard_normal(96).astype(np.float32))
    g.outputs = [b.gemm(x, w, c, trans_b=True, alpha=0.5) if turned else b.matmul(x, w)]
    return g


@pytest.mark.parametrize("form", ["matmul", "gemm"])
def test_qdq_models_are_products_of_codes(form: str) -> None:
    g, x = qdq(form), [RNG.standard_normal((32, 256)).astype(np.float32)]
    want = run(g, x, "float64")
    assert quantized(g, PassContext(facts(H200, "default")))
    (n,) = [n for n in g.nodes() if n.op.name == "matmul"]
    assert [v.type.dtype.name for v in n.inputs] == ["f8e4m3fn"] * 2
    np.testing.assert_allclose(run(g, x, "float64")[0], want[0], rtol=1e-6, atol=1e-6)


def test_zero_points_and_other_targets_keep_floats() -> None:
    assert not quantized(qdq("matmul", 1.0), PassContext(facts(H200, "default")))
    assert not quantized(qdq("matmul"), PassContext(facts(GpuTarget("sm_80"), "default")))
