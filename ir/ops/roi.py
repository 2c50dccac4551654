"""Pooling over regions of interest. Both kinds are separable: first the rows of a region become bins, then its columns.

RoiAlign's mean over sampling points is a weighted sum of pixels, whose weights are products of one for the row and one
for the column. Its maximum is not separable, and looks at each point. What is rounded to whole numbers (bins, numbers
of points) depends on the last bit of a coordinate; so these ops have Trait.BITS, and references in the operand's type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import roi as rules
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import LOOPS, PURE, Index, OpDef, Trait, require
from dnnc.ir.ops.common import Array, both, clamp, dim, guarded, require_kind, same_dim, same_dtype, sample, whole
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

BITS = PURE | {Trait.BITS}
NEAR = 8  # points that can touch one pixel: they are at least half a pixel apart if there are several
BOUNDLESS = 1e30  # pixels: no bin is that large

# --- geometry, of one axis --------------------------------------------------------------------------------------------


def _rois(rois: TensorType, columns: int) -> None:
    require_kind("rois", rois, "f")
    require(rois.rank == 2 and rois.shape[1] == columns, "rois must be [R, {}]; got {}", columns, rois)


def _images(batch: TensorType, regions: TensorType) -> None:
    """An image's number for each region; sizes that are not known may turn out to be equal."""
    require_kind("batch indices", batch, "iu")
    n, r = batch.shape[0] if batch.rank == 1 else None, regions.shape[0]
    fits = n is not None and (same_dim(n, r) or not (isinstance(n, int) and isinstance(r, int)))
    require(fits, "batch indices must be [R], one for each region of {}; got {}", regions, batch)


class Points:
    """Sampling points of a bin: point i of bin p lies at `at(p, i)`. Infinite or NaN regions have none."""

    def __init__(self, low: Any, high: Any, bins: int, ratio: int, scale: float, half_pixel: bool, ops: Any) -> None:
        offset = 0.5 if half_pixel else 0.0
        self.low = low * scale - offset
        length = high * scale - offset - self.low
        length = length if half_pixel else ops.maximum(length, 1.0)
        self.bin = length / float(bins)
        finite = (-BOUNDLESS < self.bin) & (self.bin < BOUNDLESS)
        count = ops.ceil(self.bin) if ratio <= 0 else self.bin * 0.0 + float(ratio)
        self.count = ops.where(finite, count, ops.zeros_like(count))
        self.step = self.bin / ops.maximum(self.count, 1.0)

    def at(self, p: Any, i: Any) -> Any:
        return self.low + p * self.bin + (i + 0.5) * self.step


class _Symbols:
    """NumPy's names for what the geometry needs of expressions."""

    minimum, maximum, where = staticmethod(minimum), staticmethod(maximum), staticmethod(select)

    @staticmethod
    def zeros_like(x: Expr) -> Expr:
        return const(0.0, x.dtype)

    @staticmethod
    def ceil(x: Expr) -> Expr:
        return call("ceil", x)


def _axis_points(rois: Tensor, r: Expr, column: int, attrs: dict[str, Any]) -> Points:
    return Points(rois[r, column], rois[r, column + 2], **attrs, ops=_Symbols)


def _numpy_points(rois: Array, column: int, attrs: dict[str, Any]) -> Points:
    """Of all regions, as columns [R, 1]."""
    rois = rois.astype(rois.dtype if rois.dtype in (np.float32, np.float64) else np.float32)
    parts = dict(attrs, scale=rois.dtype.type(attrs["scale"]))
    return Points(rois[:, column, None], rois[:, column + 2, None], **parts, ops=np)


def _placed(y: Any, size: Any, ops: Any) -> Any:
    """A point pulled into the image."""
    return ops.minimum(ops.maximum(y, 0.0), size)


# --- the mean: weights, rows, columns ---------------------------------------------------------------------------------


def _weights_type(
    rois: TensorType, *, size: Dim, bins: int, column: int, ratio: int = 0, scale: float = 1.0, half_pixel: bool = True
) -> TensorType:
    _rois(rois, 4)
    ok = bins > 0 and column in (0, 1) and ratio >= 0
    require(ok, "bins must be positive, column 0 or 1; got {} and {}", bins, column)
    return TensorType(rois.dtype, (rois.shape[0], bins, size))


