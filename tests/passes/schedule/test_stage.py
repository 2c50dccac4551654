"""The primitive `stage`: text before and after, equal results, and what it refuses."""

from __future__ import annotations

import pytest

from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.stage import stage
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

ROWS = """\
def k(x: f16[6, 40], w: f32[40, 16], y: f32[6, 16]):
    for i in range(3):
        acc: f32[2, 16] @ register
        for m in range(2):
            acc[m, 0:+16] = 0.0
        for r in range(40):
            for m_1 in range(2):
                acc[m_1, 0:+16] = fma(cast_f32(x[2*i + m_1, r]), w[r, 0:+16], acc[m_1, 0:+16])
        for m_2 in range(2):
            y[2*i + m_2, 0:+16] = acc[m_2, 0:+16]
"""


def test_rows_are_widened_ahead_of_the_loop() -> None:
    check_schedule(
        ROWS,
        lambda s: s.apply(stage, "r", "x", f32, 16),
        """\
def k(x: f16[6, 40], w: f32[40, 16], y: f32[6, 16]):
    for i in range(3):
        acc: f32[2, 16] @ register
        for m in range(2):
            acc[m, 0:+16] = 0.0
        x_r: f32[2, 40] @ local
        for s0_r in range(2):
            for s1_r in range(3):
                x_r[s0_r, min(16*s1_r, 24):+16] = cast_f32(x[2*i + s0_r, min(16*s1_r, 24):+16])
        for r in range(40):
            for m_1 in range(2):
                acc[m_1, 0:+16] = fma(x_r[m_1, r], w[r, 0:+16], acc[m_1, 0:+16])
        for m_2 in range(2):
            y[2*i + m_2, 0:+16] = acc[m_2, 0:+16]
""",
    )


def test_a_short_row_is_read_up_to_its_end() -> None:
    check_schedule(
        """\
def k(x: bf16[4, 5], y: f32[4, 1]):
    for i in range(4):
        y[i, 0] = 0.0
        for r in range(5):
            y[i, 0] = y[i, 0] + cast_f32(x[i, r])
""",
        lambda s: s.apply(stage, "r", "x", f32, 8),
        """\
def k(x: bf16[4, 5], y: f32[4, 1]):
    for i in range(4):
        y[i, 0] = 0.0
        x_r: f32[1, 8] @ local
        x_r[0, 0:+8] = cast_f32(x[i, 0:+8:5])
        for r in range(5):
            y[i, 0] = y[i, 0] + x_r[0, r]
""",
    )


def test_padding_repeats_the_border_where_it_is_not_read() -> None:
    """Rows -1 and 4 are asked for by no tap; the copy holds something there."""
    check_schedule(
        """\
def k(x: f16[4, 16], y: f32[4, 16]):
    for i in range(4):
        acc: f32[16] @ register
        acc[0:+16] = 0.0
        for t in range(max(0, 1 - i), min(3, 5 - i)):
            for c in range(16):
                acc[c] = acc[c] + cast_f32(x[i + t - 1, c])
        y[i, 0:+16] = acc[0:+16]
""",
        lambda s: s.apply(stage, "t", "x", f32, 16),
        """\
def k(x: f16[4, 16], y: f32[4, 16]):
    for i in range(4):
        acc: f32[16] @ register
        acc[0:+16] = 0.0
        x_t: f32[3, 16] @ local
        for s0_t in range(3):
            x_t[s0_t, 0:+16] = cast_f32(x[max(0, min(i + s0_t - 1, 3)), 0:+16])
        for t in range(max(-i + 1, 0), min(-i + 5, 3)):
            for c in range(16):
                acc[c] = acc[c] + x_t[t, c]
        y[i, 0:+16] = acc[0:+16]
""",
    )


@pytest.mark.parametrize(
    ("text", "buf", "message"),
    [
        (ROWS, "w", "reads vectors of it"),
        (ROWS, "y", "does not read y"),
        (ROWS.replace("x[2*i + m_1, r]", "x[(i + r) % 6, r]"), "x", "bounds of .* are not known"),
        (
            ROWS.replace("x[2*i + m_1, r]", "x[2*i + m_1, r] + x[0, r]").replace(
                "cast_f32(x[2*i + m_1, r] + x[0, r])", "cast_f32(x[m_1, r]) * cast_f32(x[0, r])"
            ),
            "x",
            "at several places",
        ),
        (ROWS.replace("40", "40000"), "x", "would take 80000 elements, the limit is 65536"),
    ],
)
def test_refusals(text: str, buf: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(parse_kernel(text)).apply(stage, "r", buf, f32, 16)


def test_a_buffer_that_the_loop_writes() -> None:
    text = """\
def k(x: f32[8]):
    for r in range(7):
        x[r] = x[r + 1]
"""
    with pytest.raises(ScheduleError, match="r writes it"):
        Schedule(parse_kernel(text)).apply(stage, "r", "x", f32, 8)
    text = text.replace("x[r + 1]", "0.0").replace("x: f32[8]", "x: f32[8], z: f32[8]").replace("0.0", "z[6 - r]")
    with pytest.raises(ScheduleError, match="does not read x"):
        Schedule(parse_kernel(text)).apply(stage, "r", "x", f32, 8)
