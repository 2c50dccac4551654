"""The primitive `cascade`: text before and after, equal results, and what stays as it is."""

from __future__ import annotations

import pytest

from dnnc.ir.expr import value
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.passes.schedule.cascade import cascade, in_rows
from dnnc.passes.schedule.state import Schedule, loops
from support.schedules import check_schedule

NEST = """\
def k(x: f32[20, 40, 16], y: f32[16]):
    acc: f32[16] @ register
    acc[0:+16] = 0.0
    for n in range(20):
        for h in range(40):
            acc[0:+16] = acc[0:+16] + x[n, h, 0:+16]
    y[0:+16] = acc[0:+16]
"""


def test_a_nest_has_sums_of_its_inner_loop() -> None:
    check_schedule(
        NEST,
        lambda s: s.apply(cascade),
        """\
def k(x: f32[20, 40, 16], y: f32[16]):
    acc: f32[16] @ register
    acc[0:+16] = 0.0
    for n in range(20):
        acc_n: f32[16] @ register
        acc_n[0:+16] = 0.0
        for h in range(40):
            acc_n[0:+16] = acc_n[0:+16] + x[n, h, 0:+16]
        acc[0:+16] = acc[0:+16] + acc_n[0:+16]
    y[0:+16] = acc[0:+16]
""",
    )


LONG = """\
def k(x: f32[N, 2, 4], y: f32[2, 4]):
    acc: f32[2, 4] @ register
    for m in unroll(2):
        acc[m, 0:+4] = 0.0
    for n in range(N):
        for m_1 in unroll(2):
            acc[m_1, 0:+4] = fma(x[n, m_1, 0:+4], x[n, m_1, 0:+4], acc[m_1, 0:+4])
    for m_2 in unroll(2):
        y[m_2, 0:+4] = acc[m_2, 0:+4]
"""


def pieces(size: str, outer: str, inner: str) -> str:
    return f"""\
def k(x: f32[{size}, 2, 4], y: f32[2, 4]):
    acc: f32[2, 4] @ register
    for m in unroll(2):
        acc[m, 0:+4] = 0.0
    for np in range({outer}):
        acc_np: f32[2, 4] @ register
        for acc_np_0 in unroll(2):
            acc_np[acc_np_0, 0:+4] = 0.0
        for n in range({inner}):
            for m_1 in unroll(2):
                acc_np[m_1, 0:+4] = fma(x[n, m_1, 0:+4], x[n, m_1, 0:+4], acc_np[m_1, 0:+4])
        for acc_0 in unroll(2):
            acc[acc_0, 0:+4] = acc[acc_0, 0:+4] + acc_np[acc_0, 0:+4]
    for m_2 in unroll(2):
        y[m_2, 0:+4] = acc[m_2, 0:+4]
"""


PIECES = {
    "divisor": ("1056", "33", "32*np, 32*np + 32"),
    "ragged": ("1061", "17", "63*np, min(63*np + 63, 1061)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PIECES)
def test_a_long_loop_has_pieces(case: str) -> None:
    size, *loops = PIECES[case]
    check_schedule(LONG.replace("N", size), lambda s: s.apply(cascade), pieces(size, *loops))


def test_three_levels() -> None:
    s = Schedule(parse_kernel(LONG.replace("N", "4000000")))
    s.apply(cascade)
    assert [value(x.extent) for x in loops(s.body) if x.kind == "range"] == [125, 125, 256]


UNCHANGED = {
    "short": NEST.replace("20", "10"),
    "integers": NEST.replace("f32", "i32").replace("0.0", "i32(0)"),
    "a maximum": NEST.replace("acc[0:+16] + x[n, h, 0:+16]", "max(acc[0:+16], x[n, h, 0:+16])"),
    "read in between": NEST.replace("            acc", "            y[0:+16] = acc[0:+16]\n            acc"),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_unchanged(case: str) -> None:
    s = Schedule(parse_kernel(UNCHANGED[case]))
    s.apply(cascade)
    assert show_kernel(s.done()) == UNCHANGED[case]


# --- the order of sums ------------------------------------------------------------------------------------------------

ROWS = """\
def k(x: f32[20, 40, 16], y: f32[16]):
    acc: f32[16] @ register
    acc[0:+16] = 0.0
    for n in range(20):
        acc_n: f32[16] @ register
        acc_n[0:+16] = 0.0
        for h in range(40):
            acc_n[0:+16] = acc_n[0:+16] + x[n, h, 0:+16]
        acc[0:+16] = acc[0:+16] + acc_n[0:+16]
    y[0:+16] = acc[0:+16]
"""


@pytest.mark.parametrize(
    ("text", "names", "kept"),
    [
        (ROWS, ("n", "h"), True),
        (ROWS, ("h", "n"), False),
        (ROWS.replace("for h in range(40)", "for h in range(20, 40)"), ("n", "h"), False),
        (ROWS.replace("range(20)", "range(10)"), ("n", "h"), False),
        (NEST, ("n", "h"), False),  # the rows of a sum have none of their own
        (NEST.replace("acc[0:+16] + x[n, h, 0:+16]", "max(acc[0:+16], x[n, h, 0:+16])"), ("n", "h"), True),
        (NEST.replace("y[0:+16] = acc[0:+16]", "y[0] = hsum(acc[0:+16])"), ("n", "h"), False),
        (ROWS.replace("for h in", "for m in").replace("n, h", "n, m"), ("n", "h"), False),
        (ROWS.replace("+ x[n, h, 0:+16]", "* 2.0 + x[n, h, 0:+16]"), ("n", "h"), False),
    ],
)
def test_sums_in_the_order_of_their_loops(text: str, names: tuple[str, ...], kept: bool) -> None:
    variables = {s.var.name: s.var for s in loops(parse_kernel(ROWS).entry.body)}
    assert in_rows(parse_kernel(text), [[variables[n] for n in names]]) is kept
