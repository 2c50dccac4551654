"""Python's operators on arrays. Those of two arrays of one type, or of one and a number, take the shortest way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.array.methods import function as _function
from dnnc.array.sizes import Size
from dnnc.ir.errors import InputError

if TYPE_CHECKING:
    from dnnc.array.core import Array

    Binary = Callable[[Any, Any], Array]

NUMBERS = (bool, int, float, complex)
OPERANDS = (*NUMBERS, np.ndarray, np.generic, Size)  # what stands beside an array


@cache
def elementwise() -> Any:
    return import_module("dnnc.array.elementwise")


@cache
def _unchecked(name: str) -> Any:
    """A function of the namespace for arrays alone, about which Python raises nothing."""
    return _function(name).__wrapped__


QUICK = {  # operators whose op needs no promotion between two arrays of one type, with the kinds of numbers
    "add": ("add", "iuf"), "subtract": ("sub", "iuf"), "multiply": ("mul", "iuf"), "divide": ("div", "f"),
}  # fmt: skip


def _binary(name: str, reverse: bool) -> Binary:
    op, kinds = QUICK.get(name, ("", ""))

    def method(self: Any, other: Any, /) -> Any:
        if isinstance(other, Operators):
            function = _unchecked(name)
            return function(other, self) if reverse else function(self, other)
        if not isinstance(other, OPERANDS):
            return NotImplemented
        made = elementwise().quick(op, *((other, self) if reverse else (self, other)), kinds) if op else None
        if made is not None:
            return made
        return _function(name)(other, self) if reverse else _function(name)(self, other)

    return method


def _inplace(name: str) -> Binary:
    op, kinds = QUICK.get(name, ("", ""))

    def method(self: Any, other: Any, /) -> Any:
        made = elementwise().quick(op, self, other, kinds) if op else None
        if made is not None and made._parts[0].type == self._parts[0].type:
            self._written(made._parts)
            return self
        if not isinstance(other, Operators) and not isinstance(other, OPERANDS):
            return NotImplemented
        made = _function(name)(self, elementwise().as_operand(other))
        if made.shape != self.shape:
            raise InputError(f"{name} in place: the result of shape {made.shape} does not fit into {self.shape}")
        self._written(made.astype(self._dtype, copy=False)._parts)
        return self

    return method


def _divmod(x1: Any, x2: Any) -> Any:
    if not all(isinstance(x, (Operators, *OPERANDS)) for x in (x1, x2)):
        return NotImplemented
    return _function("divmod")(x1, x2)


def _operator(name: str) -> tuple[Binary, Binary, Binary]:
    """x + y, y + x, x += y"""
    return _binary(name, False), _binary(name, True), _inplace(name)


def _unary(name: str) -> Callable[[Any], Array]:
    return lambda self: _function(name)(self)


class Operators:
    """What `Array` inherits."""

    __slots__ = ()

    __add__, __radd__, __iadd__ = _operator("add")
    __sub__, __rsub__, __isub__ = _operator("subtract")
    __mul__, __rmul__, __imul__ = _operator("multiply")
    __truediv__, __rtruediv__, __itruediv__ = _operator("divide")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operator("floor_divide")
    __mod__, __rmod__, __imod__ = _operator("remainder")
    __divmod__ = lambda self, other: _divmod(self, other)  # noqa: E731
    __rdivmod__ = lambda self, other: _divmod(other, self)  # noqa: E731
    __pow__, __rpow__, __ipow__ = _operator("pow")
    __and__, __rand__, __iand__ = _operator("bitwise_and")
    __or__, __ror__, __ior__ = _operator("bitwise_or")
    __xor__, __rxor__, __ixor__ = _operator("bitwise_xor")
    __lshift__, __rlshift__, __ilshift__ = _operator("bitwise_left_shift")
    __rshift__, __rrshift__, __irshift__ = _operator("bitwise_right_shift")
    __matmul__, __rmatmul__, __imatmul__ = _operator("matmul")
    __eq__, __ne__ = _binary("equal", False), _binary("not_equal", False)  # type: ignore[assignment]
    __lt__, __le__, __gt__, __ge__ = (_binary(n, False) for n in ("less", "less_equal", "greater", "greater_equal"))
    __neg__, __pos__, __abs__, __invert__ = map(_unary, ("negative", "positive", "abs", "bitwise_invert"))
