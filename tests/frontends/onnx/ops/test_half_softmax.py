"""A softmax of a half type over short rows: each operation rounds, in the reference and in native code, unless another
precision is asked for.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import dnnc
from dnnc.frontends.onnx import read_model
from dnnc.frontends.onnx.ops.half_softmax import LONGEST

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
NAMES = {BF16: "bfloat16", F16: "float16"}
TARGETS = ("reference", "llvm")


def softmax_model(dtype: Any, shape: str, axis: int = -1) -> Any:
    t = NAMES[dtype]
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 22]> g ({t}[{shape}] x) => ({t}[{shape}] y) '
        f"{{ y = Softmax <axis = {axis}> (x) }}"
    )


def draw(dtype: Any, *shape: int) -> Any:
    return (np.random.default_rng(3).standard_normal(shape) * 2).astype(dtype)


def stepwise(x: Any, axis: int = -1) -> Any:
    """Softmax by arrays of x's own dtype: NumPy rounds after each operation, and sums a row of bfloat16 one by one, of
    float16 in float32.
    """
    rows = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    e = np.exp(rows - rows.max(-1, keepdims=True))
    return np.moveaxis(e / e.sum(-1, keepdims=True), -1, axis)


def ops_of(model: Any) -> list[str]:
    return [n.op.name for n in read_model(model).graph.nodes()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape,axis", [((40, 6), -1), ((3, LONGEST, 4), 1), ((5, 1), 1)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_each_operation_rounds(target: str, shape: tuple[int, ...], axis: int, dtype: Any) -> None:
    x = draw(dtype, *shape)
    y = dnnc.compile(softmax_model(dtype, ", ".join(map(str, shape)), axis), target=target, cache=False)(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float64), stepwise(x, axis).astype(np.float64))


@pytest.mark.parametrize("target", TARGETS)
def test_operations_that_make_the_scores_round_too(target: str) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 22]>
        g (bfloat16[7, 8] q, bfloat16[8, 9] k, bfloat16[9] mask, bfloat16[7, 1] bias) => (bfloat16[7, 9] y) {
            s = MatMul(q, k)  a = Add(s, mask)  b = Add(a, bias)  y = Softmax(b) }
    """)
    rng = np.random.default_rng(5)
    q, k, mask, bias = (rng.standard_normal(s).astype(BF16) for s in ((7, 8), (8, 9), (9,), (7, 1)))
    scores = (q.astype(np.float64) @ k.astype(np.float64)).astype(BF16)
    want = stepwise(scores + mask + bias)
    y = dnnc.compile(model, target=target, cache=False)(q, k, mask, bias)
    np.testing.assert_array_equal(y.astype(np.float64), want.astype(np.float64))
    assert "rounded" in ops_of(model)


def test_a_row_of_infinities_is_nan_and_one_score_takes_all() -> None:
    x = np.array([[-np.inf] * 4, [-np.inf, 2, -np.inf, -np.inf]], BF16)
    y = dnnc.compile(softmax_model(BF16, "2, 4"), cache=False)(x).astype(np.float64)
    assert np.isnan(y[0]).all() and y[1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("shape", [f"4, {LONGEST + 1}", "4, n"])
def test_long_rows_keep_float32(shape: str) -> None:
    model = softmax_model(BF16, shape)
    assert ops_of(model) == ["softmax"]
    x = np.zeros((4, LONGEST + 1), BF16)
    y = dnnc.compile(model, cache=False)(x)
    np.testing.assert_array_equal(y, np.full_like(x, 1 / (LONGEST + 1)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_precision_that_is_asked_for_computes_in_float32(precision: str) -> None:
    x = draw(BF16, 40, 6)
    y = dnnc.compile(softmax_model(BF16, "40, 6"), precision=precision, cache=False)(x)
    want = stepwise(x.astype(np.float64)).astype(BF16)
    off = np.abs(y.astype(np.float64) - want.astype(np.float64)) > 0
    assert off.mean() < 0.02  # float32 is not float64: a tie may fall to the other side
    assert (stepwise(x) != want).mean() > 0.1
