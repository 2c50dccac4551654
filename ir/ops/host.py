"""Ops that a model's Python side runs between native calls, and how sizes come about that only the data knows.

A *fresh dim* is a symbolic dim that no input has: `size = dim("n", 0, bound)`. Two ops bind one, and both take it as
the attribute `size` (in converters: `dnnc.frontends.onnx.unbacked_dims.fresh_dim`; nodes with the same one must agree):

    y: f32[n, 4] = truncate(x, count, size=n)      the first `count` elements of x: f32[100, 4] along `axis`; n in [0,
                                                   100]
    _: u8[n, 0]  = measure(count, size=n)          nothing but the size: from here on n is known, for `iota(shape=(n,))`
                                                   and the like

So an operator of unknown output size is native code for the upper bound, then `truncate`, which only slices: along axis
0 it copies nothing. `bound` may be symbolic itself (`x.shape[axis]`). What follows is compiled once for all n (0 has a
program of its own). An op whose *decomposition* contains host ops has Trait.HOST, so that the driver expands it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.autodiff.rules import host as rules
from dnnc.ir.dtype import u8
from dnnc.ir.errors import InputError
from dnnc.ir.expr import dim as symbol
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.ops.common import Array, require_kind, sample
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim, TensorType

HOST = frozenset((Trait.HOST,))  # for ops elsewhere whose decompositions have these
CUT = frozenset((Trait.PURE, Trait.BITS, Trait.SIZED))
SIZE = frozenset((Trait.SIZED,))


def _require_count(count: TensorType) -> None:
    require_kind("the count", count, "iu")
    require(count.shape in ((), (1,)), "the count must be one number; got {}", count)


def _number(count: Array, most: int | None, what: str) -> int:
    n = int(np.asarray(count).reshape(-1)[0])
    if n < 0 or (most is not None and n > most):
        raise InputError(
            f"{what} is computed to be {n}; expected at least 0" + ("" if most is None else f" and at most {most}")
        )
    return n


def _truncate_type(x: TensorType, count: TensorType, *, size: Dim, axis: int = 0) -> TensorType:
    _require_count(count)
    a = normalize_axis(axis, x.rank)
    most = x.shape[a]
    ok = not isinstance(size, int) or not isinstance(most, int) or size <= most
    require(ok, "the size {} is more than the {} that there are", size, most)
    return TensorType(x.dtype, (*x.shape[:a], size, *x.shape[a + 1 :]))


def _truncate(x: Array, count: Array, *, size: Any = None, axis: int = 0) -> Array:
    a = axis % x.ndim
    return x[(*[slice(None)] * a, slice(_number(count, x.shape[a], "the size of an axis")))]


def _measure_type(count: TensorType, *, size: Dim) -> TensorType:
    _require_count(count)
    return TensorType(u8, (size, 0))


def _measure(count: Array, *, size: Any = None) -> Array:
    return np.empty((_number(count, None, "a size"), 0), np.uint8)


def _view_type(x: TensorType, target: TensorType, *, shape: tuple[Dim, ...], copy_zeros: bool = True) -> TensorType:
    require_kind("the target shape", target, "iu")
    require(target.shape == (len(shape),), "the target shape must have {} elements; got {}", len(shape), target)
    return TensorType(x.dtype, shape)


def _view(x: Array, target: Array, *, shape: Any = None, copy_zeros: bool = True) -> Array:
    asked = [int(d) for d in target]
    if copy_zeros and any(d == 0 and k >= x.ndim for k, d in enumerate(asked)):
        raise InputError(f"the shape {asked} is computed, whose 0 copies a dim that {list(x.shape)} does not have")
    try:
        return x.reshape([x.shape[k] if d == 0 and copy_zeros else d for k, d in enumerate(asked)])
    except ValueError:
        raise InputError(f"the shape {asked} is computed, to which {list(x.shape)} cannot be reshaped") from None


HOST_OPS: tuple[OpDef, ...] = (
    OpDef(
        "truncate",
        _truncate_type,
        host=_truncate,
        traits=CUT,
        samples=(
            sample("f32[5]", "i64[]", size=symbol("n", 0, 5), domain=(0.0, 5.0)),
            sample("i32[3, 4]", "i32[1]", size=symbol("n", 0, 4), axis=-1, domain=(0, 4)),
        ),
        vjp=rules.truncate,
    ),
    # a reshape to a shape that is computed; 0 copies a dim where `copy_zeros`, -1 is what remains
    OpDef(
        "view",
        _view_type,
        host=_view,
        traits=CUT,
        samples=(
            sample("f32[4]", "i64[1]", shape=(4,), domain=(-1, -1)),
            sample("i32[3, 1]", "i64[2]", shape=(symbol("a", 0, 3), 1), domain=(0, 0)),
        ),
        vjp=rules.view,
    ),
    # an effect, though it has none on anybody: without readers it is what gives the size
    OpDef(
        "measure",
        _measure_type,
        host=_measure,
        traits=SIZE,
        samples=(
            sample("i64[]", size=symbol("n", 0), domain=(0, 9)),
            sample("u8[1]", size=symbol("n", 0), domain=(0, 9)),
        ),
    ),
)
