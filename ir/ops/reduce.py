"""Reductions over axes, argmax and argmin, and running sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import reduce as rules
from dnnc.ir.dtype import DType, boolean, from_numpy, i64, u8
from dnnc.ir.expr import E, Expr, cast, const, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, REDUCTION, OpDef, Trait, require
from dnnc.ir.ops.common import Array, at_rows, count, dim, quiet, require_kind, rows_flops, sample
from dnnc.ir.shapes import normalize_axes, normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Axes = tuple[int, ...]
NUMBER = REDUCTION | {Trait.ACCUMULATES}
Combine = Callable[[Array, Axes, bool], Array]  # x, axes, keepdims


def all_axes(axes: Sequence[int] | None, rank: int) -> Axes:
    """Sorted axes counted from the front; None means all."""
    return tuple(range(rank)) if axes is None else tuple(sorted(normalize_axes(axes, rank)))


def kept(shape: Sequence[Dim], axes: Axes, keepdims: bool) -> tuple[Dim, ...]:
    return tuple(1 if k in axes else d for k, d in enumerate(shape) if keepdims or k not in axes)


def joined(index: Sequence[E], r: Sequence[E], axes: Axes, keepdims: bool = False) -> tuple[E, ...]:
    """The operand's index from the result's index and the reduction variables."""
    outer = iter([i for k, i in enumerate(index) if k not in axes] if keepdims else index)
    inner = dict(zip(axes, r))
    rank = len(index) + (0 if keepdims else len(axes))
    return tuple(inner[k] if k in inner else next(outer) for k in range(rank))


def reduced(
    x: Tensor,
    axes: Axes,
    keepdims: bool,
    combine: str,
    value: Callable[..., Expr],
    dtype: DType | None = None,
    name: str = "t",
) -> Tensor:
    """`combine` over `axes` of `value(*index of x)`."""
    shape = kept(x.dims, axes, keepdims)
    extents = [x.dims[a] for a in axes]
    if not extents:
        return te.compute(shape, dtype or x.dtype, value, name)
    n = len(shape)
    return te.reduce(
        shape, extents, dtype or x.dtype, combine, lambda *v: value(*joined(v[:n], v[n:], axes, keepdims)), name=name
    )


def keep_index(index: Sequence[E], axes: Axes) -> tuple[E, ...]:
    """The index of a row's reduction (keepdims) from the index of an element."""
    return tuple(0 if k in axes else i for k, i in enumerate(index))


def lowest(x: Array) -> Any:
    """What a maximum starts from."""
    t = from_numpy(x.dtype)
    return -np.inf if t.is_float else np.False_ if t.kind == "b" else t.range[0]


def highest(x: Array) -> Any:
    t = from_numpy(x.dtype)
    return np.inf if t.is_float else np.True_ if t.kind == "b" else t.range[1]


# --- the family -------------------------------------------------------------------------------------------------------


def _type(kinds: str) -> Callable[..., TensorType]:
    def type_(x: TensorType, *, axes: Axes | None = None, keepdims: bool = False) -> TensorType:
        require_kind("the operand of a reduction", x, kinds)
        return TensorType(x.dtype, kept(x.shape, all_axes(axes, x.rank), keepdims))

    return type_


def reduction(
    name: str,
    combine: str,
    before: Callable[[Expr], Expr],
    after: Callable[[Expr, Expr], Expr] | None,
    reference: Combine,
    kinds: str = "fiu",
    domain: tuple[float, float] = (-2.0, 2.0),
    sign: tuple[Trait, ...] = (Trait.KEEPS_SIGN,),
    vjp: Callable[..., Any] | None = None,
) -> OpDef:
    """`after(combine of before(x), number of elements combined)`."""

    def compute(x: Tensor, *, axes: Axes | None, keepdims: bool) -> Tensor:
        axes = all_axes(axes, len(x.dims))
        inner = x.dtype if after is None else x.dtype.computed
        t = reduced(x, axes, keepdims, combine, lambda *i: before(x[i]), inner)
        if after is None:
            return t
        n = count([x.dims[a] for a in axes], x.dtype.computed)
        return te.compute(t.dims, x.dtype, lambda *i: after(t[i], n))

    def numpy(x: Array, *, axes: Axes | None = None, keepdims: bool = False) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(reference(x, all_axes(axes, x.ndim), keepdims)).astype(x.dtype, copy=False)

    samples = [
        sample("f32[3, 17]", axes=(1,), keepdims=False, domain=domain),
        sample("f32[2, 5, 3]", axes=(0, -1), keepdims=True, domain=domain),
        sample("f16[4, 6]", axes=None, keepdims=False, domain=domain),
        sample("f64[7]", axes=(0,), keepdims=False, domain=domain),
        sample("f32[2, 3]", axes=(), keepdims=False, domain=domain),
    ]
    samples += (
        [sample("i64[3, 5]", axes=(0,), keepdims=True, domain=(-5, 5)), sample("u8[9]", axes=None, domain=(0, 3))]
        if "i" in kinds
        else []
    )
    at = at_rows(numpy, axes_of)
    return OpDef(
        name,
        _type(kinds),
        compute,
        reference=numpy,
        reference_at=at,
        flops=rows_flops(1),
        traits=NUMBER.union(sign),
        samples=tuple(samples),
        reduced=axes_of,
        batching=batching.along_axes,
        vjp=vjp,
    )


