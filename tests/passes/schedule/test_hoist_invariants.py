"""Numbers of a row move out of the loops along it, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.hoist_invariants import hoist_numbers, keep_numbers, sink
from dnnc.passes.schedule.loops import split
from dnnc.passes.schedule.memory import distribute, vectorize
from dnnc.passes.schedule.state import Schedule
from support.schedules import same_results

HEAD = (
    "def k(x: f32[4, 32], y: f32[4, 32]):\n    for i in range(4):\n        s: f32[1] @ register\n"
    "        s[0] = x[i, 0] + 2.0\n"
)


def hoisted(body: str) -> str:
    return show_kernel(verify_kernel(Schedule(parse_kernel(HEAD + body)).apply(hoist_numbers).done())).removeprefix(
        HEAD
    )


def test_a_number_is_computed_once() -> None:
    body = (
        "        for j in range(2):\n            y[i, 16*j:+16] = (x[i, 16*j:+16] - log(s[0])) * (1.0 / sqrt(s[0]))\n"
    )
    moved = """\
        number: f32 = 1.0 / sqrt(s[0])
        number_1: f32 = log(s[0])
        for j in range(2):
            y[i, 16*j:+16] = (x[i, 16*j:+16] - number_1) * number
"""
    assert hoisted(body) == moved
    x = np.random.default_rng(0).random((4, 32)).astype(np.float32)
    found, want = np.zeros_like(x), np.zeros_like(x)
    run_kernel(parse_kernel(HEAD + moved), {"x": x, "y": found})
    run_kernel(parse_kernel(HEAD + body), {"x": x, "y": want})
    assert np.array_equal(found, want)


def test_out_of_all_loops_in_which_it_stays_the_same() -> None:
    body = (
        "        for j in range(4):\n            for m in range(8):\n"
        "                y[i, 8*j + m] = x[i, 8*j + m] / log(s[0])\n"
    )
    moved = "        number: f32 = log(s[0])\n" + body.replace("log(s[0])", "number")
    assert hoisted(body) == moved


STAYS = [
    "        for j in range(32):\n            y[i, j] = x[i, j] - s[0]\n",  # nothing is computed
    "        for j in range(32):\n            y[i, j] = log(x[i, j])\n",  # changes
    "        for j in range(32):\n            s[0] = log(s[0])\n",  # is written
    "        for j in unroll(32):\n            y[i, j] = log(s[0])\n",  # the copies of one iteration share it
    # what is cheap is not worth a register
    "        for j in range(32):\n            y[i, j] = x[i, j] + (x[i, 0] + 1.0)\n",
    # perhaps never computed, nor even there
    "        for j in range(32):\n            if j < 7:\n                y[i, j] = log(x[i, 0])\n",
    "        for j in range(1, 32):\n            y[i, j] = log(y[i, 0])\n",  # memory that the loop writes
]


def test_what_is_costly_of_an_operand_is_computed_ahead() -> None:
    body = "        for j in range(32):\n            y[i, j] = x[i, j] * sqrt(x[i, 0])\n"
    assert hoisted(body) == "        number: f32 = sqrt(x[i, 0])\n" + body.replace("sqrt(x[i, 0])", "number")


def test_numbers_as_registers_become_vectors() -> None:
    s = Schedule(parse_kernel(NORM)).apply(keep_numbers).apply(split, "c", 16, ("co", "ci")).apply(distribute, "ci", 1)
    new = verify_kernel(s.apply(vectorize, "ci", "ci_1", "ci_2", "ci_3").done())
    assert (
        show_kernel(new)
        == """\
def k(x: f32[5, 32], y: f32[5, 32]):
    for co in range(2):
        s: f32[16] @ register
        number: f32[16] @ register
        s[0:+16] = 0.0
        for r in range(5):
            s[0:+16] = fma(x[r, 16*co:+16], x[r, 16*co:+16], s[0:+16])
        number[0:+16] = 1.0 / sqrt(s[0:+16] + 1.0)
        for i in range(5):
            y[i, 16*co:+16] = x[i, 16*co:+16] * number[0:+16]
"""
    )
    same_results(parse_kernel(NORM), new)


@pytest.mark.family("cases")
@pytest.mark.parametrize("body", STAYS)
def test_stays(body: str) -> None:
    assert hoisted(body) == body


NORM = """\
def k(x: f32[5, 32], y: f32[5, 32]):
    for c in range(32):
        s: f32[1] @ register
        s[0] = 0.0
        for r in range(5):
            s[0] = fma(x[r, c], x[r, c], s[0])
        for i in range(5):
            y[i, c] = x[i, c] * (1.0 / sqrt(s[0] + 1.0))
"""
SUMS = """\
def k(x: f32[5, 32], y: f32[5, 32]):
    for i in range(32):
        for c in range(5):
            s: f32[1] @ register
            s[0] = 0.0
            for r in range(5):
                s[0] = s[0] + x[r, i]
            y[c, i] = x[c, i] / s[0]
"""


def test_sums_ahead_of_the_loop_that_reads_them() -> None:
    kernel = parse_kernel(SUMS)
    done = verify_kernel(Schedule(kernel).apply(sink, "c").done())
    assert (
        show_kernel(done)
        == """\
def k(x: f32[5, 32], y: f32[5, 32]):
    for i in range(32):
        s: f32[1] @ register
        s[0] = 0.0
        for r in range(5):
            s[0] = s[0] + x[r, i]
        for c in range(5):
            y[c, i] = x[c, i] / s[0]
"""
    )
    x = np.random.default_rng(0).random((5, 32)).astype(np.float32)
    found, want = np.zeros_like(x), np.zeros_like(x)
    run_kernel(done, {"x": x, "y": found})
    run_kernel(kernel, {"x": x, "y": want})
    assert np.array_equal(found, want)


def test_several_results_are_sunk_together() -> None:
    text = SUMS.replace("y: f32[5, 32])", "y: f32[5, 32], z: f32[5, 32])") + "            z[c, i] = x[c, i] - s[0]\n"
    kernel = parse_kernel(text)
    done = verify_kernel(Schedule(kernel).apply(sink, "c").done())
    assert show_kernel(done).endswith(
        """\
        for c in range(5):
            y[c, i] = x[c, i] / s[0]
            z[c, i] = x[c, i] - s[0]
"""
    )
    x = np.random.default_rng(0).random((5, 32)).astype(np.float32)
    found, want = ({"x": x, "y": np.zeros_like(x), "z": np.zeros_like(x)} for _ in range(2))
    run_kernel(done, found)
    run_kernel(kernel, want)
    assert all(np.array_equal(found[k], want[k]) for k in found)


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("s[0] + x[r, i]", "s[0] + x[r, i] * x[c, i]", "not only its last statements"),
        (
            "            s[0] = 0.0",
            "            y[0, i] = 1.0\n            s[0] = 0.0",
            "does more than compute a number",
        ),
        ("            s[0] = 0.0", "            s[0] = y[0, i]", "change what"),
        (
            "            y[c, i] = x[c, i] / s[0]",
            "            for m in range(1):\n                s[0] = s[0] + 1.0\n                y[c, i] = s[0]",
            "change what",
        ),
    ],
)
def test_what_cannot_be_sunk(old: str, new: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule(parse_kernel(SUMS.replace(old, new))).apply(sink, "c")
