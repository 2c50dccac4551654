"""Helpers of op records: common type rules, broadcasting in `compute`, samples and their random inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, DType, i64
from dnnc.ir.expr import E, Expr, cast, const, maximum, minimum, select, unwrap
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import Sample, require
from dnnc.ir.shapes import broadcast_shapes
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Array = Any  # np.ndarray of any dtype, ml_dtypes' included
CHUNK = 1 << 21  # elements that a sampled reference gathers at once
WORDS = ("", "7", "-1.5", "Ab", "b c", "\u00e9t\u00e9 1")  # of which drawn strings are
_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]$")


def sample(*inputs: str, domain: tuple[float, float] = (-2.0, 2.0), **attrs: Any) -> Sample:
    """A sample from types as text: `sample("f32[2, 3]", "i64[4]", axis=1)`."""
    types = []
    for text in inputs:
        m = _TYPE.match(text)
        if m is None:
            raise ValueError(f"not a static tensor type: {text}")
        types.append(TensorType(BY_NAME[m[1]], tuple(int(d) for d in m[2].replace(",", " ").split())))
    return Sample(tuple(types), tuple(attrs.items()), domain)


def draw(s: Sample, seed: int) -> list[Array]:
    """Draw a sample's inputs: floats and integers uniform in its domain, ends included; strings from WORDS."""
    rng = np.random.default_rng(seed)
    lo, hi = s.domain
    out = []
    for t in s.inputs:
        shape: Any = t.shape
        a: Array
        if t.dtype.kind == "b":
            a = rng.integers(0, 2, shape)
        elif t.dtype.kind == "s":
            a = rng.choice(np.array(WORDS, object), shape)
        elif t.dtype.is_int:
            low, high = t.dtype.range
            a = rng.integers(max(low, int(np.ceil(lo))), min(high, int(np.floor(hi))), shape, endpoint=True)
        else:
            a = rng.uniform(lo, hi, shape)
        out.append(np.asarray(a).astype(t.dtype.numpy))
    return out


# --- type rules -------------------------------------------------------------------------------------------------------


def require_kind(what: str, t: TensorType, kinds: str) -> None:
    """ShapeError unless the dtype's kind is among `kinds` (f float, i signed, u unsigned, b bool)."""
    names = {"f": "float", "i": "signed integer", "u": "unsigned integer", "b": "bool"}
    require(t.dtype.kind in kinds, "{} must be {}; got {}", what, " or ".join(names[k] for k in kinds), t)


def same_dtype(*types: TensorType) -> DType:
    """The one dtype of all. ShapeError names those that differ."""
    first = types[0].dtype
    ok = all(t.dtype is first for t in types)
    require(ok, "operands must have one dtype; got {}: cast them", ", ".join(str(t.dtype) for t in types))
    return first


def broadcast_type(*types: TensorType, dtype: DType | None = None) -> TensorType:
    return TensorType(dtype or types[0].dtype, broadcast_shapes(*(t.shape for t in types)))


