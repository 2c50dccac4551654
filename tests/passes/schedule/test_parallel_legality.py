"""Which loops may run in parallel: what the indices of their accesses tell."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import For, walk_stmts
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.schedule.loops import annotate
from dnnc.passes.schedule.parallel_legality import obstacle

APART = [
    "for v in range(8):\n        y[v] = x[v]",
    "for v in range(8):\n        y[v] = y[v] + 1.0",
    "for v in range(4):\n        y[16*v:+16] = y[16*v:+16] + x[v]",
    "for v in range(4):\n        for i in range(3):\n            y[3*v + i] = x[i]",
    "for v in range(20):\n        z[v // 5, v % 5] = x[v]",
    "for v in range(20):\n        z[v % 5, v // 5] = z[v % 5, v // 5] + 1.0",
    "for v in range(24):\n        for i in range(2):\n            z[2*(v % 8 // 2) + i, 16*(v // 8) + v % 2] = x[v]",
    "for v in range(6):\n        for i in range(8):\n            z[(8*v + i) // 7, (8*v + i) % 7] = x[v]",
    "for v in range(2):\n        y[min(16*v, 15):+16] = x[min(16*v, 15):+16]",  # tiles that overlap write the same
    "for v in range(8):\n        a: f32[1] @ register\n        a[0] = x[v]\n        y[v] = a[0]",
    "for v in range(8):\n        y[v] = x[7 - v]",
    "for v in range(8):\n        z[v, 0:+16] = x[v]\n        z[v, 16:+16] = z[v, 0:+16]",
    # a vector that ends where the next part begins
    "for v in range(3):\n        for i in range(2):\n            y[16*i + 20*v:+16:20 - 16*i] = x[v]",
    # the same, read and written in place by a vector wider than a part
    "for v in range(3):\n        for i in range(1):\n            "
    "y[16*v + 32*i:+32:16 - 32*i] = y[16*v + 32*i:+32:16 - 32*i] + 1.0",
]
MEET = [
    (
        "for v in range(3):\n        for i in range(1):\n            "
        "y[16*v + 32*i:+32:16 - 32*i] = y[16*v + 32*i:+32:17 - 32*i] + 1.0",
        "read the same elements of y",
    ),
    (
        "for v in range(3):\n        for i in range(2):\n            y[16*i + 20*v:+16:21 - 16*i] = x[v]",
        "write the same elements of y",
    ),
    ("for v in range(8):\n        y[0] = x[v]", "every iteration writes y"),
    ("for v in range(1, 8):\n        y[v] = y[v - 1]", "read the same elements of y"),
    ("for v in range(8):\n        y[v] = y[7 - v]", "read the same elements of y"),
    ("for v in range(8):\n        y[v // 2] = x[v]", "write the same elements of y"),
    ("for v in range(8):\n        y[v % 4] = x[v]", "write the same elements of y"),
    ("for v in range(20):\n        z[v // 5, v % 4] = x[v]", "write the same elements of z"),
    ("for v in range(4):\n        for i in range(4):\n            y[3*v + i] = x[i]", "write the same elements of y"),
    ("for v in range(4):\n        y[8*v:+16] = x[v]", "write the same elements of y"),
    ("for v in range(2):\n        y[min(16*v, 15):+16] = y[min(16*v, 15):+16] + 1.0", "read the same elements of y"),
    (
        "a: f32[8] @ register\n    for v in range(8):\n        a[v] = x[v]",
        "it writes a, of which every thread has its own",
    ),
    ("for v in range(8):\n        y[at[v]] = x[v]", "write the same elements of y"),
    (
        "for v in range(6):\n        for i in range(8):\n            z[(7*v + i) // 7, (7*v + i) % 7] = x[v]",
        "write the same elements of z",
    ),
    ("for v in range(8):\n        z[v, 0:+16] = x[v]\n        z[7 - v, 16:+16] = x[v]", "write the same elements of z"),
]


def body(text: str) -> tuple[object, ...]:
    return parse_kernel(f"def k(x: f32[64], y: f32[64], z: f32[32, 64], at: i64[64]):\n    {text}\n").entry.body


def loop(text: str) -> For:
    return next(s for s in walk_stmts(body(text)) if isinstance(s, For) and s.var.name == "v")


@pytest.mark.parametrize("text", APART)
def test_iterations_that_cannot_meet(text: str) -> None:
    assert obstacle(loop(text)) == ""
    assert next(s for s in walk_stmts(annotate(body(text), "parallel", "v")) if isinstance(s, For)).kind == "parallel"


@pytest.mark.parametrize("text,why", MEET)
def test_iterations_that_may_meet(text: str, why: str) -> None:
    assert why in obstacle(loop(text))
    with pytest.raises(ScheduleError, match=f"v cannot run in parallel: .*{why}"):
        annotate(body(text), "parallel", "v")


def test_a_barrier_is_for_all_threads() -> None:
    assert obstacle(loop("for v in range(8):\n        barrier()")) == "it holds a barrier"
