"""Sums of products of bytes by fours: text before and after, the same numbers, and what is refused."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.quads import quads
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

SUM = """\
def k(a: u8[3, 8], b: i8[2, 64], y: i32[3, 16]):
    for i in range(3):
        for r in range(2):
            for l in range(16):
                for q in range(4):
                    y[i, l] = y[i, l] + cast_i32(a[i, 4*r + q])*cast_i32(b[r, 4*l + q])
"""


def test_four_steps_are_one() -> None:
    check_schedule(
        SUM,
        lambda s: s.apply(quads, "l", "q"),
        """\
def k(a: u8[3, 8], b: i8[2, 64], y: i32[3, 16]):
    for i in range(3):
        for r in range(2):
            y[i, 0:+16] = dot4(y[i, 0:+16], a[i, 4*r:+4], b[r, 0:+64])
""",
    )


@pytest.mark.parametrize(
    "old,new",
    [
        ("b[r, 4*l + q]", "b[r, l + 16*q]"),  # the bytes of a lane are not side by side
        ("a[i, 4*r + q]", "a[i, 2*q]"),
        ("range(4)", "range(3)"),
        ("i8[2, 64]", "u8[2, 64]"),
        ("y[i, l] + ", "y[i, l] - "),
    ],
)
def test_what_is_no_sum_of_four_products_is_refused(old: str, new: str) -> None:
    s = Schedule(parse_kernel(SUM.replace(old, new)))
    with pytest.raises(ScheduleError):
        s.apply(quads, "l", "q")


@pytest.mark.parametrize("a,b", [("a[i, 0:+8]", "b[0, 0:+64]"), ("a[i, 0:+4]", "b[0, 0:+32]")])
def test_numbers_of_lanes_are_verified(a: str, b: str) -> None:
    text = f"""\
def k(a: u8[3, 8], b: i8[2, 64], y: i32[3, 16]):
    for i in range(3):
        y[i, 0:+16] = dot4(y[i, 0:+16], {a}, {b})
"""
    with pytest.raises(VerifyError, match="dot4"):
        verify_kernel(parse_kernel(text))


PAIRS = """\
def k(a: bf16[3, 8], b: bf16[4, 32], y: f32[3, 16]):
    for i in range(3):
        for r in range(4):
            for l in range(16):
                for q in range(2):
                    y[i, l] = fma(cast_f32(a[i, 2*r + q]), cast_f32(b[r, 2*l + q]), y[i, l])
"""


def test_two_steps_of_bfloat16_are_one() -> None:
    check_schedule(
        PAIRS,
        lambda s: s.apply(quads, "l", "q"),
        """\
def k(a: bf16[3, 8], b: bf16[4, 32], y: f32[3, 16]):
    for i in range(3):
        for r in range(4):
            y[i, 0:+16] = y[i, 0:+16] + dot2(a[i, 2*r:+2], b[r, 0:+32])
""",
    )


@pytest.mark.parametrize("old,new", [("bf16", "f16"), ("range(2)", "range(4)"), ("2*l + q", "l + 16*q")])
def test_what_is_no_sum_of_two_bfloat16_products_is_refused(old: str, new: str) -> None:
    s = Schedule(parse_kernel(PAIRS.replace(old, new)))
    with pytest.raises(ScheduleError):
        s.apply(quads, "l", "q")


@pytest.mark.parametrize("a,b", [("a[0, 0:+8]", "b[0, 0:+32]"), ("c[0:+2]", "b[0, 0:+32]")])
def test_operands_of_dot2_are_verified(a: str, b: str) -> None:
    text = f"""\
def k(a: bf16[3, 8], c: f32[8], b: bf16[4, 32], y: f32[16]):
    y[0:+16] = dot2({a}, {b})
"""
    with pytest.raises(VerifyError, match="dot2 takes two bf16"):
        verify_kernel(parse_kernel(text))
