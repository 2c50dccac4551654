"""Factors that the terms of a loop share: text before and after, the same numbers, and what is refused."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.factor import factor
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

SUM = """\
def k(x: f32[8], q: f32[8, 3], s: f32[2, 3], y: f32[3]):
    for b in range(2):
        for k in range(4):
            for j in range(3):
                y[j] = fma(x[4*b + k], q[4*b + k, j] * s[b, j], y[j])
"""


def test_the_scale_of_a_block_multiplies_its_sum() -> None:
    check_schedule(
        SUM,
        lambda s: s.apply(factor, "k"),
        """\
def k(x: f32[8], q: f32[8, 3], s: f32[2, 3], y: f32[3]):
    for b in range(2):
        y_k: f32[3]
        for j_k_0 in unroll(3):
            y_k[j_k_0] = 0.0
        for k in range(4):
            for j in range(3):
                y_k[j] = fma(x[4*b + k], q[4*b + k, j], y_k[j])
        for j_k_1 in unroll(3):
            y[j_k_1] = fma(y_k[j_k_1], s[b, j_k_1], y[j_k_1])
""",
    )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [("s[b, j]", "s[b, j] * x[k]", "share no factor"), ("s: f32[2, 3]", "s: f32[9, 3]", "")],
)
def test_what_changes_within_the_loop_stays_there(old: str, new: str, why: str) -> None:
    text = SUM.replace(old, new) if why else SUM.replace(old, new).replace("s[b, j]", "s[b + k, j]")
    with pytest.raises(ScheduleError, match=why or "share no factor"):
        Schedule(parse_kernel(text)).apply(factor, "k")


def test_a_loop_over_results_is_no_sum() -> None:
    with pytest.raises(ScheduleError, match="no loop of the sum"):
        Schedule(parse_kernel(SUM)).apply(factor, "j")
