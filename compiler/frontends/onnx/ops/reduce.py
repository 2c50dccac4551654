"""Converters of reductions, running sums and the softmax family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.ops.half_softmax import is_rounded, rounded_softmax
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import product

Converter = Callable[[Call], Any]
FLOAT_ONLY = frozenset(("reduce_l2", "reduce_log_sum", "reduce_log_sum_exp"))


def reduction(op: str) -> Converter:
    """Axes are an attribute, or input 1 (ReduceSum since opset 13, the others since 18); none means all."""

    def convert(c: Call) -> Value:
        axes = c.ints_in(1, "axes") if c.has(1) else c.integers("axes")
        if not axes:
            # without axes and with noop_with_empty_axes nothing is combined, but squares and logarithms are still taken
            axes = () if c.flag("noop_with_empty_axes") else None
        x = c.x()
        dtype = x.type.dtype
        wide = c.cast(x, f32) if op in FLOAT_ONLY and dtype.is_int else x
        return c.cast(c.b.op(op, wide, axes=axes, keepdims=c.flag("keepdims", True)), dtype)

    return convert


def extreme_index(op: str) -> Converter:
    def convert(c: Call) -> Any:
        last = c.flag("select_last_index")
        return c.b.op(op, c.x(), axis=c.integer("axis", 0), keepdims=c.flag("keepdims", True), select_last=last)

    return convert


def running(op: str) -> Converter:
    def convert(c: Call) -> Any:
        (axis,) = c.ints_in(1, "axis")
        return c.b.op(op, c.x(), axis=axis, exclusive=c.flag("exclusive"), reverse=c.flag("reverse"))

    return convert


def _softmax(c: Call, op: str, x: Value, axis: int) -> Any:
    return rounded_softmax(c, x, axis) if op == "softmax" and is_rounded(x, axis) else c.b.op(op, x, axis=axis)


def softmax(op: str) -> Converter:
    """Along one axis since opset 13; before, over all axes from `axis` on, as one row."""

    def convert(c: Call) -> Any:
        x = c.x()
        rank = x.type.rank
        axis = normalize_axis(c.integer("axis", -1 if c.opset >= 13 else 1), rank)
        if c.opset >= 13 or all(d == 1 for d in x.type.shape[axis + 1 :]):
            return _softmax(c, op, x, axis)
        rows = c.b.reshape(x, shape=(product(x.type.shape[:axis]), product(x.type.shape[axis:])))
        return c.b.reshape(_softmax(c, op, rows, 1), shape=x.type.shape)

    return convert


def hardmax(c: Call) -> Any:
    """1 at the first largest element of a row, 0 elsewhere."""
    x = c.x()
    axis = normalize_axis(c.integer("axis", -1 if c.opset >= 13 else 1), x.type.rank)
    rows = x
    if c.opset < 13:
        rows = c.b.reshape(x, shape=(product(x.type.shape[:axis]), product(x.type.shape[axis:])))
        axis = 1
    best = c.b.argmax(rows, axis=axis, keepdims=False)
    hot = c.b.one_hot(best, c.const([0, 1], x.type.dtype), depth=rows.type.shape[axis], axis=axis)
    return hot if rows is x else c.b.reshape(hot, shape=x.type.shape)


REDUCE: dict[str, Converter] = {
    "ReduceSum": reduction("reduce_sum"),
    "ReduceMean": reduction("reduce_mean"),
    "ReduceProd": reduction("reduce_prod"),
    "ReduceMax": reduction("reduce_max"),
    "ReduceMin": reduction("reduce_min"),
    "ReduceL1": reduction("reduce_l1"),
    "ReduceL2": reduction("reduce_l2"),
    "ReduceSumSquare": reduction("reduce_sum_square"),
    "ReduceLogSum": reduction("reduce_log_sum"),
    "ReduceLogSumExp": reduction("reduce_log_sum_exp"),
    "ArgMax": extreme_index("argmax"),
    "ArgMin": extreme_index("argmin"),
    "CumSum": running("cumsum"),
    "CumProd": running("cumprod"),
    "Softmax": softmax("softmax"),
    "LogSoftmax": softmax("log_softmax"),
    "Hardmax": hardmax,
}
