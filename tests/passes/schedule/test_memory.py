"""Schedule primitives on memory and vectors: text before and after, equal results, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import const
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.loops import reorder, split
from dnnc.passes.schedule.memory import distribute, fission, prefetch, vector_reduce, vectorize
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule


def refused(text: str, steps: Callable[[Schedule], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        steps(Schedule(parse_kernel(text)))


LAYER = """\
def k(x: f32[4, 6], w: f32[6, 8], y: f32[4, 8]):
    for i in range(4):
        for j in range(8):
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(6):
                acc[0] = fma(x[i, r], w[r, j], acc[0])
            y[i, j] = max(acc[0], 0.0)
"""

# --- distribute -------------------------------------------------------------------------------------------------------


def test_distribute_makes_a_tile_of_an_accumulator() -> None:
    check_schedule(
        LAYER,
        lambda s: s.apply(distribute, "i", 2).apply(reorder, "r", "i_1", "j_1"),
        """\
def k(x: f32[4, 6], w: f32[6, 8], y: f32[4, 8]):
    acc: f32[4, 8] @ register
    for i in range(4):
        for j in range(8):
            acc[i, j] = 0.0
    for r in range(6):
        for i_1 in range(4):
            for j_1 in range(8):
                acc[i_1, j_1] = fma(x[i_1, r], w[r, j_1], acc[i_1, j_1])
    for i_2 in range(4):
        for j_2 in range(8):
            y[i_2, j_2] = max(acc[i_2, j_2], 0.0)
""",
    )


def test_distribute_sinks_guards() -> None:
    check_schedule(
        """\
def k(N: dim[1, 8], x: f32[N, 3], y: f32[N]):
    for i in range(8):
        if i < N:
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(3):
                acc[0] = acc[0] + x[i, r]
            y[i] = acc[0]
""",
        lambda s: s.apply(distribute, "i", 1),
        """\
def k(N: dim[1, 8], x: f32[N, 3], y: f32[N]):
    acc: f32[8] @ register
    for i in range(8):
        acc[i] = 0.0
    for i_1 in range(8):
        for r in range(3):
            if i_1 < N:
                acc[i_1] = acc[i_1] + x[i_1, r]
    for i_2 in range(8):
        if i_2 < N:
            y[i_2] = acc[i_2]
""",
    )


def test_distribute_keeps_the_guard_of_a_sum_that_is_read_afterwards() -> None:
    text = """\
def k(x: f32[7], y: f32[1]):
    acc: f32[1] @ register
    acc[0] = 0.0
    for o in range(3):
        for i in range(3):
            if i < 2:
                acc[0] = acc[0] + x[i + 2*o]
    y[0] = acc[0]
"""
    check_schedule(text, lambda s: s.apply(distribute, "o", 2), text)


def test_distribute_twice_names_each_loop_once() -> None:
    check_schedule(
        """
def two(x: f32[4], y: f32[4], z: f32[4], u: f32[4]):
    for i in range(4):
        if x[i] < 0.0:
            y[i] = 1.0
            z[i] = 2.0
        u[i] = 3.0
""",
        lambda s: s.apply(distribute, "i", 1).apply(distribute, "i", 1),
        """def two(x: f32[4], y: f32[4], z: f32[4], u: f32[4]):
    for i in range(4):
        if x[i] < 0.0:
            y[i] = 1.0
    for i_2 in range(4):
        if x[i_2] < 0.0:
            z[i_2] = 2.0
    for i_1 in range(4):
        u[i_1] = 3.0
""",
    )


def test_distribute_keeps_statements_that_meet_together() -> None:
    check_schedule(
        """def update(x: f32[4], m: f32[4], p: f32[4]):
    for i in range(4):
        a: f32[1] @ register
        a[0] = x[i] * 2.0
        p[i] = p[i] - m[i] * a[0]
        m[i] = m[i] + a[0]
