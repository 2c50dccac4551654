"""Losses. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast, scalar
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import (
    add,
    divide,
    equal,
    exp,
    less,
    less_equal,
    log,
    log1p,
    logical_and,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    square,
    subtract,
    where,
)
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.manipulation import broadcast_arrays, expand_dims, reshape, squeeze, take_along_axis, wide
from dnnc.array.promotion import kind_of
from dnnc.array.replay import replayed
from dnnc.array.searching import top_k
from dnnc.array.sizes import differ, same_shape
from dnnc.array.statistical import any as any_of
from dnnc.array.statistical import max as largest
from dnnc.array.statistical import mean
from dnnc.array.statistical import sum as sum_of
from dnnc.nn.functional.operands import array, arrays, choice, counted, detached, op
from dnnc.nn.functional.products import cosine_similarity, pairwise_distance

F32 = np.dtype(np.float32)


def reduced(what: str, x: Array, reduction: str) -> Array:
    """All elements as one number, or themselves."""
    how = choice(what, "reduction", reduction, "mean", "sum", "none")
    return x if how == "none" else (mean if how == "mean" else sum_of)(x)


def _pair(what: str, input: Any, target: Any) -> tuple[Array, Array]:
    """Input and target of one dtype and shape."""
    x, t = arrays(what, input=input, target=target)
    if not same_shape(x.shape, t.shape):
        x, t = broadcast_arrays(x, t)
    return x, t


def _same(what: str, input: Any, target: Any) -> tuple[Array, Array]:
    """Input and target of one dtype and shape. InputError where shapes differ, even if they broadcast."""
    x, t = arrays(what, input=input, target=target)
    if not same_shape(x.shape, t.shape):
        raise ValueInputError(f"{what}: input {x.shape} and target {t.shape} must have one shape")
    return x, t


# --- of numbers -------------------------------------------------------------------------------------------------------


def _weighted(what: str, loss: Array, weight: Any, reduction: str) -> Array:
    """Elements times their weights; the mean divides by the weights' sum."""
    if weight is None:
        return reduced(what, loss, reduction)
    w = array(what, "weight", weight)
    if not same_shape(w.shape, loss.shape):
        raise ValueInputError(f"{what}: weight {w.shape} must have the shape {loss.shape} of the input")
    loss = multiply(loss, w)
    return divide(sum_of(loss), sum_of(w)) if reduction == "mean" else reduced(what, loss, reduction)


@replayed
def mse_loss(input: Any, target: Any, *, reduction: str = "mean", weight: Any = None) -> Array:
    """(x - t)^2; `weight` holds one number for each element."""
    return _weighted("mse_loss", square(subtract(*_pair("mse_loss", input, target))), weight, reduction)


@replayed
def l1_loss(input: Any, target: Any, *, reduction: str = "mean", weight: Any = None) -> Array:
    """|x - t|; `weight` holds one number for each element."""
    return _weighted("l1_loss", absolute(subtract(*_pair("l1_loss", input, target))), weight, reduction)


