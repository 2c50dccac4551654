"""Cuts at boundaries and into digits: text before and after, equal results, and what is no boundary."""

from __future__ import annotations

from itertools import count

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import For, accesses, walk_stmts
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.index_set_splitting import boundaries, cut, digits, turns
from dnnc.passes.schedule.loops import split
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

pytestmark = pytest.mark.family("cases")

JOINED = """\
def k(a: f32[3, 4], b: f32[3, 5], y: f32[9, 3]):
    for i in range(9):
        for j in range(3):
            y[i, j] = select(i < 4, a[j, min(i, 3)], b[j, max(i - 4, 0)])
"""
BORDER = "for i in range(9):\n        y[i] = select((2 <= i) & (i < 7), x[max(min(i - 2, 4), 0)], 0.0)"
BLOCKS = (
    "for i in range(2):\n        for j in range(4):\n"
    "            y[4*i + j] = select(4*i + j < 6, x[min(4*i + j, 5)], 0.0)"
)


def loop(text: str, name: str = "i") -> For:
    kernel = parse_kernel(f"def k(x: f32[64], z: f32[64], y: f32[64]):\n    {text}\n")
    return next(s for s in walk_stmts(kernel.entry.body) if isinstance(s, For) and s.var.name == name)


def test_cut_at_a_seam_leaves_copies() -> None:
    check_schedule(
        JOINED,
        lambda s: s.apply(cut, "i", boundaries(s.loop("i")), ("", "_b")),
        """\
def k(a: f32[3, 4], b: f32[3, 5], y: f32[9, 3]):
    for i in range(4):
        for j in range(3):
            y[i, j] = a[j, i]
    for i_b in range(5):
        for j_b in range(3):
            y[i_b + 4, j_b] = b[j_b, i_b]
""",
    )


def test_cut_at_several_places() -> None:
    check_schedule(
        f"def k(x: f32[5], y: f32[9]):\n    {BORDER}\n",
        lambda s: s.apply(cut, "i", (2, 7), ("", "_b", "_c")),
        """\
def k(x: f32[5], y: f32[9]):
    for i in range(2):
        y[i] = 0.0
    for i_b in range(5):
        y[i_b + 2] = x[i_b]
    for i_c in range(2):
        y[i_c + 7] = 0.0
""",
    )


@pytest.mark.parametrize(
    "text,places",
    [
        (
            JOINED[JOINED.index("for") :]
            .replace("a[j, min(i, 3)]", "x[i]")
            .replace("b[j, max(i - 4, 0)]", "z[i]")
            .replace("y[i, j]", "y[3*i + j]"),
            (4,),
        ),
        (BORDER, (2, 7)),
        (BLOCKS, (1,)),  # of the first block all elements are there, of the second some
        ("for i in range(9):\n        y[i] = select(3*i < 10, x[i], z[i])", (4,)),
        ("for i in range(9):\n        y[i] = select(5 - i <= 3, x[i], z[i])", (2,)),
        ("for i in range(9):\n        y[i] = select(i < 9, x[i], z[i])", ()),
        ("for i in range(9):\n        y[i] = select(i < 4, 1.0, 0.0)", ()),  # no memory is read
        (
            "for i in range(8):\n        for j in range(8):\n            y[8*i + j] = select(i < j, x[i], z[j])",
            (),
        ),  # a triangle
    ],
)
def test_boundaries(text: str, places: tuple[int, ...]) -> None:
    assert boundaries(loop(text)) == places


SOURCES = {  # which element of 56 stands at i of 58, and the parts
    "reflect": ("max(0, min(55, min(110 - max(1 - i, i - 1), max(1 - i, i - 1))))", 3),
    "edge": ("max(0, min(55, i - 1))", 3),
    "wrap": ("(i + 55) % 56", 3),
}


@pytest.mark.parametrize("mode", SOURCES)
def test_borders_of_all_modes_leave_an_image_read_in_order(mode: str) -> None:
    """Cut again and again, as in a part other boundaries are known: no index is limited in the end."""
    source, parts = SOURCES[mode]
    s = Schedule(parse_kernel(f"def k(x: f32[56], y: f32[58]):\n    for i in range(58):\n        y[i] = x[{source}]\n"))
    todo, names = ["i"], map(str, count())
    while todo:
        name = todo.pop()
        s.collapse()
        if s.extent(name) == 1:
            continue
        indices = [x for a in accesses(s.loop(name).body) for x in a.idx]
        places = {*boundaries(s.loop(name)), *turns(s.loop(name), indices)}
        if places:
            suffixes = ["", *(next(names) for _ in places)]
            s.apply(cut, name, tuple(sorted(places)), tuple(suffixes))
            todo += [name + x for x in suffixes]
    text = str(s.done())
    assert not any(word in text for word in ("min", "max", "%")) and text.count("Store(") == parts


def test_clamps_behind_a_mask_are_no_seams() -> None:
    assert boundaries(loop("for i in range(9):\n        y[i] = select(i < 4, x[min(i, 3)], z[max(i - 4, 0)])")) == (4,)
    assert boundaries(loop("for i in range(9):\n        y[i] = x[min(i, 5)]")) in ((5,), (6,))
    assert boundaries(loop("for i in range(9):\n        y[i] = x[min(i, 5)]"), both=True) == ()


def test_a_mask_is_no_seam_between_two_operands() -> None:
    assert boundaries(loop(BORDER), both=True) == ()
    assert boundaries(loop("for i in range(9):\n        y[i] = select(i < 4, x[i], z[i])"), both=True) == (4,)


@pytest.mark.parametrize(
    "value,size",
    [
        ("x[i // 4] + z[i % 4]", 4),
        ("x[i // 4]", 4),
        ("x[i]", None),
        ("x[i // 4] + z[i % 2]", None),
        ("x[(i + 1) // 4]", None),
        ("x[i // 12]", None),
    ],
)
def test_digits(value: str, size: int | None) -> None:
    s = loop(f"for i in range(12):\n        y[i] = {value}")
    kernel = parse_kernel(
        f"def k(x: f32[64], z: f32[64], y: f32[64]):\n    for i in range(12):\n        y[i] = {value}\n"
    )
    assert digits(s, [i for x in accesses(s.body) for i in x.idx]) == size
    if size is not None:
        text = str(Schedule(kernel).apply(split, "i", size, ("io", "ii")).done())
        assert "//" not in text and "%" not in text


@pytest.mark.parametrize(
    "places,suffixes,message",
    [
        ((0,), ("", "_b"), "cannot be cut at"),
        ((9,), ("", "_b"), "cannot be cut at"),
        ((4, 2), ("", "_b", "_c"), "cannot be cut at"),
        ((4,), ("",), "into 1 part"),
    ],
)
def test_refusals(places: tuple[int, ...], suffixes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(parse_kernel(JOINED)).apply(cut, "i", places, suffixes)


def test_names_that_are_taken() -> None:
    s = Schedule(parse_kernel(JOINED)).apply(cut, "i", (4,), ("", "_b"))
    with pytest.raises(ScheduleError, match="names that are there already"):
        s.apply(cut, "i", (2,), ("", "_b"))
