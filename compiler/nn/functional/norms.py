"""Normalizations by mean and variance, of batches, layers, groups and images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from dnnc.array.core import Array, apply_full, array_of, cast, fresh
from dnnc.array.elementwise import add, divide, multiply, subtract
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply_all, compute_along
from dnnc.array.manipulation import flip, reshape
from dnnc.array.replay import replayed
from dnnc.array.sizes import differ, plain, same, symbolic
from dnnc.array.statistical import mean as mean_of
from dnnc.frontends.trace.functions import Composite
from dnnc.ir.errors import InputError
from dnnc.nn.functional.operands import array, detached, op, typed

Axes = tuple[int, ...]


def _given(what: str, name: str, x: Any, shape: Sequence[Any], like: Array) -> Array | None:
    """A parameter of this shape in the type of the input, or None. InputError where its shape is another."""
    if x is None or (type(x) is Array and x._dtype is like._dtype and x._parts[0].type.shape == shape):
        return x
    a = array(what, name, x)
    if len(a.shape) != len(shape) or any(differ(m, n) for m, n in zip(a.shape, shape)):
        raise ValueInputError(f"{what}: {name} must have shape {tuple(shape)}, got {a.shape}")
    return typed(a, like.dtype)


def _or(x: Array | None, like: Array, value: float, shape: tuple[Any, ...] = ()) -> Array:
    """A parameter, or the number that stands for none."""
    return array_of(apply_full(like._parts[0], value, tuple(map(plain, shape)))) if x is None else x


# --- of batches -------------------------------------------------------------------------------------------------------


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Array:
    """Normalize each channel (axis 1) of [N, C, ...] (Ioffe and Szegedy, 2015).

    Args:
        running_mean, running_var: [C]. Without `training` they are the statistics; in training those of the batch are,
            and these arrays take (1 - momentum) times their value plus momentum times that of the batch (the variance
            without bias). None in training keeps nothing.
        weight, bias: [C], the scale and what is added; None for 1 and 0.

    Raises:
        InputError: shapes differ; one value for each channel in training; or running statistics of an enclosing scope
            would take values of the trace (run modules by `dnnc.nn.functional_call` there).
    """
    if training and type(momentum) is float and running_mean is not None and running_var is not None:
        return updating_batch_norm(input, weight, bias, momentum, float(eps), running_mean, running_var)
    what, (x, w, b) = "batch_norm", _channelwise(input, weight, bias)
    if training:
        y, mean, var, count = _of_batch(x, w, b, float(eps))
        blend(running_mean, detached(mean), momentum)
        blend(running_var, _without_bias(detached(var), count), momentum)
        keep_along(y, running_mean, running_var)
        return y
    channels = (x.shape[1],)
    if running_mean is None or running_var is None:
        raise ValueInputError(f"{what}: without running statistics pass training=True")
    average, variance = (
        _given(what, n, v, channels, x) for n, v in (("running_mean", running_mean), ("running_var", running_var))
    )
    assert average is not None and variance is not None
    return op("batch_norm", x, w, b, average, variance, epsilon=float(eps))


def updating_batch_norm(input: Any, weight: Any, bias: Any, momentum: float, eps: float, *running: Array) -> Array:
    """`batch_norm` in training. `running`: the mean [C], the variance [C] and perhaps the count of batches, an integer.

    All of them take their next values.
    """
    y, *new = _with_statistics(input, weight, bias, momentum, eps, *running)
    for old, statistic in zip(running, new):
        update_buffer(old, statistic)
    keep_along(y, *running)
    return y


@replayed
def _with_statistics(
    input: Any, weight: Any, bias: Any, momentum: float, eps: float, *running: Array
) -> tuple[Array, ...]:
    """An input normalized by statistics of the batch, and the next running ones."""
    y, mean, var, count = _of_batch(*_channelwise(input, weight, bias), eps)
    return y, *_BLENDED((mean, var, *running), momentum, count)


def _channelwise(input: Any, weight: Any, bias: Any) -> tuple[Array, Array, Array]:
    """An input [N, C, ...] of a batch norm with the scale and the bias [C] of its channels."""
    what = "batch_norm"
    x = array(what, "input", input)
    shape = x.shape
    if len(shape) < 2:
        raise ValueInputError(f"{what}: the input must be [N, C, ...], got shape {shape}")
    channels = shape[1:2]
    w, b = _given(what, "weight", weight, channels, x), _given(what, "bias", bias, channels, x)
    return x, _or(w, x, 1.0, channels), _or(b, x, 0.0, channels)


def _of_batch(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array, Any]:
    """An input normalized by statistics of the batch; their mean and variance, and how many values each is of."""
    shape = x.shape
    count = shape[0]
    for n in shape[2:]:
        count = count * n
    if not symbolic(count) and count < 2:
        raise ValueInputError(f"batch_norm: training needs more than one value for each channel, got shape {shape}")
    made = apply_all("batch_norm_training", x._parts[0], w._parts[0], b._parts[0], epsilon=eps)
    y, mean, var = map(fresh, made)
    return y, mean, var, count


def _without_bias(var: Array, count: Any) -> Array:
    return divide(multiply(var, count), count - 1)


def blend(running: Array | None, new: Array, momentum: Any) -> None:
    """Let a running statistic take its next value. InputError: it would keep a value of a trace beyond its end."""
    if running is not None:
        update_buffer(running, _blended(running, new, momentum))


def _blended(running: Array, new: Array, momentum: Any) -> Array:
    made = add(multiply(running, 1.0 - momentum), multiply(cast(new, running.dtype), momentum))
    return cast(made, running.dtype)


def _next_statistics(mean: Array, var: Array, *more: Any) -> list[Array]:
    """The running mean, variance and, where there is one, count after a batch; then come the momentum and its size."""
    (average, variance, *batches), (momentum, count) = more[:-2], more[-2:]
    unbiased = _without_bias(detached(var), count)
    blended = [_blended(average, detached(mean), momentum), _blended(variance, unbiased, momentum)]
    return [*blended, *(add(n, 1) for n in batches)]


_BLENDED = Composite(_next_statistics)


def update_buffer(buffer: Array, new: Array) -> None:
    """Let a buffer take its next value. InputError: it would keep a value of a trace beyond its end."""
    if new._parts[0].traced and not (_FRESH.get() or buffer._parts[0].traced):
        raise InputError(
            "a buffer, such as a running statistic, would take a value of a function that is being traced; call the "
            "module by dnnc.nn.functional_call(module, state, ..., return_buffers=True), which gives the new buffers "
            "back, or call module.eval() first"
        )
    buffer._written(new._parts)


def keep_along(y: Array, *running: Array | None) -> None:
    """Compute the running statistics together with the result whose batch they have taken."""
    compute_along(y._parts[0], *(p for a in running if a is not None for p in a._parts))


_FRESH: ContextVar[bool] = ContextVar("dnnc_fresh_statistics", default=False)


@contextmanager
def fresh_statistics() -> Iterator[None]:
    """Within it, running statistics are handles that end with the trace: they may take values of it."""
    token = _FRESH.set(True)
    try:
        yield
    finally:
        _FRESH.reset(token)


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Array:
    """Normalize each channel of each image of [N, C, ...] (Ulyanov et al., 2016).

    Running statistics are kept as by `batch_norm`, and taken in place of the images' without `use_input_stats`.
    """
    what = "instance_norm"
    x = array(what, "input", input)
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if x.ndim < 3:
        raise ValueInputError(f"{what}: the input must be [N, C, ...] with spatial axes, got shape {x.shape}")
    axes, channels = tuple(range(2, x.ndim)), (x.shape[1],)
    count = math.prod(x.shape[2:])
    if not symbolic(count) and count < 2:
        raise ValueInputError(f"{what}: expected more than one spatial element, got shape {x.shape}")
    w, b = _given(what, "weight", weight, channels, x), _given(what, "bias", bias, channels, x)
    normal = op("mean_variance_norm", x, axes=axes, epsilon=float(eps))
    if running_mean is not None or running_var is not None:
        v = detached(x)
        mean = mean_of(v, axis=axes, keepdims=True)
        off = subtract(v, mean)
        var = divide(multiply(mean_of(multiply(off, off), axis=axes), count), count - 1)
        blend(running_mean, mean_of(reshape(mean, x.shape[:2]), axis=0), momentum)
        blend(running_var, mean_of(var, axis=0), momentum)
        keep_along(normal, running_mean, running_var)
    return _scaled(normal, w, b)


def _scaled(y: Array, w: Array | None, b: Array | None) -> Array:
    """y * w + b along axis 1."""
    spread = (-1, *(1,) * (y.ndim - 2))
    y = y if w is None else multiply(y, reshape(w, (w.shape[0], *spread[1:])))
    return y if b is None else add(y, reshape(b, (b.shape[0], *spread[1:])))


# --- of rows ----------------------------------------------------------------------------------------------------------


def _rows(what: str, x: Array, normalized_shape: Any) -> tuple[int, tuple[Any, ...]]:
    """The first of the axes that a row has, and their sizes. InputError where the input ends by others."""
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    axis = x.ndim - len(shape)
    if not shape or axis < 0 or not all(same(m, n) for m, n in zip(x.shape[axis:], shape)):
        raise ValueInputError(f"{what}: the input {x.shape} must end with normalized_shape {shape}")
    return axis, shape


@replayed
def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axes (Ba et al., 2016).

    Args:
        normalized_shape: sizes of these axes, or that of the last one.
        weight, bias: of this shape; None for 1 and 0.
    """
    x = array("layer_norm", "input", input)
    axis, shape = _rows("layer_norm", x, normalized_shape)
    w = _or(_given("layer_norm", "weight", weight, shape, x), x, 1.0)
    b = _given("layer_norm", "bias", bias, shape, x)
    given = (x, w) if b is None else (x, w, b)
    return op("layer_norm", *given, axis=axis, epsilon=float(eps))