@replayed
def smooth_l1_loss(input: Any, target: Any, *, reduction: str = "mean", beta: float = 1.0) -> Array:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, of d = x - t."""
    if beta < 0:
        raise ValueInputError(f"smooth_l1_loss: beta={beta}: expected 0 or more")
    x, t = _pair("smooth_l1_loss", input, target)
    d = subtract(x, t)
    a = absolute(d)
    loss = a if beta == 0 else where(less(a, float(beta)), multiply(square(d), 0.5 / beta), subtract(a, 0.5 * beta))
    return reduced("smooth_l1_loss", loss, reduction)


@replayed
def huber_loss(input: Any, target: Any, *, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Array:
    """d^2 / 2 where |d| <= delta, else delta * (|d| - delta / 2), of d = x - t."""
    if delta <= 0:
        raise ValueInputError(f"huber_loss: delta={delta}: expected a positive number")
    x, t = _pair("huber_loss", input, target)
    d = subtract(x, t)
    a = absolute(d)
    far = multiply(subtract(a, 0.5 * delta), float(delta))
    loss = where(less_equal(a, float(delta)), multiply(square(d), 0.5), far)
    return _weighted("huber_loss", loss, weight, reduction)


# --- of classes -------------------------------------------------------------------------------------------------------


def _class_axis(what: str, x: Array) -> int:
    if not x.ndim:
        raise ValueInputError(f"{what}: the input must be [N, C, ...] or [C], got shape ()")
    return 1 if x.ndim > 1 else 0


def _classes(what: str, x: Array, target: Any) -> Array:
    """Indices of classes, int64, [N, ...] for x [N, C, ...]."""
    k = _class_axis(what, x)
    t = array(what, "target", target, "iu")
    shape = (*x.shape[:k], *x.shape[k + 1 :])
    if len(shape) != t.ndim or any(differ(m, n) for m, n in zip(shape, t.shape)):
        raise ValueInputError(f"{what}: class indices of input {x.shape} must have shape {shape}, got {t.shape}")
    return array_of(wide(t))


def _class_weight(what: str, x: Array, weight: Any) -> Array | None:
    if weight is None:
        return None
    w = array(what, "weight", weight)
    k = _class_axis(what, x)
    if w.ndim != 1 or differ(w.shape[0], x.shape[k]):
        raise ValueInputError(f"{what}: weight must be [{x.shape[k]}], one number for each class, got shape {w.shape}")
    return cast(w, x.dtype)


@replayed
def nll_loss(
    input: Any, target: Any, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Array:
    """Minus the log-probability of each target's class.

    Args:
        input: log-probabilities [N, C, ...] or [C].
        target: classes [N, ...], integers; those equal to `ignore_index` count for nothing.
        weight: [C], of the classes; the mean divides by the sum of the targets' weights.
    """
    what = "nll_loss"
    x = array(what, "input", input)
    t = _classes(what, x, target)
    picked, counts, w = _picked(x, t, _class_weight(what, x, weight), ignore_index)
    return _mean_by(what, negative(multiply(where(counts, picked, 0.0), w)), w, reduction)


def _picked(x: Array, t: Array, weight: Array | None, ignore_index: int) -> tuple[Array, Array, Array]:
    """The element of each target's class, whether the target counts (if not, the element is any), and its weight."""
    k = 1 if x.ndim > 1 else 0
    counts = not_equal(t, ignore_index)
    at = where(counts, t, 0)
    picked = squeeze(take_along_axis(x, expand_dims(at, axis=k), axis=k), k)
    w = cast(counts, x.dtype)
    if weight is not None:
        w = multiply(w, array_of(apply("gather", weight._parts[0], at._parts[0], axis=0)))
    return picked, counts, w


def _mean_by(what: str, loss: Array, w: Array, reduction: str) -> Array:
    """Elements that hold their weight already; the mean divides by the sum of weights."""
    if choice(what, "reduction", reduction, "mean", "sum", "none") == "mean":
        return divide(sum_of(loss), sum_of(w))
    return reduced(what, loss, reduction)


@replayed
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Array:
    """The cross entropy of softmax(input) along axis 1 and the target.

    Args:
        input: logits [N, C, ...] or [C].
        target: classes [N, ...] (integers), or probabilities of the input's shape.
        weight: [C], of the classes.
        ignore_index: a class of targets that count for nothing.
        label_smoothing: this share of each target's probability goes to all classes evenly.
    """
    what = "cross_entropy"
    x = array(what, "input", input)
    k = _class_axis(what, x)
    if not 0 <= label_smoothing <= 1:
        raise ValueInputError(f"{what}: label_smoothing={label_smoothing}: expected a number from 0 to 1")
    w = _class_weight(what, x, weight)
    spread = None if w is None else reshape(w, (w.shape[0], *(1,) * (x.ndim - 1 - k)))
    n = x.shape[k]
    t = array(what, "target", target, "fiu")
    if kind_of(t.dtype) != "f" and not label_smoothing:
        t = _classes(what, x, t)
        top = detached(largest(x, axis=k, keepdims=True))
        picked, counts, counted = _picked(x, t, w, ignore_index)
        total = array_of(apply("reduce_log_sum_exp", subtract(x, top)._parts[0], axes=(k,), keepdims=False))
        loss = subtract(total, subtract(picked, squeeze(top, k)))  # no array of all log-probabilities
        loss = multiply(where(counts, loss, 0.0), counted)
        return _mean_by(what, loss, counted, reduction)
    y = op("log_softmax", x, axis=k)
    if kind_of(t.dtype) == "f":
        _, t = _same(what, x, t)
        if label_smoothing:
            t = add(multiply(t, 1 - label_smoothing), _share(label_smoothing, n, x))
        loss = negative(sum_of(multiply(multiply(y, t), 1.0 if spread is None else spread), axis=k))
        if reduction == "mean":
            return divide(sum_of(loss), math.prod(loss.shape))
        return reduced(what, loss, reduction)
    t = _classes(what, x, t)
    picked, counts, counted = _picked(y, t, w, ignore_index)
    loss = negative(multiply(where(counts, picked, 0.0), counted))
    even = negative(sum_of(y if spread is None else multiply(y, spread), axis=k))
    even = where(counts, even, 0.0)
    loss = add(multiply(loss, 1 - label_smoothing), multiply(even, _share(label_smoothing, n, x)))
    return _mean_by(what, loss, counted, reduction)