def _weights(rois: Tensor, *, size: Dim, bins: int, column: int, ratio: int, scale: float, half_pixel: bool) -> Tensor:
    attrs = {"bins": bins, "ratio": ratio, "scale": scale, "half_pixel": half_pixel}
    real = rois.dtype.computed
    last = cast(const(size) - 1, real)

    def point(r: Expr, p: Expr, h: Expr, k: Expr) -> tuple[Points, Expr, Expr]:
        """The geometry, and the k-th point that may touch pixel h: its number and its place."""
        points = _axis_points(rois, r, column, attrs)
        i = cast(k, real)
        if ratio <= 0:  # from the first one that is less than a pixel before h
            first = call("floor", (cast(h, real) - 1.0 - points.at(cast(p, real), const(0.0, real))) / points.step)
            i = i + maximum(first, 0.0)
        return points, i, points.at(cast(p, real), i)

    def weight(*v: Expr) -> Expr:
        points, _, y = point(*v)
        hat = maximum(const(1.0, real) - call("abs", _placed(y, last, _Symbols) - cast(v[2], real)), const(0.0, real))
        return hat / maximum(points.count, 1.0)

    def counts(*v: Expr) -> Expr:
        points, i, y = point(*v)
        return both(i < points.count, const(-1.0, real) <= y, y <= last + 1.0)

    extent = ratio if ratio > 0 else NEAR
    zero = const(0.0, real)
    return te.reduce(
        (rois.dims[0], bins, size), [extent], rois.dtype, "sum", lambda *v: select(counts(*v), weight(*v), zero)
    )


def _weights_numpy(
    rois: Array, *, size: int, bins: int, column: int, ratio: int = 0, scale: float = 1.0, half_pixel: bool = True
) -> Array:
    points = _numpy_points(rois, column, {"bins": bins, "ratio": ratio, "scale": scale, "half_pixel": half_pixel})
    real = points.low.dtype
    h, p = np.arange(size, dtype=real), np.arange(bins, dtype=real)[None]
    most = int(np.nanmax(points.count, initial=0))
    out = np.zeros((len(rois), bins, size), real)
    for i in range(min(most, 1 << 16)):
        y = points.at(p, real.type(i))
        inside = (i < points.count) & (y >= -1) & (y <= size)
        hat = np.maximum(1 - np.abs(_placed(y, real.type(size - 1), np)[..., None] - h), 0)
        out += np.where(inside[..., None], hat, 0).astype(real)
    return np.asarray(out / np.maximum(points.count, 1)[..., None], real)


def _rows_type(x: TensorType, batch: TensorType, weights: TensorType) -> TensorType:
    ok = x.rank == 4 and weights.rank == 3
    require(ok, "roi_rows needs [N, C, H, W] and weights [R, bins, H]; got {} and {}", x, weights)
    _images(batch, weights)
    same_dtype(x, weights)
    return TensorType(x.dtype, (weights.shape[0], x.shape[1], weights.shape[1], x.shape[3]))


def _rows(x: Tensor, batch: Tensor, weights: Tensor) -> Tensor:
    n, c, height, width = x.dims
    shape = (weights.dims[0], c, weights.dims[1], width)

    def term(*v: Expr) -> Expr:
        r, channel, p, column, h = v
        return weights[r, p, h] * x[guarded(batch[r], n), channel, h, column]

    return te.reduce(shape, [height], x.dtype, "sum", term, lambda *v: weights[v[0], v[2], v[4]].ne(0.0))


def _rows_numpy(x: Array, batch: Array, weights: Array) -> Array:
    out = np.zeros((len(weights), x.shape[1], weights.shape[1], x.shape[3]), np.result_type(x, weights))
    for r, p in np.ndindex(weights.shape[:2]):
        used = np.nonzero(weights[r, p])[0]
        out[r, :, p] = np.einsum("h,chw->cw", weights[r, p, used], x[int(batch[r])][:, used])
    return out


def _columns_type(x: TensorType, weights: TensorType) -> TensorType:
    ok = x.rank == 4 and weights.rank == 3
    require(ok, "roi_columns needs [R, C, bins, W] and weights [R, bins, W]; got {} and {}", x, weights)
    same_dtype(x, weights)
    return TensorType(x.dtype, (*x.shape[:3], weights.shape[1]))


def _columns(x: Tensor, weights: Tensor) -> Tensor:
    def term(*v: Expr) -> Expr:
        r, c, p, q, k = v
        w = weights[r, q, k]
        return select(w.eq(0.0), const(0.0, w.dtype), w * x[r, c, p, k])

    return te.reduce((*x.dims[:3], weights.dims[1]), [x.dims[3]], x.dtype, "sum", term)


