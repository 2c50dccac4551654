"""Functions of the bits of integers and bools: logical operations and shifts."""

from __future__ import annotations

from collections.abc import Callable

from dnnc.array.core import Array, array_of
from dnnc.array.elementwise import Operand, const, one, operands, real_op
from dnnc.array.lazy import apply


def _bitwise(name: str) -> Callable[[Operand, Operand], Array]:
    def function(x1: Operand, x2: Operand, /) -> Array:
        a, b = operands(f"bitwise_{name}", x1, x2, kinds="biu")
        return real_op(("logical_" if a.dtype.kind == "b" else "bitwise_") + name, a, b)

    function.__name__ = function.__qualname__ = f"bitwise_{name}"
    function.__doc__ = f"{name} of the bits of each pair of elements."
    return function


bitwise_and, bitwise_or, bitwise_xor = map(_bitwise, ("and", "or", "xor"))


def bitwise_invert(x: Operand, /) -> Array:
    """Bitwise complement of each integer; logical "not" of bools."""
    (a,) = operands("bitwise_invert", x, kinds="biu")
    return real_op("logical_not" if a.dtype.kind == "b" else "bitwise_not", a)


def bitwise_left_shift(x1: Operand, x2: Operand, /) -> Array:
    """Integers x1 shifted left by x2 bits."""
    return _shifted("shift_left", *operands("bitwise_left_shift", x1, x2, kinds="iu"))


def bitwise_right_shift(x1: Operand, x2: Operand, /) -> Array:
    """Integers x1 shifted right by x2 bits; the sign is kept."""
    return _shifted("shift_right", *operands("bitwise_right_shift", x1, x2, kinds="iu"))


def _shifted(op: str, a: Array, b: Array) -> Array:
    """Shifts by the width and more leave zeros, or copies of the sign."""
    p, q = one(a), one(b)
    last = const(q, p.type.dtype.bits - 1)
    too_far = apply("greater", q, last)
    made = apply(op, p, apply("min", q, last))
    if op == "shift_right" and a.dtype.kind == "i":
        return array_of(made)
    return array_of(apply("where", too_far, const(p, 0), made))