def _share(part: float, n: Any, like: Array) -> Any:
    """part / n of n classes."""
    return part / n if isinstance(n, int) else divide(scalar(part, like.dtype), n)


@replayed
def accuracy(input: Any, target: Any, *, topk: int = 1, ignore_index: int = -100) -> Array:
    """The share of targets [N, ...] whose class is among the `topk` largest of scores [N, C, ...], as float32."""
    x = array("accuracy", "input", input, "fiu")
    t = _classes("accuracy", x, target)
    k = 1 if x.ndim > 1 else 0
    if topk == 1:
        hit = equal(op("argmax", x, axis=k), t)
    else:
        _, best = top_k(x, topk, axis=k)
        hit = any_of(equal(best, expand_dims(t, axis=k)), axis=k)
    counts = not_equal(t, ignore_index)
    return divide(sum_of(cast(logical_and(hit, counts), F32)), sum_of(cast(counts, F32)))


# --- of probabilities -------------------------------------------------------------------------------------------------


@replayed
def binary_cross_entropy(input: Any, target: Any, weight: Any = None, *, reduction: str = "mean") -> Array:
    """-(t log x + (1 - t) log(1 - x)); logarithms are at least -100. `weight` broadcasts to the input."""
    what = "binary_cross_entropy"
    x, t = _same(what, input, target)
    near = multiply(t, maximum(log(x), -100.0))
    far = multiply(subtract(1.0, t), maximum(log1p(negative(x)), -100.0))
    loss = negative(add(near, far))
    return reduced(what, loss if weight is None else multiply(loss, array(what, "weight", weight)), reduction)


@replayed
def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, *, reduction: str = "mean", pos_weight: Any = None
) -> Array:
    """`binary_cross_entropy` of sigmoid(input), without overflow; `pos_weight` is the weight of the targets 1."""
    what = "binary_cross_entropy_with_logits"
    x, t = _same(what, input, target)
    high = op("softplus", negative(x))  # -log(sigmoid(x))
    if pos_weight is not None:
        high = multiply(high, add(multiply(subtract(array(what, "pos_weight", pos_weight), 1.0), t), 1.0))
    loss = add(multiply(subtract(1.0, t), x), high)
    return reduced(what, loss if weight is None else multiply(loss, array(what, "weight", weight)), reduction)


@replayed
def kl_div(input: Any, target: Any, *, reduction: str = "mean", log_target: bool = False) -> Array:
    """t * (log t - x) of log-probabilities x; "batchmean" divides the sum by the first axis."""
    what = "kl_div"
    x, t = _pair(what, input, target)
    if log_target:
        loss = multiply(exp(t), subtract(t, x))
    else:
        positive = less(0.0, t)
        loss = subtract(where(positive, multiply(t, log(where(positive, t, 1.0))), t), multiply(t, x))
    if choice(what, "reduction", reduction, "mean", "sum", "none", "batchmean") == "batchmean":
        return divide(sum_of(loss), x.shape[0])
    return reduced(what, loss, reduction)


