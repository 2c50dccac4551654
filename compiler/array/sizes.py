"""Sizes that a trace does not know: what `x.shape` holds for the names in a Spec.

A Size computes like an integer, and gives an integer where the result is one: `(n + 2) - n` is 2. What Python would
decide by it, a comparison or a loop, has to hold for all sizes that the name allows (1 and more); `n == 4` is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np

from dnnc.ir.bounds import bounds
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, const, op, unwrap

Dim = Union[int, "Size"]
ADVICE = "make it a number in the Spec, or use functions of arrays (dnnc.cond, dnnc.array.where) for what depends on it"


def seen(d: Any) -> Any:
    """A dim of a type as users see it."""
    return Size(d) if isinstance(d, Expr) else d


def plain(d: Any) -> Any:
    """A dim as types hold it; a whole number of any kind is one. TypeError where it is none."""
    return d.dim if isinstance(d, Size) else d.__index__()


def size(d: Any) -> Any:
    """A size that a user gave: an integer or a Size. TypeError where it is neither."""
    return d if isinstance(d, Size) else d.__index__()


def is_size(x: Any) -> bool:
    """Is it a whole number, known or not?"""
    return isinstance(x, (Size, int, np.integer)) and not isinstance(x, bool)


def symbolic(*dims: Any) -> bool:
    """Is any of these a size that is not known?"""
    return any(isinstance(d, Size) for d in dims)


def difference(a: Any, b: Any) -> Any:
    """a - b, as an integer or an expression."""
    return unwrap(const(plain(a)) - const(plain(b)))


def same(a: Any, b: Any) -> bool:
    """Are two sizes known to be equal?"""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or (difference(a, b) == 0 if symbolic(a, b) else bool(a == b))


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Are two shapes known to be equal?"""
    return len(a) == len(b) and all(map(same, a, b))


def differ(a: Any, b: Any) -> bool:
    """Are two sizes known to differ?"""
    if type(a) is int and type(b) is int:
        return a != b
    lo, hi = bounds(difference(a, b))
    return (lo is not None and lo > 0) or (hi is not None and hi < 0)


def common(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...] | None:
    """Return the broadcast of shapes; None where that is not known: an unknown size is not stretched."""
    rank = max(map(len, shapes), default=0)
    out: list[Any] = [1] * rank
    for s in shapes:
        for k, d in enumerate(s, rank - len(s)):
            if same(d, 1) or same(out[k], d):
                continue
            if not same(out[k], 1):
                return None
            out[k] = d
    return tuple(out)


def _arithmetic(name: str, turned: bool = False) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        if not is_size(other):
            return NotImplemented
        a, b = (other, self) if turned else (self, other)
        if name in ("//", "%") and (bounds(plain(b))[0] or 0) < 1:
            raise InputError(f"{a} {name} {b}: the divisor of a size that is not known must be positive; {ADVICE}")
        return seen(unwrap(op(name, const(plain(a)), const(plain(b)))))

    return method


def _order(
    name: str, holds: Callable[[int], bool], fails: Callable[[int], bool], low: bool
) -> Callable[[Size, Any], Any]:
    """Decide `a name b` by the bounds of a - b: true if the worse bound satisfies it, false if neither does."""

    def method(self: Size, other: Any) -> Any:
        if not is_size(other):
            return NotImplemented
        ends = bounds(difference(self, other))
        first, last = ends if low else ends[::-1]
        if first is not None and holds(first):
            return True
        if last is not None and fails(last):
            return False
        raise unknown(f"{self} {name} {other}")

    return method


def unknown(what: str) -> InputError:
    return InputError(f"{what} is not known while a function is traced for all sizes; {ADVICE}")


class Size:
    """An integer that is not known. `dim` is the expression that types hold."""

    __slots__ = ("dim",)

    def __init__(self, dim: Expr) -> None:
        self.dim = dim

    __add__ = __radd__ = _arithmetic("+")
    __mul__ = __rmul__ = _arithmetic("*")
    __sub__, __rsub__ = _arithmetic("-"), _arithmetic("-", True)
    __floordiv__, __rfloordiv__ = _arithmetic("//"), _arithmetic("//", True)
    __mod__, __rmod__ = _arithmetic("%"), _arithmetic("%", True)
    __gt__ = _order(">", lambda d: d > 0, lambda d: d <= 0, True)
    __ge__ = _order(">=", lambda d: d >= 0, lambda d: d < 0, True)
    __lt__ = _order("<", lambda d: d < 0, lambda d: d >= 0, False)
    __le__ = _order("<=", lambda d: d <= 0, lambda d: d > 0, False)

    def __neg__(self) -> Any:
        return 0 - self

    def __pos__(self) -> Size:
        return self

    def __eq__(self, other: object) -> bool:
        if not is_size(other):
            return NotImplemented
        if same(self, other):
            return True
        if differ(self, other):
            return False
        raise unknown(f"{self} == {other}")

    def __hash__(self) -> int:
        return hash(self.dim)

    def __bool__(self) -> bool:
        return self != 0

    def __truediv__(self, other: Any) -> Any:
        if is_size(other) or isinstance(other, float):
            raise InputError(f"{self} / {other} is no size; divide by //, or divide an array by it")
        return NotImplemented

    __rtruediv__ = __truediv__

    def __index__(self) -> int:
        raise unknown(f"the number {self}")

    def __int__(self) -> int:
        raise unknown(f"the number {self}")

    def __float__(self) -> float:
        raise unknown(f"the number {self}")

    def __repr__(self) -> str:
        return str(self.dim)
