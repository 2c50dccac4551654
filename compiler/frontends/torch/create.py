"""Tensors from nothing: fills, ranges, triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]


def filled(c: Call, value: Any) -> Any:
    """A tensor of one value, a number, a size or a tensor of one element."""
    if isinstance(value, Value):
        v = c.b.reshape(c.cast(value, c.dtype), shape=(1,) * len(c.shape))
        return c.b.expand(v, shape=c.shape)
    if isinstance(value, Expr):
        return c.b.expand(c.b.reshape(c.scalar(value, c.dtype), shape=(1,) * len(c.shape)), shape=c.shape)
    dtype = c.dtype
    plain = bool(value) if dtype is boolean else float(value) if dtype.is_float else int(value)
    return c.b.full(shape=c.shape, value=plain, dtype=dtype)


def full(c: Call) -> Any:
    return filled(c, c.args["fill_value"])


def fill(c: Call) -> Any:
    return filled(c, c.args["value"])


def scalar_tensor(c: Call) -> Any:
    return filled(c, c.args["s"])


def of(value: float) -> Converter:
    """Also `empty`: what was never written to is 0."""
    return lambda c: filled(c, value)


def arange(c: Call) -> Any:
    """start + step * 0, 1, ...; the number of elements is torch's."""
    start, step, dtype = c.get("start", 0), c.get("step", 1), c.dtype
    y = c.b.iota(shape=c.shape, axis=0, dtype=dtype if dtype.is_float else i64)
    if step != 1:
        y = c.b.mul(y, c.scalar(step, y.type.dtype))
    if isinstance(start, Expr) or start != 0:
        y = c.b.add(y, c.scalar(start, y.type.dtype))
    return c.cast(y, dtype)


def eye(c: Call) -> Any:
    return c.b.eye(rows=c.shape[0], columns=c.shape[1], dtype=c.dtype)


def triangle(upper: bool) -> Converter:
    return lambda c: c.b.trilu(c.x(), k=c.integer("diagonal", 0), upper=upper)


CREATE: dict[str, Converter] = {
    "full": full,
    "full_like": full,
    "fill": fill,
    "new_full": full,
    "scalar_tensor": scalar_tensor,
    **{
        n: of(0)
        for n in (
            "zeros zeros_like new_zeros empty empty_like empty_strided empty_permuted new_empty new_empty_strided"
        ).split()
    },
    **{n: of(1) for n in "ones ones_like new_ones".split()},
    "arange": arange,
    "eye": eye,
    "tril": triangle(False),
    "triu": triangle(True),
}
