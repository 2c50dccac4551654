"""Einstein's summation of any number of operands, as products of matrices, element-wise products and sums.

An expression of several operands is a tree of expressions of two, in the order that `numpy.einsum_path` finds (greedy:
Smith and Gray, "opt_einsum", JOSS 2018). Each of two becomes: sums of labels that only one has, one batched product of
matrices over labels that both have and the result has not, a transpose.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.elementwise import multiply
from dnnc.array.errors import ValueInputError
from dnnc.array.linalg import diagonal, matmul
from dnnc.array.manipulation import moveaxis, permute_dims, reshape, same_type
from dnnc.array.sizes import same, symbolic
from dnnc.array.statistical import sum as sum_
from dnnc.ir.errors import count

LETTERS = string.ascii_letters


@dataclass(frozen=True)
class Term:
    """An operand, and a label for each of its axes."""

    x: Array
    labels: str

    def size(self, label: str) -> Any:
        return self.x.shape[self.labels.index(label)]


def einsum(*operands: Any, optimize: Any = True) -> Array:
    """Einstein's summation.

    Args:
        *operands: the subscripts, as in "bij,bjk->bik", and the arrays; or the arrays, each followed by the list of the
            numbers of its axes, and last the list of the result's. A label may occur twice in an operand (its
            diagonal); "..." stands for any axes, which broadcast. Without "->" the result has the labels that occur
            once, in alphabetical order, behind those of "...".
        optimize: the order of products: "greedy" (True), "optimal", a path of `numpy.einsum_path`, or False for the
            order of the operands.

    Returns:
        An array of the promoted dtype, lazy and differentiable.

    Raises:
        ValueInputError: the subscripts do not fit to the operands.
    """
    given, arrays = _parsed(operands)
    xs = same_type(arrays)
    inputs, result = _labels(given, xs)
    terms = [_term(x, labels, given) for x, labels in zip(xs, inputs)]
    _checked(terms, given)
    for pair in _path(terms, result, optimize):
        chosen = [terms[k] for k in pair]
        terms = [t for k, t in enumerate(terms) if k not in pair]
        for other in chosen[1:]:
            kept = set(result).union(*(t.labels for t in terms), *(t.labels for t in chosen[2:]))
            chosen[0] = _product(chosen[0], other, kept)
        terms.append(chosen[0])
    (last,) = terms
    last = _summed(last, set(result))
    return permute_dims(last.x, [last.labels.index(c) for c in result]) if last.labels != result else last.x


# --- subscripts -------------------------------------------------------------------------------------------------------


def _parsed(operands: Sequence[Any]) -> tuple[str, list[Any]]:
    """The subscripts as text, and the arrays."""
    if not operands:
        raise ValueInputError("einsum: expected subscripts and arrays")
    if isinstance(operands[0], str):
        return operands[0].replace(" ", ""), list(operands[1:])
    pairs = len(operands) // 2
    texts = [_text(operands[2 * k + 1]) for k in range(pairs)]
    end = f"->{_text(operands[-1])}" if len(operands) % 2 else ""
    return ",".join(texts) + end, list(operands[: 2 * pairs : 2])


def _text(numbers: Any) -> str:
    try:
        return "".join("..." if k is Ellipsis else LETTERS[k] for k in numbers)
    except (TypeError, IndexError):
        raise ValueInputError(
            f"einsum: {numbers!r} are no axes: expected numbers from 0 to {len(LETTERS) - 1}, or an ellipsis"
        ) from None


def _labels(given: str, xs: Sequence[Array]) -> tuple[list[str], str]:
    """A letter for each axis of the operands, and of the result."""
    left, arrow, right = given.partition("->")
    texts = left.split(",")
    if len(texts) != len(xs):
        raise ValueInputError(f"einsum: {given!r} is for {count(len(texts), 'operand')}, got {len(xs)}")
    for text in (*texts, right):
        plain = text.replace("...", "", 1)
        if not (plain.isascii() and plain.isalpha()) and plain:
            raise ValueInputError(f"einsum: {given!r}: expected letters and one ellipsis, got {text!r}")
    free = [c for c in LETTERS if c not in given]
    widest = max((x.ndim - len(t) + 3 for x, t in zip(xs, texts) if "..." in t), default=0)
    if widest > len(free):
        raise ValueInputError(f"einsum: {given!r}: no letters left for {widest} axes of the ellipsis")
    between = "".join(free[: max(widest, 0)])
    inputs = []
    for x, t in zip(xs, texts):
        many = x.ndim - len(t) + 3 if "..." in t else 0
        t = t.replace("...", between[len(between) - many :] if many > 0 else "")
        if len(t) != x.ndim or many < 0:
            raise ValueInputError(f"einsum: {given!r}: {count(len(t), 'label')} for an operand of shape {x.shape}")
        inputs.append(t)
    if arrow:
        result = right.replace("...", between)
    else:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        result = between + "".join(once)
    for c in result:
        if result.count(c) > 1 or not any(c in t for t in inputs):
            raise ValueInputError(f"einsum: {given!r}: {c!r} of the result must occur once there, and in an operand")
    if between and arrow and "..." not in right:
        raise ValueInputError(f"einsum: {given!r}: the result must have the ellipsis of the operands")
    return inputs, result


def _term(x: Array, labels: str, given: str) -> Term:
    """An operand in which each label occurs once: the diagonal of those that occur twice."""
    for c in dict.fromkeys(labels):
        while labels.count(c) > 1:
            a = labels.index(c)
            b = labels.index(c, a + 1)
            if not same(x.shape[a], x.shape[b]):
                raise ValueInputError(f"einsum: {given!r}: axes {a} and {b} of {x.shape} are both {c!r}, but differ")
            x = diagonal(moveaxis(x, (a, b), (-2, -1)))
            labels = labels[:a] + labels[a + 1 : b] + labels[b + 1 :] + c
    return Term(x, labels)


def _checked(terms: Sequence[Term], given: str) -> None:
    """ValueInputError where a label stands for different sizes; 1 broadcasts."""
    sizes: dict[str, Any] = {}
    for t in terms:
        for c, n in zip(t.labels, t.x.shape):
            known = sizes.get(c, 1)
            if not same(known, 1) and not same(n, 1) and not same(known, n):
                raise ValueInputError(f"einsum: {given!r}: {c!r} is {known} and {n}")
            sizes[c] = n if same(known, 1) else known


def _path(terms: Sequence[Term], result: str, optimize: Any) -> list[tuple[int, ...]]:
    """Which operands are multiplied next; products go to the end of the list."""
    everything = tuple(range(len(terms)))
    if len(terms) < 3 or optimize is False:
        return [everything]
    if symbolic(*(d for t in terms for d in t.x.shape)):
        sizes = [tuple(d if type(d) is int else 64 for d in t.x.shape) for t in terms]  # for the order alone
    else:
        sizes = [t.x.shape for t in terms]
    text = ",".join(t.labels for t in terms) + "->" + result
    zeros = [np.broadcast_to(np.float32(0), s) for s in sizes]
    path, _ = np.einsum_path(text, *zeros, optimize="greedy" if optimize is True else optimize)
    return [tuple(sorted(p)) for p in path[1:]]


# --- products ---------------------------------------------------------------------------------------------------------


def _summed(t: Term, kept: set[str]) -> Term:
    """Without the labels that nobody needs."""
    axes = tuple(k for k, c in enumerate(t.labels) if c not in kept)
    if not axes:
        return t
    return Term(sum_(t.x, axis=axes, dtype=t.x.dtype), "".join(c for c in t.labels if c in kept))


def _product(a: Term, b: Term, kept: set[str]) -> Term:
    """The product of two operands with the labels in `kept`, one batched product of matrices where they share more."""
    a, b = _summed(a, kept | set(b.labels)), _summed(b, kept | set(a.labels))
    both = [c for c in a.labels if c in b.labels]
    # a size of 1 beside a larger one broadcasts: it is no label of its operand, and is summed in the other
    for c in both:
        p, q = a.size(c), b.size(c)
        if not same(p, q):
            narrow, wide = (a, b) if same(p, 1) else (b, a)
            return _product(_without(narrow, c), wide, kept)
    inner = [c for c in both if c not in kept]
    batch = [c for c in both if c in kept]
    rows, columns = ([c for c in t.labels if c not in both] for t in (a, b))
    labels = "".join([*batch, *rows, *columns])
    left, right = _ordered(a, [*batch, *rows, *inner]), _ordered(b, [*batch, *inner, *columns])
    if not inner:
        left = reshape(left, (*left.shape, *(1 for _ in columns)))
        lead = len(batch)
        right = reshape(right, (*right.shape[:lead], *(1 for _ in rows), *right.shape[lead:]))
        return Term(multiply(left, right), labels)
    sizes = [[t.size(c) for c in some] for t, some in ((a, batch), (a, rows), (b, columns), (a, inner))]
    m, n, k = (math.prod(s) for s in sizes[1:])
    left = reshape(left, (*sizes[0], m, k))
    right = reshape(right, (*sizes[0], k, n))
    return Term(reshape(matmul(left, right), (*sizes[0], *sizes[1], *sizes[2])), labels)


def _ordered(t: Term, labels: Sequence[str]) -> Array:
    order = [t.labels.index(c) for c in labels]
    return t.x if order == list(range(len(order))) else permute_dims(t.x, order)


def _without(t: Term, label: str) -> Term:
    """Without an axis of size 1."""
    k = t.labels.index(label)
    shape = t.x.shape[:k] + t.x.shape[k + 1 :]
    return Term(reshape(t.x, shape), t.labels[:k] + t.labels[k + 1 :])
