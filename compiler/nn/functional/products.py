"""Products: layers that are linear in their input, and tables of rows."""

from __future__ import annotations

from typing import Any

from dnnc.array.core import Array, array_of, cast
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import add, divide, equal, maximum, multiply, not_equal, pow, subtract, where
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import axis_of, broadcast_arrays, expand_dims, permute_dims, reshape, wide
from dnnc.array.promotion import DEFAULTS
from dnnc.array.replay import replayed
from dnnc.array.sizes import differ, symbolic
from dnnc.array.statistical import max as max_of
from dnnc.array.statistical import sum as sum_of
from dnnc.ir.errors import UnsupportedError
from dnnc.nn.functional.operands import array, arrays, choice, counted, detached, filled, op, rank_of


@replayed
def linear(input: Any, weight: Any, bias: Any = None) -> Array:
    """x W^T + b over the last axis of x; `weight` is [out, in] or [in], `bias` [out] or a number."""
    x, w, b = arrays("linear", input=input, weight=weight, bias=bias)
    rank_of("linear", w, 1, 2, name="weight")
    if not x.ndim or differ(x.shape[-1], w.shape[-1]):
        raise ValueInputError(
            f"linear: the last axis of the input {x.shape} must have the {w.shape[-1]} elements of weight {w.shape}"
        )
    y = matmul(x, permute_dims(w, (1, 0)) if w.ndim == 2 else w)
    return y if b is None else add(y, b)


@replayed
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Array:
    """x1^T W_k x2 + b_k for each k; `weight` is [out, in1, in2], the inputs [..., in1] and [..., in2]."""
    x, y, w, b = arrays("bilinear", input1=input1, input2=input2, weight=weight, bias=bias)
    rank_of("bilinear", w, 3, name="weight")
    out, m, n = w.shape
    if x.shape[:-1] != y.shape[:-1] or x.shape[-1] != m or y.shape[-1] != n:
        raise ValueInputError(f"bilinear: inputs {x.shape} and {y.shape} do not fit to weight {w.shape}")
    middle = reshape(matmul(x, reshape(permute_dims(w, (1, 0, 2)), (m, out * n))), (*x.shape[:-1], out, n))
    z = sum_of(multiply(middle, expand_dims(y, axis=-2)), axis=-1)
    return z if b is None else add(z, b)


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """The rows of `weight` [n, width] that the integers `input` name.

    Args:
        padding_idx: a row through which no gradient flows; below 0 it counts from the end.
        sparse: gradients are dense arrays in any case.

    Raises:
        UnsupportedError: `max_norm` or `scale_grad_by_freq`, which are not there.
    """
    at, w = array("embedding", "input", input, "iu"), array("embedding", "weight", weight)
    rank_of("embedding", w, 2, name="weight")
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedError("embedding: max_norm and scale_grad_by_freq; scale the rows or the gradient instead")
    index = wide(at)
    rows = array_of(apply("gather", w._parts[0], index, axis=0))
    if padding_idx is None:
        return rows
    n = w.shape[0]
    if not symbolic(n) and not -n <= padding_idx < n:
        raise ValueInputError(f"embedding: padding_idx={padding_idx} is no row of weight {w.shape}")
    row = padding_idx if padding_idx >= 0 else n + padding_idx
    return where(expand_dims(equal(array_of(index), row), axis=-1), detached(rows), rows)


