"""Activations. At kinks they have PyTorch's derivatives (`docs/gradients.md`)."""

from __future__ import annotations

from typing import Any

from dnnc import random
from dnnc.array.core import Array, cast
from dnnc.array.elementwise import (
    add,
    divide,
    greater,
    less,
    logical_and,
    logical_or,
    multiply,
    negative,
    subtract,
    where,
)
from dnnc.array.elementwise import tanh as tanh_of
from dnnc.array.errors import ValueInputError
from dnnc.array.manipulation import axis_of, concat, expand_dims, reshape, sliced
from dnnc.array.promotion import dtype_of
from dnnc.array.replay import replayed
from dnnc.array.searching import argmax
from dnnc.array.sizes import same, symbolic
from dnnc.array.statistical import max as max_of
from dnnc.nn.functional.operands import array, arrays, choice, detached, op, written


def relu(input: Any, inplace: bool = False) -> Array:
    """max(x, 0)"""
    x = array("relu", "input", input)
    return written(x, op("relu", x), inplace)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Array:
    """x within [min_val, max_val], else the nearer bound; the derivative at a bound is 0."""
    x = array("hardtanh", "input", input)
    if not min_val < max_val:
        raise ValueInputError(f"hardtanh: expected min_val < max_val, got {min_val} and {max_val}")
    inside = logical_and(greater(x, float(min_val)), less(x, float(max_val)))
    bounded = op("clip", x, low=float(min_val), high=float(max_val))
    return written(x, where(inside, x, detached(bounded)), inplace)


def relu6(input: Any, inplace: bool = False) -> Array:
    """x within [0, 6], else the nearer bound."""
    return hardtanh(input, 0.0, 6.0, inplace)


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Array:
    """x, or negative_slope * x below 0."""
    x = array("leaky_relu", "input", input)
    return written(x, op("leaky_relu", x, alpha=float(negative_slope)), inplace)


def prelu(input: Any, weight: Any) -> Array:
    """x, or weight * x below 0; `weight` is one number, or one for each channel (axis 1)."""
    x, w = arrays("prelu", input=input, weight=weight)
    if w.ndim > 1 or (w.size != 1 and (x.ndim < 2 or not same(x.shape[1], w.size))):
        raise ValueInputError(f"prelu: weight must be [1] or [channels] of {x.shape}, got shape {w.shape}")
    per_channel = w.size != 1 and x.ndim > 2
    w = reshape(w, ()) if w.size == 1 else reshape(w, (w.size, *(1,) * (x.ndim - 2))) if per_channel else w
    return op("prelu", x, w)


def rrelu(
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    *,
    key: Any = None,
) -> Array:
    """x, or a * x below 0: a is random in [lower, upper) in training, else the middle."""
    if not training:
        return leaky_relu(input, (lower + upper) / 2, inplace)
    x = array("rrelu", "input", input)
    slope = cast(random.uniform(random.next_key(key, "rrelu"), x.shape, minval=lower, maxval=upper), x.dtype)
    return written(x, where(less(x, 0.0), multiply(x, slope), x), inplace)


def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Array:
    """x, or alpha * (exp(x) - 1) below 0."""
    x = array("elu", "input", input)
    return written(x, op("elu", x, alpha=float(alpha)), inplace)


def selu(input: Any, inplace: bool = False) -> Array:
    """Scaled `elu` (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
    x = array("selu", "input", input)
    return written(x, op("selu", x, alpha=1.6732632423543772, gamma=1.0507009873554805), inplace)


def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Array:
    """x, or alpha * (exp(x / alpha) - 1) below 0."""
    x = array("celu", "input", input)
    return written(x, op("celu", x, alpha=float(alpha)), inplace)


def gelu(input: Any, approximate: str = "none") -> Array:
    """x times the normal distribution function of x; `approximate="tanh"` as in Hendrycks and Gimpel (2016)."""
    x = array("gelu", "input", input)
    return op("gelu", x, approximate=choice("gelu", "approximate", approximate, "none", "tanh"))


def sigmoid(input: Any) -> Array:
    """1 / (1 + exp(-x))"""
    return op("sigmoid", array("sigmoid", "input", input))


@replayed
def logsigmoid(input: Any) -> Array:
    """log(sigmoid(x)), without overflow."""
    return negative(op("softplus", negative(array("logsigmoid", "input", input))))


def silu(input: Any, inplace: bool = False) -> Array:
    """x * sigmoid(x)"""
    x = array("silu", "input", input)
    return written(x, op("swish", x), inplace)


def mish(input: Any, inplace: bool = False) -> Array:
    """x * tanh(softplus(x))"""
    x = array("mish", "input", input)
    return written(x, op("mish", x), inplace)


def tanh(input: Any) -> Array:
    """The hyperbolic tangent."""
    return tanh_of(array("tanh", "input", input))


@replayed
def tanhshrink(input: Any) -> Array:
    """x - tanh(x)"""
    x = array("tanhshrink", "input", input)
    return subtract(x, tanh_of(x))


@replayed
def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + exp(beta * x)) / beta, and x where beta * x is above the threshold."""
    x = array("softplus", "input", input)
    t = x if beta == 1 else multiply(x, float(beta))
    y = op("softplus", t)
    return where(greater(t, float(threshold)), x, y if beta == 1 else divide(y, float(beta)))


