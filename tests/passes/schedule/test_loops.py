"""Schedule primitives on loops: text before and after, equal results, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.loops import annotate, choose, fuse, hoist_guards, join, narrow, peel, reorder, split
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule, same_results

COPY = """\
def k(x: f32[20], y: f32[20]):
    for i in range(20):
        y[i] = x[i] + 1.0
"""
MATMUL = """\
def k(a: f32[6, 5], b: f32[5, 8], c: f32[6, 8]):
    for i in range(6):
        for j in range(8):
            for k in range(5):
                c[i, j] = fma(a[i, k], b[k, j], c[i, j])
"""


def refused(text: str, steps: Callable[[Schedule], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        steps(Schedule(parse_kernel(text)))


# --- split ------------------------------------------------------------------------------------------------------------


def test_split_exactly() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 4, ("io", "ii")),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(5):
        for ii in range(4):
            y[ii + 4*io] = x[ii + 4*io] + 1.0
""",
    )


def test_split_keeps_a_lower_bound_and_the_kind() -> None:
    check_schedule(
        "def k(y: f32[20]):\n    for i in parallel(2, 14):\n        y[i] = 1.0\n",
        lambda s: s.apply(split, "i", 3, ("io", "ii")),
        """\
def k(y: f32[20]):
    for io in parallel(4):
        for ii in range(3):
            y[ii + 3*io + 2] = 1.0
""",
    )


def test_split_with_an_overlapping_tail() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="overlap"),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(3):
        for ii in range(8):
            y[ii + min(8*io, 12)] = x[ii + min(8*io, 12)] + 1.0
""",
    )


def test_split_that_repeats_the_last_iteration() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="clamp"),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(3):
        for ii in range(8):
            y[min(ii + 8*io, 19)] = x[min(ii + 8*io, 19)] + 1.0
""",
    )


def test_split_with_a_guard() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="guard"),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(3):
        for ii in range(8):
            if ii + 8*io < 20:
                y[ii + 8*io] = x[ii + 8*io] + 1.0
""",
    )


def test_split_with_a_peeled_tail() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="peel"),
        """\
def k(x: f32[20], y: f32[20]):
    for io in range(2):
        for ii in range(8):
            y[ii + 8*io] = x[ii + 8*io] + 1.0
    for i_t in range(4):
        y[i_t + 16] = x[i_t + 16] + 1.0
""",
    )


def test_split_of_less_than_a_tile_leaves_the_tail_alone() -> None:
    check_schedule(
        COPY,
        lambda s: s.apply(split, "i", 32, ("io", "ii"), tail="peel"),
        "def k(x: f32[20], y: f32[20]):\n    for i_t in range(20):\n        y[i_t] = x[i_t] + 1.0\n",
    )


def test_a_tail_that_is_not_needed_changes_nothing() -> None:
    for tail in ("overlap", "clamp", "guard", "peel"):
        s = Schedule(parse_kernel(COPY)).apply(split, "i", 5, ("io", "ii"), tail=tail)
        t = Schedule(parse_kernel(COPY)).apply(split, "i", 5, ("io", "ii"))
        assert show_kernel(s.done()) == show_kernel(t.done())


SYMBOLIC = "def k(N: dim[1, 64], x: f32[N], y: f32[N]):\n    for i in range(N):\n        y[i] = x[i]\n"


def test_split_of_a_symbolic_extent() -> None:
    check_schedule(
        SYMBOLIC,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="guard"),
        """\
