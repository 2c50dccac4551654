"""Converters of operators that choose elements by index or make tensors from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import KNOWN_LIMIT, Call, Item, of_array, of_contents, of_value
from dnnc.frontends.onnx.reader import sparse
from dnnc.frontends.onnx.sizes import computed_range, sizes
from dnnc.ir.dtype import f32, from_numpy
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import Expr, const, maximum, unwrap
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
SMALL = 1 << 12  # elements up to which a tensor of one value becomes a constant


# --- gather and scatter -----------------------------------------------------------------------------------------------


def gather(c: Call) -> Any:
    return c.b.gather(c.x(0), c.x(1), axis=c.integer("axis", 0))


def gather_elements(c: Call) -> Any:
    return c.b.gather_elements(c.x(0), c.x(1), axis=c.integer("axis", 0))


def gather_nd(c: Call) -> Any:
    return c.b.gather_nd(c.x(0), c.x(1), batch_dims=c.integer("batch_dims", 0))


def scatter_elements(c: Call) -> Any:
    reduction = c.text("reduction", "none")
    return c.b.scatter_elements(c.x(0), c.x(1), c.x(2), axis=c.integer("axis", 0), reduction=reduction)


def scatter_nd(c: Call) -> Any:
    return c.b.scatter_nd(c.x(0), c.x(1), c.x(2), reduction=c.text("reduction", "none"))


def one_hot(c: Call) -> Any:
    """Inputs are indices, depth, and the values [off, on]; indices out of range give off everywhere."""
    (depth,) = sizes(c, 1, "depth", True) if c.type_of(1).dtype.is_int else (int(c.scalar(1, "depth")),)
    return c.b.one_hot(c.x(0), c.x(2), depth=depth, axis=c.integer("axis", -1))


def trilu(c: Call) -> Any:
    (k,) = c.ints_in(1, "k") if c.has(1) else (0,)
    return c.b.trilu(c.x(), k=k, upper=c.flag("upper", True))


def reverse_sequence(c: Call) -> Any:
    return c.b.reverse_sequence(
        c.x(0), c.x(1), batch_axis=c.integer("batch_axis", 1), time_axis=c.integer("time_axis", 0)
    )


# --- from nothing -----------------------------------------------------------------------------------------------------


def constant(c: Call) -> Item:
    """The attribute that is there says the kind: a tensor, a sparse tensor, or numbers."""
    kinds: dict[str, Any] = {
        "value_float": np.float32,
        "value_int": np.int64,
        "value_floats": np.float32,
        "value_ints": np.int64,
    }
    given = [k for k in ("value", "sparse_value", "value_string", "value_strings", *kinds) if k in c.attrs]
    if len(given) != 1:
        raise ModelError(f"exactly one attribute must give the value, there are {given}")
    v = c.attrs[given[0]]
    if given[0] == "value":
        return of_array(v)
    if given[0] == "sparse_value":
        return of_array(sparse(v, None))
    if given[0] in kinds:
        return of_array(np.array(v, kinds[given[0]]))
    return of_array(np.array(v, object))


def filled(c: Call, shape: tuple[Dim, ...], value: Any, dtype: Any) -> Item:
    """A tensor of one value: dims where it is tiny, a constant where it is small, else an op."""
    sizes = [d for d in shape if isinstance(d, int)]
    if len(sizes) == len(shape) and math.prod(sizes) <= SMALL:
        return of_array(np.full(sizes, value, dtype.numpy))
    return of_value(c.b.full(shape=shape, value=value.item() if hasattr(value, "item") else value, dtype=dtype))


def constant_of_shape(c: Call) -> Item:
    v = c.tensor("value")
    shape = sizes(c, 0, "the shape", True)
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ModelError(f"the shape {list(shape)} has a negative dim")
    if v is not None and v.size != 1:
        raise ModelError(f"attribute value must hold one element, it is of shape {list(v.shape)}")
    return filled(c, shape, 0.0 if v is None else v.reshape(-1)[0], f32 if v is None else from_numpy(v.dtype))


MOST_CONSTANT = 1 << 30  # elements of a range that is made while reading


def range_(c: Call) -> Item:
    """start, start + delta, ... below limit; symbolic bounds give a symbolic size."""
    if all(c.item(i).constant for i in range(3)):
        start, limit, delta = (c.array(i).reshape(-1)[0] for i in range(3))
        if delta == 0:
            raise ModelError("delta is 0")
        n = max(int(np.ceil((np.asarray(limit, np.float64) - start) / delta)), 0)
        if n > MOST_CONSTANT:
            raise ModelError(
                f"the range from {start} to {limit} by {delta} has {n} elements; a constant can have {MOST_CONSTANT}"
            )
        return of_array(
            (start + np.arange(n, dtype=start.dtype if start.dtype.kind == "f" else np.int64) * delta).astype(
                start.dtype
            )
        )
    if any(c.item(i).contents is None and not c.item(i).constant for i in range(3)) and not c.env[0].by_contents:
        return of_value(computed_range(c))
    if not c.type_of(0).dtype.is_int:
        c.array(next(i for i in range(3) if not c.item(i).constant), "the bounds of a range of floats")
    (first,), (last,), (step,) = (c.dims(i, w) for i, w in enumerate(("start", "limit", "delta")))
    if not isinstance(step, int) or step == 0:
        raise UnsupportedError(f"delta must be a number other than 0, it is {step!r}")
    room = const(last) - first if step > 0 else const(first) - last
    return _progression(c, unwrap((maximum(room, 0) + (abs(step) - 1)) // abs(step)), first, step)


def _progression(c: Call, n: Dim, first: Dim, step: int) -> Item:
    if isinstance(n, int) and n <= KNOWN_LIMIT:
        return of_contents([unwrap(const(first) + k * step) for k in range(n)], c.type_of(0).dtype)
    dtype = c.type_of(0).dtype
    y = c.b.iota(shape=(n,), axis=0, dtype=dtype)
    y = y if step == 1 else c.b.mul(y, step)
    if isinstance(first, Expr):
        return of_value(c.b.add(y, c.b.full(shape=(), value=first, dtype=dtype)))
    return of_value(y if first == 0 else c.b.add(y, first))


def eye_like(c: Call) -> Any:
    x = c.type_of(0)
    if x.rank != 2:
        raise ModelError(f"EyeLike takes a matrix, got {x}")
    return c.b.eye(rows=x.shape[0], columns=x.shape[1], k=c.integer("k", 0), dtype=c.dtype("dtype", x.dtype))


INDEX: dict[str, Converter] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "Trilu": trilu,
    "ReverseSequence": reverse_sequence,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Range": range_,
    "EyeLike": eye_like,
}