def _columns_numpy(x: Array, weights: Array) -> Array:
    out = np.zeros((*x.shape[:3], weights.shape[1]), np.result_type(x, weights))
    for r, q in np.ndindex(weights.shape[:2]):
        used = np.nonzero(weights[r, q])[0]
        out[r, ..., q] = np.einsum("w,cpw->cp", weights[r, q, used], x[r][..., used])
    return out


# --- the maximum over sampling points ---------------------------------------------------------------------------------


def _max_type(
    x: TensorType,
    rois: TensorType,
    batch: TensorType,
    *,
    bins: tuple[int, int],
    ratio: int = 0,
    scale: float = 1.0,
    half_pixel: bool = True,
) -> TensorType:
    _rois(rois, 4)
    _images(batch, rois)
    ok = x.rank == 4 and len(bins) == 2
    require(ok, "roi_align_max needs [N, C, H, W] and bins (rows, columns); got {} and {}", x, bins)
    same_dtype(x, rois)
    return TensorType(x.dtype, (rois.shape[0], x.shape[1], *bins))


def _max(
    x: Tensor, rois: Tensor, batch: Tensor, *, bins: tuple[int, int], ratio: int, scale: float, half_pixel: bool
) -> Tensor:
    n, c, *spatial = x.dims
    real = x.dtype.computed
    extents = [ratio if ratio > 0 else dim(const(size) * 2 + 5) for size in spatial]
    attrs = [{"bins": b, "ratio": ratio, "scale": scale, "half_pixel": half_pixel} for b in bins]
    minus_one, zero = const(-1.0, real), const(0.0, real)

    def point(v: tuple[Expr, ...], k: int) -> tuple[Points, Expr, Expr]:
        """Along axis k: the geometry, the number of the point, and its place."""
        points, p, i = _axis_points(rois, v[0], 1 - k, attrs[k]), cast(v[2 + k], real), cast(v[4 + k], real)
        if ratio <= 0:  # from the first point in the image
            i = i + maximum(call("floor", (minus_one - points.at(p, zero)) / points.step), 0.0)
        return points, i, points.at(p, i)

    def taps(v: tuple[Expr, ...], k: int) -> list[tuple[Expr, Expr]]:
        size = spatial[k]
        y = _placed(point(v, k)[2], cast(const(size) - 1, real), _Symbols)
        low = call("floor", y)
        j = clamp(cast(low, i64), size)
        return [(j, const(1.0, real) - (y - low)), (clamp(j + 1, size), y - low)]

    def value(*v: Expr) -> Expr:
        found = [w * u * x[guarded(batch[v[0]], n), v[1], j, i] for j, w in taps(v, 0) for i, u in taps(v, 1)]
        return maximum(maximum(found[0], found[1]), maximum(found[2], found[3]))

    def counts(*v: Expr) -> Expr:
        conds = []
        for k, size in enumerate(spatial):
            points, i, y = point(v, k)
            conds += [i < points.count, minus_one <= y, y <= cast(const(size), real)]
        return both(*conds)

    best = te.reduce((rois.dims[0], c, *bins), extents, real, "max", value, counts)

    def element(*v: Expr) -> Expr:
        # a point outside of the image counts as 0; so does a bin without points
        outside = zero.ne(0.0)
        for k, size in enumerate(spatial):
            points, p = _axis_points(rois, v[0], 1 - k, attrs[k]), cast(v[2 + k], real)
            outside = (
                outside
                | (points.at(p, zero) < minus_one)
                | (cast(const(size), real) < points.at(p, points.count - 1.0))
                | (points.count < 1.0)
            )
        return select(outside, maximum(best[v], zero), best[v])

    return te.compute((rois.dims[0], c, *bins), x.dtype, element)


def _max_numpy(
    x: Array,
    rois: Array,
    batch: Array,
    *,
    bins: tuple[int, int],
    ratio: int = 0,
    scale: float = 1.0,
    half_pixel: bool = True,
) -> Array:
    out = np.zeros((len(rois), x.shape[1], *bins), x.dtype if x.dtype in (np.float32, np.float64) else np.float32)
    axes = []
    for k in (0, 1):
        axes.append(
            _numpy_points(rois, 1 - k, {"bins": bins[k], "ratio": ratio, "scale": scale, "half_pixel": half_pixel})
        )
    for r, p, q in np.ndindex(len(rois), *bins):
        where = [
            [float(g.at(j, i)[r, 0]) for i in range(min(int(g.count[r, 0]), 1 << 12))] for g, j in zip(axes, (p, q))
        ]
        image = x[int(batch[r])].astype(out.dtype)
        found = [_tap_numpy(image, y, z) for y in where[0] for z in where[1]]
        if found:
            out[r, :, p, q] = np.max(found, 0)
    return out


