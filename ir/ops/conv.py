"""Convolution and its transpose, 1 to 3 spatial dims; x [N, C, ...], w [O, C/group, ...] ([C, O/group, ...]).

A grouped convolution may be written by panels of outputs (`panel=16`): all outputs of a panel read the same inputs,
those of all groups that the panel has outputs of, and w is [O, most inputs of a panel, ...] with zeros where an input
is of another group. So several groups share a register of outputs. `panels_of` says which inputs a panel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir import batching, te
from dnnc.ir.autodiff.rules import conv as rules
from dnnc.ir.dtype import DType, i32
from dnnc.ir.expr import E, Expr, cast, const, minimum, unwrap
from dnnc.ir.op import CONTRACTION, ContractionForm, OpDef, require
from dnnc.ir.ops.common import CHUNK, Array, both, channel_dims, dim, require_kind, same_dim, same_dtype, sample, within
from dnnc.ir.ops.matmul import float64, widened
from dnnc.ir.ops.window import Ints, Window, offsets, pad_numpy, shifted, sizes_numpy, window
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

Pads = tuple[Dim, ...]


@dataclass(frozen=True)
class Panels:
    """The inputs that the outputs of a grouped convolution read, `width` outputs at a time."""

    inputs: int  # of a group
    outputs: int  # of a group
    made: int  # all outputs
    width: int  # outputs of a panel

    def first(self, o: E) -> Expr:
        """The first input that output `o` and the rest of its panel read."""
        return const(o) // self.width * self.width // self.outputs * self.inputs

    def count(self, o: E) -> Expr:
        """How many inputs they read."""
        at = const(o) // self.width * self.width
        last = at + (self.width - 1) if self.made % self.width == 0 else minimum(at + (self.width - 1), self.made - 1)
        return (last // self.outputs - at // self.outputs + 1) * self.inputs

    @property
    def counts(self) -> list[int]:
        """Inputs of each panel."""
        ends = [(at, min(at + self.width, self.made) - 1) for at in range(0, self.made, self.width)]
        return [(last // self.outputs - first // self.outputs + 1) * self.inputs for first, last in ends]

    @property
    def of_a_block(self) -> int:
        """Panels that share a block of `width` inputs, each lane one group's element; 0 if a panel reads more."""
        if self.outputs % self.inputs or self.width % self.inputs or self.inputs == self.width:
            return 0  # groups of a block have as many outputs as whole panels hold
        panels = self.outputs // self.inputs
        return panels if -(-self.made // self.width) % panels == 0 else 0

    @property
    def most(self) -> int:
        return max(self.counts, default=0)


def panels_of(channels: int, made: int, group: int, width: int) -> Panels:
    """Of a convolution of `channels` inputs and `made` outputs in `group` groups."""
    return Panels(channels // group, made // group, made, width)


def _channels(x: TensorType, w: TensorType, b: TensorType | None, group: int, out_dtype: DType | None) -> None:
    ok = 3 <= x.rank <= 5 and w.rank == x.rank
    require(ok, "conv needs 1 to 3 spatial dims and equal ranks; got x {} and w {}", x, w)
    if out_dtype is None:
        same_dtype(x, w, *(() if b is None else (b,)))
    require_kind("conv's operands", x, "fiu")
    require(group > 0 and w.shape[0] % group == 0, "dim 0 of w {} must be divisible by group {}", w, group)


def _type(
    x: TensorType,
    w: TensorType,
    b: TensorType | None = None,
    *,
    strides: Ints | None = None,
    pads: Pads | None = None,
    dilations: Ints | None = None,
    group: int = 1,
    panel: int = 0,
    out_dtype: DType | None = None,
) -> TensorType:
    _channels(x, w, b, group, out_dtype)
    if panel:
        sizes = x.shape[1], w.shape[0]
        ok = all(isinstance(n, int) and n % group == 0 for n in sizes)
        require(ok, "panels need channels in {} groups; got {} and {}", group, *sizes)
        most = panels_of(*sizes, group, panel).most  # type: ignore[arg-type]
        ok = w.shape[1] == most
        require(ok, "a panel of {} outputs of {} groups reads {} inputs; w is {}", panel, group, most, w)
    else:
        want = dim(const(w.shape[1]) * group)
        ok = same_dim(x.shape[1], want)
        require(ok, "x {} has {} channels, w {} in {} groups needs {}", x, x.shape[1], w, group, want)
    ok = b is None or (b.rank == 1 and same_dim(b.shape[0], w.shape[0]))
    require(ok, "the bias must be [{}]; got {}", w.shape[0], b)
    win = window(x.rank - 2, w.shape[2:], strides, pads, dilations)
    return TensorType(out_dtype or x.dtype, (x.shape[0], w.shape[0], *win.sizes(x.shape[2:])))


def _with_bias(acc: Tensor, b: Tensor | None, dtype: DType) -> Tensor:
    if b is None:
        return acc
    return te.compute(acc.dims, dtype, lambda *i: acc[i] + cast(b[i[1]], dtype.computed))


def _compute(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    strides: Ints | None,
    pads: Pads | None,
    dilations: Ints | None,
    group: int,
    panel: int,
    out_dtype: DType | None,
) -> Tensor:
    rank = len(x.dims) - 2
    dtype = out_dtype or x.dtype
    win = window(rank, w.dims[2:], strides, pads, dilations)
    spatial = x.dims[2:]
    channels, per_group = w.dims[1], const(w.dims[0]) // group
    panels = panels_of(x.dims[1], w.dims[0], group, panel) if panel else None  # type: ignore[arg-type]
    uneven = panels is not None and len(set(panels.counts)) > 1

    def value(*v: Expr) -> Expr:
        n, o, at = v[0], v[1], win.positions(v[2 : 2 + rank], v[3 + rank :])
        first = o // per_group * channels if panels is None else panels.first(o)
        return cast(x[(n, first + v[2 + rank], *at)], dtype.computed) * cast(w[(o, *v[2 + rank :])], dtype.computed)

    def inside(*v: Expr) -> Expr:
        tests = [win.inside(win.positions(v[2 : 2 + rank], v[3 + rank :]), spatial)] if win.padded else []
        return both(*([v[2 + rank] < panels.count(v[1])] if uneven and panels is not None else []), *tests)

    shape = (x.dims[0], w.dims[0], *win.sizes(spatial))
    where = inside if win.padded or uneven else None
    acc = te.reduce(shape, w.dims[1:], dtype if b is None else dtype.computed, "sum", value, where)
    return _with_bias(acc, b, dtype)


def _bias_numpy(y: Array, b: Array | None) -> Array:
    return y if b is None else y + b.reshape((-1,) + (1,) * (y.ndim - 2))


def _reference(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    group: int = 1,
    panel: int = 0,
    out_dtype: DType | None = None,
    **attrs: Any,
) -> Array:
    x, w = widened(x, out_dtype), widened(w, out_dtype)
    if panel:
        panels = panels_of(x.shape[1], w.shape[0], group, panel)
        firsts = [unwrap(panels.first(at)) for at in range(0, w.shape[0], panel)]
        parts = [
            _reference(x[:, first : first + count], w[k * panel : (k + 1) * panel, :count], **attrs)
            for k, (first, count) in enumerate(zip(firsts, panels.counts))
        ]
        return _bias_numpy(np.concatenate(parts, 1), b)
    win = window(x.ndim - 2, w.shape[2:], attrs.get("strides"), attrs.get("pads"), attrs.get("dilations"))
    sizes = sizes_numpy(win, x.shape[2:])
    padded = pad_numpy(x, win, 0)
    n, c, o = x.shape[0], x.shape[1] // group, w.shape[0] // group
    y = np.zeros((n, group, o, int(np.prod(sizes))), np.result_type(x, w))
    for at in offsets(win):
        part = shifted(padded, win, sizes, at).reshape(n, group, c, int(np.prod(sizes)))
        y += np.matmul(w[(..., *at)].reshape(group, o, c), part)
    return _bias_numpy(y.reshape(n, group * o, *sizes), b)


def _reference_at(
    inputs: Sequence[Array | None],
    points: Array,
    *,
    group: int = 1,
    panel: int = 0,
    out_dtype: DType | None = None,
    **attrs: Any,
) -> Array:
    """Compute pixels times channels as a matrix product where the points form a (near) grid, else by windows."""
    x, w, b = (widened(a, out_dtype) if a is not None else None for a in (*inputs, None)[:3])
    assert x is not None and w is not None
    win = window(x.ndim - 2, w.shape[2:], attrs.get("strides"), attrs.get("pads"), attrs.get("dilations"))
    size = max(int(np.prod(w.shape[1:])), 1)
    pixels, which = np.unique(np.delete(points, 1, axis=1), axis=0, return_inverse=True)
    channels, column = np.unique(points[:, 1], return_inverse=True)
    grid = group == 1 and len(pixels) * len(channels) <= 8 * len(points)
    at = pixels if grid else points
    first = (
        points[:, 1] // panel * panel if panel else points[:, 1]
    )  # output whose group's inputs are the first that are read
    lead = (
        at[:, 0],
        np.zeros(len(at), np.int64) if grid else first // max(w.shape[0] // group, 1) * (x.shape[1] // group),
    )
    if panel:
        counts = np.repeat(panels_of(x.shape[1], w.shape[0], group, panel).counts, panel)[: w.shape[0]]
        w = np.where(
            (np.arange(w.shape[1]) < counts[:, None]).reshape(*w.shape[:2], *(1,) * (w.ndim - 2)), w, w.dtype.type(0)
        )
    spatial = at[:, 1:] if grid else at[:, 2:]
    matrix = float64(w[channels]).reshape(len(channels), int(np.prod(w.shape[1:]))).T if grid else None
    step = max(1, CHUNK // size)
    out = []
    for k in range(0, len(at), step):
        part = slice(k, k + step)
        read = _windows(x, win, w.shape, lead[0][part], lead[1][part], spatial[part])
        out.append(
            read @ matrix
            if matrix is not None
            else (read * float64(w[points[part, 1]]).reshape(read.shape)).sum(1, dtype=read.dtype)
        )
    y = np.concatenate(out) if out else np.zeros((0, len(channels)) if grid else 0, float64(x[:0]).dtype)
    y = y[which.reshape(-1), column.reshape(-1)] if grid else y
    return y if b is None else y + b[points[:, 1]]


def _windows(x: Array, win: Window, kernel: Sequence[int], images: Array, first: Array, at: Array) -> Array:
    """Return windows [windows, elements of a window] of one image and `kernel[1]` channels from `first` on."""
    grids = np.meshgrid(*(np.arange(k) for k in kernel[1:]), indexing="ij")
    col = (slice(None),) + (None,) * len(grids)
    channels = first[col] + grids[0]
    index = [images[col], np.minimum(channels, x.shape[1] - 1)]
    valid = channels < x.shape[1]
    for k, n in enumerate(x.shape[2:]):
        p = at[:, k][col] * win.strides[k] + grids[1 + k] * win.dilations[k] - win.begin[k]
        valid = valid & (p >= 0) & (p < n)
        index.append(np.clip(p, 0, n - 1))
    read = float64(np.where(valid, x[tuple(index)], x.dtype.type(0)))
    return read.reshape(len(at), int(np.prod(kernel[1:])))


def _flops(x: TensorType, w: TensorType, b: TensorType | None = None, **attrs: Any) -> Dim:
    inputs = const(x.shape[1]) // attrs.get("group", 1)  # not those that a panel reads in vain
    return dim(const(product(_type(x, w, b, **attrs).shape)) * inputs * product(w.shape[2:]) * 2)


# --- transposed -------------------------------------------------------------------------------------------------------


def _transposed_sizes(win: Window, spatial: Sequence[Dim], extra: Sequence[Dim]) -> tuple[Dim, ...]:
    out = []
    for n, k, s, b, e, d, p in zip(spatial, win.kernel, win.strides, win.begin, win.end, win.dilations, extra):
        out.append(dim((const(n) - 1) * s + p + (const(k) - 1) * d + 1 - b - e))
    return tuple(out)


def _transpose_type(
    x: TensorType,
    w: TensorType,
    b: TensorType | None = None,
    *,
    strides: Ints | None = None,
    pads: Pads | None = None,
    dilations: Ints | None = None,
    output_padding: Ints | None = None,
    group: int = 1,
) -> TensorType:
    _channels(x, w, b, group, None)
    require(same_dim(x.shape[1], w.shape[0]), "x {} has {} channels, w {} needs {}", x, x.shape[1], w, w.shape[0])
    win = window(x.rank - 2, w.shape[2:], strides, pads, dilations)
    outputs = dim(const(w.shape[1]) * group)
    require(b is None or (b.rank == 1 and same_dim(b.shape[0], outputs)), "the bias must be [{}]; got {}", outputs, b)
    return TensorType(
        x.dtype, (x.shape[0], outputs, *_transposed_sizes(win, x.shape[2:], output_padding or (0,) * (x.rank - 2)))
    )


def _transpose_compute(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    strides: Ints | None,
    pads: Pads | None,
    dilations: Ints | None,
    output_padding: Ints | None,
    group: int,
) -> Tensor:
    """out[y] gathers x[(y + begin - k*d) / stride] for those k that divide."""
    rank = len(x.dims) - 2
    win = window(rank, w.dims[2:], strides, pads, dilations)
    spatial = x.dims[2:]
    per_group, channels = w.dims[1], const(w.dims[0]) // group
    # a whole number of strides keeps the dividend from being negative
    shifts = [
        const(0) - ((const(b_) - (const(k) - 1) * d) // s)
        for b_, k, d, s in zip(win.begin, win.kernel, win.dilations, win.strides)
    ]

    def dividends(v: tuple[Expr, ...]) -> list[Expr]:
        pairs = zip(v[2 : 2 + rank], v[3 + rank :], win.begin, win.dilations, shifts, win.strides)
        return [y + b_ - k * d + m * s for y, k, b_, d, m, s in pairs]

    def source(v: tuple[Expr, ...]) -> list[Expr]:
        return [t // s - m for t, s, m in zip(dividends(v), win.strides, shifts)]

    def value(*v: Expr) -> Expr:
        c = v[1] // per_group * channels + v[2 + rank]
        return x[(v[0], c, *source(v))] * w[(c, v[1] % per_group, *v[3 + rank :])]

    def inside(*v: Expr) -> Expr:
        return both(
            *((t % s).eq(0) for t, s in zip(dividends(v), win.strides)),
            *(within(p, n) for p, n in zip(source(v), spatial)),
        )

    shape = (x.dims[0], dim(const(per_group) * group), *_transposed_sizes(win, spatial, output_padding or (0,) * rank))
    acc = te.reduce(
        shape, (dim(channels), *w.dims[2:]), x.dtype if b is None else x.dtype.computed, "sum", value, inside
    )
    return _with_bias(acc, b, x.dtype)


def _transpose_reference(
    x: Array, w: Array, b: Array | None = None, *, group: int = 1, output_padding: Ints | None = None, **attrs: Any
) -> Array:
    rank = x.ndim - 2
    win = window(rank, w.shape[2:], attrs.get("strides"), attrs.get("pads"), attrs.get("dilations"))
    sizes = [int(n) for n in _transposed_sizes(win, x.shape[2:], output_padding or (0,) * rank)]  # type: ignore[arg-type]
    n, c, o = x.shape[0], x.shape[1] // group, w.shape[1]
    full = [s + int(p) + max(int(q), 0) for s, p, q in zip(sizes, win.begin, win.end)]  # type: ignore[arg-type]
    reach = [(m - 1) * s + (k - 1) * d + 1 for m, s, k, d in zip(x.shape[2:], win.strides, w.shape[2:], win.dilations)]
    y: Array = np.zeros((n, group * o, *map(max, full, reach)), np.result_type(x, w))
    for at in offsets(win):
        part = np.matmul(
            w[(..., *at)].reshape(group, c, o).swapaxes(1, 2), x.reshape(n, group, c, int(np.prod(x.shape[2:])))
        )
        shifted(y, win, x.shape[2:], at)[...] += part.reshape(n, group * o, *x.shape[2:])
    ahead = [max(-int(p), 0) for p in win.begin]  # type: ignore[arg-type]
    cut = tuple(slice(max(int(p), 0), max(int(p), 0) + s) for p, s in zip(win.begin, sizes))  # type: ignore[arg-type]
    grown: Array = np.pad(y, [(0, 0), (0, 0), *((a, 0) for a in ahead)])
    return _bias_numpy(grown[(..., *cut)], b)


def _transpose_flops(x: TensorType, w: TensorType, *_: Any, **__: Any) -> Dim:
    return dim(const(x.size) * product(w.shape[1:]) * 2)


def _equal_dims(x: TensorType, w: TensorType, *_: TensorType, group: int = 1, **__: Any) -> list[tuple[Dim, Dim]]:
    return [(x.shape[1], dim(const(w.shape[1]) * group))] if min(x.rank, w.rank) > 1 else []


CONV_OPS: tuple[OpDef, ...] = (
    OpDef(
        "conv",
        _type,
        _compute,
        reference=_reference,
        reference_at=_reference_at,
        flops=_flops,
        traits=CONTRACTION,
        batching=batching.images,
        contraction=ContractionForm.CONVOLUTION,
        terms=lambda x, w, *_, **__: product(w.shape[1:]),
        equal_dims=_equal_dims,
        vjp=rules.conv,
        samples=(
            sample("f32[1, 4, 7, 9]", "f32[6, 4, 3, 3]", "f32[6]", strides=(1, 1), pads=(1, 1, 1, 1)),
            sample("f32[2, 3, 11, 11]", "f32[8, 3, 7, 7]", strides=(2, 2), pads=(3, 3, 3, 3)),
            sample("f32[1, 6, 5, 5]", "f32[6, 1, 3, 3]", "f32[6]", pads=(1, 1, 1, 1), group=6),
            sample("f32[1, 4, 5, 5]", "f32[8, 4, 1, 1]"),
            sample("f32[1, 6, 9, 8]", "f32[4, 3, 3, 2]", strides=(2, 1), pads=(0, 1, 2, 0), dilations=(2, 3), group=2),
            sample("f16[2, 4, 13]", "f16[5, 4, 3]", "f16[5]", strides=(2,), pads=(1, 0)),
            sample("f64[1, 2, 4, 5, 6]", "f64[3, 2, 2, 3, 3]", pads=(0, 1, 1, 1, 1, 1)),
            sample("u8[1, 3, 6, 6]", "i8[4, 3, 3, 3]", pads=(1, 1, 1, 1), out_dtype=i32, domain=(-128, 255)),
            sample("f32[1, 2, 6, 6]", "f32[3, 2, 3, 3]", pads=(-1, 0, 1, -1)),
            sample("f32[2, 12, 5, 4]", "f32[12, 8, 3, 3]", "f32[12]", pads=(1, 1, 1, 1), group=3, panel=6),
            sample("f32[1, 6, 7]", "f32[15, 4, 2]", group=3, panel=4),
        ),
    ),
    OpDef(
        "conv_transpose",
        _transpose_type,
        _transpose_compute,
        reference=_transpose_reference,
        flops=_transpose_flops,
        equal_dims=channel_dims,
        traits=CONTRACTION,
        batching=batching.images,
        vjp=rules.conv_transpose,
        samples=(
            sample("f32[1, 4, 5, 3]", "f32[4, 3, 2, 2]", "f32[3]", strides=(2, 2)),
            sample(
                "f32[2, 4, 5, 5]", "f32[4, 2, 3, 3]", strides=(2, 3), pads=(1, 0, 1, 2), output_padding=(1, 0), group=2
            ),
            sample("f16[1, 3, 7]", "f16[3, 2, 4]", strides=(3,), dilations=(2,)),
            sample("f64[1, 2, 3, 3, 2]", "f64[2, 2, 2, 2, 3]", pads=(1, 0, 1, 0, 1, 1)),
            sample("f32[1, 3, 4, 4]", "f32[3, 2, 3, 3]", pads=(-1, 0, 1, -1)),
        ),
    ),
)