def axes_of(rank: int, *, axes: Axes | None = None, **_: Any) -> Axes:
    return all_axes(axes, rank)


def _same(x: Expr) -> Expr:
    return x


def _square(x: Expr) -> Expr:
    return x * x


def _abs(x: Expr) -> Expr:
    return x if x.dtype.kind == "u" else call("abs", x)


def _mean(s: Expr, n: Expr) -> Expr:
    return s / n if s.dtype.is_float else call("truncdiv", s, n)


def _mean_numpy(x: Array, axes: Axes, keepdims: bool) -> Array:
    n = int(np.prod([x.shape[a] for a in axes], dtype=np.int64))
    s = np.sum(x, axes, dtype=x.dtype, keepdims=keepdims)
    return s / n if x.dtype.kind not in "iu" else np.trunc(s / n)


def _extreme(name: str, combine: str, reference: Combine) -> OpDef:
    """Maximum or minimum; over bools `any` and `all`, which the bytes 0 and 1 of their storage compute."""

    def compute(x: Tensor, *, axes: Axes | None, keepdims: bool) -> Tensor:
        axes = all_axes(axes, len(x.dims))
        if x.dtype is not boolean:
            return reduced(x, axes, keepdims, combine, lambda *i: x[i])
        t = reduced(x, axes, keepdims, combine, lambda *i: cast(x[i], u8), u8)
        return te.compute(t.dims, boolean, lambda *i: t[i].ne(0))

    def numpy(x: Array, *, axes: Axes | None = None, keepdims: bool = False) -> Array:
        return np.asarray(reference(x, all_axes(axes, x.ndim), keepdims))

    samples = (
        sample("f32[3, 17]", axes=(1,), keepdims=False),
        sample("f16[2, 5, 3]", axes=(0, -1), keepdims=True),
        sample("i32[3, 5]", axes=None, keepdims=False, domain=(-50, 50)),
        sample("u8[9]", axes=(0,), domain=(0, 255)),
        sample("bool[3, 4]", axes=(1,)),
        sample("f32[2, 3]", axes=()),
    )
    at = at_rows(numpy, axes_of)
    return OpDef(
        name,
        _type("fiub"),
        compute,
        reference=numpy,
        reference_at=at,
        flops=rows_flops(1),
        traits=NUMBER | {Trait.KEEPS_SIGN},
        samples=samples,
        reduced=axes_of,
        batching=batching.along_axes,
        vjp=rules.extreme,
    )


# --- log of a sum of exponentials -------------------------------------------------------------------------------------


def finite(m: Expr) -> Expr:
    """0 in place of an infinite maximum, so that exp(x - m) of a row of -inf is 0 and not NaN."""
    return select(call("abs", m).eq(const(float("inf"), m.dtype)), const(0.0, m.dtype), m)


def _log_sum_exp(x: Tensor, *, axes: Axes | None, keepdims: bool) -> Tensor:
    axes = all_axes(axes, len(x.dims))
    wide = x.dtype.computed
    m = reduced(x, axes, True, "fmax", lambda *i: x[i], wide, "row_max")
    s = reduced(x, axes, True, "sum", lambda *i: call("exp", x[i] - finite(m[keep_index(i, axes)])), wide, "row_sum")
    shape = kept(x.dims, axes, keepdims)

    def value(*i: Expr) -> Expr:
        at = joined(i, [0] * len(axes), axes, keepdims)
        return call("log", s[at]) + finite(m[at])

    return te.compute(shape, x.dtype, value)


def _log_sum_exp_numpy(x: Array, *, axes: Axes | None = None, keepdims: bool = False) -> Array:
    axes = all_axes(axes, x.ndim)
    m = np.max(x, axes, keepdims=True, initial=-np.inf).astype(x.dtype)
    m = np.where(np.isinf(m), np.zeros_like(m), m)
    r = np.log(np.sum(np.exp(x - m), axes, keepdims=True)) + m
    return r if keepdims else np.squeeze(r, axes)


# --- argmax and argmin ------------------------------------------------------------------------------------------------