def _tap_numpy(image: Array, y: float, x: float) -> Array:
    """The largest of four weighted pixels around a point, 0 outside of the image."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(image), image.dtype)
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    j, i = int(y), int(x)
    rows, columns = (
        ((j, 1 - (y - j)), (min(j + 1, height - 1), y - j)),
        ((i, 1 - (x - i)), (min(i + 1, width - 1), x - i)),
    )
    return np.max([image[:, a, b] * image.dtype.type(w * u) for a, w in rows for b, u in columns], 0)


# --- the maximum over whole pixels ------------------------------------------------------------------------------------


def _bins_type(rois: TensorType, *, size: Dim, bins: int, column: int, scale: float = 1.0) -> TensorType:
    _rois(rois, 5)
    require(bins > 0 and column in (0, 1), "bins must be positive, column 0 or 1; got {} and {}", bins, column)
    return TensorType(i64, (rois.shape[0], bins, 2))


def _bins(rois: Tensor, *, size: Dim, bins: int, column: int, scale: float) -> Tensor:
    real = rois.dtype.computed

    def whole(v: Expr) -> Expr:  # half goes away from 0
        v = v * scale
        up = call("floor", call("abs", v) + 0.5)
        return select(v < 0.0, const(0.0, real) - up, up)

    def element(r: Expr, p: Expr, end: Expr) -> Expr:
        low, high = whole(rois[r, 1 + column]), whole(rois[r, 3 + column])
        width = maximum(high - low + 1.0, 1.0) / float(bins)
        first, last = call("floor", cast(p, real) * width), call("ceil", cast(p + 1, real) * width)
        edge = cast(select(end < 1, first, last) + low, i64)
        return minimum(maximum(edge, 0), const(size))

    return te.compute((rois.dims[0], bins, 2), i64, element)


def _bins_numpy(rois: Array, *, size: int, bins: int, column: int, scale: float = 1.0) -> Array:
    v = rois.astype(rois.dtype if rois.dtype in (np.float32, np.float64) else np.float32)
    v = v[:, [1 + column, 3 + column]] * v.dtype.type(scale)
    v = np.where(v < 0, -1, 1).astype(v.dtype) * np.floor(np.abs(v) + v.dtype.type(0.5))
    low, high = v[:, :1], v[:, 1:]
    width = np.maximum(high - low + 1, 1) / v.dtype.type(bins)
    p = np.arange(bins, dtype=v.dtype)
    edges = np.stack([np.floor(p * width) + low, np.ceil((p + 1) * width) + low], -1)
    return np.nan_to_num(np.clip(edges, 0, size)).astype(np.int64)  # NaN becomes 0, as in all casts


def _pool_type(x: TensorType, bins: TensorType, batch: TensorType, *, along: int) -> TensorType:
    ok = x.rank == 4 and bins.rank == 3 and bins.dtype is i64
    require(ok, "roi_max needs [N, C, H, W] and bins [R, bins, 2]; got {} and {}", x, bins)
    _images(batch, bins)
    require(along in (2, 3), "pooling is along 2 or 3; got {}", along)
    return TensorType(
        x.dtype, (bins.shape[0], x.shape[1], *(bins.shape[1] if k == along else x.shape[k] for k in (2, 3)))
    )


def _pool(x: Tensor, bins: Tensor, batch: Tensor, *, along: int) -> Tensor:
    """`batch` says which image each region is in. The maximum of nothing is 0."""
    shape = (bins.dims[0], x.dims[1], *(bins.dims[1] if k == along else x.dims[k] for k in (2, 3)))

    def value(*v: Expr) -> Expr:
        image = guarded(batch[v[0]], x.dims[0])
        return x[(image, v[1], v[4] if along == 2 else v[2], v[4] if along == 3 else v[3])]

    def inside(*v: Expr) -> Expr:
        return both(bins[v[0], v[along], 0] <= v[4], v[4] < bins[v[0], v[along], 1])

    best = te.reduce(shape, [x.dims[along]], x.dtype, "max", value, inside)
    zero = const(0.0, x.dtype.computed)
    return te.compute(
        shape, x.dtype, lambda *v: select(bins[v[0], v[along], 0] < bins[v[0], v[along], 1], best[v], zero)
    )


def _pool_numpy(x: Array, bins: Array, batch: Array, *, along: int) -> Array:
    shape = [bins.shape[0], *x.shape[1:]]
    shape[along] = bins.shape[1]
    out = np.zeros(shape, x.dtype)
    for r, p in np.ndindex(*bins.shape[:2]):
        low, high = np.clip(bins[r, p], 0, x.shape[along])
        if low < high:
            place = (r, slice(None), *(p if k == along else slice(None) for k in (2, 3)))
            out[place] = np.take(x[int(batch[r])], range(low, high), along - 1).max(along - 1)
    return out


def _work(x: TensorType, *others: TensorType | None, **attrs: Any) -> Dim:
    return dim(const(x.size) * 4)


ROI_OPS: tuple[OpDef, ...] = (
    OpDef(
        "roi_weights",
        _weights_type,
        _weights,
        reference=_weights_numpy,
        flops=lambda rois, *, size, bins, **_: dim(const(size) * bins * rois.shape[0] * NEAR * 6),
        traits=BITS | {Trait.LOOPS},
        samples=(
            sample("f32[4, 4]", size=9, bins=3, column=0, domain=(-3.0, 12.0)),
            sample("f32[3, 4]", size=6, bins=2, column=1, ratio=2, scale=0.5, half_pixel=False, domain=(0.0, 14.0)),
            sample("f64[5, 4]", size=5, bins=1, column=1, domain=(-20.0, 20.0)),
        ),
    ),
    OpDef(
        "roi_rows",
        _rows_type,
        _rows,
        reference=_rows_numpy,
        flops=lambda x, batch, weights: dim(const(weights.size) * x.shape[1] * x.shape[3] * 2),
        traits=LOOPS,
        samples=(
            sample("f32[2, 3, 5, 4]", "i64[3]", "f32[3, 2, 5]", domain=(0.0, 1.0)),
            sample("f16[1, 2, 3, 7]", "i32[2]", "f16[2, 1, 3]", domain=(0.0, 0.5)),
        ),
        index=Index(1, whole),
        vjp=rules.rows,
    ),
    OpDef(
        "roi_columns",
        _columns_type,
        _columns,
        reference=_columns_numpy,
        flops=lambda x, weights: dim(const(x.size) * weights.shape[1] * 2),
        traits=LOOPS,
        samples=(sample("f32[3, 2, 2, 9]", "f32[3, 4, 9]"), sample("f16[2, 1, 3, 5]", "f16[2, 2, 5]")),
    ),
    OpDef(
        "roi_align_max",
        _max_type,
        _max,
        reference=_max_numpy,
        flops=lambda x, rois, batch, *, bins, **_: dim(const(bins[0] * bins[1]) * rois.shape[0] * x.shape[1] * 32),
        traits=BITS | {Trait.LOOPS},
        samples=(
            sample("f32[2, 2, 5, 6]", "f32[3, 4]", "i64[3]", bins=(2, 3), domain=(0.0, 1.0)),
            sample(
                "f32[1, 3, 7, 4]",
                "f32[2, 4]",
                "i64[2]",
                bins=(2, 2),
                ratio=2,
                scale=4.0,
                half_pixel=False,
                domain=(-0.9, 0.9),
            ),
        ),
        index=Index(2, whole),
    ),
    OpDef(
        "roi_bins",
        _bins_type,
        _bins,
        reference=_bins_numpy,
        flops=lambda rois, *, bins, **_: dim(const(rois.shape[0]) * bins * 8),
        traits=BITS,
        samples=(
            sample("f32[4, 5]", size=9, bins=3, column=0, domain=(-3.0, 12.0)),
            sample("f32[3, 5]", size=5, bins=2, column=1, scale=0.25, domain=(0.0, 24.0)),
        ),
    ),
    OpDef(
        "roi_max",
        _pool_type,
        _pool,
        reference=_pool_numpy,
        flops=_work,
        traits=LOOPS,
        samples=(
            sample("f32[3, 2, 5, 4]", "i64[3, 2, 2]", "i64[3]", along=2, domain=(0, 2)),
            sample("f16[2, 2, 3, 7]", "i64[2, 4, 2]", "i64[2]", along=3, domain=(0, 1)),
        ),
        index=Index(2, whole),
    ),
)
