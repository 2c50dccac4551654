"""Loop versioning: text before and after, the same numbers, and what is refused."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.loops import narrow
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.version import version
from support.schedules import check_schedule

WINDOW = """\
def k(x: f32[6], w: f32[5], y: f32[8]):
    for p in range(2):
        for t in range(5):
            for i in unroll(4):
                if 0 <= 4 * p + t + i - 5:
                    if 4 * p + t + i - 5 < 6:
                        y[4 * p + i] = fma(x[4 * p + t + i - 5], w[t], y[4 * p + i])
"""


def test_taps_of_a_window() -> None:
    check_schedule(
        WINDOW,
        lambda s: s.apply(version, "t", "i").apply(narrow),
        """\
def k(x: f32[6], w: f32[5], y: f32[8]):
    for p in range(2):
        for t in range(max(-4*p + 2, 0), 5):
            if (0 <= 4*p + t - 5) & (4*p + t - 2 < 6):
                for i in unroll(4):
                    y[i + 4*p] = fma(x[i + 4*p + t - 5], w[t], y[i + 4*p])
            else:
                for i_b in unroll(4):
                    if 0 <= i_b + 4*p + t - 5:
                        if i_b + 4*p + t - 5 < 6:
                            y[i_b + 4*p] = fma(x[i_b + 4*p + t - 5], w[t], y[i_b + 4*p])
""",
    )


def test_tile_that_repeats_the_last_pixel() -> None:
    """Pixels beyond the last are the last one again: the position is a minimum, which grows or stays."""
    pixel = "min(i + 3, 4)"
    check_schedule(
        WINDOW.replace("2):", "1):", 1)
        .replace("6", "4")
        .replace("4 * p + t + i - 5", f"2 * {pixel} + t - 8")
        .replace("4 * p + i", pixel),
        lambda s: s.apply(version, "t", "i").apply(narrow),
        """\
def k(x: f32[4], w: f32[5], y: f32[8]):
    for p in range(1):
        for t in range(5):
            if (0 <= t - 2) & (t < 4):
                for i in unroll(4):
                    y[min(i + 3, 4)] = fma(x[2*min(i + 3, 4) + t - 8], w[t], y[min(i + 3, 4)])
            else:
                for i_b in unroll(4):
                    if 0 <= 2*min(i_b + 3, 4) + t - 8:
                        if 2*min(i_b + 3, 4) + t - 8 < 4:
                            y[min(i_b + 3, 4)] = fma(x[2*min(i_b + 3, 4) + t - 8], w[t], y[min(i_b + 3, 4)])
""",
    )


def test_without_guards_nothing_changes() -> None:
    text = "def k(y: f32[3, 4]):\n    for t in range(3):\n        for i in range(4):\n            y[t, i] = 1.0\n"
    check_schedule(text, lambda s: s.apply(version, "t", "i"), text)


@pytest.mark.parametrize(
    ("guard", "message"),
    [("i * i < t + 3", "not monotonic"), ("i + j < 4", "depend on other loops"), ("i < 3", "not inside")],
)
def test_refused(guard: str, message: str) -> None:
    body = f"            for i in range(4):\n                if {guard}:\n                    y[t, j, i] = 1.0\n"
    s = Schedule(parse_kernel(f"def k(y: f32[3, 2, 4]):\n    for t in range(3):\n        for j in range(2):\n{body}"))
    with pytest.raises(ScheduleError, match=message):
        s.apply(version, *(("i", "t") if "inside" in message else ("t", "i")))