@replayed
def poisson_nll_loss(
    input: Any,
    target: Any,
    log_input: bool = True,
    *,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Array:
    """exp(x) - t x, or x - t log(x + eps) without `log_input`; `full` adds Stirling's term of targets above 1."""
    what = "poisson_nll_loss"
    x, t = _pair(what, input, target)
    loss = subtract(exp(x), multiply(t, x)) if log_input else subtract(x, multiply(t, log(add(x, float(eps)))))
    if full:
        above = less(1.0, t)
        s = where(above, t, 1.0)
        stirling = add(subtract(multiply(s, log(s)), s), multiply(log(multiply(s, 2 * math.pi)), 0.5))
        loss = add(loss, where(above, stirling, 0.0))
    return reduced(what, loss, reduction)


@replayed
def gaussian_nll_loss(
    input: Any, target: Any, var: Any, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Array:
    """(log v + (x - t)^2 / v) / 2 of variances v of at least `eps`; `full` adds log(2 pi) / 2."""
    what = "gaussian_nll_loss"
    x, t, v = arrays(what, input=input, target=target, var=var)
    v = expand_dims(v, axis=-1) if v.ndim == x.ndim - 1 else v
    held = add(v, detached(op("relu", subtract(float(eps), v))))  # the bound has no derivative
    loss = multiply(add(log(held), divide(square(subtract(x, t)), held)), 0.5)
    return reduced(what, add(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)


# --- of margins -------------------------------------------------------------------------------------------------------


@replayed
def hinge_embedding_loss(input: Any, target: Any, *, margin: float = 1.0, reduction: str = "mean") -> Array:
    """x where the target is 1, max(0, margin - x) where it is -1."""
    x = array("hinge_embedding_loss", "input", input)
    t = array("hinge_embedding_loss", "target", target, "fiu")
    far = op("relu", subtract(float(margin), x))
    loss = add(where(not_equal(t, 1), far, 0.0), where(not_equal(t, -1), x, 0.0))
    return reduced("hinge_embedding_loss", loss, reduction)


@replayed
def margin_ranking_loss(
    input1: Any, input2: Any, target: Any, *, margin: float = 0.0, reduction: str = "mean"
) -> Array:
    """max(0, -t (x1 - x2) + margin), t = 1 where x1 is to be the larger one, else -1."""
    a, b = arrays("margin_ranking_loss", input1=input1, input2=input2)
    t = cast(array("margin_ranking_loss", "target", target, "fiu"), a.dtype)
    loss = op("relu", add(multiply(negative(t), subtract(a, b)), float(margin)))
    return reduced("margin_ranking_loss", loss, reduction)


@replayed
def soft_margin_loss(input: Any, target: Any, *, reduction: str = "mean") -> Array:
    """log(1 + exp(-t x)) of targets 1 and -1."""
    x = array("soft_margin_loss", "input", input)
    t = cast(array("soft_margin_loss", "target", target, "fiu"), x.dtype)
    return reduced("soft_margin_loss", op("softplus", negative(multiply(t, x))), reduction)


@replayed
def multi_margin_loss(
    input: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, *, reduction: str = "mean"
) -> Array:
    """Hinge loss of classes: the mean over i of max(0, margin - x[t] + x[i])^p, i != t; `weight` is [C]."""
    what = "multi_margin_loss"
    x = array(what, "input", input)
    if p not in (1, 2) or x.ndim not in (1, 2):
        raise ValueInputError(f"{what}: expected p of 1 or 2 and an input [N, C] or [C], got p={p} and {x.shape}")
    t = _classes(what, x, target)
    k = x.ndim - 1
    own = take_along_axis(x, expand_dims(t, axis=k), axis=k)
    far = op("relu", add(subtract(x, own), float(margin)))
    far = far if p == 1 else square(far)
    w = _class_weight(what, x, weight)
    if w is not None:
        far = multiply(far, expand_dims(array_of(apply("gather", w._parts[0], t._parts[0], axis=0)), axis=k))
    classes = counted(x.shape[k])
    far = where(equal(classes, expand_dims(t, axis=k)), 0.0, far)
    return reduced(what, divide(sum_of(far, axis=k), x.shape[k]), reduction)


@replayed
def multilabel_soft_margin_loss(input: Any, target: Any, weight: Any = None, *, reduction: str = "mean") -> Array:
    """The mean over classes (last axis) of the binary cross entropy of sigmoid(input)."""
    what = "multilabel_soft_margin_loss"
    loss = binary_cross_entropy_with_logits(input, target, reduction="none")
    loss = loss if weight is None else multiply(loss, array(what, "weight", weight))
    return reduced(what, mean(loss, axis=-1), reduction)


@replayed
def cosine_embedding_loss(
    input1: Any, input2: Any, target: Any, *, margin: float = 0.0, reduction: str = "mean"
) -> Array:
    """1 - cos(x1, x2) where the target is 1, max(0, cos(x1, x2) - margin) where it is -1; rows along the last axis."""
    what = "cosine_embedding_loss"
    a, b = arrays(what, input1=input1, input2=input2)
    t = array(what, "target", target, "fiu")
    cos = cosine_similarity(a, b, dim=-1)
    far = op("relu", subtract(cos, float(margin)))
    near = where(equal(t, 1), subtract(1.0, cos), 0.0)
    return reduced(what, add(near, where(equal(t, -1), far, 0.0)), reduction)


def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Array:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) of distances by the p-norm along the last axis."""
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduced("triplet_margin_loss", op("relu", add(subtract(near, far), float(margin))), reduction)