def _arg_type(x: TensorType, *, axis: int = 0, keepdims: bool = False, select_last: bool = False) -> TensorType:
    require_kind("the operand of argmax or argmin", x, "fiu")
    axis = normalize_axis(axis, x.rank)
    require(x.shape[axis] != 0, "axis {} of {} is empty: it has no extreme element", axis, x)
    return TensorType(i64, kept(x.shape, (axis,), keepdims))


def arg(name: str, combine: str, pick: Callable[..., Array]) -> OpDef:
    """Where the extreme element of a row stands; a NaN is the extreme, as NumPy has it."""

    def compute(x: Tensor, *, axis: int, keepdims: bool, select_last: bool) -> Tensor:
        axes = (normalize_axis(axis, len(x.dims)),)
        m = reduced(x, axes, True, combine, lambda *i: x[i], x.dtype.computed, "extreme")
        shape = kept(x.dims, axes, keepdims)
        n = len(shape)

        def hit(*v: Expr) -> Expr:
            at = joined(v[:n], v[n:], axes, keepdims)
            equal = x[at].eq(m[keep_index(at, axes)])
            return equal | call("isnan", x[at]) if x.dtype.is_float else equal

        return te.reduce(shape, [x.dims[axes[0]]], i64, "max" if select_last else "min", lambda *v: v[n], hit)

    def numpy(x: Array, *, axis: int = 0, keepdims: bool = False, select_last: bool = False) -> Array:
        if select_last:
            found = x.shape[axis] - 1 - pick(np.flip(x, axis), axis=axis, keepdims=keepdims)
        else:
            found = pick(x, axis=axis, keepdims=keepdims)
        return np.asarray(found, np.int64)

    def at(
        inputs: Sequence[Array], points: Array, *, axis: int = 0, keepdims: bool = False, select_last: bool = False
    ) -> Array:
        def rows(x: Array, *, axes: Axes) -> Array:
            return numpy(x, axis=axes[0], select_last=select_last)

        return at_rows(rows, lambda rank, **_: (normalize_axis(axis, rank),))(inputs, points, keepdims=keepdims)

    samples = (
        sample("f32[3, 7]", axis=1, keepdims=False, select_last=False),
        sample("f16[2, 5, 3]", axis=1, keepdims=True, select_last=True),
        sample("i32[4, 9]", axis=-1, keepdims=False, select_last=True, domain=(-2, 2)),
        sample("u8[9]", axis=0, keepdims=False, select_last=False, domain=(0, 3)),
    )
    return OpDef(
        name,
        _arg_type,
        compute,
        reference=numpy,
        reference_at=at,
        flops=rows_flops(2),
        traits=REDUCTION | {Trait.ARG},
        batching=batching.along_axis,
        samples=samples,
    )


# --- running sums -----------------------------------------------------------------------------------------------------


