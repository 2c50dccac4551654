"""The primitive `stretches`: text before and after, equal results, and what it refuses."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.k_blocking import LIMIT, stretches
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

TILES = """\
def k(x: f32[6, 12], w: f32[12, 4], y: f32[6, 4]):
    for p in range(3):
        acc: f32[2, 4] @ register
        for m in unroll(2):
            acc[m, 0:+4] = 0.0
        for r in range(3):
            for q in range(4):
                for m_1 in unroll(2):
                    acc[m_1, 0:+4] = fma(x[2*p + m_1, 4*r + q], w[4*r + q, 0:+4], acc[m_1, 0:+4])
        for m_2 in unroll(2):
            y[2*p + m_2, 0:+4] = acc[m_2, 0:+4]
"""


def test_sums_of_all_tiles_wait_in_memory() -> None:
    check_schedule(
        TILES,
        lambda s: s.apply(stretches, "p", "r"),
        """\
def k(x: f32[6, 12], w: f32[12, 4], y: f32[6, 4]):
    acc_p: f32[3, 2, 4] @ local
    for r in range(3):
        for p in range(3):
            acc: f32[2, 4] @ register
            if r < 1:
                for m in unroll(2):
                    acc[m, 0:+4] = 0.0
            else:
                for pl0 in unroll(2):
                    acc[pl0, 0:+4] = acc_p[p, pl0, 0:+4]
            for q in range(4):
                for m_1 in unroll(2):
                    acc[m_1, 0:+4] = fma(x[m_1 + 2*p, q + 4*r], w[q + 4*r, 0:+4], acc[m_1, 0:+4])
            if r < 2:
                for ps0 in unroll(2):
                    acc_p[p, ps0, 0:+4] = acc[ps0, 0:+4]
            else:
                for m_2 in unroll(2):
                    y[m_2 + 2*p, 0:+4] = acc[m_2, 0:+4]
""",
    )


def test_stretches_that_are_added_up_apart() -> None:
    check_schedule(
        TILES,
        lambda s: s.apply(stretches, "p", "r", True),
        """\
def k(x: f32[6, 12], w: f32[12, 4], y: f32[6, 4]):
    acc_p: f32[3, 2, 4] @ local
    for r in range(3):
        for p in range(3):
            acc: f32[2, 4] @ register
            for m in unroll(2):
                acc[m, 0:+4] = 0.0
            for q in range(4):
                for m_1 in unroll(2):
                    acc[m_1, 0:+4] = fma(x[m_1 + 2*p, q + 4*r], w[q + 4*r, 0:+4], acc[m_1, 0:+4])
            if 0 < r:
                for pl0 in unroll(2):
                    acc[pl0, 0:+4] = acc[pl0, 0:+4] + acc_p[p, pl0, 0:+4]
            if r < 2:
                for ps0 in unroll(2):
                    acc_p[p, ps0, 0:+4] = acc[ps0, 0:+4]
            else:
                for m_2 in unroll(2):
                    y[m_2 + 2*p, 0:+4] = acc[m_2, 0:+4]
""",
    )


def test_stretches_apart_start_from_zero() -> None:
    s = Schedule(parse_kernel(TILES.replace("= 0.0", "= 1.0")))
    with pytest.raises(ScheduleError, match="does not start from 0"):
        s.apply(stretches, "p", "r", True)


REFUSED = {
    "no loop of a sum": (TILES.replace("for r in", "for s in").replace("*r", "*s"), "sums run along r"),
    "another tile": (
        TILES.replace("        for m in", "        more: f32[4] @ register\n        for m in"),
        "no loop over tiles",
    ),
    "single elements are set": (TILES.replace("acc[m, 0:+4] = 0.0", "acc[m, 0] = 0.0"), "whole vectors"),
    "more than the tile is set": (TILES.replace("acc[m, 0:+4] = 0.0", "y[2*p + m, 0:+4] = 0.0"), "whole vectors"),
    "the sum's length differs from tile to tile": (
        TILES.replace("range(3):\n            for q", "range(p, 3):\n            for q"),
        "no constant numbers",
    ),
    "a tile needs another one": (TILES.replace("y[2*p + m_2, 0:+4] =", "y[m_2, 0:+4] ="), "depend on each other"),
    "too much memory": (
        TILES.replace("range(3):\n        acc", f"range({LIMIT}):\n        acc").replace("6,", f"{2 * LIMIT},"),
        "the limit is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(ScheduleError, match=message):
        Schedule(parse_kernel(text)).apply(stretches, "p", "r")