def same_dim(a: Dim, b: Dim) -> bool:
    """Are two dims known to be equal?"""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Are two shapes of one rank, their dims known to be equal?"""
    return len(a) == len(b) and all(map(same_dim, a, b))


def size_flops(per_element: int = 1) -> Callable[..., Dim]:
    """`per_element` operations for each element of the largest operand."""

    def flops(*types: TensorType | None, **attrs: Any) -> Dim:
        shape = broadcast_shapes(*(t.shape for t in types if t is not None))
        return dim(const(product(shape)) * per_element)

    return flops


def rows_flops(per_element: int) -> Callable[..., Dim]:
    """`per_element` operations for each element of the first operand."""

    def flops(x: TensorType, *rest: Any, **attrs: Any) -> Dim:
        return dim(const(x.size) * per_element)

    return flops


def whole(x: TensorType, *_: Any, **__: Any) -> tuple[Dim, ...]:
    """All axes of the first operand, as those that its indices may address."""
    return tuple(x.shape)


def broadcast_dims(a: Sequence[Dim], b: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """The pairs of dims that must be equal where shapes broadcast."""
    return [(x, y) for x, y in zip(reversed(a), reversed(b)) if x != 1 and y != 1]


def channel_dims(x: TensorType, *rest: TensorType, **_: Any) -> list[tuple[Dim, Dim]]:
    """The channels of images, at axis 1, are the rows of the second operand."""
    return [(x.shape[1], t.shape[0]) for t in rest[:1] if t.rank and x.rank > 1]


def one_axis(rank: int, *, axis: int = -1, **_: Any) -> tuple[int, ...]:
    """The axes of rows along one axis."""
    return (axis % rank,)


def last_axes(rank: int, *, axis: int = -1, **_: Any) -> tuple[int, ...]:
    """The axes of rows that are all axes from one on."""
    return tuple(range(axis % rank, rank))


def dim(e: E) -> Dim:
    return unwrap(e)  # type: ignore[no-any-return]


# --- compute ----------------------------------------------------------------------------------------------------------


def broadcast_index(t: Tensor, index: Sequence[E]) -> tuple[E, ...]:
    """The element of `t` that stands at `index` of a shape to which t is broadcast."""
    dims = t.dims
    tail = index[len(index) - len(dims) :]
    return tuple(0 if d == 1 else i for d, i in zip(dims, tail))


def elementwise(f: Callable[..., Expr], *xs: Tensor, dtype: DType | None = None) -> Tensor:
    """`f` of the operands' elements, broadcast; the result has the first operand's dtype unless given."""
    shape = broadcast_shapes(*(x.dims for x in xs))
    return te.compute(shape, dtype or xs[0].dtype, lambda *i: f(*(x[broadcast_index(x, i)] for x in xs)))


def clamp(i: E, size: Dim) -> Expr:
    """An index forced into [0, size)."""
    return maximum(minimum(const(i), const(size) - 1), const(0))


def both(*conds: Expr) -> Expr:
    """All of the conditions."""
    r = conds[0]
    for c in conds[1:]:
        r = r & c
    return r


def within(i: E, size: Dim) -> Expr:
    """0 <= i < size"""
    return both(const(0) <= i, const(i) < size)


def wrapped(j: Expr, size: Dim) -> Expr:
    """An index read from a tensor as i64, negative ones counted from the end."""
    signed = j.dtype.kind == "i"
    j = cast(j, i64)
    return select(j < 0, j + size, j) if signed else j


def guarded(j: Expr, size: Dim) -> Expr:
    """An index read from a tensor, negative ones counted from the end, checked at run time."""
    return call("guard", wrapped(j, size), 0, size)


def count(dims: Iterable[Dim], dtype: DType) -> Expr:
    """The product of dims as a value of `dtype`."""
    n = product(tuple(dims))
    return const(n, dtype) if isinstance(n, int) else cast(const(n), dtype)


def at_rows(reference: Callable[..., Array], axes_of: Callable[..., tuple[int, ...]]) -> Callable[..., Array]:
    """`reference_at` of a reduction: the rows that the asked outputs combine, each once, through the reference.

    `axes_of(rank, **attrs)` are the sorted axes that are combined; the reference takes `axes` and `keepdims`.
    """

    def at(inputs: Sequence[Array], points: Array, **attrs: Any) -> Array:
        x, keepdims = inputs[0], attrs.get("keepdims", False)
        axes = axes_of(x.ndim, **attrs)
        outer = [k for k in range(x.ndim) if k not in axes]
        asked, back = np.unique(points[:, outer] if keepdims else points, axis=0, return_inverse=True)
        rows = np.transpose(x, (*outer, *axes))
        step = max(1, CHUNK // max(int(np.prod(rows.shape[len(outer) :])), 1))
        inner = tuple(range(1, 1 + len(axes)))
        parts = [
            np.asarray(
                reference(
                    rows[tuple(asked[s : s + step].T)].reshape(len(asked[s : s + step]), *rows.shape[len(outer) :]),
                    axes=inner,
                )
            )
            for s in range(0, len(asked), step)
        ]
        if not parts:  # the dtype is that of the result for some row
            return np.asarray(reference(np.ones((1,) * (1 + len(axes)), x.dtype), axes=inner))[:0]
        return np.concatenate(parts)[back.reshape(-1)]

    return at


# --- NumPy ------------------------------------------------------------------------------------------------------------


def quiet(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function without NumPy's floating-point warnings."""

    def g(*args: Any, **attrs: Any) -> Any:
        with np.errstate(all="ignore"):
            return f(*args, **attrs)

    return g


def without_attrs(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays alone as a reference that ignores attributes."""
    return quiet(lambda *args, **attrs: f(*args))