def _cum_type(x: TensorType, *, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> TensorType:
    require_kind("the operand of a running sum", x, "fiu")
    normalize_axis(axis, x.rank)
    return x


def running(name: str, combine: str, f: Callable[..., Array], identity: int, vjp: Callable[..., Any]) -> OpDef:
    """`out[i] = combine of x[r] over r <= i`: r < i if exclusive, from the end if reverse; n^2 work here."""

    def compute(x: Tensor, *, axis: int, exclusive: bool, reverse: bool) -> Tensor:
        a = normalize_axis(axis, len(x.dims))

        def before(*v: Expr) -> Expr:
            first, last = (v[a], v[-1]) if reverse else (v[-1], v[a])
            return first < last if exclusive else first <= last

        return te.reduce(x.dims, [x.dims[a]], x.dtype, combine, lambda *v: x[(*v[:a], v[-1], *v[a + 1 : -1])], before)

    def numpy(x: Array, *, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Array:
        y = np.flip(x, axis) if reverse else x
        if exclusive and x.shape[axis]:
            y = np.concatenate([np.full_like(np.take(y, [0], axis), identity), np.delete(y, -1, axis)], axis)
        y = f(y, axis=axis, dtype=x.dtype)
        return np.flip(y, axis) if reverse else y

    def flops(x: TensorType, *, axis: int, **_: Any) -> Dim:
        return dim(const(product(x.shape)) * x.shape[normalize_axis(axis, x.rank)])

    samples = (
        sample("f32[7]", axis=0, exclusive=False, reverse=False),
        sample("f16[3, 5]", axis=-1, exclusive=True, reverse=False),
        sample("i64[2, 3, 4]", axis=1, exclusive=False, reverse=True),
        sample("f64[6, 2]", axis=0, exclusive=True, reverse=True),
    )
    return OpDef(
        name,
        _cum_type,
        compute,
        reference=quiet(numpy),
        flops=flops,
        traits=LOOPS | {Trait.ACCUMULATES},
        samples=samples,
        batching=batching.along_axis,
        vjp=vjp,
    )


def _cumprod_backward_type(x: TensorType, g: TensorType, **attrs: Any) -> TensorType:
    require(x == g, "the operands of a running product's gradient have the types {}, {}", x, g)
    return _cum_type(x, **attrs)


def _cumprod_backward(b: Any, x: Any, g: Any, *, axis: int, exclusive: bool, reverse: bool) -> Any:
    """The running sum of g times the products from the other end, over x; zeros apart.

    All products behind a row's second zero are 0. At the first one the products are those with a 1 in its place.
    """
    back = {"axis": axis, "exclusive": exclusive, "reverse": not reverse}
    zero, one = (b.constant(v, dtype=x.type.dtype) for v in (0.0, 1.0))
    gone = b.equal(x, zero)
    seen = b.cumsum(b.where(gone, one, zero), axis=axis, exclusive=False, reverse=reverse)
    first = b.logical_and(gone, b.equal(seen, one))
    y, without = (b.cumprod(v, axis=axis, exclusive=exclusive, reverse=reverse) for v in (x, b.where(first, one, x)))
    plain = b.div(b.cumsum(b.mul(g, y), **back), b.where(gone, one, x))
    return b.where(gone, b.where(first, b.cumsum(b.mul(g, without), **back), zero), plain)


def _zero_to(f: Callable[..., Array], identity: Callable[[Array], Any]) -> Combine:
    return lambda x, axes, keepdims: f(x, axes, keepdims=keepdims, initial=identity(x))


REDUCE_OPS: tuple[OpDef, ...] = (
    reduction(
        "reduce_sum", "sum", _same, None, lambda x, a, k: np.sum(x, a, dtype=x.dtype, keepdims=k), vjp=rules.total
    ),
    reduction("reduce_mean", "sum", _same, _mean, _mean_numpy, vjp=rules.mean),
    reduction(
        "reduce_prod", "prod", _same, None, lambda x, a, k: np.prod(x, a, dtype=x.dtype, keepdims=k), vjp=rules.prod
    ),
    reduction(
        "reduce_l1",
        "sum",
        _abs,
        None,
        lambda x, a, k: np.sum(np.abs(x), a, dtype=x.dtype, keepdims=k),
        sign=(Trait.NOT_NEGATIVE,),
        vjp=rules.l1,
    ),
    reduction(
        "reduce_sum_square",
        "sum",
        _square,
        None,
        lambda x, a, k: np.sum(x * x, a, dtype=x.dtype, keepdims=k),
        sign=(Trait.NOT_NEGATIVE,),
        vjp=rules.sum_square,
    ),
    reduction(
        "reduce_l2",
        "sum",
        _square,
        lambda s, n: call("sqrt", s),
        lambda x, a, k: np.sqrt(np.sum(x * x, a, keepdims=k)),
        "f",
        sign=(Trait.NOT_NEGATIVE,),
        vjp=rules.l2,
    ),
    reduction(
        "reduce_log_sum",
        "sum",
        _same,
        lambda s, n: call("log", s),
        lambda x, a, k: np.log(np.sum(x, a, keepdims=k)),
        "f",
        (0.1, 3.0),
        sign=(),
        vjp=rules.log_sum,
    ),
    _extreme("reduce_max", "max", _zero_to(np.max, lowest)),
    _extreme("reduce_min", "min", _zero_to(np.min, highest)),
    OpDef(
        "reduce_log_sum_exp",
        _type("f"),
        _log_sum_exp,
        reference=quiet(_log_sum_exp_numpy),
        reference_at=at_rows(quiet(_log_sum_exp_numpy), axes_of),
        flops=rows_flops(10),
        traits=NUMBER,
        reduced=axes_of,
        batching=batching.along_axes,
        samples=(
            sample("f32[3, 17]", axes=(1,), keepdims=False, domain=(-9.0, 9.0)),
            sample("f16[2, 5, 3]", axes=(0, -1), keepdims=True),
            sample("f64[4]", axes=None, keepdims=False, domain=(700.0, 900.0)),
        ),
        vjp=rules.log_sum_exp,
    ),
    arg("argmax", "max", np.argmax),
    arg("argmin", "min", np.argmin),
    running("cumsum", "sum", np.cumsum, 0, rules.cumsum),
    running("cumprod", "prod", np.cumprod, 1, rules.cumprod),
    OpDef(
        "cumprod_backward",
        _cumprod_backward_type,
        decompose=_cumprod_backward,
        flops=rows_flops(8),
        traits=REDUCTION,
        vjp=rules.cumprod_backward,
        samples=(
            sample("f32[3, 7]", "f32[3, 7]", axis=1, exclusive=False, reverse=False),
            sample("f64[5, 2]", "f64[5, 2]", axis=0, exclusive=True, reverse=True),
        ),
    ),
)
