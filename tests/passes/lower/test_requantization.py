"""Steps of quantized values stay floats: the expression before and after, and where it must stay."""

from __future__ import annotations

import pytest

from dnnc.ir.expr import Op
from dnnc.ir.loops.stmt import Store
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.lower.requantization import clip_range, steps

TEXT = """\
def k(x: f32[16], y: f32[16]):
    y[0:+16] = cast_f32(cast_i32(cast_u8(cast_i32(rint(fmin({high}, fmax({low}, x[0:+16])))){more})){less})
"""


def expression(low: str, high: str, more: str, less: str) -> Op:
    text = TEXT.format(low=low, high=high, more=more, less=less)
    (s,) = parse_kernel(text).entry.body
    assert isinstance(s, Store) and isinstance(s.value, Op)
    return s.value


@pytest.mark.parametrize("zero", [0, 3, 255])
def test_steps_stay_floats(zero: int) -> None:
    moved = (f" + i32({zero})", f" - i32({zero})") if zero else ("", "")
    e = expression(f"{-zero}.0", f"{255 - zero}.0", *moved)
    found = steps(e)
    assert isinstance(found, Op) and found.name == "rint" and clip_range(found.args[0]) == (-zero, 255 - zero)


@pytest.mark.parametrize(
    "low,high,more,less",
    [
        ("-4.0", "252.0", " + i32(3)", " - i32(3)"),  # a byte wraps
        ("-3.0", "252.0", " + i32(3)", " - i32(4)"),
        ("-3.0", "253.0", " + i32(3)", " - i32(3)"),
    ],
)
def test_what_a_byte_changes_goes_through_it(low: str, high: str, more: str, less: str) -> None:
    e = expression(low, high, more, less)
    assert steps(e) is e
