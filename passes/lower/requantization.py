"""Quantized values that a kernel dequantizes again while they are in a register: their steps stay floats.

    cast_f32(cast_i32(cast_u8(cast_i32(rint(c)) + z)) - z)   ->   rint(c)        c a clip to the range of u8, less z

The same number. Quantization clips NaN to the lower bound; of another clip NaN would become 0 by way of the integer. So
strict numerics keep it.
"""

from __future__ import annotations

from dnnc.ir.dtype import f32, i8, i32, u8
from dnnc.ir.expr import Const, Expr, Op
from dnnc.ir.loops.intrinsics import cast_target


def clip_range(e: Expr) -> tuple[float, float] | None:
    """The constants between which a chain of minima and maxima clips; None where one side has none. NaN may pass."""
    low: list[float] = []
    high: list[float] = []
    while isinstance(e, Op) and e.name in ("fmin", "fmax", "min", "max"):
        numbers = [a for a in e.args if isinstance(a, Const)]
        if len(numbers) != 1:
            return None
        (low if e.name.endswith("max") else high).append(float(numbers[0].value))
        e = next(a for a in e.args if a is not numbers[0])
    return (min(low), max(high)) if low and high else None


def steps(e: Op) -> Expr:
    """The rule above for a conversion to f32; the expression itself where it does not hold."""
    if e.name != "cast_f32" or e.args[0].dtype is not i32:
        return e
    wide, less = _with_constant(e.args[0])
    q = wide.args[0] if isinstance(wide, Op) and wide.name == "cast_i32" else None
    if not isinstance(q, Op) or q.dtype not in (u8, i8) or cast_target(q.name) is None or q.args[0].dtype is not i32:
        return e
    whole, more = _with_constant(q.args[0])
    near = whole.args[0] if isinstance(whole, Op) and whole.name == "cast_i32" else None
    if not isinstance(near, Op) or near.name != "rint" or near.dtype is not f32 or less != -more:
        return e
    found, (low, high) = clip_range(near.args[0]), q.dtype.range
    return near if found is not None and low - more <= found[0] and found[1] <= high - more else e


def _with_constant(e: Expr) -> tuple[Expr, int]:
    """`x + 3` as (x, 3)."""
    if isinstance(e, Op) and e.name in ("+", "-") and isinstance(e.args[1], Const):
        return e.args[0], int(e.args[1].value) * (1 if e.name == "+" else -1)
    return e, 0