def k(N: dim[1, 64], x: f32[N], y: f32[N]):
    for io in range((N + 7) // 8):
        for ii in range(8):
            if ii + 8*io < N:
                y[ii + 8*io] = x[ii + 8*io]
""",
    )
    check_schedule(
        SYMBOLIC,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="peel"),
        """\
def k(N: dim[1, 64], x: f32[N], y: f32[N]):
    for io in range(N // 8):
        for ii in range(8):
            y[ii + 8*io] = x[ii + 8*io]
    for i_t in range(N % 8):
        y[8*(N // 8) + i_t] = x[8*(N // 8) + i_t]
""",
    )


def test_split_uses_a_known_divisor() -> None:
    check_schedule(
        SYMBOLIC.replace("dim[1, 64]", "dim[8, 64, 8]"),
        lambda s: s.apply(split, "i", 8, ("io", "ii")),
        """\
def k(N: dim[8, 64, 8], x: f32[N], y: f32[N]):
    for io in range(N // 8):
        for ii in range(8):
            y[ii + 8*io] = x[ii + 8*io]
""",
    )


def test_split_refuses() -> None:
    refused(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii")),
        "8 does not divide the extent 20 of i; choose a tail of overlap, clamp, guard, peel",
    )
    refused(SYMBOLIC, lambda s: s.apply(split, "i", 8, ("io", "ii")), "8 does not divide the extent N of i")
    refused(
        COPY,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="mask"),
        "unknown tail mask; there are exact, overlap, clamp, guard, peel",
    )
    refused(COPY, lambda s: s.apply(split, "j", 4, ("io", "ii")), "no loops are called j; there are i")
    inplace = "def k(y: f32[20]):\n    for i in range(20):\n        y[i] = y[i] + 1.0\n"
    refused(
        inplace,
        lambda s: s.apply(split, "i", 8, ("io", "ii"), tail="overlap"),
        "i cannot overlap: a repeated iteration would read what it wrote in y",
    )


# --- fuse, reorder ----------------------------------------------------------------------------------------------------

NEST = """\
def k(x: f32[4, 6], y: f32[4, 6]):
    for i in range(4):
        for j in range(6):
            y[i, j] = x[i, j]
"""


def test_fuse() -> None:
    check_schedule(
        NEST,
        lambda s: s.apply(fuse, "i", "j", "ij"),
        "def k(x: f32[4, 6], y: f32[4, 6]):\n    for ij in range(24):\n        y[ij // 6, ij % 6] = x[ij // 6, ij % "
        "6]\n",
    )


def test_fuse_undoes_a_split() -> None:
    s = Schedule(parse_kernel(COPY)).apply(split, "i", 4, ("io", "ii")).apply(fuse, "io", "ii", "i")
    assert show_kernel(s.done()) == COPY


def test_fuse_refuses() -> None:
    triangle = (
        "def k(y: f32[8, 8]):\n    for i in range(8):\n        for j in range(i + 1):\n            y[i, j] = 1.0\n"
    )
    refused(triangle, lambda s: s.apply(fuse, "i", "j", "ij"), "i and j are not a rectangular nest from 0")
    refused(NEST, lambda s: s.apply(fuse, "i", "k", "ij"), "i and k are not a rectangular nest from 0")
    two = "def k(y: f32[8]):\n    for i in range(8):\n        y[i] = 1.0\n        y[i] = 2.0\n"
    refused(two, lambda s: s.apply(fuse, "i", "j", "ij"), "i is not perfectly nested; its body is")


def test_reorder_a_reduction() -> None:
    check_schedule(
        MATMUL,
        lambda s: s.apply(reorder, "k", "j", "i"),
        """\
def k(a: f32[6, 5], b: f32[5, 8], c: f32[6, 8]):
    for k in range(5):
        for j in range(8):
            for i in range(6):
                c[i, j] = fma(a[i, k], b[k, j], c[i, j])
""",
    )


def test_reorder_tiles() -> None:
    def tile(s: Schedule) -> None:
        s.apply(split, "i", 3, ("io", "ii")).apply(split, "j", 4, ("jo", "ji")).apply(
            reorder, "io", "jo", "k", "ii", "ji"
        )
        assert s.steps == [
            "split('i', 3, ('io', 'ii'))",
            "split('j', 4, ('jo', 'ji'))",
            "reorder('io', 'jo', 'k', 'ii', 'ji')",
        ]

    check_schedule(
        MATMUL,
        tile,
        """\
def k(a: f32[6, 5], b: f32[5, 8], c: f32[6, 8]):
    for io in range(2):
        for jo in range(2):
            for k in range(5):
                for ii in range(3):
                    for ji in range(4):
                        c[ii + 3*io, ji + 4*jo] = fma(a[ii + 3*io, k], b[k, ji + 4*jo], c[ii + 3*io, ji + 4*jo])
""",
    )


def test_reorder_refuses() -> None:
    refused(NEST, lambda s: s.apply(reorder, "j", "k"), "the nest is i, j; asked for j, k|not perfectly nested")
    refused(NEST, lambda s: s.apply(reorder, "p", "q"), "no loop is called p")
    triangle = (
        "def k(y: f32[8, 8]):\n    for i in range(8):\n        for j in range(i + 1):\n            y[i, j] = 1.0\n"
    )
    refused(triangle, lambda s: s.apply(reorder, "j", "i"), "the bounds of i, j depend on one another")
    last = (
        "def k(x: f32[4, 6], y: f32[4]):\n    for i in range(4):\n        for j in range(6):\n"
        "            y[i] = x[i, j]\n"
    )
    refused(
        last,
        lambda s: s.apply(reorder, "j", "i"),
        "y is overwritten by iterations of j: the last one must stay the last",
    )
    shift = (
        "def k(y: f32[4, 7]):\n    for i in range(4):\n        for j in range(6):\n            y[i, j] = y[i, j + 1]\n"
    )
    refused(shift, lambda s: s.apply(reorder, "j", "i"), "y is read at another index than it is written")


# --- peel, annotate ---------------------------------------------------------------------------------------------------


def test_peel_folds_guards() -> None:
    check_schedule(
        """\
def k(x: f32[8], y: f32[8]):
    for i in range(8):
        if 1 <= i:
            y[i] = x[i - 1]
""",
        lambda s: s.apply(peel, "i", 1, 0),
        "def k(x: f32[8], y: f32[8]):\n    for i in range(1, 8):\n        y[i] = x[i - 1]\n",
    )


def test_peel_both_ends() -> None:
    check_schedule(
        COPY.replace("20", "5"),
        lambda s: s.apply(peel, "i", 1, 2),
        """\
def k(x: f32[5], y: f32[5]):
    y[0] = x[0] + 1.0
    for i in range(1, 3):
        y[i] = x[i] + 1.0
    y[3] = x[3] + 1.0
    y[4] = x[4] + 1.0
""",
    )


def test_peel_of_a_short_loop_leaves_no_loop() -> None:
    check_schedule(
        COPY.replace("20", "2"),
        lambda s: s.apply(peel, "i", 3, 3),
        "def k(x: f32[2], y: f32[2]):\n    y[0] = x[0] + 1.0\n    y[1] = x[1] + 1.0\n",
    )


def test_peeled_copies_have_buffers_and_loops_of_their_own() -> None:
    check_schedule(
        """\
def k(x: f32[3, 4], y: f32[3]):
    for i in range(3):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(4):
            acc[0] = acc[0] + x[i, r]
        y[i] = acc[0]
""",
        lambda s: s.apply(peel, "i", 1, 0),
        """\
def k(x: f32[3, 4], y: f32[3]):
    acc_f0: f32[1] @ register
    acc_f0[0] = 0.0
    for r_f0 in range(4):
        acc_f0[0] = acc_f0[0] + x[0, r_f0]
    y[0] = acc_f0[0]
    for i in range(1, 3):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(4):
            acc[0] = acc[0] + x[i, r]
        y[i] = acc[0]
""",
    )


def test_peel_refuses_symbolic_extents() -> None:
    refused(SYMBOLIC, lambda s: s.apply(peel, "i"), "i has no constant extent to peel")


def test_annotate() -> None:
    check_schedule(
        NEST,
        lambda s: s.apply(annotate, "parallel", "i").apply(annotate, "unroll", "j"),
        """\
def k(x: f32[4, 6], y: f32[4, 6]):
    for i in parallel(4):
        for j in unroll(6):
            y[i, j] = x[i, j]
""",
    )


def test_annotate_refuses_what_is_not_independent() -> None:
    refused(MATMUL, lambda s: s.apply(annotate, "parallel", "k"), "k cannot run in parallel: every iteration writes c")
    barrier = "def k(y: f32[4]):\n    for i in range(4):\n        y[i] = 1.0\n        barrier()\n"
    refused(barrier, lambda s: s.apply(annotate, "parallel", "i"), "i cannot run in parallel: it holds a barrier")
    assert annotate(parse_kernel(MATMUL).entry.body, "unroll", "k")  # unrolling keeps the order


# --- guards -----------------------------------------------------------------------------------------------------------


def test_hoist_guards() -> None:
    check_schedule(
        """\
def k(N: dim[1, 64], x: f32[64, 8], y: f32[64, 8]):
    for i in range(64):
        for j in range(8):
            if i < N:
                if j < N:
                    y[i, j] = x[i, j]
""",
        lambda s: s.apply(hoist_guards),
        """\
def k(N: dim[1, 64], x: f32[64, 8], y: f32[64, 8]):
    for i in range(64):
        if i < N:
            for j in range(8):
                if j < N:
                    y[i, j] = x[i, j]
""",
    )


def test_a_loop_of_one_iteration_holds_no_guard() -> None:
    check_schedule(
        """\
def k(x: f32[64, 1, 8], y: f32[64, 1, 8]):
    for i in range(64):
        for j in range(1):
            for k in range(8):
                if i + j + k < 36:
                    if i + 2 * j < 30:
                        y[i, j, k] = x[i, j, k]
""",
        lambda s: s.apply(hoist_guards).apply(narrow),
        """\
def k(x: f32[64, 1, 8], y: f32[64, 1, 8]):
    for i in range(30):
        for j in range(1):
            for k in range(min(-i - j + 36, 8)):
                y[i, j, k] = x[i, j, k]
""",
    )


def test_vectors_choose_where_a_guard_reads_what_it_needs() -> None:
    """Not where more is read behind a guard, which may keep an index within its array, nor without memory."""
    text = """\
def k(x: f32[8], z: f32[8], y: i64[1], s: f32[1], t: f32[1], u: f32[1]):
    y[0] = 9
    s[0] = 0.0
    t[0] = 0.0
    u[0] = 0.0
    for i in range(8):
        if 0.5 < x[i]:
            y[0] = min(i, y[0])
        if 0.5 < x[i]:
            s[0] = x[i] + s[0]
        if 0.5 < x[i]:
            t[0] = t[0] + z[i]
        if i < 3:
            u[0] = u[0] + 1.0
"""
    after = text.replace(
        "        if 0.5 < x[i]:\n            y[0] = min(i, y[0])\n"
        "        if 0.5 < x[i]:\n            s[0] = x[i] + s[0]\n",
        "        y[0] = min(select(0.5 < x[i], i, 9223372036854775807), y[0])\n"
        "        s[0] = s[0] + select(0.5 < x[i], x[i], 0.0)\n",
    )
    check_schedule(text, lambda s: s.apply(choose), after)


def test_guards_that_read_memory_stay() -> None:
    text = """\
def k(n: f32[1], y: f32[8]):
    for i in range(8):
        if n[0] < 2.0:
            y[i] = 1.0
"""
    check_schedule(text, lambda s: s.apply(hoist_guards), text)


def test_narrow() -> None:
    check_schedule(
        """\
def k(x: f32[16], y: f32[16]):
    for i in range(16):
        for j in range(3):
            if 0 <= i + j - 1:
                if i + j < 17:
                    y[i] = y[i] + x[i + j - 1]
""",
        lambda s: s.apply(narrow),
        """\
def k(x: f32[16], y: f32[16]):
    for i in range(16):
        for j in range(max(-i + 1, 0), min(-i + 17, 3)):
            y[i] = y[i] + x[i + j - 1]
""",
    )


def test_narrow_by_steps() -> None:
    check_schedule(
        "def k(y: f32[16, 40]):\n    for j in range(16):\n        for i in range(16):\n"
        "            if 3 <= 2*i + j:\n                if 3*i < j:\n                    y[i, 2*i] = 1.0\n",
        lambda s: s.apply(narrow),
        "def k(y: f32[16, 40]):\n    for j in range(16):\n"
        "        for i in range(max(-((j + 1) // 2) + 2, 0), (j + 2) // 3):\n            y[i, 2*i] = 1.0\n",
    )


def test_narrow_leaves_other_guards_and_other_loops() -> None:
    for text in (
        "def k(y: f32[16]):\n    for i in parallel(16):\n        if i < 5:\n            y[i] = 1.0\n",
        "def k(x: f32[16], y: f32[16]):\n    for i in range(16):\n        if x[i] < 5.0:\n            y[i] = 1.0\n",
    ):
        check_schedule(text, lambda s: s.apply(narrow), text)


def test_a_tile_larger_than_the_loop_is_no_overlap() -> None:
    """`min(8*io, n - 8)` would be negative for n < 8: what split does not see, the verifier refuses."""
    s = Schedule(parse_kernel(SYMBOLIC)).apply(split, "i", 8, ("io", "ii"), tail="overlap")
    with pytest.raises(VerifyError, match="x"):
        verify_kernel(s.done())
    enough = parse_kernel(SYMBOLIC.replace("dim[1, 64]", "dim[8, 64]"))
    done = Schedule(enough).apply(split, "i", 8, ("io", "ii"), tail="overlap").done()
    same_results(enough, verify_kernel(done))


# --- join -------------------------------------------------------------------------------------------------------------

TWO = """\
def k(x: f32[20], y: f32[20], z: f32[20]):
    for i in parallel(20):
        y[i] = x[i] + 1.0
    for j in parallel(20):
        z[j] = x[j] * 2.0
"""


def test_join() -> None:
    check_schedule(
        TWO,
        lambda s: s.apply(join, "i", "j"),
        """\
def k(x: f32[20], y: f32[20], z: f32[20]):
    for i in parallel(20):
        y[i] = x[i] + 1.0
        z[i] = x[i] * 2.0
""",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO.replace("x[j] * 2.0", "y[j] * 2.0"), "reads what the other writes"),
        (TWO.replace("x[i] + 1.0", "z[i] + 1.0"), "reads what the other writes"),
        (TWO.replace("j in parallel(20)", "j in parallel(19)"), "are not the same loop"),
        (TWO.replace("j in parallel", "j in range"), "are not the same loop"),
        (TWO.replace("    for j in", "    y[0] = 0.0\n    for j in"), "does not come right behind"),
    ],
)
def test_join_refuses(text: str, message: str) -> None:
    refused(text, lambda s: s.apply(join, "i", "j"), message)
