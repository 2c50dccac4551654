"""Dropout. The mask is a pure function of a key (`dnnc.random`), so that gradients compute it again."""

from __future__ import annotations

from typing import Any

from dnnc import random
from dnnc.array.core import Array
from dnnc.array.elementwise import add, multiply, where
from dnnc.array.errors import ValueInputError
from dnnc.nn.functional.operands import array, rank_of, written


def _probability(what: str, p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueInputError(f"{what}: p={p!r}: expected a probability from 0 to 1")
    return float(p)


def _dropped(what: str, x: Array, p: float, shape: tuple[Any, ...], key: Any) -> Array:
    """x / (1 - p) where a mask of this shape holds, else 0."""
    p = _probability(what, p)
    if p in (0.0, 1.0):
        return x if p == 0 else multiply(x, 0.0)
    kept = random.bernoulli(random.next_key(key, what), 1 - p, shape)
    return where(kept, multiply(x, 1 / (1 - p)), 0.0)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, key: Any = None) -> Array:
    """Set elements to 0 with probability p, and divide the others by 1 - p (Srivastava et al., 2014).

    Args:
        training: False gives the input.
        key: of `dnnc.random`; by default the next one of the default generator, or of `rngs=` of `functional_call`.

    Raises:
        InputError: no probability, or no key in a function that is being traced.
    """
    x = array("dropout", "input", input)
    return written(x, _dropped("dropout", x, p, x.shape, key), inplace) if training else x


def _channels(what: str, input: Any, p: float, training: bool, inplace: bool, key: Any, *ranks: int) -> Array:
    x = array(what, "input", input)
    rank_of(what, x, *ranks)
    if not training:
        return x
    front = x.ndim - (ranks[-1] - 2)
    return written(x, _dropped(what, x, p, (*x.shape[:front], *(1,) * (x.ndim - front)), key), inplace)


def dropout1d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, key: Any = None) -> Array:
    """`dropout` of whole channels of [N, C, L] or [C, L]."""
    return _channels("dropout1d", input, p, training, inplace, key, 2, 3)


def dropout2d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, key: Any = None) -> Array:
    """`dropout` of whole channels of [N, C, H, W] or [C, H, W]."""
    return _channels("dropout2d", input, p, training, inplace, key, 3, 4)


def dropout3d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, key: Any = None) -> Array:
    """`dropout` of whole channels of [N, C, D, H, W] or [C, D, H, W]."""
    return _channels("dropout3d", input, p, training, inplace, key, 4, 5)


def _alpha(what: str, x: Array, p: float, shape: tuple[Any, ...], key: Any) -> Array:
    """Elements become the lower end of `selu`, and all are scaled so that mean 0 and variance 1 stay."""
    p = _probability(what, p)
    if p in (0.0, 1.0):
        return x if p == 0 else multiply(x, 0.0)
    low = -1.7580993408473766
    scale = ((1 - p) * (1 + p * low * low)) ** -0.5
    kept = random.bernoulli(random.next_key(key, what), 1 - p, shape)
    return add(multiply(where(kept, x, low), scale), -scale * p * low)


def alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False, *, key: Any = None
) -> Array:
    """Dropout that keeps mean and variance of `selu`'s results (Klambauer et al., 2017)."""
    x = array("alpha_dropout", "input", input)
    return written(x, _alpha("alpha_dropout", x, p, x.shape, key), inplace) if training else x


def feature_alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False, *, key: Any = None
) -> Array:
    """`alpha_dropout` of whole channels of [N, C, ...]."""
    x = array("feature_alpha_dropout", "input", input)
    if not training:
        return x
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
    return written(x, _alpha("feature_alpha_dropout", x, p, shape, key), inplace)
