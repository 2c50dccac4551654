"""Random quantised models: a few in every test run, and what makes and judges them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dnnc.frontends.onnx import read
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from support.fuzz import check_quantized, check_quantized_seed
from support.random_quantized import first_wrong, random_quantized

FORMS = (
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "QLinearAdd", "Conv", "Gemm", "MatMul", "Concat", "MaxPool", "AveragePool", "Resize",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(8))
def test_random_quantised_models(seed: int, tmp_path: Any) -> None:
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