def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Array:
    """One row for each bag of integers: the sum, mean or maximum of the rows of `weight` [n, width] that they name.

    Args:
        input: [bags, size], or [total] with `offsets`.
        offsets: [bags], where each bag begins; with `include_last_offset` also where the last one ends.
        mode: "sum", "mean" or "max". An empty bag gives 0.
        sparse: gradients are dense arrays in any case.
        per_sample_weights: factors of the rows, of the shape of `input`; for sums.
        padding_idx: a row that counts as not there.

    Raises:
        UnsupportedError: `max_norm` or `scale_grad_by_freq`, which are not there.
    """
    what = "embedding_bag"
    choice(what, "mode", mode, "sum", "mean", "max")
    at, w = array(what, "input", input, "iu"), array(what, "weight", weight)
    rank_of(what, at, 1, 2)
    if (offsets is None) != (at.ndim == 2):
        raise ValueInputError(f"{what}: an input {at.shape} needs {'no' if at.ndim == 2 else ''} offsets")
    if per_sample_weights is not None and mode != "sum":
        raise ValueInputError(f"{what}: per_sample_weights are for mode 'sum', got {mode!r}")
    rows = embedding(at, w, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    n = w.shape[0]
    there = not_equal(at, padding_idx % n) if padding_idx is not None else equal(at, at)
    low = float("-inf") if mode == "max" else 0.0
    if per_sample_weights is not None:
        rows = multiply(rows, expand_dims(array(what, "per_sample_weights", per_sample_weights), axis=-1))
    rows = where(expand_dims(there, axis=-1), rows, low)
    if at.ndim == 2:
        count = sum_of(cast(there, w.dtype), axis=1, keepdims=True)
        made = max_of(rows, axis=1) if mode == "max" else sum_of(rows, axis=1)
    else:
        starts = array(what, "offsets", offsets, "iu")
        bags = starts.shape[0] - (1 if include_last_offset else 0)
        begun = cast(
            expand_dims(counted(at.shape[0]), axis=1) >= cast(starts, DEFAULTS["i"])[None, :bags], DEFAULTS["i"]
        )
        place = expand_dims(subtract(sum_of(begun, axis=1), 1), axis=1)
        zeros = filled((bags, 1), 0.0, w.dtype)
        count = _gathered(zeros, place, expand_dims(cast(there, w.dtype), axis=1), "add")
        made = _gathered(filled((bags, w.shape[1]), low, w.dtype), place, rows, "max" if mode == "max" else "add")
    if mode == "mean":
        return divide(made, maximum(count, 1.0))
    return where(equal(count, 0.0), 0.0, made) if mode == "max" else made


def _gathered(first: Array, place: Array, rows: Array, reduction: str) -> Array:
    """`first` with rows added, or their maxima taken, at places."""
    return array_of(apply("scatter_nd", first._parts[0], place._parts[0], rows._parts[0], reduction=reduction))


def one_hot(input: Any, num_classes: int = -1) -> Array:
    """int64 rows with a 1 at each integer's place: [..., num_classes]; -1 takes one class more than the largest."""
    at = array("one_hot", "input", input, "iu")
    if num_classes == -1:
        if not at.size:
            raise ValueInputError("one_hot: num_classes must be given where there are no elements")
        num_classes = int(max_of(at)) + 1
    classes = counted(num_classes)
    return cast(equal(expand_dims(cast(at, DEFAULTS["i"]), axis=-1), classes), DEFAULTS["i"])


@replayed
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Array:
    """The cosine of the angle between rows along `dim`; a norm counts as at least `eps`."""
    a, b = broadcast_arrays(*arrays("cosine_similarity", x1=x1, x2=x2))
    k = axis_of(dim, a.ndim)

    norms = [maximum(norm_along(x, 2, k, False), float(eps)) for x in (a, b)]
    return divide(sum_of(multiply(a, b), axis=k), multiply(*norms))


@replayed
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Array:
    """The p-norm of x1 - x2 + eps along the last axis."""
    a, b = arrays("pairwise_distance", x1=x1, x2=x2)
    d = add(subtract(a, b), float(eps))
    return norm_along(d, p, -1, keepdim)


def norm_along(x: Array, p: float, axis: int, keepdims: bool) -> Array:
    """The p-norm along an axis."""
    if p == 2:
        return op("reduce_l2", x, axes=(axis_of(axis, x.ndim),), keepdims=keepdims)
    if p == float("inf"):
        return max_of(absolute(x), axis=axis, keepdims=keepdims)
    if p == 1:
        return sum_of(absolute(x), axis=axis, keepdims=keepdims)
    return pow(sum_of(pow(absolute(x), float(p)), axis=axis, keepdims=keepdims), 1 / float(p))


@replayed
def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Array:
    """x divided by its p-norm along `dim`, which counts as at least `eps`."""
    x = array("normalize", "input", input)
    return divide(x, maximum(norm_along(x, p, axis_of(dim, x.ndim), True), float(eps)))