@replayed
def softsign(input: Any) -> Array:
    """x / (1 + |x|)"""
    return op("softsign", array("softsign", "input", input))


def hardsigmoid(input: Any, inplace: bool = False) -> Array:
    """x / 6 + 1 / 2 within [0, 1]"""
    x = array("hardsigmoid", "input", input)
    return written(x, op("hard_sigmoid", x, alpha=1 / 6, beta=0.5), inplace)


def hardswish(input: Any, inplace: bool = False) -> Array:
    """x * hardsigmoid(x)"""
    x = array("hardswish", "input", input)
    return written(x, op("hard_swish", x), inplace)


@replayed
def hardshrink(input: Any, lambd: float = 0.5) -> Array:
    """x where |x| > lambd, else 0."""
    x = array("hardshrink", "input", input)
    return where(logical_or(greater(x, float(lambd)), less(x, -float(lambd))), x, 0.0)


@replayed
def softshrink(input: Any, lambd: float = 0.5) -> Array:
    """x moved towards 0 by lambd."""
    x = array("softshrink", "input", input)
    if lambd < 0:
        raise ValueInputError(f"softshrink: lambd={lambd}: expected 0 or more")
    return op("shrink", x, bias=float(lambd), lambd=float(lambd))


def threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Array:
    """x where it is above the threshold, else `value`."""
    x = array("threshold", "input", input)
    return written(x, where(greater(x, float(threshold)), x, float(value)), inplace)


@replayed
def glu(input: Any, dim: int = -1) -> Array:
    """a * sigmoid(b) of the halves a, b along `dim`."""
    x = array("glu", "input", input)
    k = axis_of(dim, x.ndim)
    n = x.shape[k]
    if not symbolic(n) and n % 2:
        raise ValueInputError(f"glu: axis {dim} of {x.shape} has {n} elements: expected an even number")
    half = n // 2
    return multiply(sliced(x, k, 0, half), op("sigmoid", sliced(x, k, half, half)))


def crelu(input: Any, dim: int = 1) -> Array:
    """relu(x) and relu(-x), concatenated (Shang et al., 2016)."""
    x = array("crelu", "input", input)
    return concat([op("relu", x), op("relu", negative(x))], axis=axis_of(dim, x.ndim))


def maxout(input: Any, pool_size: int, dim: int = 1) -> Array:
    """The largest of each `pool_size` neighbours along `dim` (Goodfellow et al., "Maxout Networks", 2013)."""
    x = array("maxout", "input", input)
    k = axis_of(dim, x.ndim)
    n = x.shape[k]
    if pool_size < 1 or (not symbolic(n) and n % pool_size):
        raise ValueInputError(f"maxout: {n} elements along axis {dim} of {x.shape} do not divide by {pool_size}")
    return max_of(reshape(x, (*x.shape[:k], n // pool_size, pool_size, *x.shape[k + 1 :])), axis=k + 1)


# --- rows that add up to one ------------------------------------------------------------------------------------------


def _typed(x: Array, dtype: Any) -> Array:
    return x if dtype is None else cast(x, dtype_of(dtype))


@replayed
def softmax(input: Any, dim: int, dtype: Any = None) -> Array:
    """exp(x) / sum(exp(x)) along `dim`, without overflow. `dtype`: of the operand before."""
    x = _typed(array("softmax", "input", input, "fiu" if dtype is not None else "f"), dtype)
    return op("softmax", x, axis=axis_of(dim, x.ndim)) if x.ndim else op("exp", subtract(x, x))


@replayed
def log_softmax(input: Any, dim: int, dtype: Any = None) -> Array:
    """log(softmax(x)) along `dim`."""
    x = _typed(array("log_softmax", "input", input, "fiu" if dtype is not None else "f"), dtype)
    return op("log_softmax", x, axis=axis_of(dim, x.ndim)) if x.ndim else subtract(x, x)


@replayed
def softmin(input: Any, dim: int, dtype: Any = None) -> Array:
    """softmax(-x) along `dim`."""
    return softmax(negative(_typed(array("softmin", "input", input, "fiu"), dtype)), dim)


def gumbel_softmax(
    logits: Any, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1, *, key: Any = None
) -> Array:
    """softmax((logits + Gumbel numbers) / tau) along `dim`: a differentiable draw of a category (Jang et al., 2017).

    With `hard` the result is one-hot, and its derivative that of the soft one (straight through). `eps` is PyTorch's
    unused argument.
    """
    x = array("gumbel_softmax", "logits", logits)
    k = axis_of(dim, x.ndim)
    noise = random.gumbel(random.next_key(key, "gumbel_softmax"), x.shape, x.dtype)
    soft = op("softmax", divide(add(x, noise), float(tau)), axis=k)
    if not hard:
        return soft
    best = expand_dims(argmax(soft, axis=k), axis=k)
    places = op("iota", shape=tuple(n if j == k else 1 for j, n in enumerate(_dims(x))), axis=k)
    one_hot = cast(_equal(places, best), x.dtype)
    return add(subtract(one_hot, detached(soft)), soft)


def _dims(x: Array) -> tuple[Any, ...]:
    return x._parts[0].type.shape


def _equal(a: Array, b: Array) -> Array:
    return op("equal", a, b)
