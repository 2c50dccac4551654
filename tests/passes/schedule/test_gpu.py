"""GPU primitives on texts: blocks and threads, streams of chunks, tiles through shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.gpu import share_rows, sink, solo, spread, stream, wrap
from dnnc.passes.schedule.loops import annotate, split
from dnnc.passes.schedule.shared_tiles import transpose_tiles
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule, same_results

ADD = """\
def add(x: f32[100], y: f32[100]):
    for i in range(100):
        y[i] = x[i] + 1.0
"""
TRANSPOSE = """\
def tr(x: f32[40, 50], z: f32[50], y: f32[50, 40]):
    for i in range(50):
        for j in range(40):
            y[i, j] = x[j, i] + z[i]
"""
SUMS = """\
def f(x: f32[3, 4], y: f32[3, 4]):
    for i in range(3):
        for j in range(4):
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(4):
                acc[0] = acc[0] + x[i, r]
            y[i, j] = x[i, j] * acc[0]
"""


def chunks(s: Schedule, tail: str = "exact") -> Schedule:
    return s.apply(split, "i", 4, ("c", "v"), tail=tail).apply(annotate, "unroll", "v")


def test_spread() -> None:
    after = """\
def add(x: f32[100], y: f32[100]):
    for b in block.x(4):
        for t in thread.x(32):
            if 32*b + t < 100:
                y[32*b + t] = x[32*b + t] + 1.0
"""
    check_schedule(ADD, lambda s: s.apply(spread, "i", 32), after)


def test_solo_and_wrap() -> None:
    after = """\
def add(x: f32[100], y: f32[100]):
    for b in block.x(1):
        for t in thread.x(1):
            for p in range(1):
                for i in range(100):
                    y[i] = x[i] + 1.0
"""
    check_schedule(ADD, lambda s: s.apply(wrap, "p").apply(solo), after)


def test_stream() -> None:
    after = """\
def add(x: f32[100], y: f32[100]):
    for b in block.x(2):
        for t in thread.x(8):
            x_w: f32[2, 4] @ register
            for q in unroll(2):
                if 16*b + 8*q + t < 25:
                    x_w[q, 0:+4] = x[64*b + 32*q + 4*t:+4]
            for q_1 in unroll(2):
                if 16*b + 8*q_1 + t < 25:
                    y_w: f32[4] @ register
                    for v in unroll(4):
                        y_w[v] = x_w[q_1, v] + 1.0
                    y[64*b + 32*q_1 + 4*t:+4] = y_w[0:+4]
"""
    check_schedule(ADD, lambda s: chunks(s).apply(stream, "c", 8, 2), after)


def test_a_stream_that_ends_within_a_chunk() -> None:
    after = """\
def add(x: f32[102], y: f32[102]):
    for b in block.x(2):
        for t in thread.x(16):
            x_w: f32[1, 4] @ register
            if 16*b + t < 26:
                if 64*b + 4*t + 3 < 102:
                    x_w[0, 0:+4] = x[64*b + 4*t:+4]
            if 16*b + t < 26:
                if 64*b + 4*t + 3 < 102:
                    y_w: f32[4] @ register
                    for v in unroll(4):
                        y_w[v] = x_w[0, v] + 1.0
                    y[64*b + 4*t:+4] = y_w[0:+4]
                else:
                    for v in unroll(4):
                        if 64*b + 4*t + v < 102:
                            y[64*b + 4*t + v] = x[64*b + 4*t + v] + 1.0
"""
    check_schedule(ADD.replace("100", "102"), lambda s: chunks(s, "guard").apply(stream, "c", 16, 1), after)


def test_transpose_tiles() -> None:
    after = """\
def tr(x: f32[40, 50], z: f32[50], y: f32[50, 40]):
    for b in block.x(4):
        x_t: f32[32, 33] @ shared
        for t in thread.x(256):
            for q in unroll(4):
                if t % 32 + 32*(b // 2) < 50:
                    if 32*(b % 2) + t // 32 + 8*q < 40:
                        x_t[t // 32 + 8*q, t % 32] = x[32*(b % 2) + t // 32 + 8*q, t % 32 + 32*(b // 2)]
            barrier()
            for q_1 in unroll(4):
                if 32*(b // 2) + t // 32 + 8*q_1 < 50:
                    if 32*(b % 2) + t % 32 < 40:
                        y[32*(b // 2) + t // 32 + 8*q_1, 32*(b % 2) + t % 32] = x_t[t % 32, t // 32 + 8*q_1] \
+ z[32*(b // 2) + t // 32 + 8*q_1]
"""
    check_schedule(TRANSPOSE, lambda s: s.apply(transpose_tiles, "i", "j"), after)


def test_small_types_move_in_words() -> None:
    """Two halves at a time in tiles of 64, four bytes in tiles of 128; one if rows are no whole words."""
    for dtype, n, tile in (("f16", 64, "f16[64, 66]"), ("i8", 64, "i8[128, 132]"), ("f16", 65, "f16[32, 34]")):
        old = parse_kernel(
            f"def tr(x: {dtype}[36, {n}], y: {dtype}[{n}, 36]):\n    for i in range({n}):\n        for j in "
            "range(36):\n            y[i, j] = x[j, i]\n"
        )
        new = verify_kernel(Schedule(old).apply(transpose_tiles, "i", "j").done())
        assert f"x_t: {tile} @ shared" in show_kernel(new)
        same_results(old, new)


def test_sink() -> None:
    after = """\
def f(x: f32[3, 4], y: f32[3, 4]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(4):
            acc[0] = acc[0] + x[i, r]
        for j in range(4):
            y[i, j] = x[i, j] * acc[0]
"""
    check_schedule(SUMS, lambda s: s.apply(sink, "j"), after)


def test_share_rows() -> None:
    before = """\
def f(x: f32[9], y: f32[9]):
    row: f32[9] @ local
    for i in range(9):
        row[i] = x[i]
    for j in range(9):
        y[j] = row[8 - j]
"""
    after = """\
def f(x: f32[9], y: f32[9]):
    for b in block.x(1):
        for t in thread.x(1):
            row: f32[9] @ shared
            for i in range(9):
                row[i] = x[i]
            for j in range(9):
                y[j] = row[-j + 8]
"""
    check_schedule(before, lambda s: s.apply(share_rows).apply(solo), after)


@pytest.mark.parametrize(
    "text,step,message",
    [
        (ADD.replace("y[i] =", "y[0] ="), lambda s: s.apply(spread, "i", 32), "every iteration writes y"),
        (ADD.replace("x[i]", "y[99 - i]"), lambda s: s.apply(spread, "i", 32), "may read the same elements"),
        (
            "def f(N: dim, y: f32[N]):\n    for i in range(N):\n        y[i] = 1.0\n",
            lambda s: s.apply(spread, "i", 32),
            "constant number",
        ),
        (SUMS, lambda s: s.apply(sink, "i"), "depends on i"),
        (TRANSPOSE, lambda s: s.apply(transpose_tiles, "j", "i"), "no load runs along j"),
        (
            TRANSPOSE.replace("z[i]", "x[0, i + j - j]").replace("x[j, i]", "x[j // 2, i]"),
            lambda s: s.apply(transpose_tiles, "i", "k"),
            "not loops",
        ),
    ],
)
def test_refusals(text: str, step: Callable[[Schedule], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        step(Schedule(parse_kernel(text)))
