"""Operators of com.microsoft with weights of 4 and 8 bits, compiled, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from against import feeds, node_model, run_dnnc, run_ort

RNG = np.random.default_rng(7)


def f(*shape: int) -> Any:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def q(*shape: int, dtype: Any = np.uint8) -> Any:
    info = np.iinfo(dtype)
    return np.asarray(RNG.integers(info.min, info.max, shape, endpoint=True)).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    "n, k, block, constants", [(8, 64, 16, (1, 2)), (96, 64, 32, (1, 2)), (3, 15, 16, ()), (3, 15, 16, (1, 2))]
)
def test_weights_in_fp4_and_nf4(kind: int, n: int, k: int, block: int, constants: tuple[int, ...]) -> None:
    inputs = [f(2, k), q(-(-n * k // 2)), np.abs(f(-(-n * k // block)))]
    model = node_model("MatMulBnb4", inputs, constants=constants, K=k, N=n, block_size=block, quant_type=kind)
    given = feeds([None if i in constants else x for i, x in enumerate(inputs)])
    np.testing.assert_allclose(run_dnnc(model, given)[0], run_ort(model, given)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_quantized_lstm(direction: str) -> None:
    d, hidden, width = 1 + (direction == "bidirectional"), 6, 5
    # seven bits: on CPUs without dot products of bytes ONNX Runtime adds pairs of products in 16 bits, which saturate
    w, r = (q(d, rows, 4 * hidden, dtype=np.int8) // 2 for rows in (width, hidden))
    scales = [
        np.full(d, 0.01, np.float32),
        np.full(d, 3, np.int8),
        np.full(d, 0.012, np.float32),
        np.full(d, -2, np.int8),
    ]
    inputs = [f(7, 1, width), w, r, f(d, 8 * hidden), None, f(d, 1, hidden), f(d, 1, hidden), None, *scales]
    constants = (1, 2, 3, 8, 9, 10, 11)
    model = node_model(
        "DynamicQuantizeLSTM", inputs, outputs=3, constants=constants, direction=direction, hidden_size=hidden
    )
    feed = feeds(inputs, constants)
    for got, want in zip(run_dnnc(model, feed), run_ort(model, feed), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
