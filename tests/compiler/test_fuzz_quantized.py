"""Random quantized models: a few in every test run, and what makes and judges them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dnnc.frontends.onnx import read
from dnnc.ir.dtype import i32, u8
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.types import TensorType
from support.fuzz import check_quantized, check_quantized_seed
from support.random_quantized import first_wrong, random_quantized

FORMS = (
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "QLinearAdd", "Conv", "Gemm", "MatMul", "Concat", "MaxPool", "AveragePool", "Resize",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(8))
def test_random_quantized_models(seed: int, tmp_path: Any) -> None:
    failure = check_quantized_seed(seed, 5, "llvm", tmp_path)
    assert failure is None, f"seed {seed}: {failure}"


@pytest.mark.slow
def test_models_have_all_forms_and_equal_seeds_make_equal_ones() -> None:
    ops: Counter[str] = Counter()
    types: Counter[Any] = Counter()
    for seed in range(120):
        model, arrays, exact = random_quantized(seed)
        again, same, _ = random_quantized(seed)
        assert model == again and all(map(np.array_equal, arrays, same))
        ops.update(n.op_type for n in model.graph.node)
        if exact:  # float32 makes the same codes as float64
            g = read(model)
            want = run(g, arrays, "float64")
            assert all(map(np.array_equal, run(g, arrays, "as-is"), want)), seed
            types.update(a.dtype.name for a in want)
    assert min(ops[f] for f in FORMS) >= 3, ops
    assert {"uint8", "int8"} < set(types)


def test_wrong_codes_are_found() -> None:
    g = parse("def g(x: u8[40]):\n    return max(x, x)")
    x = np.arange(40, dtype=np.uint8)
    near, far = x.copy(), x.copy()
    near[3] += 1
    far[3] += 3
    assert first_wrong(g, [x], [x], exact=True) is None is first_wrong(g, [x], [near], exact=False)
    for got, exact in ((near, True), (far, False), (x + 1, False), (x[:39], False)):
        assert (first_wrong(g, [x], [got], exact) or "").startswith("wrong result: output")


@pytest.mark.slow
def test_a_convolution_of_bytes_with_one_output(tmp_path: Any) -> None:
    """Its lanes go over inputs, and integers are summed."""
    g = parse("def g(x: u8[2, 19, 4, 6], w: i8[1, 19, 2, 2]):\n    return conv(cast(x, to=i32), cast(w, to=i32))")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (2, 19, 4, 6)).astype("u1"), rng.integers(-128, 128, (1, 19, 2, 2)).astype("i1")]
    assert check_quantized(g, arrays, {"target": "llvm", "threads": 1}, tmp_path, exact=True) is None


@pytest.mark.slow
def test_bytes_of_a_row_that_are_apart_are_copied_first(tmp_path: Any) -> None:
    """A product of bytes takes four neighbours of a row at once."""
    g = Graph("g")
    b = Builder(g)
    x = g.add_input("x", TensorType(u8, (3, 8, 3)))
    w = b.constant(np.random.default_rng(1).integers(-128, 128, (8, 33)).astype("i1"))
    g.outputs = [b.matmul(b.cast(b.transpose(x, perm=(0, 2, 1)), to=i32), b.cast(w, to=i32))]
    arrays = [np.random.default_rng(0).integers(0, 256, (3, 8, 3)).astype("u1")]
    assert check_quantized(g, arrays, {"target": "llvm", "threads": 1}, tmp_path, exact=True) is None


@pytest.mark.slow
def test_tiles_of_a_strided_convolution_of_every_other_column(tmp_path: Any) -> None:
    """2 * ((n + 1) // 4) <= (n + 1) // 2, behind what the tiles of an open size add to it."""
    g = parse(
        "def g(x: f32[2, 8, 14, n], w: f32[16, 8, 5, 1]):\n    return quantize_linear(conv(x, w, strides=(2, 2)), 0.25)"
    )
    b = Builder(g)
    q, rng = g.outputs[0], np.random.default_rng(0)
    w = b.constant(rng.integers(-128, 128, (32, 8, 5, 2)).astype("i1"))
    codes = b.sub(b.cast(q, to=i32), b.constant(np.int32(3)))
    g.outputs = [b.conv(codes, b.cast(w, to=i32), strides=(2, 2), pads=(1, 0, 0, 2), group=2)]
    arrays = [rng.standard_normal(s).astype("f4") for s in ((2, 8, 14, 9), (16, 8, 5, 1))]
    assert check_quantized(g, arrays, {"target": "llvm -mcpu=haswell", "threads": 2}, tmp_path, exact=False) is None