""",
        lambda s: s.apply(distribute, "i", 1),
        """def update(x: f32[4], m: f32[4], p: f32[4]):
    a: f32[4] @ register
    for i in range(4):
        a[i] = x[i] * 2.0
    for i_1 in range(4):
        p[i_1] = p[i_1] - m[i_1] * a[i_1]
        m[i_1] = m[i_1] + a[i_1]
""",
    )


def test_distribute_refuses() -> None:
    meet = (
        "def k(x: f32[8], y: f32[8], z: f32[8]):\n    for i in range(7):\n        y[i] = x[i]\n"
        "        z[i] = y[i + 1]\n"
    )
    refused(meet, lambda s: s.apply(distribute, "i", 1), "i cannot be distributed: its first and its last statement")
    symbolic = (
        "def k(N: dim[1, 8], y: f32[N]):\n    for i in range(N):\n        a: f32[1] @ register\n"
        "        a[0] = 1.0\n        y[i] = a[0]\n"
    )
    refused(symbolic, lambda s: s.apply(distribute, "i", 1), "an extent is not constant")
    refused(LAYER, lambda s: s.apply(distribute, "i", 3), "j is not perfectly nested")


# --- vectorize --------------------------------------------------------------------------------------------------------


def test_vectorize() -> None:
    check_schedule(
        """\
def k(a: f32[4, 16], b: f32[16], y: f32[4, 16]):
    for i in range(4):
        for j in range(16):
            y[i, j] = max(a[i, j] + b[j], 0.0) * a[i, 0]
""",
        lambda s: s.apply(vectorize, "j"),
        """\
def k(a: f32[4, 16], b: f32[16], y: f32[4, 16]):
    for i in range(4):
        y[i, 0:+16] = max(a[i, 0:+16] + b[0:+16], 0.0) * a[i, 0]
""",
    )


def test_a_guard_becomes_the_limit() -> None:
    check_schedule(
        "def k(x: f32[20], y: f32[20]):\n    for i in range(20):\n        y[i] = x[i] + 1.0\n",
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="guard").apply(vectorize, "ii"),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(3):
        y[8*io:+8:-8*io + 20] = x[8*io:+8:-8*io + 20] + 1.0
""",
    )


def test_lanes_that_are_not_neighbours_are_gathered() -> None:
    check_schedule(
        "def k(x: f32[16, 3], y: f32[16]):\n    for i in range(16):\n        y[i] = x[i, 1]\n",
        lambda s: s.apply(vectorize, "i"),
        "def k(x: f32[16, 3], y: f32[16]):\n    y[0:+16] = x[lanes(16), 1]\n",
    )


def test_an_accumulator_per_lane() -> None:
    check_schedule(
        LAYER,
        lambda s: s.apply(distribute, "j", 1).apply(reorder, "r", "j_1").apply(vectorize, "j", "j_1", "j_2"),
        """\
def k(x: f32[4, 6], w: f32[6, 8], y: f32[4, 8]):
    for i in range(4):
        acc: f32[8] @ register
        acc[0:+8] = 0.0
        for r in range(6):
            acc[0:+8] = fma(x[i, r], w[r, 0:+8], acc[0:+8])
        y[i, 0:+8] = max(acc[0:+8], 0.0)
""",
    )


