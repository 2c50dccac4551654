"""Rows shared among teams of threads: their texts, equal results for every form of team, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.block_reduce import Team, teams
from dnnc.passes.schedule.loops import annotate, split
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule, same_results

SHIFTED = """\
def shifted(x: f32[6, 200], y: f32[6, 200]):
    for i in range(6):
        m: f32[1] @ register
        m[0] = f32(-inf)
        for a in range(200):
            m[0] = max(m[0], x[i, a])
        row: f32[200] @ local
        for k in range(200):
            row[k] = x[i, k] - m[0]
        s: f32[1] @ register
        s[0] = 0.0
        for c in range(200):
            s[0] = s[0] + row[c]
        for d in range(200):
            y[i, d] = row[d] * s[0]
"""
COLUMNS = """\
def columns(x: f32[100, 40], y: f32[40]):
    for j in range(40):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(100):
            acc[0] = acc[0] + x[r, j]
        y[j] = acc[0]
"""
FIRST = """\
def first(x: i32[7, 90], y: i64[7]):
    for i in range(7):
        m: i32[1] @ register
        m[0] = i32(-2147483648)
        for a in range(90):
            m[0] = max(m[0], x[i, a])
        at: i64[1] @ register
        at[0] = 9223372036854775807
        for c in range(90):
            if x[i, c] == m[0]:
                at[0] = min(at[0], c)
        y[i] = at[0]
"""


UPDATED = """\
def updated(x: f32[100, 40], m: f32[40], p: f32[40]):
    for j in range(40):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(100):
            acc[0] = acc[0] + x[r, j]
        p[j] = p[j] - (m[j] * 0.5 + acc[0])
        m[j] = m[j] * 0.5 + acc[0]
"""


def test_sums_of_columns_and_what_they_update_in_place() -> None:
    """One member of a team reads what is overwritten; threads past the last column recompute it, and read nothing."""
    old = parse_kernel(UPDATED)
    new = Schedule(old).apply(teams, "j", Team(8, 32, across=True)).done()
    same_results(old, verify_kernel(new))
    repeated = UPDATED.replace("acc[0] + x[r, j]", "acc[0] + x[r, j] * m[j]")
    with pytest.raises(ScheduleError, match=r"cannot compute a row twice|read by others"):
        Schedule(parse_kernel(repeated)).apply(teams, "j", Team(8, 32, across=True))


def test_a_warp_for_each_row() -> None:
    after = """\
