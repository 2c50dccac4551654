"""Passes over a row become one where none waits for another, and nothing else changes places."""

from __future__ import annotations

import pytest

from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.passes.schedule.share_passes import share_passes
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

HEAD = "def k(x: f32[4, 32], z: f32[4, 32], y: f32[4, 2]):\n    for i in range(4):\n"
SUM = """\
        s: f32[1] @ register
        s[0] = 0.0
        for r in range(32):
            s[0] = s[0] + x[i, r]
"""


def test_sums_and_elements_in_one_pass() -> None:
    before = (
        HEAD
        + SUM
        + """\
        y[i, 0] = s[0]
        t: f32[1] @ register
        t[0] = 1.0
        for q in range(32):
            t[0] = max(t[0], x[i, q])
        y[i, 1] = t[0]
        for j in range(32):
            z[i, j] = z[i, j] * 2.0 + x[i, j]
"""
    )
    after = (
        HEAD
        + """\
        s: f32[1] @ register
        s[0] = 0.0
        t: f32[1] @ register
        t[0] = 1.0
        for r in range(32):
            s[0] = s[0] + x[i, r]
            t[0] = max(t[0], x[i, r])
            z[i, r] = z[i, r] * 2.0 + x[i, r]
        y[i, 0] = s[0]
        y[i, 1] = t[0]
"""
    )
    check_schedule(before, lambda s: s.apply(share_passes), after)


@pytest.mark.parametrize(
    "rest",
    [
        "        for j in range(32):\n            z[i, j] = x[i, j] - s[0]\n",  # waits for the sum
        "        for j in range(32):\n            x[i, j] = 0.0\n",  # overwrites what is summed
        "        for j in range(16):\n            z[i, j] = x[i, j]\n",  # another range
        "        z[i, 0] = s[0]\n        for j in range(32):\n            z[i, j] = z[i, j] + 1.0\n",  # reads the store
        "        t: f32[1] @ register\n        t[0] = s[0]\n"
        "        for j in range(32):\n            t[0] = t[0] + x[i, j]\n",  # begins with the sum
    ],
)
def test_what_waits_stays(rest: str) -> None:
    text = HEAD + SUM + rest
    assert show_kernel(Schedule(parse_kernel(text)).apply(share_passes).done()) == text
