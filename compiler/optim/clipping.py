"""Gradient clipping, in place and as a function of a list of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

from dnnc.array.core import Array
from dnnc.array.creation import zeros
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import clip, maximum, minimum, sqrt
from dnnc.array.statistical import max as largest
from dnnc.array.statistical import sum as total
from dnnc.ir.errors import InputError
from dnnc.optim.rounding import NARROW, WIDE

EPS = 1e-6  # what PyTorch adds to the norm


def norm_of(gradients: Sequence[Array], norm_type: float = 2.0) -> Array:
    """The norm of all elements together. Those of half precision are summed in float32."""
    wide = [g.astype(WIDE) if g.dtype.name in NARROW else g for g in gradients]
    if not wide:
        return zeros(())
    if norm_type == math.inf:
        return reduce(maximum, [largest(absolute(g)) for g in wide])
    if norm_type == 2:
        return sqrt(reduce(add, [total(g * g) for g in wide]))
    return reduce(add, [total(absolute(g) ** norm_type) for g in wide]) ** (1 / norm_type)


def clipped_by_norm(gradients: Sequence[Array], max_norm: Any, norm: Array) -> list[Array]:
    """Gradients whose norm is `max_norm` at most."""
    factor = minimum(max_norm / (norm + EPS), 1.0)
    return [g * factor.astype(g.dtype) for g in gradients]


def clip_grad_norm_(
    parameters: Array | Iterable[Array], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Array:
    """Scale the gradients of parameters so that the norm of all of them together is `max_norm` at most.

    Args:
        parameters: arrays; those without a gradient are left out.
        max_norm: the largest norm.
        norm_type: the order of the norm; `math.inf` for the largest element.
        error_if_nonfinite: raise InputError where the norm is infinite or NaN.

    Returns:
        The norm before.
    """
    params = _list(parameters)
    norm = get_total_norm([p.grad for p in params if p.grad is not None], norm_type, error_if_nonfinite)
    clip_grads_with_norm_(params, max_norm, norm)
    return norm


def get_total_norm(tensors: Array | Iterable[Array], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Array:
    """The norm of the elements of all arrays together; see `clip_grad_norm_` for the arguments."""
    norm = norm_of(_list(tensors), norm_type)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise InputError(f"clip_grad_norm_: the norm of the gradients is {float(norm)}, so they cannot be clipped")
    return norm


def clip_grads_with_norm_(parameters: Array | Iterable[Array], max_norm: float, total_norm: Array) -> None:
    """Scale the gradients of parameters, whose norm is `total_norm`, so that it is `max_norm` at most."""
    params = [p for p in _list(parameters) if p.grad is not None]
    gradients = [p.grad for p in params if p.grad is not None]
    for p, g in zip(params, clipped_by_norm(gradients, max_norm, total_norm)):
        p.grad = g


def clip_grad_value_(parameters: Array | Iterable[Array], clip_value: float) -> None:
    """Bring all elements of the gradients of parameters to between `-clip_value` and `clip_value`."""
    if not clip_value >= 0:
        raise InputError(f"clip_grad_value_: clip_value={clip_value!r}, expected no negative number")
    for p in _list(parameters):
        if p.grad is not None:
            p.grad = clip(p.grad, -clip_value, clip_value)


def _list(parameters: Array | Iterable[Array]) -> list[Array]:
    return [parameters] if isinstance(parameters, Array) else list(parameters)