def shifted(x: f32[6, 200], y: f32[6, 200]):
    for b in block.x(2):
        for t in thread.x(128):
            if t // 32 + 4*b < 6:
                m: f32[1] @ register
                m[0] = f32(-inf)
                x_w: f32[7, 1] @ register
                for q in unroll(7):
                    if t % 32 + 32*q < 200:
                        x_w[q, 0] = x[t // 32 + 4*b, t % 32 + 32*q]
                for q_1 in unroll(7):
                    if t % 32 + 32*q_1 < 200:
                        m[0] = max(m[0], x_w[q_1, 0])
                for o in unroll(5):
                    m[0] = max(m[0], shfl_xor(m[0], shl(1, o)))
                row: f32[7, 1] @ register
                for q_2 in unroll(7):
                    if t % 32 + 32*q_2 < 200:
                        row[q_2, 0] = x_w[q_2, 0] - m[0]
                s: f32[1] @ register
                s[0] = 0.0
                for q_3 in unroll(7):
                    if t % 32 + 32*q_3 < 200:
                        s[0] = s[0] + row[q_3, 0]
                for o_1 in unroll(5):
                    s[0] = s[0] + shfl_xor(s[0], shl(1, o_1))
                for q_4 in unroll(7):
                    if t % 32 + 32*q_4 < 200:
                        y[t // 32 + 4*b, t % 32 + 32*q_4] = row[q_4, 0] * s[0]
"""
    check_schedule(SHIFTED, lambda s: s.apply(teams, "i", Team(32, 4)), after)


def test_columns_meet_in_shared_memory() -> None:
    after = """\
def columns(x: f32[100, 40], y: f32[40]):
    for b in block.x(2):
        acc_part: f32[4, 32] @ shared
        for t in thread.x(128):
            acc: f32[1] @ register
            acc[0] = 0.0
            for g in range(2):
                x_w: f32[16, 1] @ register
                for q in unroll(16):
                    if t // 32 + 64*g + 4*q < 100:
                        x_w[q, 0] = x[t // 32 + 64*g + 4*q, min(t % 32 + 32*b, 39)]
                for q_1 in unroll(16):
                    if t // 32 + 64*g + 4*q_1 < 100:
                        acc[0] = acc[0] + x_w[q_1, 0]
            acc_part[t // 32, t % 32] = acc[0]
            barrier()
            acc[0] = acc_part[0, t % 32]
            for j in unroll(1, 4):
                acc[0] = acc[0] + acc_part[j, t % 32]
            if t // 32 == 0:
                if t % 32 + 32*b < 40:
                    y[min(t % 32 + 32*b, 39)] = acc[0]
"""
    check_schedule(COLUMNS, lambda s: s.apply(teams, "j", Team(4, 32, across=True)), after)


TEAMS = [Team(1, 32), Team(8, 16), Team(32, 4), Team(64), Team(256), Team(4, 32, across=True), Team(64, keep=0),
Team(32, 2, keep=0, ahead=8),
         Team(64, 8, across=True, near=4), Team(32, 16, across=True, near=2)]  # fmt: skip


@pytest.mark.family("choices")
@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize(
    "text,row", [(SHIFTED, "i"), (COLUMNS, "j"), (FIRST, "i"), (SHIFTED.replace("row[d]", "row[199 - d]"), "i")]
)
def test_every_team_computes_the_same(text: str, row: str, team: Team) -> None:
    old = parse_kernel(text)
    new = verify_kernel(Schedule(old).apply(teams, row, team).done())
    assert show_kernel(parse_kernel(show_kernel(new))) == show_kernel(new)
    same_results(old, new)


def test_members_in_a_warp_exchange_their_sums_first() -> None:
    text = show_kernel(Schedule(parse_kernel(COLUMNS)).apply(teams, "j", Team(16, 8, across=True, near=4)).done())
    assert "acc_part: f32[4, 8] @ shared" in text and text.count("barrier()") == 1
    assert "acc[0] = acc[0] + shfl_xor(acc[0], shl(8, o))" in text  # 8 and 16 threads away: the same column
    assert "if t // 8 % 4 == 0:\n                acc_part[t // 32, t % 8] = acc[0]" in text


def test_a_row_that_is_read_elsewhere_lies_in_shared_memory() -> None:
    text = show_kernel(
        Schedule(parse_kernel(SHIFTED.replace("row[d]", "row[199 - d]"))).apply(teams, "i", Team(64)).done()
    )
    assert "row: f32[1, 200] @ shared" in text and text.count("barrier()") == 3


def test_vectors_of_a_row() -> None:
    s = Schedule(parse_kernel(SHIFTED))
    for name in "akcd":
        s.apply(split, name, 4, (name + "o", name + "v")).apply(annotate, "unroll", name + "v")
    new = s.apply(teams, "i", Team(32, 2)).done()
    assert "row: f32[2, 4] @ register" in show_kernel(new) and "y_w[0:+4]" in show_kernel(new)
    same_results(parse_kernel(SHIFTED), new)


RUNNING = """\
def running(x: f32[4, 50], y: f32[4, 50]):
    for i in range(4):
        row: f32[50] @ local
        for k in range(50):
            row[k] = x[i, k]
        for c in range(49):
            row[c + 1] = row[c] + row[c + 1]
        for d in range(50):
            y[i, d] = row[d]
"""


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "step,message",
    [
        (lambda: Team(48), "power of two"),
        (lambda: Team(64, 2), "barriers of their own"),
        (lambda: Team(8, 2), "do not fill warps"),
        (lambda: Team(8, 16, across=True, near=4), "4 members of each of 16 rows do not fill warps"),
        (lambda: Schedule(parse_kernel(RUNNING)).apply(teams, "i", Team(32)), "row is filled by every thread"),
        (lambda: Schedule(parse_kernel(SHIFTED)).apply(teams, "a", Team(32)), "a is not the outermost loop"),
        (
            lambda: Schedule(parse_kernel(COLUMNS.replace("y[j] =", "y[0] ="))).apply(teams, "j", Team(32)),
            "every iteration writes y",
        ),
    ],
)
def test_refusals(step: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        step()
