"""Interpreter values: `()` for all threads, `[threads]`, `[threads or 1, lanes]`; scalars `()` if single."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dnnc.ir.dtype import i64
from dnnc.ir.errors import VerifyError
from dnnc.ir.expr import Const, Expr, Linear, Op, Product, Var
from dnnc.ir.loops.intrinsics import TABLE, cast_numpy, cast_target

Array = Any  # a NumPy array, or a NumPy or Python scalar


class KernelError(VerifyError):
    """A kernel did something forbidden while it was interpreted; the message quotes the statement."""

    quoted = False


def uniform(v: Array) -> bool:
    """Is this one scalar for all threads?"""
    return not isinstance(v, np.ndarray) or v.ndim == 0


def tidy(v: Array) -> Array:
    """The canonical form: no arrays of rank 0, no [1]."""
    if isinstance(v, np.ndarray):
        if v.ndim == 0:
            return v[()]
        if v.ndim == 1 and len(v) == 1:
            return v[0]
    return v


def column(v: Array, wide: bool = True) -> Array:
    """[threads] as [threads, 1], beside values with lanes."""
    return v[:, None] if wide and isinstance(v, np.ndarray) and v.ndim == 1 else v


def spread(v: Array, rows: int, n: int) -> Array:
    """A value of `rows` threads for `rows * n`: each repeated n times; what is uniform stays."""
    if n > 1 and rows > 1 and isinstance(v, np.ndarray) and v.ndim and len(v) == rows:
        return np.repeat(v, n, 0)
    return v


def _less(name: str) -> Callable[[Array, Array], Array]:
    python, numpy = (min, np.minimum) if name == "min" else (max, np.maximum)
    return lambda a, b: python(a, b) if type(a) is int and type(b) is int else numpy(a, b)


def _divide(a: Array, b: Array) -> Array:
    return TABLE["truncdiv"].meaning(a, b) if np.asarray(a).dtype.kind in "iu" else np.true_divide(a, b)  # type: ignore[misc]


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "//": operator.floordiv, "%": operator.mod,
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, "&": operator.and_, "|": operator.or_,
    "^": operator.xor,
    "min": _less("min"), "max": _less("max"),
}  # fmt: skip


def constant(e: Const) -> Array:
    """A constant: indices are Python integers, everything else NumPy scalars of its type."""
    if e.dtype is i64:
        return int(e.value)
    if e.dtype.is_int:
        return np.array([e.value & ((1 << e.dtype.bits) - 1)], np.uint64).astype(e.dtype.numpy)[0]  # type: ignore[operator]
    return np.array([e.value]).astype(e.dtype.numpy)[0]


def wrapped(v: Array) -> Array:
    """Indices are computed in Python integers, which do not wrap: bring one back to 64 bits."""
    if type(v) is int and not -(1 << 63) <= v < 1 << 63:
        return (v + (1 << 63)) % (1 << 64) - (1 << 63)
    return v


def linear(e: Linear | Product, value: Callable[[Expr], Array]) -> Array:
    if isinstance(e, Product):
        r: Array = 1
        for f in e.factors:
            r = r * value(f)
        return wrapped(r)
    r = e.const
    for t, c in e.terms:
        v = value(t)
        r = r + (v if c == 1 else v * c)
    return wrapped(r)


def operate(e: Op, args: list[Array]) -> Array:
    """Any operation that is not collective, on values in the canonical form."""
    lanes = e.lanes
    for operand in e.args:  # no generator: this runs for every operation of every statement
        lanes = max(lanes, operand.lanes)
    if lanes > 1:
        args = [column(v) for v in args]
    binary = BINARY.get(e.name)
    if binary is not None:
        a, b = e.args
        if a.dtype is not b.dtype or (a.lanes != b.lanes and 1 not in (a.lanes, b.lanes)):
            raise KernelError(f"{e!r} mixes {a.dtype}x{a.lanes} and {b.dtype}x{b.lanes}")
        try:
            return tidy(binary(*args))
        except ZeroDivisionError:
            raise KernelError(f"{e!r} divides by zero") from None
    if e.name == "select":
        return args[1 if args[0] else 2] if uniform(args[0]) else tidy(np.where(*args))
    target = cast_target(e.name)
    if target is not None:
        to, bits = target
        return tidy(np.asarray(args[0]).view(to.numpy) if bits else cast_numpy(args[0], to))
    record = TABLE.get(e.name)
    if record is None or record.meaning is None:
        raise KernelError(f"{e.name} has no value")
    r = np.asarray(record.meaning(*args))
    if record.regroups and e.lanes == 1:
        r = r.reshape(-1)
    return tidy(r if r.dtype == e.dtype.numpy else r.astype(e.dtype.numpy))


def index_value(e: Expr, env: Mapping[Var, Array]) -> Array:
    """An index expression without loads: shapes, strides, swizzled addresses."""
    if isinstance(e, Const):
        return constant(e)
    if isinstance(e, Var):
        if e not in env:
            raise KernelError(f"{e.name} is not defined here")
        return env[e]
    if isinstance(e, (Linear, Product)):
        return linear(e, lambda t: index_value(t, env))
    if not isinstance(e, Op):
        raise KernelError(f"the shape or stride {e!r} depends on memory")
    return (
        BINARY[e.name](*(index_value(a, env) for a in e.args))
        if e.name in BINARY
        else operate(e, [index_value(a, env) for a in e.args])
    )
