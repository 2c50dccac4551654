"""Convolutions, pooling and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.torch.call import Call, wide
from dnnc.frontends.torch.movement import part
from dnnc.frontends.torch.reduce import position
from dnnc.ir.dtype import i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim, product

Converter = Callable[[Call], Any]


def convolution(c: Call) -> Any:
    x, w, bias = c.x("input"), c.x("weight"), c.opt("bias")
    rank = x.type.rank - 2
    pads, strides = c.window("padding", rank), c.window("stride", rank)
    dilations, groups = c.window("dilation", rank), c.integer("groups", 1)
    if not c.flag("transposed"):
        return c.b.conv(x, w, bias, strides=strides, pads=pads * 2, dilations=dilations, group=groups)
    more = c.window("output_padding", rank)
    return c.b.conv_transpose(
        x, w, bias, strides=strides, pads=pads * 2, dilations=dilations, output_padding=more, group=groups
    )


# --- pooling ----------------------------------------------------------------------------------------------------------


def batched(c: Call, x: Value, rank: int) -> Value:
    """[N, C, ...] of an operand that may lack the batch."""
    made: Value = x if x.type.rank == rank + 2 else c.b.unsqueeze(x, axes=(0,))
    return made


def like(c: Call, y: Value, k: int = 0) -> Any:
    """Without the batch that `batched` has added."""
    return y if y.type.rank == len(c.type(k).shape) else c.b.squeeze(y, axes=(0,))


def pool_window(c: Call, x: Value, rank: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The window, and how much of each end pad ceil_mode has added."""
    kernel = c.window("kernel_size", rank)
    strides = c.window("stride", rank) or kernel
    pads, dilations = c.window("padding", rank, (0,)), c.window("dilation", rank, (1,))
    ends, more = list(pads), [0] * rank
    if c.flag("ceil_mode"):
        for k, (n, out) in enumerate(zip(x.type.shape[2:], c.shape[-rank:])):
            if not isinstance(n, int) or not isinstance(out, int):
                raise UnsupportedError("pooling with ceil_mode of a size that is not known")
            ends[k] = (out - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1 - n - pads[k]
            more[k] = max(ends[k] - pads[k], 0)
    return {"kernel": kernel, "strides": strides, "pads": (*pads, *ends), "dilations": dilations}, tuple(more)


def max_pool(rank: int) -> Converter:
    """The second result says where in its plane each maximum stands."""

    def convert(c: Call) -> Any:
        x = batched(c, c.x(), rank)
        window, _ = pool_window(c, x, rank)
        y = like(c, c.b.max_pool(x, **window))
        if len(c.outs) == 1:
            return y
        return y, plane_index(c, x, window) if c.wants(1) else None

    return convert


def plane_index(c: Call, x: Value, window: dict[str, Any]) -> Any:
    at = c.b.max_pool_index(x, **window)
    return like(c, c.b.mod(at, c.scalar(product(x.type.shape[2:]), i64)), 1)


def avg_pool(rank: int) -> Converter:
    def convert(c: Call) -> Any:
        x = batched(c, c.x(), rank)
        window, more = pool_window(c, x, rank)
        divisor = c.get("divisor_override")
        if divisor is None:
            return like(
                c, c.b.avg_pool(x, **window, count_include_pad=bool(c.get("count_include_pad", True)), uncounted=more)
            )
        y = c.b.avg_pool(x, **window, count_include_pad=True)
        return like(c, c.b.mul(y, c.scalar(math.prod(window["kernel"]) / divisor, c.dtype)))

    return convert


def adaptive(rank: int) -> Converter:
    """Windows of one size where they divide the input; else a product with a matrix of means for each axis."""

    def convert(c: Call) -> Any:
        x, new = c.x(), c.shape[-rank:]
        old = x.type.shape[-rank:]
        if all(n == 1 for n in new):
            return c.b.reduce_mean(x, axes=tuple(range(-rank, 0)), keepdims=True)
        if not all(isinstance(n, int) for n in (*old, *new)):
            raise UnsupportedError("adaptive pooling to more than one element of a size that is not known")
        sizes = [(int(a), int(n)) for a, n in zip(old, new)]  # type: ignore[arg-type]
        if all(a % n == 0 for a, n in sizes):
            kernel = tuple(a // n for a, n in sizes)
            return like(c, c.b.avg_pool(batched(c, x, rank), kernel=kernel, strides=kernel))
        for k, (a, n) in enumerate(sizes, x.type.rank - rank):
            x = along(c, x, k, means(a, n))
        return x

    return convert


def adaptive_max(rank: int) -> Converter:
    """The largest of windows one axis after the other."""

    def convert(c: Call) -> Any:
        x = c.x()
        if c.wants(1):
            return placed_maxima(c, x, rank)
        for axis, n in enumerate(c.shape[-rank:], x.type.rank - rank):
            ends = adaptive_windows(x.type.shape[axis], n)
            parts = [
                c.b.reduce_max(part(c, x, axis, first, last - first), axes=(axis,), keepdims=True)
                for first, last in ends
            ]
            x = parts[0] if n == 1 else c.b.concat(*parts, axis=axis)
        return x, None

    return convert


def adaptive_windows(old: Dim, new: Dim) -> list[tuple[int, int]]:
    """First index and end of each window of an axis."""
    if not isinstance(old, int) or not isinstance(new, int):
        raise UnsupportedError("adaptive pooling of a size that is not known")
    return [(j * old // new, -(-(j + 1) * old // new)) for j in range(new)]


def placed_maxima(c: Call, x: Value, rank: int) -> tuple[Value, Value]:
    """Maxima of adaptive windows, and where in its plane each stands: windows as rows, the short ones filled up."""
    b, lead, sizes, new = c.b, x.type.rank - rank, x.type.shape[-rank:], c.shape[-rank:]
    fixed = [int(str(n)) for n in sizes]
    plane: Any = np.arange(math.prod(fixed)).reshape(fixed)
    y = x
    for k, (n, m) in enumerate(zip(sizes, new)):
        ends = adaptive_windows(n, m)
        widest = max(last - first for first, last in ends)
        at = np.array([[min(first + i, last - 1) for i in range(widest)] for first, last in ends])
        y, plane = b.gather(y, b.constant(at, dtype=i64), axis=lead + 2 * k), np.take(plane, at, axis=2 * k)
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    plane = plane.transpose(order).reshape(*new, -1)
    rows = b.transpose(y, perm=(*range(lead), *(lead + k for k in order)))
    rows = b.reshape(rows, shape=(*x.type.shape[:lead], *new, plane.shape[-1]))
    largest = position(c, "argmax", rows, rows.type.rank - 1, True)
    places = b.expand(b.constant(plane.reshape((1,) * lead + plane.shape), dtype=i64), shape=rows.type.shape)
    where = b.gather_elements(places, largest, axis=rows.type.rank - 1)
    return b.reduce_max(rows, axes=(-1,)), b.reshape(where, shape=c.type(1).shape)


def means(old: int, new: int) -> np.ndarray[Any, Any]:
    """[old, new]: the weight of each element in the mean of its windows."""
    out = np.zeros((old, new))
    for j in range(new):
        first, last = j * old // new, -(-(j + 1) * old // new)
        out[first:last, j] = 1 / (last - first)
    return out


def along(c: Call, x: Value, axis: int, m: np.ndarray[Any, Any]) -> Value:
    """The product with a matrix along one axis."""
    perm = [k for k in range(x.type.rank) if k != axis] + [axis]
    y = c.b.matmul(c.b.transpose(x, perm=tuple(perm)), c.b.constant(m, dtype=x.type.dtype))
    made: Value = c.b.transpose(y, perm=tuple(perm.index(k) for k in range(len(perm))))
    return made


# --- normalization ----------------------------------------------------------------------------------------------------


def of_all(c: Call, v: Value | None, value: float, shape: Sequence[Dim], like: Value) -> Value:
    """A scale or bias, or what stands for none."""
    made: Value = (
        c.cast(v, like.type.dtype)
        if v is not None
        else c.b.full(shape=tuple(shape), value=value, dtype=like.type.dtype)
    )
    return made


def layer_norm(c: Call) -> Any:
    x, shape = c.x("input"), c.args["normalized_shape"]
    axis = x.type.rank - len(shape)
    scale, bias = of_all(c, c.opt("weight"), 1.0, x.type.shape[axis:], x), c.opt("bias")
    y = c.b.layer_norm(
        x, scale, None if bias is None else c.cast(bias, x.type.dtype), axis=axis, epsilon=float(c.number("eps"))
    )
    if len(c.outs) == 1:
        return y
    return y, *statistics(c, x, tuple(range(axis, x.type.rank)))


def statistics(c: Call, x: Value, axes: tuple[int, ...]) -> list[Value | None]:
    """Mean and 1 / deviation over axes, in the types and shapes of results 1 and 2."""
    if not (c.wants(1) or c.wants(2)):
        return [None, None]
    v = c.cast(x, wide(x.type.dtype))
    mean, var = moments(c, v, axes)
    inverse = c.b.reciprocal(c.b.sqrt(c.b.add(var, c.scalar(float(c.number("eps")), v.type.dtype))))
    return [c.cast(c.b.reshape(s, shape=c.type(k).shape), c.type(k).dtype) for k, s in ((1, mean), (2, inverse))]


def moments(c: Call, v: Value, axes: tuple[int, ...]) -> tuple[Value, Value]:
    mean = c.b.reduce_mean(v, axes=axes, keepdims=True)
    off = c.b.sub(v, mean)
    return mean, c.b.reduce_mean(c.b.mul(off, off), axes=axes, keepdims=True)


def rms_norm(c: Call) -> Any:
    """Without an epsilon it is the smallest step of the type."""
    x = c.x("input")
    axis = x.type.rank - len(c.args["normalized_shape"])
    eps = c.get("eps")
    epsilon = float(eps) if eps is not None else float(np.finfo(wide(x.type.dtype).numpy).eps)
    y = c.b.rms_norm(x, of_all(c, c.opt("weight"), 1.0, x.type.shape[axis:], x), axis=axis, epsilon=epsilon)
    return y if len(c.outs) == 1 else (y, *statistics_of_squares(c, x, axis, epsilon))


def statistics_of_squares(c: Call, x: Value, axis: int, epsilon: float) -> list[Value | None]:
    if not c.wants(1):
        return [None]
    v = c.cast(x, wide(x.type.dtype))
    square = c.b.reduce_mean(c.b.mul(v, v), axes=tuple(range(axis, x.type.rank)), keepdims=True)
    return [c.cast(c.b.reciprocal(c.b.sqrt(c.b.add(square, c.scalar(epsilon, v.type.dtype)))), c.type(1).dtype)]


def group_norm(c: Call) -> Any:
    x = c.x("input")
    groups, channels = c.integer("group" if "group" in c.args else "num_groups"), x.type.shape[1]
    scale, bias = of_all(c, c.opt("weight"), 1.0, (channels,), x), of_all(c, c.opt("bias"), 0.0, (channels,), x)
    y = c.b.group_norm(x, scale, bias, groups=groups, epsilon=float(c.number("eps", 1e-5)))
    if len(c.outs) == 1:
        return y
    if not (c.wants(1) or c.wants(2)):
        return y, None, None
    rows = c.b.reshape(x, shape=(x.type.shape[0], groups, unwrap(const(product(x.type.shape[1:])) // groups)))
    return y, *statistics(c, rows, (2,))


def batch_norm(c: Call) -> Any:
    """Normalize by running or batch statistics. Results: y, batch mean, 1 / deviation, running statistics.

    Statistics that are results normalize, too: they are computed once.
    """
    x = c.x("input")
    channels = (x.type.shape[1],)
    mean, var = c.opt("running_mean"), c.opt("running_var")
    training = c.flag("training") or mean is None or var is None
    if not training:
        scale, bias = (of_all(c, c.opt(n), value, channels, x) for n, value in (("weight", 1.0), ("bias", 0.0)))
        y = c.b.batch_norm(
            x,
            scale,
            bias,
            c.cast(mean, x.type.dtype),  # type: ignore[arg-type]
            c.cast(var, x.type.dtype),  # type: ignore[arg-type]
            epsilon=float(c.number("eps")),
        )
        empty = [
            c.b.full(shape=c.type(k).shape, value=0.0, dtype=c.type(k).dtype) if c.wants(k) else None
            for k in range(1, len(c.outs))
        ]
        return (y, *empty) if len(c.outs) > 1 else y
    return of_the_batch(c, x, mean, var)


def of_the_batch(c: Call, x: Value, mean: Value | None, var: Value | None) -> Any:
    b, axes, eps = c.b, tuple(k for k in range(x.type.rank) if k != 1), float(c.number("eps"))
    channels, v = (x.type.shape[1],), c.cast(x, wide(x.type.dtype))
    spread = (1, *channels, *(1,) * (x.type.rank - 2))
    scale, bias = (
        None if (w := c.opt(name)) is None else b.reshape(c.cast(w, v.type.dtype), shape=spread)
        for name in ("weight", "bias")
    )
    if not c.wanted - {0}:
        y = b.mean_variance_norm(x, axes=axes, epsilon=eps)
        y = y if scale is None else b.mul(y, c.cast(scale, x.type.dtype))
        y = y if bias is None else b.add(y, c.cast(bias, x.type.dtype))
        return (y, *(None for _ in c.outs[1:]))
    mean_now, variance = moments(c, v, axes)
    deviation = b.reciprocal(b.sqrt(b.add(variance, c.scalar(eps, v.type.dtype))))
    y = b.mul(b.sub(v, mean_now), deviation if scale is None else b.mul(deviation, scale))
    y = c.cast(y if bias is None else b.add(y, bias), x.type.dtype)
    now, squares, inverse = (b.reshape(m, shape=channels) for m in (mean_now, variance, deviation))
    made = [y, now, inverse]
    if len(c.outs) > 3:
        n = c.scalar(product([x.type.shape[k] for k in axes]), v.type.dtype)
        unbiased = b.div(b.mul(squares, n), b.sub(n, c.scalar(1.0, v.type.dtype)))
        keep = c.number("momentum")
        blend = [(mean, now), (var, unbiased)]
        made += [
            b.add(b.mul(old, c.scalar(1 - keep, v.type.dtype)), b.mul(new, c.scalar(keep, v.type.dtype)))
            for old, new in blend
            if old is not None
        ]
    return [y, *(c.cast(v, c.type(k).dtype) for k, v in enumerate(made[1:], 1))]


NN: dict[str, Converter] = {
    "convolution": convolution,
    "_convolution": convolution,
    **{f"max_pool{k}d_with_indices": max_pool(k) for k in (2, 3)},
    **{f"max_pool{k}d": max_pool(k) for k in (1, 2, 3)},
    **{f"avg_pool{k}d": avg_pool(k) for k in (1, 2, 3)},
    **{f"_adaptive_avg_pool{k}d": adaptive(k) for k in (2, 3)},
    **{f"adaptive_avg_pool{k}d": adaptive(k) for k in (1, 2, 3)},
    **{f"adaptive_max_pool{k}d": adaptive_max(k) for k in (2, 3)},
    "native_layer_norm": layer_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "_fused_rms_norm": rms_norm,
    "native_group_norm": group_norm,
    "group_norm": group_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit_functional": batch_norm,
    "_batch_norm_no_update": batch_norm,
}
