"""Converters of operators that look at numbers as they are stored: their order and their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call, number
from dnnc.ir.bounds import bounds
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import const
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
COUNTED = 1024  # elements up to which a row of symbolic length is sorted by counting


def top_k(c: Call) -> Any:
    """Return the k largest or smallest along an axis, always sorted; opset 1 has k as an attribute."""
    x = c.x()
    axis = normalize_axis(c.integer("axis", -1), x.type.rank)
    (k,) = c.dims(1, "k") if c.opset >= 10 else (c.integer("k", -1),)
    n: Dim = x.type.shape[axis]
    if (bounds(const(n))[1] or COUNTED + 1) > COUNTED:
        n, k = number(n, "the axis of TopK"), number(k, "k")
    if isinstance(k, int) and (k < 0 or (isinstance(n, int) and k > n)):
        raise ModelError(f"k is {k}; axis {axis} of {x.type} has {n} elements")
    return c.b.sort(x, axis=axis, descending=c.flag("largest", True), keep=k)


def bit_cast(c: Call) -> Any:
    x, to = c.x(), c.dtype("to")
    if "c" in (x.type.dtype.kind, to.kind) and to is not x.type.dtype:
        raise UnsupportedError(f"BitCast from {x.type.dtype} to {to}")
    return x if to is x.type.dtype else c.b.bit_cast(x, to=to)


SORT: dict[str, Converter] = {"TopK": top_k, "BitCast": bit_cast}
