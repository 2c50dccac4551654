"""Ops that move elements: reshape, transpose, concat, slice, pad, tile and their kin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select, value
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import OpDef, require
from dnnc.ir.ops.common import (
    MOVEMENT,
    VIEW,
    Array,
    both,
    broadcast_index,
    clamp,
    dim,
    same_dim,
    same_dtype,
    sample,
    within,
)
from dnnc.ir.shapes import broadcast_shapes, normalize_axes, normalize_axis
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, Layout, TensorType, parse_layout, product

Dims = tuple[Dim, ...]
PAD_MODES = ("constant", "reflect", "edge", "wrap")
MAX_FOLDS = 4  # reflections of an index that cost less than a remainder

# --- reshape ----------------------------------------------------------------------------------------------------------


def reshaped(old: Sequence[Dim], shape: Sequence[Dim]) -> Dims:
    """Return a reshape's target shape with its -1 resolved. ShapeError where sizes are not known to be equal."""
    unknown = [k for k, d in enumerate(shape) if isinstance(d, int) and d == -1]
    require(len(unknown) <= 1, "reshape to {} leaves {} dims open; one is possible", shape, len(unknown))
    total = const(product(tuple(old)))
    out = list(shape)
    if unknown:
        known = const(product(tuple(d for k, d in enumerate(shape) if k != unknown[0])))
        ok = value(known) != 0
        require(ok, "reshape of {} to {}: the open dim could be anything, as the others hold no element", old, shape)
        out[unknown[0]] = dim(total // known)
    ok = same_dim(dim(total), product(tuple(out)))
    require(ok, "reshape of {} to {}: {} elements against {}", old, shape, total, product(tuple(out)))
    return tuple(out)


def groups(old: Dims, new: Dims) -> list[tuple[range, range]]:
    """Both shapes cut into the smallest runs of dims that hold equally many elements, outermost first."""
    out = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while not same_dim(product(old[a:i]), product(new[b:j])):
            left, right = product(old[a:i]), product(new[b:j])
            grow_old = isinstance(left, int) and isinstance(right, int) and left < right
            if (grow_old or j == len(new) or (not isinstance(right, int) and isinstance(left, int))) and i < len(old):
                i += 1
            elif j < len(new):
                j += 1
            else:
                i = len(old)
        out.append((range(a, i), range(b, j)))
    return out


def reshape_index(old: Dims, new: Dims, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """The row-major index in shape `old` of the element at `index` of shape `new`."""
    out: list[Expr] = []
    for mine, theirs in groups(old, new):
        wide = [k for k in mine if not same_dim(old[k], 1)]
        flat: Expr = const(0)
        for j in theirs:
            flat = flat * new[j] + index[j]
        inner: Expr = const(1)
        found: dict[int, Expr] = {}
        for k in reversed(wide):
            part = flat // inner
            found[k] = part if k == wide[0] else part % const(old[k])
            inner = inner * old[k]
        out += [found.get(k, const(0)) for k in mine]
    return tuple(out)


def _reshape_type(x: TensorType, *, shape: Dims) -> TensorType:
    return TensorType(x.dtype, reshaped(x.shape, shape))


def _reshape(x: Tensor, *, shape: Dims) -> Tensor:
    new = reshaped(x.dims, shape)
    if product(new) == 0:
        return te.compute(new, x.dtype, lambda *i: const(0, x.dtype.computed))
    return te.compute(new, x.dtype, lambda *i: x[reshape_index(x.dims, new, i)])


def _squeeze_type(x: TensorType, *, axes: tuple[int, ...] | None = None) -> TensorType:
    return TensorType(x.dtype, _squeezed(x.shape, axes))


def _squeezed(shape: Dims, axes: tuple[int, ...] | None) -> Dims:
    gone = [k for k, d in enumerate(shape) if same_dim(d, 1)] if axes is None else normalize_axes(axes, len(shape))
    ok = all(same_dim(shape[k], 1) for k in gone)
    require(ok, "squeeze of axes {} of shape {}: only dims of size 1 can go", axes, shape)
    return tuple(d for k, d in enumerate(shape) if k not in gone)


def _unsqueeze_type(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    new = normalize_axes(axes, x.rank + len(axes))
    dims = iter(x.shape)
    return TensorType(x.dtype, tuple(1 if k in new else next(dims) for k in range(x.rank + len(axes))))


def _flatten_type(x: TensorType, *, axis: int = 1) -> TensorType:
    require(-x.rank <= axis <= x.rank, "flatten: axis {} is outside [{}, {}]", axis, -x.rank, x.rank)
    axis = axis + x.rank if axis < 0 else axis
    return TensorType(x.dtype, (product(x.shape[:axis]), product(x.shape[axis:])))


def _as_reshape(type_: Callable[..., TensorType]) -> Callable[..., Any]:
    return lambda b, x, **attrs: b.reshape(x, shape=type_(x.type, **attrs).shape)


# --- transpose, expand, tile ------------------------------------------------------------------------------------------


def _transpose_type(x: TensorType, *, perm: tuple[int, ...]) -> TensorType:
    ok = sorted(perm) == list(range(x.rank))
    require(ok, "transpose: {} is no permutation of the {} axes of {}", perm, x.rank, x)
    return TensorType(x.dtype, tuple(x.shape[p] for p in perm))


def _transpose(x: Tensor, *, perm: tuple[int, ...]) -> Tensor:
    back = [perm.index(k) for k in range(len(perm))]
    return te.compute([x.dims[p] for p in perm], x.dtype, lambda *i: x[tuple(i[k] for k in back)])


def _expand_type(x: TensorType, *, shape: Dims) -> TensorType:
    return TensorType(x.dtype, broadcast_shapes(x.shape, shape))


def _expand(x: Tensor, *, shape: Dims) -> Tensor:
    return te.compute(broadcast_shapes(x.dims, shape), x.dtype, lambda *i: x[broadcast_index(x, i)])


def _expand_numpy(x: Array, *, shape: Sequence[int]) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))


def _tile_type(x: TensorType, *, repeats: Dims) -> TensorType:
    require(len(repeats) == x.rank, "tile needs {} repeats for {}; got {}", x.rank, x, repeats)
    return TensorType(x.dtype, tuple(dim(const(d) * r) for d, r in zip(x.shape, repeats)))


def _tile(x: Tensor, *, repeats: Dims) -> Tensor:
    shape = [dim(const(d) * r) for d, r in zip(x.dims, repeats)]
    if product(shape) == 0:
        return te.compute(shape, x.dtype, lambda *i: const(0, x.dtype.computed))
    return te.compute(shape, x.dtype, lambda *i: x[tuple(j % const(d) for j, d in zip(i, x.dims))])


# --- concat -----------------------------------------------------------------------------------------------------------


def _concat_type(*xs: TensorType, axis: int) -> TensorType:
    require(len(xs) > 0, "concat needs an operand")
    same_dtype(*xs)
    first = xs[0]
    axis = normalize_axis(axis, first.rank)
    total: Expr = const(0)
    for x in xs:
        fits = x.rank == first.rank and all(
            k == axis or same_dim(a, b) for k, (a, b) in enumerate(zip(x.shape, first.shape))
        )
        require(fits, "concat along axis {}: {} does not fit to {}", axis, x, first)
        total = total + x.shape[axis]
    return TensorType(first.dtype, (*first.shape[:axis], dim(total), *first.shape[axis + 1 :]))


def _concat(*xs: Tensor, axis: int) -> Tensor:
    axis = normalize_axis(axis, len(xs[0].dims))
    total: Expr = const(0)
    parts = []  # (operand, where it starts)
    for x in xs:
        if not same_dim(x.dims[axis], 0):
            parts.append((x, total))
        total = total + x.dims[axis]

    def element(*i: Expr) -> Expr:
        def part(k: int) -> Expr:
            x, start = parts[k]
            # both arms of a select are evaluated, so the index stays inside each operand
            at = (*i[:axis], i[axis] if len(parts) == 1 else clamp(i[axis] - start, x.dims[axis]), *i[axis + 1 :])
            return x[at]

        r = part(len(parts) - 1)
        for k in reversed(range(len(parts) - 1)):
            r = select(i[axis] < parts[k + 1][1], part(k), r)
        return r

    shape = (*xs[0].dims[:axis], dim(total), *xs[0].dims[axis + 1 :])
    dtype = xs[0].dtype
    return te.compute(shape, dtype, element if parts else lambda *i: const(0, dtype.computed))


# --- slices -----------------------------------------------------------------------------------------------------------


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
    # a symbolic bound is a size, so it is not negative unless its upper bound says so; 2^31 and more mean "to the end"
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
    """How often an index is to be reflected, at 0 and then at the last element, until it is none of the padding, if the
    last element is at least this one; more than MAX_FOLDS where nobody knows.
    """
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


# --- blocks and layouts -----------------------------------------------------------------------------------------------


def _depth_type(x: TensorType, *, block: int, mode: str = "DCR") -> TensorType:
    ok = x.rank == 4 and mode in ("DCR", "CRD")
    require(ok, "depth_to_space needs [N, C, H, W] and mode DCR or CRD; got {} and {}", x, mode)
    n, c, h, w = x.shape
    ok = isinstance(c, int) and block > 0 and c % (block * block) == 0
    require(ok, "{} channels do not divide into {}x{} blocks", c, block, block)
    return TensorType(x.dtype, (n, dim(const(c) // (block * block)), dim(const(h) * block), dim(const(w) * block)))


def _depth_to_space(b: Any, x: Any, *, block: int, mode: str) -> Any:
    n, c, h, w = x.type.shape
    inner = c // (block * block)
    if mode == "DCR":
        y = b.transpose(b.reshape(x, shape=(n, block, block, inner, h, w)), perm=(0, 3, 4, 1, 5, 2))
    else:
        y = b.transpose(b.reshape(x, shape=(n, inner, block, block, h, w)), perm=(0, 1, 4, 2, 5, 3))
    return b.reshape(y, shape=_depth_type(x.type, block=block, mode=mode).shape)


def _space_type(x: TensorType, *, block: int) -> TensorType:
    require(x.rank == 4 and block > 0, "space_to_depth needs [N, C, H, W]; got {}", x)
    n, c, h, w = x.shape
    ok = all(dim(const(d) % block) == 0 for d in (h, w))
    require(ok, "the spatial dims of {} do not divide into blocks of {}", x, block)
    return TensorType(x.dtype, (n, dim(const(c) * block * block), dim(const(h) // block), dim(const(w) // block)))


def _space_to_depth(b: Any, x: Any, *, block: int) -> Any:
    out = _space_type(x.type, block=block).shape
    n, c, *_ = x.type.shape
    y = b.reshape(x, shape=(n, c, out[2], block, out[3], block))
    return b.reshape(b.transpose(y, perm=(0, 3, 5, 1, 2, 4)), shape=out)


def _interleave_type(x: TensorType, *, strides: tuple[int, ...], channels: int) -> TensorType:
    phases = math.prod(strides)
    ok = x.rank == len(strides) + 2 and all(s > 0 for s in strides)
    require(ok, "interleave needs a stride > 0 for each of the spatial axes of {}", x)
    n, c, *sizes = x.shape
    ok = isinstance(c, int) and c % phases == 0 and 0 < channels <= c // phases
    require(ok, "{} channels are not {} x {} and more", c, phases, channels)
    return TensorType(x.dtype, (n, channels, *(dim(const(q) * s) for q, s in zip(sizes, strides))))


def _interleave(x: Tensor, *, strides: tuple[int, ...], channels: int) -> Tensor:
    n, c, *sizes = x.dims
    share = const(c) // math.prod(strides)

    def element(image: Expr, channel: Expr, *i: Expr) -> Expr:
        phase: Expr = const(0)
        for k, s in zip(i, strides):
            phase = phase * s + k % s
        return x[(image, phase * share + channel, *(k // s for k, s in zip(i, strides)))]

    return te.compute((n, channels, *(dim(const(q) * s) for q, s in zip(sizes, strides))), x.dtype, element)


def _interleave_numpy(x: Array, *, strides: Sequence[int], channels: int) -> Array:
    n, c, *sizes = x.shape
    rank, phases = len(strides), math.prod(strides)
    y = x.reshape(n, *strides, c // phases, *sizes)
    y = y.transpose(0, 1 + rank, *(axis for k in range(rank) for axis in (2 + rank + k, 1 + k)))
    return np.ascontiguousarray(y.reshape(n, c // phases, *(q * s for q, s in zip(sizes, strides)))[:, :channels])


def _pack_type(x: TensorType, *, layout: Layout | None) -> TensorType:
    ok = layout is None or {p.axis for p in layout.parts} == set(range(x.rank))
    require(ok, "layout {} does not fit to {}", layout, x)
    ok = layout is None or not layout.winograd
    require(ok, "layout {} is for constants, which are transformed when they are packed", layout)
    return TensorType(x.dtype, x.shape, layout)


def _identity(x: Tensor, **attrs: Any) -> Tensor:
    return te.compute(x.dims, x.dtype, lambda *i: x[i])


def _array(x: Array, **attrs: Any) -> Array:
    return x


MOVEMENT_OPS: tuple[OpDef, ...] = (
    OpDef(
        "identity",
        lambda x: x,
        _identity,
        reference=_array,
        traits=VIEW,
        samples=(sample("f32[2, 3]"), sample("f16[5]"), sample("bool[]")),
    ),
    OpDef(
        "reshape",
        _reshape_type,
        _reshape,
        reference=lambda x, *, shape: x.reshape(shape),
        traits=VIEW,
        samples=(
            sample("f32[2, 3, 4]", shape=(4, 6)),
            sample("f32[6, 35]", shape=(2, 3, 5, 7)),
            sample("f16[2, 1, 3, 5]", shape=(2, -1, 1)),
            sample("i64[1]", shape=()),
            sample("f32[4, 9]", shape=(6, 6)),
            sample("f32[0, 4]", shape=(2, 0)),
            sample("bool[2, 6, 5]", shape=(3, 4, 5)),
        ),
    ),
    OpDef(
        "squeeze",
        _squeeze_type,
        decompose=_as_reshape(_squeeze_type),
        traits=VIEW,
        samples=(sample("f32[1, 3, 1]"), sample("f16[1, 3, 1]", axes=(-1,))),
    ),
    OpDef(
        "unsqueeze",
        _unsqueeze_type,
        decompose=_as_reshape(_unsqueeze_type),
        traits=VIEW,
        samples=(sample("f32[3, 5]", axes=(0, -1)), sample("f16[]", axes=(0,))),
    ),
    OpDef(
        "flatten",
        _flatten_type,
        decompose=_as_reshape(_flatten_type),
        traits=VIEW,
        samples=(sample("f32[2, 3, 5]"), sample("f16[2, 3]", axis=0), sample("f32[2, 3, 5]", axis=-1)),
    ),
    OpDef(
        "transpose",
        _transpose_type,
        _transpose,
        reference=lambda x, *, perm: np.transpose(x, perm),
        traits=MOVEMENT,
        samples=(
            sample("f32[3, 7]", perm=(1, 0)),
            sample("f16[2, 3, 4, 5]", perm=(0, 2, 3, 1)),
            sample("i64[2, 3, 4]", perm=(2, 0, 1)),
        ),
    ),
    OpDef(
        "expand",
        _expand_type,
        _expand,
        reference=_expand_numpy,
        traits=MOVEMENT,
        samples=(sample("f32[3, 1]", shape=(2, 3, 5)), sample("f16[4]", shape=(1,)), sample("i64[]", shape=(7,))),
    ),
    OpDef(
        "tile",
        _tile_type,
        _tile,
        reference=lambda x, *, repeats: np.tile(x, repeats),
        traits=MOVEMENT,
        samples=(
            sample("f32[3, 2]", repeats=(2, 3)),
            sample("f16[5]", repeats=(3,)),
            sample("u8[2, 3]", repeats=(1, 0)),
        ),
    ),
    OpDef(
        "concat",
        _concat_type,
        _concat,
        reference=lambda *xs, axis: np.concatenate(xs, axis),
        traits=MOVEMENT,
        samples=(
            sample("f32[2, 3]", "f32[2, 5]", axis=1),
            sample("f16[2, 1]", "f16[3, 1]", "f16[1, 1]", axis=-2),
            sample("i64[0, 2]", "i64[3, 2]", "i64[0, 2]", axis=0),
            sample("bool[4]", axis=0),
        ),
    ),
    OpDef(
        "slice",
        _slice_type,
        _slice,
        reference=_slice_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[7, 5]", starts=(2, 0), steps=(1, 1), shape=(3, 5)),
            sample("f16[9]", starts=(8,), steps=(-2,), shape=(5,)),
            sample("i64[4, 6]", starts=(1, 5), steps=(2, -3), shape=(2, 2)),
            sample("f32[3, 2]", starts=(0, 0), steps=(1, 1), shape=(0, 2)),
        ),
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
        indices=(1,),
    ),
    OpDef(
        "pad",
        _pad_type,
        _pad,
        reference=_pad_numpy,
        traits=MOVEMENT,
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
    ),
    OpDef(
        "depth_to_space",
        _depth_type,
        decompose=_depth_to_space,
        traits=MOVEMENT,
        samples=(sample("f32[1, 8, 2, 3]", block=2), sample("f16[2, 12, 3, 2]", block=2, mode="CRD")),
    ),
    OpDef(
        "space_to_depth",
        _space_type,
        decompose=_space_to_depth,
        traits=MOVEMENT,
        samples=(sample("f32[1, 2, 4, 6]", block=2), sample("f16[2, 1, 3, 6]", block=3)),
    ),
    # the phases of an image, of which each has its own channels, take turns along every spatial axis; a share may end
    # in channels unused
    OpDef(
        "interleave",
        _interleave_type,
        _interleave,
        reference=_interleave_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[1, 12, 2, 3]", strides=(2, 2), channels=3),
            sample("f16[2, 8, 3]", strides=(4,), channels=1),
            sample("f32[1, 36, 2, 1]", strides=(3, 2), channels=5),
        ),
    ),
    # the same values in another layout; layout=None is row-major again
    OpDef(
        "pack",
        _pack_type,
        _identity,
        reference=_array,
        traits=MOVEMENT,
        samples=(sample("f32[1, 20, 3, 3]", layout=parse_layout("0 1/16 2 3 1%16")), sample("f16[5, 4]", layout=None)),
    ),
)
