"""Normalization: one or two row reductions and an element-wise tail. Half types keep rows in f32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import normalize as rules
from dnnc.ir.dtype import DType, bf16, f16, f32
from dnnc.ir.expr import Expr, const
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, REDUCTION, ROWWISE, OpDef, Trait, require
from dnnc.ir.ops.cast import round_numpy, round_to
from dnnc.ir.ops.common import (
    Array,
    broadcast_index,
    channel_dims,
    count,
    dim,
    last_axes,
    one_axis,
    quiet,
    require_kind,
    rows_flops,
    same_dim,
    same_dtype,
    sample,
    within,
)
from dnnc.ir.ops.reduce import Axes, all_axes, axes_of, keep_index, reduced
from dnnc.ir.shapes import broadcast_shapes, normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax_type(x: TensorType, *, axis: int = -1) -> TensorType:
    require_kind("the operand of softmax", x, "f")
    normalize_axis(axis, x.rank)
    return x


def _softmax(x: Tensor, *, axis: int) -> Tensor:
    axes, wide = (normalize_axis(axis, len(x.dims)),), x.dtype.computed
    # fmax may pass over a NaN: the sum still meets it
    m = reduced(x, axes, True, "fmax", lambda *i: x[i], wide, "row_max")
    e = te.compute(x.dims, wide, lambda *i: call("exp", x[i] - m[keep_index(i, axes)]), "exponential")
    s = reduced(e, axes, True, "sum", lambda *i: e[i], wide, "row_sum")
    return te.compute(x.dims, x.dtype, lambda *i: e[i] / s[keep_index(i, axes)])


def _softmax_numpy(x: Array, *, axis: int = -1) -> Array:
    e = np.exp(x - np.max(x, axis, keepdims=True, initial=-np.inf).astype(x.dtype))
    return e / np.sum(e, axis, keepdims=True)


# Half types whose sums are kept in the type itself, one rounding for each addition; float16 is summed in float32 and
# rounded once. It is what the standard's reference implementation does, by which its expected values were made.
RUNNING_SUMS = frozenset(("bf16",))
TERMS = 4  # additions in one expression: a longer chain of roundings is a deep one


def _rounded_softmax_type(x: TensorType, *, dtype: DType) -> TensorType:
    require(x.dtype is dtype, "rounded_softmax rounds to the type of its operand; got {} and {}", x, dtype)
    out = _softmax_type(x)
    require(isinstance(x.shape[-1], int) and x.shape[-1] > 0, "rounded_softmax needs rows of a known length; got {}", x)
    return out


def _rounded_softmax(x: Tensor, *, dtype: DType) -> Tensor:
    """softmax of rows along the last axis in which each operation rounds to `dtype`: difference, exp, sum, quotient."""
    wide, axes = dtype.computed, (len(x.dims) - 1,)

    def rounded(e: Expr) -> Expr:
        return round_to(e, dtype)

    # an operand that the same kernel makes has not been rounded yet
    m = reduced(x, axes, True, "fmax", lambda *i: rounded(x[i]), wide, "row_max")
    e = te.compute(
        x.dims, wide, lambda *i: rounded(call("exp", rounded(rounded(x[i]) - m[keep_index(i, axes)]))), "exponential"
    )
    s = (
        _running_sum(e, rounded)
        if dtype.name in RUNNING_SUMS
        else reduced(e, axes, True, "sum", lambda *i: e[i], wide, "row_sum")
    )
    return te.compute(x.dims, dtype, lambda *i: rounded(e[i] / rounded(s[keep_index(i, axes)])))


def _running_sum(e: Tensor, rounded: Callable[[Expr], Expr]) -> Tensor:
    """Row sums rounded after each addition, as one-step reductions, which are computed once for a row."""
    *front, n = e.dims
    assert isinstance(n, int)

    def part(start: int, before: Tensor | None) -> Tensor:
        def value(*v: Expr) -> Expr:
            terms = [e[(*v[:-2], k)] for k in range(start, min(start + TERMS, n))]
            return functools.reduce(
                lambda total, term: rounded(total + term), terms if before is None else [before[v[:-1]], *terms]
            )

        return te.reduce((*front, 1), [1], e.dtype, "sum", value, name="row_sum")

    s = part(0, None)
    for start in range(TERMS, n, TERMS):
        s = part(start, s)
    return s


def _rounded_softmax_numpy(x: Array, *, dtype: DType) -> Array:
    def rounded(a: Array) -> Array:
        return round_numpy(a, dtype)

    x = rounded(x)
    e = rounded(np.exp(rounded(x - np.max(x, -1, keepdims=True))))
    if dtype.name in RUNNING_SUMS:
        s = functools.reduce(lambda total, term: rounded(total + term), np.split(e, e.shape[-1], -1))
    else:
        s = rounded(np.sum(e, -1, keepdims=True))
    return rounded(e / s)


def _log_softmax(x: Tensor, *, axis: int) -> Tensor:
    axes, wide = (normalize_axis(axis, len(x.dims)),), x.dtype.computed
    m = reduced(x, axes, True, "fmax", lambda *i: x[i], wide, "row_max")
    s = reduced(x, axes, True, "sum", lambda *i: call("exp", x[i] - m[keep_index(i, axes)]), wide, "row_sum")

    def value(*i: Expr) -> Expr:
        at = keep_index(i, axes)
        return x[i] - m[at] - call("log", s[at])

    return te.compute(x.dims, x.dtype, value)


def _log_softmax_numpy(x: Array, *, axis: int = -1) -> Array:
    y = x - np.max(x, axis, keepdims=True, initial=-np.inf).astype(x.dtype)
    return y - np.log(np.sum(np.exp(y), axis, keepdims=True))


# --- by mean and variance ---------------------------------------------------------------------------------------------


def _mean(x: Tensor, axes: Axes) -> Tensor:
    wide = x.dtype.computed
    s = reduced(x, axes, True, "sum", lambda *i: x[i], wide, "row_sum")
    n = count([x.dims[a] for a in axes], wide)
    return te.compute(s.dims, wide, lambda *i: s[i] / n, "mean")


def _inverse_deviation(x: Tensor, axes: Axes, epsilon: float, mean: Tensor | None) -> Tensor:
    """1 / sqrt(mean((x - mean)^2) + epsilon), keepdims; without a mean that of the squares."""
    wide = x.dtype.computed

    def square(*i: Expr) -> Expr:
        d = x[i] if mean is None else x[i] - mean[keep_index(i, axes)]
        return d * d

    s = reduced(x, axes, True, "sum", square, wide, "square_sum")
    n = count([x.dims[a] for a in axes], wide)
    return te.compute(s.dims, wide, lambda *i: 1.0 / call("sqrt", s[i] / n + epsilon), "inverse_deviation")


def _layer_type(
    x: TensorType, scale: TensorType, bias: TensorType | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> TensorType:
    require_kind("the operand of a normalization", x, "f")
    normalize_axis(axis, x.rank)
    for t in (scale, bias):
        if t is not None:
            same_dtype(x, t)
            require(broadcast_shapes(x.shape, t.shape) == x.shape, "scale and bias must broadcast to {}; got {}", x, t)
    return x


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int, epsilon: float) -> Tensor:
    axes = tuple(range(normalize_axis(axis, len(x.dims)), len(x.dims)))
    mean = _mean(x, axes)
    inverse = _inverse_deviation(x, axes, epsilon, mean)

    def value(*i: Expr) -> Expr:
        at = keep_index(i, axes)
        y = (x[i] - mean[at]) * inverse[at] * scale[broadcast_index(scale, i)]
        return y if bias is None else y + bias[broadcast_index(bias, i)]

    return te.compute(x.dims, x.dtype, value)


def _layer_norm_numpy(
    x: Array, scale: Array, bias: Array | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Array:
    y = _standardized(x, tuple(range(axis % x.ndim, x.ndim)), epsilon) * scale
    return y if bias is None else y + bias


def _standardized(x: Array, axes: Axes, epsilon: float) -> Array:
    d = x - np.mean(x, axes, keepdims=True)
    return d / np.sqrt(np.mean(d * d, axes, keepdims=True) + epsilon)


def _rms_type(x: TensorType, scale: TensorType, *, axis: int = -1, epsilon: float = 1e-5) -> TensorType:
    return _layer_type(x, scale, axis=axis, epsilon=epsilon)


def _rms_norm(x: Tensor, scale: Tensor, *, axis: int, epsilon: float) -> Tensor:
    axes = tuple(range(normalize_axis(axis, len(x.dims)), len(x.dims)))
    inverse = _inverse_deviation(x, axes, epsilon, None)
    return te.compute(
        x.dims, x.dtype, lambda *i: x[i] * inverse[keep_index(i, axes)] * scale[broadcast_index(scale, i)]
    )


def _rms_norm_numpy(x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5) -> Array:
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / np.sqrt(np.mean(x * x, axes, keepdims=True) + epsilon) * scale


def _mvn_type(x: TensorType, *, axes: Axes | None = None, epsilon: float = 1e-5) -> TensorType:
    require_kind("the operand of a normalization", x, "f")
    all_axes(axes, x.rank)
    return x


def _mvn(x: Tensor, *, axes: Axes | None, epsilon: float) -> Tensor:
    axes = all_axes(axes, len(x.dims))
    mean = _mean(x, axes)
    inverse = _inverse_deviation(x, axes, epsilon, mean)
    return te.compute(x.dims, x.dtype, lambda *i: (x[i] - mean[keep_index(i, axes)]) * inverse[keep_index(i, axes)])


def _mvn_numpy(x: Array, *, axes: Axes | None = None, epsilon: float = 1e-5) -> Array:
    return _standardized(x, all_axes(axes, x.ndim), epsilon)


# --- across channels --------------------------------------------------------------------------------------------------


def _lrn_type(x: TensorType, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> TensorType:
    require_kind("the operand of lrn", x, "f")
    require(x.rank >= 2 and size >= 1, "lrn needs channels at axis 1 and a positive size; got {} and size {}", x, size)
    return x


def _lrn(x: Tensor, *, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """x / (bias + alpha/size * sum of squares over `size` neighbouring channels) ^ beta"""
    wide, before = x.dtype.computed, (size - 1) // 2

    def square(*v: Expr) -> Expr:
        e = x[(v[0], v[1] + v[-1] - before, *v[2:-1])]
        return e * e

    s = te.reduce(
        x.dims, [size], wide, "sum", square, lambda *v: within(v[1] + v[-1] - before, x.dims[1]), "neighbours"
    )
    return te.compute(x.dims, x.dtype, lambda *i: x[i] / call("pow", s[i] * (alpha / size) + bias, const(beta, wide)))


def _lrn_numpy(x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Array:
    before = (size - 1) // 2
    squares = np.pad(x * x, [(0, 0), (before, size - 1 - before)] + [(0, 0)] * (x.ndim - 2))
    s = np.zeros_like(x)
    for k in range(size):
        s += squares[:, k : k + x.shape[1]]
    return x / (s * (alpha / size) + bias) ** beta


# --- in terms of others -----------------------------------------------------------------------------------------------


def _per_channel(b: Any, v: Any, rank: int) -> Any:
    return b.reshape(v, shape=(v.type.shape[0], *(1,) * (rank - 2)))


def _channels(x: TensorType, *params: TensorType) -> None:
    require_kind("the operand of a normalization", x, "f")
    require(x.rank >= 2, "channels are at axis 1; got {}", x)
    for p in params:
        require(p.rank == 1 and same_dim(p.shape[0], x.shape[1]), "a parameter must be [{}]; got {}", x.shape[1], p)


def _batch_type(
    x: TensorType, scale: TensorType, bias: TensorType, mean: TensorType, var: TensorType, *, epsilon: float = 1e-5
) -> TensorType:
    _channels(x, scale, bias, mean, var)
    return x


def _batch_norm(b: Any, x: Any, scale: Any, bias: Any, mean: Any, var: Any, *, epsilon: float) -> Any:
    """(x - mean) * (scale / sqrt(var + epsilon)) + bias, in f32 for half types; constant parameters fold."""
    dtype, rank = x.type.dtype, x.type.rank
    wide = dtype.computed
    x, scale, bias, mean, var = (v if v.type.dtype is wide else b.cast(v, to=wide) for v in (x, scale, bias, mean, var))
    factor = _per_channel(b, b.div(scale, b.sqrt(b.add(var, epsilon))), rank)
    y = b.add(b.mul(b.sub(x, _per_channel(b, mean, rank)), factor), _per_channel(b, bias, rank))
    return y if dtype is wide else b.cast(y, to=dtype)


def _instance_type(x: TensorType, scale: TensorType, bias: TensorType, *, epsilon: float = 1e-5) -> TensorType:
    _channels(x, scale, bias)
    same_dtype(x, scale, bias)
    return x


def _instance_norm(b: Any, x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
    rank = x.type.rank
    y = b.mean_variance_norm(x, axes=tuple(range(2, rank)), epsilon=epsilon)
    return b.add(b.mul(y, _per_channel(b, scale, rank)), _per_channel(b, bias, rank))


def _group_type(
    x: TensorType, scale: TensorType, bias: TensorType, *, groups: int, epsilon: float = 1e-5
) -> TensorType:
    c = x.shape[1]
    ok = isinstance(c, int) and groups > 0 and c % groups == 0
    require(ok, "{} channels do not divide into {} groups", c, groups)
    return _instance_type(x, scale, bias, epsilon=epsilon)


def _group_norm(b: Any, x: Any, scale: Any, bias: Any, *, groups: int, epsilon: float) -> Any:
    n, c, *spatial = x.type.shape
    parts = b.reshape(x, shape=(n, groups, c // groups, *spatial))
    y = b.mean_variance_norm(parts, axes=tuple(range(2, x.type.rank + 1)), epsilon=epsilon)
    y = b.reshape(y, shape=x.type.shape)
    return b.add(b.mul(y, _per_channel(b, scale, x.type.rank)), _per_channel(b, bias, x.type.rank))


def _lp_type(x: TensorType, *, axis: int = -1, p: int = 2) -> TensorType:
    require(p in (1, 2), "lp_norm knows p 1 and 2; got {}", p)
    return _softmax_type(x, axis=axis)


def _lp_norm(b: Any, x: Any, *, axis: int, p: int) -> Any:
    """x divided by the norm of its row; a row of zeros stays zeros."""
    dtype, wide = x.type.dtype, x.type.dtype.computed
    x = x if dtype is wide else b.cast(x, to=wide)
    n = b.op(f"reduce_l{p}", x, axes=(axis,), keepdims=True)
    y = b.div(x, b.where(b.equal(n, 0.0), b.constant(1.0, dtype=wide), n))
    return y if dtype is wide else b.cast(y, to=dtype)


def _flops(per_element: int) -> Callable[..., Dim]:
    return lambda x, *_, **__: dim(const(x.size) * per_element)


_CHANNEL_SAMPLES = ("f32[2, 3, 5, 4]", "f16[1, 4, 7]")

NORMALIZE_OPS: tuple[OpDef, ...] = (
    *(
        OpDef(
            name,
            _softmax_type,
            compute,
            reference=quiet(numpy),
            flops=rows_flops(12),
            traits=ROWWISE | traits,
            reduced=one_axis,
            vjp=vjp,
            batching=batching.along_axis,
            samples=(
                sample("f32[4, 17]", axis=-1, domain=(-9.0, 9.0)),
                sample("f16[2, 3, 5]", axis=1),
                sample("f64[7]", axis=0, domain=(-900.0, 900.0)),
                sample("bf16[2, 9]", axis=1),
            ),
        )
        for name, compute, numpy, traits, vjp in (
            ("softmax", _softmax, _softmax_numpy, {Trait.NOT_NEGATIVE}, rules.softmax),
            ("log_softmax", _log_softmax, _log_softmax_numpy, set[Trait](), rules.log_softmax),
        )
    ),
    OpDef(
        "rounded_softmax",
        _rounded_softmax_type,
        _rounded_softmax,
        reference=quiet(_rounded_softmax_numpy),
        flops=rows_flops(12),
        traits=REDUCTION,
        samples=(
            sample("bf16[4, 6]", dtype=bf16, domain=(-4.0, 4.0)),
            sample("bf16[2, 3, 5]", dtype=bf16),
            sample("f16[5, 16]", dtype=f16, domain=(-4.0, 4.0)),
            sample("bf16[16]", dtype=bf16, domain=(0.0, 0.0)),
            sample("f32[3, 1, 7]", dtype=f32),
        ),
        vjp=rules.softmax,
    ),
    OpDef(
        "layer_norm",
        _layer_type,
        _layer_norm,
        reference=_layer_norm_numpy,
        flops=rows_flops(8),
        traits=ROWWISE | {Trait.NORM},
        reduced=last_axes,
        samples=(
            sample("f32[3, 17]", "f32[17]", "f32[17]", axis=-1, epsilon=1e-5),
            sample("f32[2, 3, 4]", "f32[3, 4]", axis=1, epsilon=1e-3),
            sample("f16[2, 9]", "f16[9]", "f16[1]", axis=1),
        ),
        vjp=rules.layer_norm,
    ),
    OpDef(
        "rms_norm",
        _rms_type,
        _rms_norm,
        reference=_rms_norm_numpy,
        flops=rows_flops(5),
        traits=ROWWISE | {Trait.NORM},
        reduced=last_axes,
        samples=(
            sample("f32[3, 17]", "f32[17]"),
            sample("f16[2, 3, 4]", "f16[3, 4]", axis=1),
            sample("f64[5]", "f64[]", axis=0, epsilon=1e-6),
        ),
        vjp=rules.rms_norm,
    ),
    OpDef(
        "mean_variance_norm",
        _mvn_type,
        _mvn,
        reference=_mvn_numpy,
        flops=rows_flops(6),
        traits=REDUCTION,
        reduced=axes_of,
        samples=(
            sample("f32[2, 3, 4, 5]", axes=(0, 2, 3)),
            sample("f16[3, 9]", axes=(1,)),
            sample("f64[4, 3]", axes=None, epsilon=1e-9),
        ),
        vjp=rules.mean_variance_norm,
    ),
    OpDef(
        "lrn",
        _lrn_type,
        _lrn,
        reference=_lrn_numpy,
        flops=rows_flops(16),
        traits=REDUCTION | {Trait.WINDOW},
        vjp=rules.lrn,
        samples=(
            sample("f32[1, 7, 3, 3]", size=5, alpha=0.1),
            sample("f16[2, 5, 3]", size=4, alpha=0.3, beta=0.5, bias=2.0),
        ),
    ),
    OpDef(
        "batch_norm",
        _batch_type,
        decompose=_batch_norm,
        flops=_flops(4),
        traits=ELEMENTWISE,
        equal_dims=channel_dims,
        samples=tuple(
            sample(x, *(f"{p}[{x.split(', ')[1]}]",) * 4, epsilon=1e-3, domain=(0.1, 3.0))
            for x, p in zip(_CHANNEL_SAMPLES, ("f32", "f32"))
        ),
    ),
    OpDef(
        "instance_norm",
        _instance_type,
        decompose=_instance_norm,
        flops=_flops(8),
        traits=REDUCTION,
        equal_dims=channel_dims,
        samples=(
            sample("f32[2, 3, 5, 4]", "f32[3]", "f32[3]"),
            sample("f16[1, 4, 7]", "f16[4]", "f16[4]", epsilon=1e-2),
        ),
    ),
    OpDef(
        "group_norm",
        _group_type,
        decompose=_group_norm,
        flops=_flops(8),
        traits=REDUCTION,
        equal_dims=channel_dims,
        samples=(
            sample("f32[2, 6, 5, 4]", "f32[6]", "f32[6]", groups=3),
            sample("f16[1, 4, 7]", "f16[4]", "f16[4]", groups=2, epsilon=1e-2),
        ),
    ),
    OpDef(
        "lp_norm",
        _lp_type,
        decompose=_lp_norm,
        flops=_flops(4),
        traits=REDUCTION,
        samples=(
            sample("f32[3, 7]", axis=-1, p=2),
            sample("f16[2, 3, 5]", axis=1, p=1),
            sample("f32[4]", axis=0, p=2, domain=(0.0, 0.0)),
        ),
    ),
)
