"""Pooling over 1 to 3 spatial axes of [N, C, ...] or [C, ...], or over any axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, overload
from typing import cast as cast_type

import numpy as np

from dnnc.array.core import Array, cast, scalar
from dnnc.array.creation import asarray
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import add, divide, greater_equal, less, logical_and, multiply, pow, where
from dnnc.array.errors import ValueInputError
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import (
    axes_of,
    axis_of,
    broadcast_to,
    concat,
    expand_dims,
    moveaxis,
    permute_dims,
    reshape,
    sliced,
    take,
    take_along_axis,
)
from dnnc.array.manipulation import squeeze as squeezed
from dnnc.array.promotion import DEFAULTS
from dnnc.array.replay import replayed
from dnnc.array.searching import argmax
from dnnc.array.sizes import same_shape, symbolic
from dnnc.array.statistical import max as max_of
from dnnc.array.statistical import mean
from dnnc.ir.errors import UnsupportedError
from dnnc.nn.functional.operands import Ints, array, counted, filled, ints, op, rank_of


def _images(what: str, x: Array, rank: int) -> tuple[Array, bool]:
    """The operand with a batch axis, and whether it had none."""
    single = rank_of(what, x, rank + 1, rank + 2) == rank + 1
    return (expand_dims(x, axis=0) if single else x), single


def _window(
    what: str, sizes: Sequence[Any], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[dict[str, Any], Ints]:
    """A window over axes of these sizes, and how much of each end pad `ceil_mode` has added."""
    rank = len(sizes)
    kernel = ints(what, "kernel_size", kernel, rank, 1)
    strides = kernel if stride is None else ints(what, "stride", stride, rank, 1)
    pads, dilations = ints(what, "padding", padding, rank, 0), ints(what, "dilation", dilation, rank, 1)
    if any(2 * p > k for p, k in zip(pads, kernel)):
        raise ValueInputError(f"{what}: padding {pads} is more than half of the window {kernel}")
    ends, more = list(pads), [0] * rank
    if ceil_mode:
        if symbolic(*sizes):
            raise UnsupportedError(f"{what}: ceil_mode of sizes {tuple(sizes)} that are not known")
        for k, n in enumerate(sizes):
            reach = dilations[k] * (kernel[k] - 1) + 1
            out = -(-(n + 2 * pads[k] - reach) // strides[k]) + 1
            out -= (out - 1) * strides[k] >= n + pads[k]  # the last window begins inside
            ends[k] = (out - 1) * strides[k] + reach - n - pads[k]
            more[k] = max(ends[k] - pads[k], 0)
    return {"kernel": kernel, "strides": strides, "pads": (*pads, *ends), "dilations": dilations}, tuple(more)


# --- maxima -----------------------------------------------------------------------------------------------------------


@replayed
def _max_pool(
    rank: int,
    input: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    return_indices: bool,
) -> Array | tuple[Array, Array]:
    what = f"max_pool{rank}d"
    x, single = _images(what, array(what, "input", input, "fiu"), rank)
    window, _ = _window(what, x.shape[2:], kernel_size, stride, padding, dilation, ceil_mode)
    y = op("max_pool", x, **window)
    y = squeezed(y, 0) if single else y
    if not return_indices:
        return y
    at = op("mod", op("max_pool_index", x, **window), _count(x.shape[2:]))
    return y, squeezed(at, 0) if single else at


def _count(sizes: Sequence[Any]) -> Array:
    return scalar(math.prod(sizes), DEFAULTS["i"])


class MaxPool(Protocol):
    """A function that returns the places of the largest elements as well where it is asked to."""

    @overload
    def __call__(
        self,
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: Literal[False] = False,
    ) -> Array: ...
    @overload
    def __call__(
        self,
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        *,
        return_indices: Literal[True],
    ) -> tuple[Array, Array]: ...


def _typed(function: Callable[..., Any]) -> MaxPool:
    return cast_type(MaxPool, function)


@_typed
def max_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Array | tuple[Array, Array]:
    """The largest element of each window along the last axis; see `max_pool2d`."""
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@_typed
def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Array | tuple[Array, Array]:
    """The largest element of each window of [N, C, H, W] (or [C, H, W]).

    Args:
        kernel_size, stride, padding, dilation: a number, or one for each spatial axis. The stride is the window's size
            by default. Padding is at most half of the window.
        ceil_mode: round the size of the result up.
        return_indices: give the place of each maximum in its plane as well, as int64.
    """
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@_typed
def max_pool3d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Array | tuple[Array, Array]:
    """The largest element of each window of [N, C, D, H, W]; see `max_pool2d`."""
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@replayed
def _max_unpool(
    rank: int, input: Any, indices: Any, kernel_size: Any, stride: Any, padding: Any, output_size: Any
) -> Array:
    what = f"max_unpool{rank}d"
    x, at = array(what, "input", input, "fiu"), array(what, "indices", indices, "iu")
    if not same_shape(x.shape, at.shape):
        raise ValueInputError(f"{what}: indices must have the shape {x.shape} of the input, got {at.shape}")
    rank_of(what, x, rank + 1, rank + 2)
    kernel = ints(what, "kernel_size", kernel_size, rank, 1)
    strides = kernel if stride is None else ints(what, "stride", stride, rank, 1)
    pads = ints(what, "padding", padding, rank, 0)
    usual = tuple((n - 1) * s - 2 * p + k for n, s, p, k in zip(x.shape[-rank:], strides, pads, kernel))
    sizes = usual if output_size is None else tuple(output_size)[-rank:]
    if len(sizes) != rank or any(not u - s < n < u + s for n, u, s in zip(sizes, usual, strides)):
        raise ValueInputError(
            f"{what}: output_size={output_size}: expected {usual}, each size less than a stride {strides} from that"
        )
    planes, size = math.prod(x.shape[:-rank]), math.prod(sizes)
    place = reshape(cast(at, DEFAULTS["i"]), (planes, -1))
    inside = logical_and(greater_equal(place, 0), less(place, size))
    place = where(
        inside, add(place, expand_dims(counted(planes) * size, axis=1)), planes * size
    )  # a last one for others
    zeros = filled((planes * size + 1,), 0, x.dtype)
    y = op("scatter_nd", zeros, reshape(place, (-1, 1)), reshape(x, (-1,)))
    return reshape(sliced(y, 0, 0, planes * size), (*x.shape[:-rank], *sizes))


def max_unpool1d(
    input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
) -> Array:
    """Zeros with the maxima of windows along the last axis where they came from; see `max_unpool2d`."""
    return _max_unpool(1, input, indices, kernel_size, stride, padding, output_size)


def max_unpool2d(
    input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
) -> Array:
    """Zeros [N, C, H, W] (or [C, H, W]) with the maxima of windows where they came from (Zeiler and Fergus, 2014).

    Args:
        input, indices: results of `max_pool2d(..., return_indices=True)`. Indices beyond a plane are left out.
        kernel_size, stride, padding: as there.
        output_size: (H, W), or the whole shape, where several sizes have as many windows.

    Raises:
        InputError: shapes differ, or no such pool gives so many windows.
    """
    return _max_unpool(2, input, indices, kernel_size, stride, padding, output_size)


def max_unpool3d(
    input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
) -> Array:
    """Zeros with the maxima of windows over three axes where they came from; see `max_unpool2d`."""
    return _max_unpool(3, input, indices, kernel_size, stride, padding, output_size)


# --- means ------------------------------------------------------------------------------------------------------------


@replayed
def _avg_pool(
    rank: int,
    input: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Array:
    what = f"avg_pool{rank}d"
    x, single = _images(what, array(what, "input", input), rank)
    window, more = _window(what, x.shape[2:], kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override is None:
        y = op("avg_pool", x, **window, count_include_pad=bool(count_include_pad), uncounted=more)
    else:
        (divisor,) = ints(what, "divisor_override", divisor_override, 1, 1)
        y = multiply(op("avg_pool", x, **window, count_include_pad=True), math.prod(window["kernel"]) / divisor)
    return squeezed(y, 0) if single else y


def avg_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """The mean of each window along the last axis; see `avg_pool2d`."""
    return _avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """The mean of each window of [N, C, H, W] (or [C, H, W]).

    Args:
        kernel_size, stride, padding, ceil_mode: as for `max_pool2d`.
        count_include_pad: do the zeros of the padding count?
        divisor_override: divide sums by this in place of the number of elements.
    """
    return _avg_pool(2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """The mean of each window of [N, C, D, H, W]; see `avg_pool2d`."""
    return _avg_pool(3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


# --- p-norms ----------------------------------------------------------------------------------------------------------


@replayed
def _lp_pool(rank: int, input: Any, norm_type: float, kernel_size: Any, stride: Any, ceil_mode: bool) -> Array:
    what = f"lp_pool{rank}d"
    x, single = _images(what, array(what, "input", input), rank)
    if not norm_type > 0:
        raise ValueInputError(f"{what}: norm_type={norm_type}: expected a positive number")
    window, more = _window(what, x.shape[2:], kernel_size, stride, 0, 1, ceil_mode)
    p = float(norm_type)
    if p == int(p) and not any(more):
        y = op("lp_pool", x, **window, p=int(p))
    else:  # a window that ends outside has the mean of its elements outside too, as in PyTorch
        means = op("avg_pool", pow(absolute(x), p), **window, count_include_pad=True, uncounted=more)
        y = pow(multiply(means, float(math.prod(window["kernel"]))), 1 / p)
    return squeezed(y, 0) if single else y


def lp_pool1d(input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Array:
    """The p-norm of each window along the last axis, with p = `norm_type`."""
    return _lp_pool(1, input, norm_type, kernel_size, stride, ceil_mode)


def lp_pool2d(input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Array:
    """The p-norm of each window of [N, C, H, W]."""
    return _lp_pool(2, input, norm_type, kernel_size, stride, ceil_mode)


def lp_pool3d(input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Array:
    """The p-norm of each window of [N, C, D, H, W]."""
    return _lp_pool(3, input, norm_type, kernel_size, stride, ceil_mode)


# --- adaptive ---------------------------------------------------------------------------------------------------------


def _sizes(what: str, x: Array, rank: int, output_size: Any) -> tuple[Any, ...]:
    """The sizes asked for; None keeps one."""
    rank_of(what, x, rank + 1, rank + 2)
    given = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * rank
    if len(given) != rank:
        raise ValueInputError(f"{what}: output_size={output_size!r}: expected a number, or {rank} of them")
    return tuple(n if v is None else ints(what, "output_size", v, 1, 1)[0] for n, v in zip(x.shape[-rank:], given))


@replayed
def _adaptive(rank: int, input: Any, output_size: Any, largest: bool) -> Array:
    """Windows of one size where they divide the input; else axis by axis."""
    what = f"adaptive_{'max' if largest else 'avg'}_pool{rank}d"
    x = array(what, "input", input)
    new = _sizes(what, x, rank, output_size)
    axes = tuple(range(x.ndim - rank, x.ndim))
    if all(type(n) is int and n == 1 for n in new):
        return (max_of if largest else mean)(x, axis=axes, keepdims=True)
    old = x.shape[-rank:]
    if symbolic(*old, *new):
        raise UnsupportedError(f"{what}: sizes {old} that are not known, to {new}")
    if all(a % n == 0 for a, n in zip(old, new)):
        kernel = tuple(a // n for a, n in zip(old, new))
        y, single = _images(what, x, rank)
        y = op("max_pool" if largest else "avg_pool", y, kernel=kernel, strides=kernel)
        return squeezed(y, 0) if single else y
    for k, n in zip(axes, new):
        x = _windows(x, k, n, largest)
    return x


def _windows(x: Array, axis: int, new: int, largest: bool) -> Array:
    """The maxima or means of windows along one axis; window j is [floor(j * old / new), ceil((j + 1) * old / new))."""
    old = x.shape[axis]
    if old == new:
        return x
    if not largest:
        return moveaxis(matmul(moveaxis(x, axis, -1), _means(x, old, new)), -1, axis)
    ends = [(j * old // new, -(-(j + 1) * old // new)) for j in range(new)]
    parts = [max_of(sliced(x, axis, first, last - first), axis=axis, keepdims=True) for first, last in ends]
    return concat(parts, axis=axis)


def _means(x: Array, old: int, new: int) -> Array:
    """[old, new]: the weight of each element in the mean of its windows."""
    at, j = expand_dims(counted(old), axis=1), counted(new)
    first, last = (j * old) // new, ((j + 1) * old + (new - 1)) // new
    inside = logical_and(greater_equal(at, first), less(at, last))
    return divide(cast(inside, x.dtype), cast(last - first, x.dtype))


def adaptive_avg_pool1d(input: Any, output_size: Any) -> Array:
    """The means of `output_size` windows along the last axis."""
    return _adaptive(1, input, output_size, False)


def adaptive_avg_pool2d(input: Any, output_size: Any) -> Array:
    """The means of as many windows along each spatial axis as `output_size` says; None keeps a size."""
    return _adaptive(2, input, output_size, False)


def adaptive_avg_pool3d(input: Any, output_size: Any) -> Array:
    """The means of windows along three axes; see `adaptive_avg_pool2d`."""
    return _adaptive(3, input, output_size, False)


def _adaptive_max(rank: int, input: Any, output_size: Any, return_indices: bool) -> Array | tuple[Array, Array]:
    return _largest(rank, input, output_size) if return_indices else _adaptive(rank, input, output_size, True)


@replayed
def _largest(rank: int, input: Any, output_size: Any) -> tuple[Array, Array]:
    """The maxima of windows, and their places in a plane."""
    what = f"adaptive_max_pool{rank}d"
    x = array(what, "input", input)
    old, new = x.shape[-rank:], _sizes(what, x, rank, output_size)
    if symbolic(*old, *new):
        raise UnsupportedError(f"{what}: places of maxima of sizes {old} that are not known, to {new}")
    places = asarray(_window_places(old, new))
    planes = reshape(x, (*x.shape[:-rank], math.prod(old)))
    windows = reshape(take(planes, reshape(places, (-1,)), axis=-1), (*planes.shape[:-1], *places.shape))
    first = expand_dims(argmax(windows, axis=-1), axis=-1)
    at = take_along_axis(broadcast_to(places, windows.shape), first, axis=-1)
    y = take_along_axis(windows, first, axis=-1)
    return reshape(y, (*x.shape[:-rank], *new)), reshape(at, (*x.shape[:-rank], *new))


def _window_places(old: Ints, new: Ints) -> np.ndarray[Any, Any]:
    """Places in a plane [windows, elements], int64, row by row. Smaller windows have their last elements again."""
    rank, flat = len(old), np.zeros((), np.int64)
    for k, (n, m) in enumerate(zip(old, new)):
        j = np.arange(m)
        first, last = j * n // m, -(-(j + 1) * n // m)
        at = np.minimum(first[:, None] + np.arange((last - first).max()), last[:, None] - 1)
        flat = flat * n + at.reshape([at.shape[a // rank] if a % rank == k else 1 for a in range(2 * rank)])
    return flat.reshape(math.prod(new), -1)


def adaptive_max_pool1d(input: Any, output_size: Any, return_indices: bool = False) -> Array | tuple[Array, Array]:
    """The maxima of `output_size` windows along the last axis; see `adaptive_max_pool2d`."""
    return _adaptive_max(1, input, output_size, return_indices)


def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Array | tuple[Array, Array]:
    """The maxima of as many windows along each spatial axis as `output_size` says; None keeps a size.

    Args:
        return_indices: give the place of each maximum in its plane as well, as int64.
    """
    return _adaptive_max(2, input, output_size, return_indices)


def adaptive_max_pool3d(input: Any, output_size: Any, return_indices: bool = False) -> Array | tuple[Array, Array]:
    """The maxima of windows along three axes; see `adaptive_max_pool2d`."""
    return _adaptive_max(3, input, output_size, return_indices)


# --- over any axes ----------------------------------------------------------------------------------------------------


@replayed
def _pool(name: str, input: Any, kernel_size: Any, stride: Any, padding: Any, axes: Any, **more: Any) -> Array:
    what = f"{name} over axes"
    x = array(what, "input", input)
    given = tuple(axis_of(a, x.ndim) for a in (axes if isinstance(axes, (tuple, list)) else (axes,)))
    axes_of(given, x.ndim)  # each once
    sizes = [x.shape[a] for a in given]
    window, _ = _window(what, sizes, kernel_size, stride, padding, 1, False)
    order = list(range(len(given)))
    for group in (order[k : k + 3] for k in range(0, len(order), 3)):  # windows are products of windows along axes
        pads = window["pads"]
        part = {
            "kernel": tuple(window["kernel"][k] for k in group),
            "strides": tuple(window["strides"][k] for k in group),
            "pads": tuple(pads[k] for k in group) * 2,
        }
        x = _over(name, x, [given[k] for k in group], part, more)
    return x


def _over(name: str, x: Array, axes: list[int], window: dict[str, Any], more: dict[str, Any]) -> Array:
    """Pool over at most three axes: the others become images of one channel."""
    others = [k for k in range(x.ndim) if k not in axes]
    perm = [*others, *axes]
    y = permute_dims(x, perm)
    front = y.shape[: len(others)]
    y = op(name, reshape(y, (math.prod(front), 1, *y.shape[len(others) :])), **window, **more)
    y = reshape(y, (*front, *y.shape[2:]))
    return permute_dims(y, [perm.index(k) for k in range(x.ndim)])


def max_pool(input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *, axes: Any) -> Array:
    """The largest element of windows over any axes, channels included.

    Args:
        kernel_size, stride, padding: a number, or one for each of `axes`.
        axes: an axis or several, in the order of these numbers.
    """
    return _pool("max_pool", input, kernel_size, stride, padding, axes)


def avg_pool(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, count_include_pad: bool = True, *, axes: Any
) -> Array:
    """The mean of windows over any axes, channels included; see `max_pool`."""
    return _pool("avg_pool", input, kernel_size, stride, padding, axes, count_include_pad=bool(count_include_pad))
