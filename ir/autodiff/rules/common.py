"""What rules share: cotangents of broadcast operands, reduced values beside their rows, sums in wide types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dnnc.ir.dtype import DType
from dnnc.ir.expr import Expr
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Value
from dnnc.ir.types import Dim, product


def unbroadcast(b: Builder, g: Value, operand: Value) -> Value:
    """The cotangent of an operand that was broadcast: summed over the axes along which it was repeated.

    A cotangent that is narrower than the operand, since it does not depend on all of its axes, is repeated.
    """
    shape = operand.type.shape
    if g.type.shape == shape:
        return g
    extra = g.type.rank - len(shape)
    axes = tuple(k for k, d in enumerate(g.type.shape) if d != 1 and (k < extra or shape[k - extra] == 1))
    summed = b.reduce_sum(g, axes=axes, keepdims=True) if axes else g
    if extra > 0:
        summed = b.reshape(summed, shape=summed.type.shape[extra:])
    return spread(b, summed, shape)  # type: ignore[no-any-return]


def spread(b: Builder, v: Any, shape: Sequence[Dim]) -> Any:
    """A value repeated to a shape."""
    return v if v.type.shape == tuple(shape) else b.expand(v, shape=tuple(shape))


def keep(b: Builder, v: Any, x: Value, axes: Sequence[int]) -> Any:
    """What was reduced from x along axes, with these axes of size 1."""
    shape = tuple(1 if k in axes else d for k, d in enumerate(x.type.shape))
    return v if v.type.shape == shape else b.reshape(v, shape=shape)


def wide(b: Builder, v: Any) -> Any:
    """A value in the dtype in which registers hold it."""
    return v if v.type.dtype.computed is v.type.dtype else b.cast(v, to=v.type.dtype.computed)


def narrow(b: Builder, v: Any, dtype: DType) -> Any:
    return v if v.type.dtype is dtype else b.cast(v, to=dtype)


def number(b: Builder, n: Dim, dtype: DType) -> Any:
    """A size as a number."""
    return b.full(shape=(), value=n, dtype=dtype) if isinstance(n, Expr) else b.constant(float(n), dtype=dtype)


def count(b: Builder, x: Value, axes: Sequence[int], dtype: DType) -> Any:
    """How many elements of x are reduced to one along axes."""
    return number(b, product(tuple(x.type.shape[a] for a in axes)), dtype)


def constant_number(g: Graph, v: Value) -> float | None:
    """The number that all elements of a constant are; None where they differ, or v is no constant."""
    a = g.constants.get(v)
    if a is None or not a.size or (a != a.flat[0]).any():
        return None
    return float(a.flat[0])
