"""Connectionist temporal classification: the probability of a sequence of labels over all of its alignments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast, from_buffer
from dnnc.array.elementwise import add, divide, equal, exp, less, log, logical_or, maximum, negative, subtract, where
from dnnc.array.errors import ValueInputError
from dnnc.array.manipulation import broadcast_to, concat, expand_dims, reshape, sliced, squeeze, take_along_axis, wide
from dnnc.array.statistical import mean
from dnnc.frontends.trace.control import looped, pack
from dnnc.nn.functional.loss import reduced
from dnnc.nn.functional.operands import array, choice, counted, filled, rank_of

NEVER = -1e30  # log of a probability of 0: its sums and differences are numbers, as those of -inf are not


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Array:
    """Minus the log-probability of the targets (Graves et al., 2006), by its forward recursion.

    Args:
        log_probs: [T, N, C] or [T, C], of `log_softmax`.
        targets: labels [N, S], padded with anything, or those of all sequences one after the other; without `blank`.
        input_lengths, target_lengths: [N] integers, or one number without N.
        blank: the label that stands for none.
        reduction: "mean" divides each loss by its number of labels (at least 1) before.
        zero_infinity: 0 in place of infinity where the input is too short for its targets.

    The derivative by `log_probs` is that of the loss itself; PyTorch's adds a term that `log_softmax` cancels.
    """
    what = "ctc_loss"
    x = array(what, "log_probs", log_probs)
    rank_of(what, x, 2, 3, name="log_probs")
    choice(what, "reduction", reduction, "mean", "sum", "none")
    single = x.ndim == 2
    x = expand_dims(x, axis=1) if single else x
    steps, n, classes = x.shape
    if not 0 <= blank < classes:
        raise ValueInputError(f"{what}: blank={blank} is none of {classes} classes")
    lengths, counts = (
        _lengths(what, "input_lengths", input_lengths, n),
        _lengths(what, "target_lengths", target_lengths, n),
    )
    labels = _labels(what, targets, counts, n)
    loss = _forward(x, labels, lengths, counts, blank, steps)
    loss = where(less(1e29, loss), 0.0 if zero_infinity else math.inf, loss)
    if single:
        return reduced(what, squeeze(loss, 0), "sum")
    if reduction == "mean":
        return mean(divide(loss, cast(maximum(counts, 1), x.dtype)))
    return reduced(what, loss, reduction)


def _lengths(what: str, name: str, given: Any, n: Any) -> Array:
    """[N] int64."""
    listed = isinstance(given, (int, list, tuple))
    a = array(what, name, np.array(given, np.int64) if listed else given, "iu")
    a = reshape(a, (1,)) if not a.ndim else a
    if a.shape != (n,):
        raise ValueInputError(f"{what}: {name} must be [{n}], one number for each sequence, got shape {a.shape}")
    return array_of(wide(a))


def _labels(what: str, targets: Any, counts: Array, n: Any) -> Array:
    """[N, S] int64."""
    t = array(what, "targets", targets, "iu")
    t = reshape(t, (1, t.shape[0])) if t.ndim == 1 and n == 1 else t
    if t.ndim == 1:  # one sequence after the other: where each begins, its length says
        flat, each = t.numpy(), counts.numpy()
        if each.sum() > flat.size:
            raise ValueInputError(f"{what}: there are {flat.size} targets, and target_lengths add up to {each.sum()}")
        rows = np.zeros((n, max(int(each.max(initial=0)), 1)), np.int64)
        for k, part in enumerate(np.split(flat, np.cumsum(each))[:n]):
            rows[k, : len(part)] = part
        t = from_buffer(rows)
    if t.ndim != 2 or t.shape[0] != n:
        raise ValueInputError(f"{what}: targets must be [{n}, S] or of one axis, got shape {t.shape}")
    return array_of(wide(t))


def _forward(x: Array, labels: Array, lengths: Array, counts: Array, blank: int, steps: int) -> Array:
    """[N]: minus the log-probability, from the probabilities of all beginnings of an alignment."""
    n, s = labels.shape
    blanks = filled((n, s, 1), blank, "int64")
    pairs = reshape(concat([blanks, expand_dims(labels, axis=2)], axis=2), (n, 2 * s))
    path = concat([pairs, sliced(blanks, 1, 0, 1)[:, :, 0]], axis=1)  # blank, label, blank, ..., blank
    m = 2 * s + 1
    index = broadcast_to(expand_dims(path, axis=0), (steps, n, m))
    scores = take_along_axis(x, index, axis=2)
    beside = filled((n, 2), -1, "int64")
    before = sliced(concat([beside, path], axis=1), 1, 0, m)
    stays = logical_or(equal(path, blank), equal(path, before))  # between equal labels a blank must stand
    leap = cast(where(stays, NEVER, 0.0), x.dtype)
    first = cast(where(equal(counted(m), 0), 0.0, NEVER), x.dtype)
    start = broadcast_to(first, (n, m))
    edge = filled((n, 2), NEVER, x.dtype)

    def step(old: Array, row: Any, leap: Array, edge: Array, lengths: Array) -> tuple[Array, None]:
        emitted, t = row
        wider = concat([edge, old], axis=1)
        new = add(_either(old, sliced(wider, 1, 1, m), add(sliced(wider, 1, 0, m), leap)), emitted)
        return where(less(t, lengths), new, old), None

    rows = pack((scores, counted(steps)), "rows")
    last, _ = looped(step, pack(start, "state"), rows, steps, fixed=[leap, edge, expand_dims(lengths, axis=1)])
    ends = concat([edge, last], axis=1)  # two columns in front, for targets without labels
    at = expand_dims(add(counts * 2, 2), axis=1)
    blank_end, label_end = (squeeze(take_along_axis(ends, k, axis=1), 1) for k in (at, subtract(at, 1)))
    return negative(_either(blank_end, label_end))


def _either(*logs: Array) -> Array:
    """log(sum(exp(logs)))"""
    top = logs[0]
    for a in logs[1:]:
        top = maximum(top, a)
    total = exp(subtract(logs[0], top))
    for a in logs[1:]:
        total = add(total, exp(subtract(a, top)))
    return add(top, log(total))