def test_vectorize_refuses() -> None:
    reduction = "def k(x: f32[16], y: f32[1]):\n    for i in range(16):\n        y[0] = y[0] + x[i]\n"
    refused(
        reduction,
        lambda s: s.apply(vectorize, "i"),
        "i cannot be a vector: it does not index the store to y, which is a reduction",
    )
    last = "def k(x: f32[16], y: f32[1]):\n    for i in range(16):\n        y[0] = x[i]\n"
    refused(last, lambda s: s.apply(vectorize, "i"), "which is overwritten by every lane")
    strided = "def k(x: f32[16], y: f32[16, 2]):\n    for i in range(16):\n        y[i, 0] = x[i]\n"
    refused(strided, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: it is not unit stride in the store to y")
    symbolic = "def k(N: dim[1, 8], y: f32[N]):\n    for i in range(N):\n        y[i] = 1.0\n"
    refused(symbolic, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: its extent is not constant")
    refused(LAYER, lambda s: s.apply(vectorize, "j"), "j cannot be a vector: it holds a Alloc; distribute it first")
    data = "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        if x[i] < 1.0:\n            y[i] = 1.0\n"
    refused(data, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: it holds the guard")
    wide = "def k(x: f32[8, 4], y: f32[8]):\n    for i in range(8):\n        y[i] = hsum(x[i, 0:+4])\n"
    refused(wide, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: it holds the vector")
    stored = "def k(y: f32[8, 4]):\n    for i in range(8):\n        y[i, 0:+4] = 1.0\n"
    refused(stored, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: it holds a store of 4 lanes to y")
    triangle = (
        "def k(y: f32[16, 16]):\n    for i in range(16):\n        for j in range(i + 1):\n            y[j, i] = 1.0\n"
    )
    refused(triangle, lambda s: s.apply(vectorize, "i"), "i cannot be a vector: it holds a For")


def test_fission_around_a_loop() -> None:
    text = """\
def k(x: f32[3, 9], y: f32[3, 9]):
    for i in range(3):
        y[i, 0] = x[i, 0]
        for j in range(1, 8):
            y[i, j] = x[i, j] * 2.0
        y[i, 8] = x[i, 8]
"""
    check_schedule(
        text,
        lambda s: s.apply(fission, "i", "j"),
        """\
def k(x: f32[3, 9], y: f32[3, 9]):
    for i in range(3):
        y[i, 0] = x[i, 0]
    for i_m in range(3):
        for j in range(7):
            y[i_m, j + 1] = x[i_m, j + 1] * 2.0
    for i_l in range(3):
        y[i_l, 8] = x[i_l, 8]
""",
    )
    refused(text.replace("x[i, 8]", "y[i, 7]"), lambda s: s.apply(fission, "i", "j"), "its parts meet in memory")
    refused(text, lambda s: s.apply(fission, "i", "i"), "i is not right inside of i")


# --- vector_reduce ----------------------------------------------------------------------------------------------------

SUM = """\
def k(x: f32[3, 70], y: f32[3]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(70):
            acc[0] = acc[0] + x[i, r]
        y[i] = acc[0]
"""


def test_vector_reduce() -> None:
    check_schedule(
        SUM,
        lambda s: s.apply(vector_reduce, "r", 16, 2),
        """\
def k(x: f32[3, 70], y: f32[3]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        acc_r: f32[2, 16] @ register
        for ru_init in unroll(2):
            acc_r[ru_init, 0:+16] = 0.0
        for ro in range(2):
            for ru in unroll(2):
                acc_r[ru, 0:+16] = acc_r[ru, 0:+16] + x[i, 32*ro + 16*ru:+16]
        for rt in range(1):
            acc_r[0, 0:+16] = acc_r[0, 0:+16] + select(lanes(16) < -16*rt + 6, x[i, 16*rt + 64:+16:-16*rt + 6], 0.0)
        acc[0] = acc[0] + hsum(acc_r[0, 0:+16] + acc_r[1, 0:+16])
        y[i] = acc[0]
""",
    )


@pytest.mark.parametrize(
    ("start", "step"),
    [
        ("0.0", "fma(x[r], x[r], acc[0])"),
        ("f32(-inf)", "max(acc[0], x[r])"),
        ("f32(inf)", "fmin(x[r], acc[0])"),
        ("1.0", "acc[0] * x[r]"),
    ],
)
@pytest.mark.parametrize("n", [1, 16, 33, 64])
def test_every_kind_of_reduction(start: str, step: str, n: int) -> None:
    text = f"""\
def k(x: f32[{n}], y: f32[1]):
    acc: f32[1] @ register
    acc[0] = {start}
    for r in range({n}):
        acc[0] = {step}
    y[0] = acc[0]
"""
    from dnnc.ir.loops.verify import verify_kernel
    from support.schedules import same_results

    old = parse_kernel(text)
    new = Schedule(old).apply(vector_reduce, "r", 16, 2).done()
    same_results(old, verify_kernel(new))


def test_one_sum_across_rows() -> None:
    text = """\
def k(x: f32[3, 5, 9], y: f32[3]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(5):
            for q in range(9):
                acc[0] = acc[0] + x[i, r, q]
        y[i] = acc[0]
"""
    check_schedule(
        text,
        lambda s: s.apply(vector_reduce, "q", 16, 1, "r"),
        """\
def k(x: f32[3, 5, 9], y: f32[3]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        acc_q: f32[1, 16] @ register
        for qu_init in unroll(1):
            acc_q[qu_init, 0:+16] = 0.0
        for r in range(5):
            for qo in range(0):
                for qu in unroll(1):
                    acc_q[qu, 0:+16] = acc_q[qu, 0:+16] + x[i, r, 16*qo + 16*qu:+16]
            for qt in range(1):
                acc_q[0, 0:+16] = acc_q[0, 0:+16] + select(lanes(16) < -16*qt + 9, x[i, r, 16*qt:+16:-16*qt + 9], 0.0)
        acc[0] = acc[0] + hsum(acc_q[0, 0:+16])
        y[i] = acc[0]
""",
    )
    each = text.replace("y[i] = acc[0]", "pass").replace("acc[0] = 0.0", "y[i] = 0.0").replace("acc[0]", "y[i]")
    refused(each, lambda s: s.apply(vector_reduce, "q", 16, 1, "i"), "q is no plain reduction into one element|nest")


def test_a_symbolic_row() -> None:
    text = SUM.replace("def k(x: f32[3, 70]", "def k(N: dim[1, 100], x: f32[3, N]").replace("range(70)", "range(N)")
    s = Schedule(parse_kernel(text)).apply(vector_reduce, "r", 8, 4)
    from dnnc.ir.loops.verify import verify_kernel
    from support.schedules import same_results

    same_results(parse_kernel(text), verify_kernel(s.done()))


def test_vector_reduce_refuses() -> None:
    copy = "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        y[i] = x[i]\n"
    refused(copy, lambda s: s.apply(vector_reduce, "i", 8, 1), "i is no plain reduction into one element")
    each = "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        y[i] = y[i] + x[i]\n"
    refused(each, lambda s: s.apply(vector_reduce, "i", 8, 1), "i is no plain reduction into one element")
    twice = "def k(x: f32[16], y: f32[1]):\n    for i in range(16):\n        y[0] = y[0] + y[0]\n"
    refused(twice, lambda s: s.apply(vector_reduce, "i", 8, 1), "i is no plain reduction into one element")


# --- prefetch ---------------------------------------------------------------------------------------------------------


def test_prefetch_any_address() -> None:
    text = "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        y[i] = x[i]\n"
    check_schedule(
        text,
        lambda s: s.apply(prefetch, "i", "x", (s.loop("i").var + 64,)),
        "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        prefetch(addr(x[i + 64]))\n        y[i] = "
        "x[i]\n",
    )
    refused(text, lambda s: s.apply(prefetch, "i", "w", (const(0),)), "loop i does not access w")


# --- axes in blocks ---------------------------------------------------------------------------------------------------


def test_lanes_of_one_block_are_a_vector() -> None:
    check_schedule(
        """\
def k(x: f32[6, 5, 4], b: f32[6], y: f32[24]):
    for j in range(24):
        y[j] = x[j // 4, 2, j % 4] + b[j // 4]
""",
        lambda s: s.apply(split, "j", 4, ("jo", "jv")).apply(vectorize, "jv"),
        """\
def k(x: f32[6, 5, 4], b: f32[6], y: f32[24]):
    for jo in range(6):
        y[4*jo:+4] = x[jo, 2, 0:+4] + b[jo]
""",
    )
