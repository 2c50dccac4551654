"""Converters of support vector machines: SVMRegressor and SVMClassifier of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.ml.linear import labelled, labels_of, one_score, rows_of, transformed
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]
KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
LEAST = 1e-7  # a pair's probability is kept away from 0 and 1 by this


def _numbers(c: Call, name: str) -> Array:
    return np.asarray(c.numbers(name) or (), np.float32)


def _matrix(c: Call, name: str, rows: int) -> Array:
    given = _numbers(c, name)
    if rows < 1 or given.size == 0 or given.size % rows:
        raise ModelError(f"attribute {name} has {given.size} numbers, which are not {rows} rows")
    return given.reshape(rows, -1)


def kernel(c: Call, x: Value, vectors: Array, name: str) -> Any:
    """The kernel of each row of x with each support vector: [rows, vectors]. Parameters are gamma, coef0 and degree."""
    b = c.b
    gamma, coef0, degree = [*(c.numbers("kernel_params") or ()), 0.0, 0.0, 0.0][:3]
    if name not in KERNELS:
        raise ModelError(f"attribute kernel_type must be one of {', '.join(KERNELS)}, got {name!r}")
    features = number(x.type.shape[1], "the number of features")
    if vectors.shape[1] != features:
        raise ModelError(f"the support vectors have {vectors.shape[1]} features, the input is {x.type}")
    if name == "RBF":
        off = b.sub(b.unsqueeze(x, axes=(1,)), c.const(vectors[None], x.type.dtype))
        return b.exp(b.mul(b.reduce_sum(b.mul(off, off), axes=(2,), keepdims=False), -gamma))
    dots = b.matmul(x, c.const(vectors.T, x.type.dtype))
    if name == "LINEAR":
        return dots
    moved = b.add(b.mul(dots, gamma), coef0)
    return b.tanh(moved) if name == "SIGMOID" else b.pow(moved, c.const(degree, x.type.dtype))


def regressor(c: Call) -> Any:
    """Regress or classify; without support vectors features have coefficients. One class: 1 if positive, else -1."""
    x, count = rows_of(c, c.x()), c.integer("n_supports", 0)
    rho = float(_numbers(c, "rho")[0]) if c.numbers("rho") else 0.0
    if count > 0:
        k = kernel(c, x, _matrix(c, "support_vectors", count), c.text("kernel_type", "LINEAR"))
        weights = _matrix(c, "coefficients", count)
    else:
        k, weights = x, _matrix(c, "coefficients", number(x.type.shape[1], "the number of features"))
    y = c.b.add(c.b.matmul(k, c.const(weights, x.type.dtype)), rho)
    if c.flag("one_class"):
        dtype = x.type.dtype
        return c.cast(c.b.where(c.b.greater(y, 0.0), c.const(1.0, dtype), c.const(-1.0, dtype)), f32)
    return c.cast(transformed(c, y, c.text("post_transform", "NONE")), f32)


def classifier(c: Call) -> Any:
    """Classes vote in pairs; `prob_a` gives probabilities. Without support vectors scores are linear."""
    x, labels, transform = rows_of(c, c.x()), labels_of(c), c.text("post_transform", "NONE")
    per_class, classes = c.integers("vectors_per_class") or (), len(labels)
    if not sum(per_class):
        weights = _matrix(c, "coefficients", classes)
        scores = c.b.add(kernel(c, x, weights, "LINEAR"), float(_numbers(c, "rho")[0]) if c.numbers("rho") else 0.0)
        return _finished(c, scores, scores, labels, transform, False)
    if len(per_class) != classes:
        raise ModelError(f"attribute vectors_per_class has {count(len(per_class), 'number')} for {classes} classes")
    k = kernel(c, x, _matrix(c, "support_vectors", sum(per_class)), c.text("kernel_type", "LINEAR"))
    scores = _pairs(c, k, per_class)
    votes = _votes(c, scores, classes)
    if not c.numbers("prob_a"):
        return _finished(c, votes, scores, labels, transform, False)
    probabilities = _probabilities(c, scores, classes)
    return _finished(c, votes, probabilities, labels, transform, True)


def _pair_list(classes: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(classes) for j in range(i + 1, classes)]


def _pairs(c: Call, k: Value, per_class: tuple[int, ...]) -> Any:
    """For each pair of classes a weighted sum of the kernels of their vectors: one product with a sparse matrix."""
    total, pairs = sum(per_class), _pair_list(len(per_class))
    weights, rho = _numbers(c, "coefficients"), _numbers(c, "rho")
    if weights.size % total or weights.size // total < len(per_class) - 1 or rho.size < len(pairs):
        raise ModelError(
            f"{count(len(per_class), 'class', 'classes')} with {total} vectors need {len(per_class) - 1} "
            "rows of coefficients and "
            f"{len(pairs)} rho"
        )
    weights = weights.reshape(-1, total)
    start = np.concatenate([[0], np.cumsum(per_class)])
    matrix = np.zeros((total, len(pairs)), np.float32)
    for p, (i, j) in enumerate(pairs):
        matrix[start[i] : start[i + 1], p] = weights[j - 1, start[i] : start[i + 1]]
        matrix[start[j] : start[j + 1], p] = weights[i, start[j] : start[j + 1]]
    return c.b.add(c.b.matmul(k, c.const(matrix, k.type.dtype)), c.const(rho[: len(pairs)], k.type.dtype))


def _votes(c: Call, scores: Value, classes: int) -> Any:
    """How many pairs each class wins: the first class of a pair where the score is positive."""
    won = np.zeros((classes * (classes - 1) // 2, classes), np.float32)
    lost = won.copy()
    for p, (i, j) in enumerate(_pair_list(classes)):
        won[p, i], lost[p, j] = 1, 1
    first = c.cast(c.b.greater(scores, 0.0), scores.type.dtype)
    gain, base = c.const(won - lost, scores.type.dtype), c.const(lost.sum(0), scores.type.dtype)
    return c.b.add(c.b.matmul(first, gain), base)


def _probabilities(c: Call, scores: Value, classes: int) -> Any:
    """Class probabilities p of pairs r[i, j]: minimise sum over i != j of (r[j, i] p[i] - r[i, j] p[j])^2, sum(p) = 1.

    (Wu, Lin and Weng, 2004.) Solved exactly, by the inverse of the matrix with the constraint; ONNX Runtime iterates.
    """
    b, dtype, pairs = c.b, scores.type.dtype, _pair_list(classes)
    p_a, p_b = (_numbers(c, n) for n in ("prob_a", "prob_b"))
    if p_a.size != len(pairs) or p_b.size != len(pairs):
        raise ModelError(
            f"attributes prob_a and prob_b need {count(len(pairs), 'number')}, got {p_a.size} and {p_b.size}"
        )
    r = b.sigmoid(b.neg(b.add(b.mul(scores, c.const(p_a, dtype)), c.const(p_b, dtype))))
    r = b.clip(r, low=LEAST, high=1 - LEAST)
    if classes == 2:
        return b.concat(r, b.sub(c.const(1.0, dtype), r), axis=1)
    n = classes
    # q[i, i] = sum of r[j, i]^2, q[i, j] = -r[j, i] r[i, j]; r[j, i] = 1 - r[i, j]
    other = b.sub(c.const(1.0, dtype), r)
    diagonal = np.zeros((2, len(pairs), n * n), np.float32)
    cross = np.zeros((len(pairs), n * n), np.float32)
    for p, (i, j) in enumerate(pairs):
        diagonal[0, p, j * n + j], diagonal[1, p, i * n + i] = 1, 1
        cross[p, i * n + j] = cross[p, j * n + i] = -1
    flat = b.matmul(b.mul(r, r), c.const(diagonal[0], dtype))
    flat = b.add(flat, b.matmul(b.mul(other, other), c.const(diagonal[1], dtype)))
    flat = b.add(flat, b.matmul(b.mul(r, other), c.const(cross, dtype)))
    rows = scores.type.shape[0]
    q = b.pad(b.reshape(flat, shape=(rows, n, n)), pads=(0, 0, 0, 0, 1, 1))
    edge = np.zeros((n + 1, n + 1), np.float32)
    edge[n, :n] = edge[:n, n] = 1
    solved = b.inverse(b.add(q, c.const(edge, dtype)))
    return b.reshape(b.slice(solved, starts=(0, 0, n), steps=(1, 1, 1), shape=(rows, n, 1)), shape=(rows, n))


def _finished(c: Call, votes: Value, scores: Value, labels: Any, transform: str, probable: bool) -> Any:
    """The label of most votes, and the scores; two classes with one score between them get one each."""
    if number(votes.type.shape[1], "the number of classes") == 1:
        index, y = one_score(c, scores, 2, transform)
        return labelled(c, index, labels), c.cast(y, f32)
    index = c.b.argmax(votes, axis=1, keepdims=False)
    if scores.type.shape[1] != 1:
        return labelled(c, c.cast(index, i64), labels), c.cast(transformed(c, scores, transform), f32)
    both = c.b.concat(c.b.neg(scores), scores, axis=1)
    return labelled(c, index, labels), c.cast(transformed(c, both, transform), f32)


SVM: dict[str, Converter] = {"SVMClassifier": classifier, "SVMRegressor": regressor}
