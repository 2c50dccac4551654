"""Reductions, scans, sorting, and the two normalizations by exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call, wide
from dnnc.ir.dtype import boolean, i8, i64
from dnnc.ir.graph import Value
from dnnc.ir.types import product

Converter = Callable[[Call], Any]


def reduced(c: Call, op: str, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    """A reduction; of a tensor without axes it is the tensor."""
    if x.type.rank == 0:
        return c.b.identity(x)  # type: ignore[no-any-return]
    made: Value = c.b.op(op, x, axes=axes, keepdims=keep)
    return made


def total(op: str) -> Converter:
    """sum, prod, mean: in the type of the result."""
    return lambda c: reduced(c, op, c.cast(c.x(), c.dtype), c.axes(), c.flag("keepdim"))


def extreme(op: str) -> Converter:
    """amax, amin; max and min of all elements."""

    def convert(c: Call) -> Any:
        x = c.x()
        if x.type.dtype is boolean:
            return c.cast(reduced(c, op, c.cast(x, i8), c.axes(), c.flag("keepdim")), boolean)
        return reduced(c, op, x, c.axes(), c.flag("keepdim"))

    return convert


def extreme_at(op: str, where: str) -> Converter:
    """max.dim, min.dim: the values and where they stand; without an axis the values alone."""

    def convert(c: Call) -> Any:
        if "dim" not in c.args:
            return extreme(op)(c)
        x, axis, keep = c.x(), c.axis(), c.flag("keepdim")
        at = position(c, where, x, axis, keep) if c.wants(1) else None
        return (extreme(op)(c) if c.wants(0) else None), at

    return convert


def position(c: Call, op: str, x: Value, axis: int, keep: bool) -> Value:
    """Where the largest or smallest stands; a NaN is larger and smaller than all others."""
    b = c.b
    if x.type.rank == 0:
        return c.scalar(0, i64)
    if x.type.dtype is boolean:
        x = c.cast(x, i8)
    at: Value = b.op(op, x, axis=axis, keepdims=keep)
    if not x.type.dtype.is_float:
        return at
    nan = c.cast(b.isnan(x), i8)
    first, some = b.argmax(nan, axis=axis, keepdims=keep), b.reduce_max(nan, axes=(axis,), keepdims=keep)
    made: Value = b.where(c.cast(some, boolean), first, at)
    return made


def arg(op: str) -> Converter:
    def convert(c: Call) -> Any:
        x = c.x()
        if c.get("dim") is not None:
            return position(c, op, x, c.axis(), c.flag("keepdim"))
        flat = c.b.reshape(x, shape=(product(x.type.shape),)) if x.type.rank != 1 else x
        return c.b.reshape(position(c, op, flat, 0, False), shape=c.shape)

    return convert


def truth(op: str) -> Converter:
    """any, all"""

    def convert(c: Call) -> Any:
        x = c.cast(c.cast(c.x(), boolean), i8)
        return c.cast(reduced(c, op, x, c.axes(), c.flag("keepdim")), c.dtype)

    return convert


def spread(c: Call) -> Value:
    """Variance: squared distances from the mean over their number less the correction (1 by default)."""
    b, axes, keep = c.b, c.axes(), c.flag("keepdim")
    correction = c.get("correction", 1) if "correction" in c.args else int(c.get("unbiased", True))
    x = c.cast(c.x(), wide(c.x().type.dtype))
    off = b.sub(x, reduced(c, "reduce_mean", x, axes, True))
    if correction == 0:
        return reduced(c, "reduce_mean", b.mul(off, off), axes, keep)
    n = product([x.type.shape[a] for a in axes])
    count = b.max(b.sub(c.scalar(n, x.type.dtype), c.scalar(correction, x.type.dtype)), c.scalar(0.0, x.type.dtype))
    made: Value = b.div(reduced(c, "reduce_sum", b.mul(off, off), axes, keep), count)
    return made


def variance(c: Call) -> Any:
    return c.cast(spread(c), c.dtype)


def variance_and_mean(c: Call) -> Any:
    return c.cast(spread(c), c.dtype), reduced(c, "reduce_mean", c.x(), c.axes(), c.flag("keepdim"))


def deviation(c: Call) -> Any:
    return c.cast(c.b.sqrt(spread(c)), c.dtype)


def log_sum_exp(c: Call) -> Any:
    return reduced(c, "reduce_log_sum_exp", c.cast(c.x(), c.dtype), c.axes(), c.flag("keepdim"))


def vector_norm(c: Call) -> Any:
    """The sum of p-th powers of magnitudes, and its p-th root."""
    x, axes, keep, p = c.cast(c.x(), c.dtype), c.axes(), c.flag("keepdim"), c.number("ord", 2)
    b, dtype = c.b, c.dtype
    if p in (math.inf, -math.inf):
        return reduced(c, "reduce_max" if p > 0 else "reduce_min", b.abs(x), axes, keep)
    if p in (1, 2) and x.type.rank:
        return b.op("reduce_l1" if p == 1 else "reduce_l2", x, axes=axes, keepdims=keep)
    if p == 0:
        return reduced(c, "reduce_sum", c.cast(b.not_equal(x, c.scalar(0.0, dtype)), dtype), axes, keep)
    powers = reduced(c, "reduce_sum", b.pow(b.abs(x), c.scalar(float(p), dtype)), axes, keep)
    return b.pow(powers, c.scalar(1 / p, dtype))


def distances(c: Call) -> Any:
    """The norm of the difference of each row of one operand and each row of the other."""
    b, p, (x, y) = c.b, c.number("p", 2), (c.x("x1"), c.x("x2"))
    off = b.abs(b.sub(b.unsqueeze(x, axes=(x.type.rank - 1,)), b.unsqueeze(y, axes=(y.type.rank - 2,))))
    if p in (1, 2):
        return b.op("reduce_l1" if p == 1 else "reduce_l2", off, axes=(-1,))
    if p == math.inf:
        return b.reduce_max(off, axes=(-1,))
    if p == 0:
        return b.reduce_sum(c.cast(b.not_equal(off, c.scalar(0.0, c.dtype)), c.dtype), axes=(-1,))
    return b.pow(b.reduce_sum(b.pow(off, c.scalar(float(p), c.dtype)), axes=(-1,)), c.scalar(1 / p, c.dtype))


def softmax(op: str) -> Converter:
    def convert(c: Call) -> Any:
        x = c.cast(c.x(), c.dtype)
        return (
            c.b.op(op, x, axis=c.axis())
            if x.type.rank
            else c.b.reshape(c.b.op(op, c.b.reshape(x, shape=(1,)), axis=0), shape=())
        )

    return convert


def safe_softmax(c: Call) -> Any:
    """Rows of -inf alone become 0."""
    x = c.cast(c.x(), c.dtype)
    if not x.type.rank:
        return softmax("softmax")(c)
    none = c.b.equal(c.b.reduce_max(x, axes=(c.axis(),), keepdims=True), c.scalar(-math.inf, c.dtype))
    return c.b.where(none, c.scalar(0.0, c.dtype), c.b.softmax(x, axis=c.axis()))


def running(op: str) -> Converter:
    def convert(c: Call) -> Any:
        x = c.cast(c.x(), c.dtype)
        return c.b.op(op, x, axis=c.axis()) if x.type.rank else c.b.identity(x)

    return convert


def sort(c: Call) -> Any:
    """Stable, as torch's need not be."""
    if c.x().type.rank == 0:
        return c.b.identity(c.x()), c.scalar(0, i64)
    return c.b.sort(c.x(), axis=c.axis("dim", default=-1), descending=c.flag("descending"))


