"""Sums factored over the lanes of a vector: text before and after, the same numbers, and what is refused."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.rfactor import rfactor, round_up
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

DOT = """\
def k(x: f32[3, 20], w: f32[3, 20], y: f32[1]):
    for b in range(2):
        for t in range(3):
            for l in range(16):
                if 16*b + l < 20:
                    y[0] = fma(x[t, 16*b + l], w[t, 16*b + l], y[0])
"""


def test_a_nest_of_sums() -> None:
    check_schedule(
        DOT,
        lambda s: s.apply(rfactor, "b", "l"),
        """\
def k(x: f32[3, 20], w: f32[3, 20], y: f32[1]):
    y_l: f32[16] @ register
    y_l[0:+16] = 0.0
    for b in range(2):
        for t in range(3):
            y_l[0:+16] = fma(x[t, 16*b:+16:-16*b + 20], w[t, 16*b:+16:-16*b + 20], y_l[0:+16])
    y[0] = y[0] + hsum(y_l[0:+16])
""",
    )


def test_a_sum_of_integers() -> None:
    text = DOT.replace("f32", "i32").replace(
        "fma(x[t, 16*b + l], w[t, 16*b + l], y[0])", "y[0] + x[t, 16*b + l] * w[t, 16*b + l]"
    )
    check_schedule(
        text,
        lambda s: s.apply(rfactor, "b", "l"),
        """\
def k(x: i32[3, 20], w: i32[3, 20], y: i32[1]):
    y_l: i32[16] @ register
    y_l[0:+16] = i32(0)
    for b in range(2):
        for t in range(3):
            y_l[0:+16] = y_l[0:+16] + x[t, 16*b:+16:-16*b + 20] * w[t, 16*b:+16:-16*b + 20]
    y[0] = y[0] + hsum(y_l[0:+16])
""",
    )


def test_what_is_no_sum_of_products_is_refused() -> None:
    s = Schedule(parse_kernel(DOT.replace("fma(x[t, 16*b + l], w[t, 16*b + l], y[0])", "max(y[0], x[t, 16*b + l])")))
    with pytest.raises(ScheduleError, match="sum of products"):
        s.apply(rfactor, "b", "l")


def test_rows_whose_ends_hold_zeros() -> None:
    s = Schedule(
        parse_kernel(
            "def k(x: f32[2, 16], y: f32[1]):\n    for r in range(20):\n        y[0] = y[0] + x[r // 16, r % 16]\n"
        )
    )
    assert s.apply(round_up, "r", 16).extent("r") == 32
