"""Parts of arrays, and borders around them: slice, dynamic_slice, pad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import borders
from dnnc.ir.autodiff.rules import movement as rules
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select, value
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import MOVEMENT, Index, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, clamp, dim, same_dim, sample, within
from dnnc.ir.shapes import normalize_axes, normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Dims = tuple[Dim, ...]
PAD_MODES = ("constant", "reflect", "edge", "wrap")
MAX_FOLDS = 4  # reflections of an index that cost less than a remainder


def normalize_slice(
    shape: Sequence[Dim],
    starts: Sequence[Dim],
    ends: Sequence[Dim],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> dict[str, tuple[Any, ...]]:
    """Convert an ONNX or Python slice to attributes of `slice`: start, step, size per dim; ends are clamped."""
    rank = len(shape)
    axes = tuple(range(len(starts))) if axes is None else normalize_axes(axes, rank)
    start: list[Dim] = [0] * rank
    step: list[int] = [1] * rank
    size = list(shape)
    for k, (a, first, last) in enumerate(zip(axes, starts, ends)):
        n, s = const(shape[a]), 1 if steps is None else int(steps[k])
        require(s != 0, "slice: the step of axis {} is 0", a)
        low, high = (const(0), n) if s > 0 else (const(-1), n - 1)
        b, e = (minimum(maximum(_from_front(x, n), low), high) for x in (first, last))
        room = e - b if s > 0 else b - e
        start[a], step[a], size[a] = dim(b), s, dim(maximum((room + (abs(s) - 1)) // abs(s), 0))
        if size[a] == 0:
            start[a], step[a] = 0, 1
    return {"starts": tuple(start), "steps": tuple(step), "shape": tuple(size)}


def _from_front(x: Dim, n: Expr) -> Expr:
    # a symbolic bound is a size, so it is not negative unless its upper bound says so; numbers of 2^31 and more mean
    # "to the end"
    if isinstance(x, int):
        if value(n) is None and abs(x) >= (1 << 31) - 1:
            return n if x > 0 else const(-1)
        return n + x if x < 0 else const(x)
    hi = bounds(x)[1]
    return n + x if hi is not None and hi < 0 else x


def _slice_type(x: TensorType, *, starts: Dims, steps: tuple[int, ...], shape: Dims) -> TensorType:
    ok = len(starts) == len(steps) == len(shape) == x.rank
    require(ok, "slice needs {} starts, steps and sizes for {}", x.rank, x)
    for n, b, s, m in zip(x.shape, starts, steps, shape):
        last = dim(const(b) + (const(m) - 1) * s)
        if isinstance(n, int) and isinstance(b, int) and isinstance(last, int) and m != 0:
            ok = 0 <= min(b, last) and max(b, last) < n
            require(ok, "slice [{} : step {} : {} elements] leaves a dim of {} of {}", b, s, m, n, x)
    return TensorType(x.dtype, tuple(shape))


def _slice(x: Tensor, *, starts: Dims, steps: tuple[int, ...], shape: Dims) -> Tensor:
    return te.compute(shape, x.dtype, lambda *i: x[tuple(const(b) + j * s for j, b, s in zip(i, starts, steps))])


def _slice_numpy(x: Array, *, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Array:
    cuts = []
    for b, s, m in zip(starts, steps, shape):
        stop = b + m * s
        cuts.append(slice(b, None if stop < 0 else stop, s) if m else slice(0, 0))
    return x[tuple(cuts)]


def _dynamic_slice_type(
    x: TensorType, starts: TensorType, *, shape: Dims, steps: tuple[int, ...] | None = None
) -> TensorType:
    ok = starts.dtype.is_int and starts.shape == (x.rank,)
    require(ok, "dynamic_slice needs integer starts [{}]; got {}", x.rank, starts)
    ok = len(shape) == x.rank and len(steps or shape) == x.rank
    require(ok, "dynamic_slice needs {} sizes and steps for {}; got {}", x.rank, x, shape)
    return TensorType(x.dtype, tuple(shape))


def _dynamic_slice(x: Tensor, starts: Tensor, *, shape: Dims, steps: tuple[int, ...] | None) -> Tensor:
    steps = steps or (1,) * len(shape)

    def element(*i: Expr) -> Expr:
        at = [call("guard", cast(starts[k], i64) + j * s, 0, n) for k, (j, s, n) in enumerate(zip(i, steps, x.dims))]
        return x[tuple(at)]

    return te.compute(shape, x.dtype, element)


def _dynamic_slice_numpy(x: Array, starts: Array, *, shape: Sequence[int], steps: Sequence[int] | None = None) -> Array:
    steps = steps or (1,) * len(shape)
    at = [np.clip(int(b) + np.arange(m) * s, 0, n - 1) for b, m, s, n in zip(starts, shape, steps, x.shape)]
    return x[np.ix_(*at)]


# --- pad --------------------------------------------------------------------------------------------------------------


def _pad_type(x: TensorType, fill: TensorType | None = None, *, pads: Dims, mode: str = "constant") -> TensorType:
    require(mode in PAD_MODES, "pad knows the modes {}; got {}", ", ".join(PAD_MODES), mode)
    ok = len(pads) == 2 * x.rank
    require(ok, "pad needs {} numbers (all begins, then all ends) for {}; got {}", 2 * x.rank, x, pads)
    ok = fill is None or (fill.dtype is x.dtype and fill.size == 1)
    require(ok, "the pad value must be one {}; got {}", x.dtype, fill)
    begin, end = pads[: x.rank], pads[x.rank :]
    for n, b, e in zip(x.shape, begin, end):
        require(mode == "constant" or not same_dim(n, 0) or (b, e) == (0, 0), "pad by {}: {} has an empty dim", mode, x)
    return TensorType(x.dtype, tuple(dim(const(n) + b + e) for n, b, e in zip(x.shape, begin, end)))


def _pad_source(j: Expr, n: Dim, b: Dim, e: Dim, mode: str) -> Expr:
    """Which element stands at j, counted from the first one that is not padding."""
    if mode in ("constant", "edge"):
        return clamp(j, n)
    last = const(n) - 1
    folds = _folds(max(bounds(last)[0] or 0, 1), b, e) if mode == "reflect" else MAX_FOLDS + 1
    if folds <= MAX_FOLDS:
        for _ in range(folds):
            j = maximum(j, const(0) - j)
            j = minimum(j, last * 2 - j)
        return clamp(j, n)
    period = maximum(last * 2, 1) if mode == "reflect" else const(n)
    j = (j + (maximum(const(b), 0) + period - 1) // period * period) % period  # not negative, for what is not symbolic
    return minimum(minimum(j, last * 2 - j), last) if mode == "reflect" else j


def _folds(last: int, b: Dim, e: Dim) -> int:
    """Return how often an index is reflected at 0 and the last element: more than MAX_FOLDS if unknown."""
    if not isinstance(b, int) or not isinstance(e, int):
        return MAX_FOLDS + 1
    below, above, folds = max(b, 0), max(e, 0), 0
    while below or above:
        below, above, folds = max(below - last * 2, above - last, 0), 0, folds + 1
    return folds


def _pad(x: Tensor, fill: Tensor | None = None, *, pads: Dims, mode: str) -> Tensor:
    rank = len(x.dims)
    begin, end = pads[:rank], pads[rank:]
    shape = [dim(const(n) + b + e) for n, b, e in zip(x.dims, begin, end)]
    zero = const(0, x.dtype.computed)
    if product(x.dims) == 0:
        return te.compute(shape, x.dtype, lambda *i: zero if fill is None else fill[(0,) * len(fill.dims)])

    plain = [k for k in range(rank) if same_dim(begin[k], 0) and same_dim(end[k], 0)]

    def element(*i: Expr) -> Expr:
        at = [j - b for j, b in zip(i, begin)]
        kept = x[
            tuple(j if k in plain else _pad_source(j, x.dims[k], begin[k], end[k], mode) for k, j in enumerate(at))
        ]
        if mode != "constant":
            return kept
        inside = both(const(True, boolean), *(within(j, n) for j, n in zip(at, x.dims)))
        return select(inside, kept, zero if fill is None else fill[(0,) * len(fill.dims)])

    return te.compute(shape, x.dtype, element)


def _pad_numpy(x: Array, fill: Array | None = None, *, pads: Sequence[int], mode: str = "constant") -> Array:
    begin, end = pads[: x.ndim], pads[x.ndim :]
    widths = [(max(b, 0), max(e, 0)) for b, e in zip(begin, end)]
    kind: Any = mode
    more = {"constant_values": 0 if fill is None else np.asarray(fill).reshape(())} if mode == "constant" else {}
    y = np.pad(x, widths, kind, **more)
    return y[tuple(slice(max(-b, 0), n - max(-e, 0)) for b, e, n in zip(begin, end, y.shape))]


def _room(
    x: TensorType, at: TensorType, *, shape: Sequence[Dim], steps: Sequence[int] | None = None
) -> tuple[Dim, ...]:
    """The places at which a slice of that shape may begin."""
    by = steps or (1,) * x.rank
    return tuple(dim(const(d) - (const(e) - 1) * s) for d, e, s in zip(x.shape, shape, by))


def _unfold_type(x: TensorType, *, axis: int, start: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> TensorType:
    a = normalize_axis(axis, x.rank)
    require(len(steps) == len(shape), "unfold needs a step for each of the sizes {}; got {}", shape, steps)
    ends = [start + sum(f(0, (m - 1) * s) for m, s in zip(shape, steps)) for f in (min, max)]
    n = x.shape[a]
    ok = not isinstance(n, int) or 0 in shape or (ends[0] >= 0 and ends[1] < n)
    require(ok, "unfold reads elements {} to {} of an axis of {}", *ends, n)
    return TensorType(x.dtype, (*x.shape[:a], *shape, *x.shape[a + 1 :]))


def _unfold(x: Tensor, *, axis: int, start: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    a = normalize_axis(axis, len(x.dims))

    def element(*i: Expr) -> Expr:
        at: Expr = const(start)
        for k, s in zip(i[a : a + len(steps)], steps):
            at = at + k * s
        return x[(*i[:a], at, *i[a + len(steps) :])]

    return te.compute((*x.dims[:a], *shape, *x.dims[a + 1 :]), x.dtype, element)


def _unfold_numpy(x: Array, *, axis: int, start: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    at = start + sum(k * s for k, s in zip(np.ogrid[tuple(slice(m) for m in shape)], steps))
    return np.take(x, np.broadcast_to(at, shape), axis)


SLICE_OPS: tuple[OpDef, ...] = (
    # y[.., i, j, ..] = x[.., start + steps[0]*i + steps[1]*j, ..]: an axis becomes its windows
    OpDef(
        "unfold",
        _unfold_type,
        _unfold,
        reference=_unfold_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[2, 9, 3]", axis=1, start=0, steps=(1, 2), shape=(4, 3)),
            sample("f16[7]", axis=0, start=5, steps=(-1, 1), shape=(3, 2)),
            sample("i64[3, 5]", axis=-1, start=1, steps=(0, 1, 1), shape=(2, 2, 3)),
        ),
    ),
    OpDef(
        "slice",
        _slice_type,
        _slice,
        reference=_slice_numpy,
        traits=MOVEMENT | {Trait.KEEPS_SIGN, Trait.RESAMPLES},
        batching=batching.slice_,
        samples=(
            sample("f32[7, 5]", starts=(2, 0), steps=(1, 1), shape=(3, 5)),
            sample("f16[9]", starts=(8,), steps=(-2,), shape=(5,)),
            sample("i64[4, 6]", starts=(1, 5), steps=(2, -3), shape=(2, 2)),
            sample("f32[3, 2]", starts=(0, 0), steps=(1, 1), shape=(0, 2)),
        ),
        vjp=rules.slice_,
    ),
    OpDef(
        "dynamic_slice",
        _dynamic_slice_type,
        _dynamic_slice,
        reference=_dynamic_slice_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[7, 5]", "i64[2]", shape=(3, 2), domain=(0, 3)),
            sample("f16[9]", "i32[1]", shape=(3,), steps=(2,), domain=(0, 4)),
        ),
        index=Index(1, _room, wraps=False),
    ),
    OpDef(
        "pad",
        _pad_type,
        _pad,
        reference=_pad_numpy,
        traits=MOVEMENT | {Trait.RESAMPLES, Trait.FILLS},
        batching=batching.pad,
        samples=(
            sample("f32[3, 5]", pads=(1, 2, 0, 3)),
            sample("f16[4]", "f16[]", pads=(2, 1)),
            sample("f32[4, 5]", pads=(3, 0, 2, 4), mode="reflect"),
            sample("f32[3]", pads=(7, 8), mode="reflect"),
            sample("f32[1, 2]", pads=(2, 0, 1, 1), mode="reflect"),
            sample("i64[3, 2]", pads=(1, 0, 2, 5), mode="edge"),
            sample("f32[3, 2]", pads=(4, 0, 2, 5), mode="wrap"),
            sample("f32[6, 5]", "f32[1]", pads=(-1, 2, 1, -3)),
        ),
        vjp=borders.pad,
    ),
)