def topk(c: Call) -> Any:
    if c.x().type.rank == 0:
        return c.b.identity(c.x()), c.scalar(0, i64)
    keep = c.args["k"]
    return c.b.sort(c.x(), axis=c.axis("dim", default=-1), descending=bool(c.get("largest", True)), keep=keep)


REDUCE: dict[str, Converter] = {
    "sum": total("reduce_sum"),
    "prod": total("reduce_prod"),
    "mean": total("reduce_mean"),
    "amax": extreme("reduce_max"),
    "amin": extreme("reduce_min"),
    "max": extreme_at("reduce_max", "argmax"),
    "min": extreme_at("reduce_min", "argmin"),
    "argmax": arg("argmax"),
    "argmin": arg("argmin"),
    "any": truth("reduce_max"),
    "all": truth("reduce_min"),
    "var": variance,
    "std": deviation,
    "var_mean": variance_and_mean,
    "logsumexp": log_sum_exp,
    "_cdist_forward": distances,
    "linalg_vector_norm": vector_norm,
    "_softmax": softmax("softmax"),
    "_safe_softmax": safe_softmax,
    "_log_softmax": softmax("log_softmax"),
    "cumsum": running("cumsum"),
    "cumprod": running("cumprod"),
    "sort": sort,
    "topk": topk,
}