@replayed
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Array:
    """x / sqrt(mean of squares + eps) * weight over the last axes; `eps` is the dtype's by default (of f16, f32's)."""
    x = array("rms_norm", "input", input)
    axis, shape = _rows("rms_norm", x, normalized_shape)
    w = _or(_given("rms_norm", "weight", weight, shape, x), x, 1.0)
    wide = np.float32 if x.dtype.itemsize == 2 else x.dtype
    return op("rms_norm", x, w, axis=axis, epsilon=float(np.finfo(wide).eps if eps is None else eps))


@replayed
def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Array:
    """Normalize groups of the channels (axis 1) of each image (Wu and He, 2018); `weight` and `bias` are [C]."""
    what = "group_norm"
    x = array(what, "input", input)
    if x.ndim < 2:
        raise ValueInputError(f"{what}: the input must be [N, C, ...], got shape {x.shape}")
    channels = (x.shape[1],)
    w, b = _given(what, "weight", weight, channels, x), _given(what, "bias", bias, channels, x)
    given = _or(w, x, 1.0, channels), _or(b, x, 0.0, channels)
    return op("group_norm", x, *given, groups=int(num_groups), epsilon=float(eps))


@replayed
def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Array:
    """x / (k + alpha / size * sum of squares of `size` neighbouring channels) ^ beta (Krizhevsky et al., 2012)."""
    x = array("local_response_norm", "input", input)
    if x.ndim < 3:
        raise ValueInputError(f"local_response_norm: the input must be [N, C, ...], got shape {x.shape}")
    attrs = {"size": int(size), "alpha": float(alpha), "beta": float(beta), "bias": float(k)}
    if size % 2:
        return op("lrn", x, **attrs)
    return flip(op("lrn", flip(x, axis=1), **attrs), axis=1)  # of an even window the larger half is in front
