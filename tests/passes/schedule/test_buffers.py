"""Axes that are walked as one become one; the memory and its bounds stay."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.loops import fuse
from dnnc.passes.schedule.state import Schedule

CASES = [
    (
        "x: f32[7, 45], y: f32[7, 45]",
        "for e in range(315):\n        y[e // 45, e % 45] = x[e // 45, e % 45]",
        ["x: f32[315]", "y[e] = x[e]"],
    ),
    (
        "x: f32[2, 3, 4], y: f32[24]",
        "for e in range(24):\n        y[e] = x[e // 12, e // 4 % 3, e % 4]",
        ["x: f32[24]", "y[e] = x[e]"],
    ),
    (
        "x: f32[5, 6], y: f32[5, 2, 3]",
        "for i in range(5):\n        for e in range(6):\n            y[i, e // 3, e % 3] = x[i, e]",
        ["y: f32[5, 6]"],
    ),
    # one use gains nothing, another would lose: nothing happens
    (
        "x: f32[4, 4], y: f32[4, 4]",
        "for i in range(4):\n        for j in range(4):\n            y[i, j] = x[j, i]",
        ["x: f32[4, 4]", "x[j, i]"],
    ),
    (
        "x: f32[6], y: f32[4, 6]",
        "for e in range(24):\n        y[e // 6, e % 6] = x[e % 6]",
        ["y: f32[24]", "x: f32[6]", "x[e % 6]"],
    ),
]


@pytest.mark.parametrize("params,body,expected", CASES)
def test_collapse(params: str, body: str, expected: list[str]) -> None:
    old = verify_kernel(parse_kernel(f"def k({params}):\n    {body}\n"))
    new = verify_kernel(Schedule(old).collapse().done())
    text = show_kernel(new)
    assert all(e in text for e in expected), text
    assert [p.name for p in new.entry.params] == [p.name for p in old.entry.params]
    np.testing.assert_array_equal(result(old), result(new))
    assert show_kernel(Schedule(new).collapse().done()) == text


def result(kernel: Kernel) -> np.ndarray:
    rng = np.random.default_rng(0)
    sizes = {b.name: int(np.prod([d.value for d in b.shape])) for b in kernel.entry.buffers}  # type: ignore[attr-defined]
    args = {name: rng.random(n, np.float32) for name, n in sizes.items()}
    args["y"][:] = -1
    run_kernel(kernel, args)
    return args["y"]


def test_restore_takes_back_what_collapse_did() -> None:
    s = Schedule(
        parse_kernel(
            "def k(x: f32[3, 5], y: f32[3, 5]):\n    for i in range(3):\n        for j in range(5):\n            y[i, "
            "j] = x[i, j]\n"
        )
    )
    mark, before = s.mark(), show_kernel(s.done())
    s.apply(fuse, "i", "j", "e").collapse()
    assert "y[e] = x[e]" in show_kernel(s.done()) and s.steps[-1] == "collapse()"
    s.restore(mark)
    assert show_kernel(s.done()) == before and s.steps == []
