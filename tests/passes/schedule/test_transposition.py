"""Square tiles by zipping: the same elements at the same places, and refusals that name the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.operator.interp import run_kernel
from dnnc.ir.operator.text import parse_kernel, show_kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.schedule.loops import reorder, split
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.transposition import transpose_tile

TEXT = """
def k(x: f32[11, 13], b: f32[11], y: f32[13, 11]):
    for i in range(13):
        for j in range(11):
            y[i, j] = x[j, i] * 2.0 + b[j]
"""


def tiled(text: str, n: int) -> Schedule:
    s = Schedule(parse_kernel(text))
    s.apply(split, "i", n, ("io", "iv"), tail="overlap").apply(split, "j", n, ("jo", "jv"), tail="overlap")
    return s.apply(reorder, "io", "jo", "iv", "jv").apply(transpose_tile, "iv", "jv")


@pytest.mark.parametrize("n", [2, 4, 8])
def test_meaning(n: int) -> None:
    kernel = verify_kernel(tiled(TEXT, n).done())
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    rng = np.random.default_rng(n)
    x, b, y = rng.random((11, 13), np.float32), rng.random(11, np.float32), np.zeros((13, 11), np.float32)
    run_kernel(kernel, {"x": x, "b": b, "y": y})
    np.testing.assert_array_equal(y, x.T * np.float32(2) + b)


def test_text(golden: Callable[..., None]) -> None:
    golden(show_kernel(tiled(TEXT, 4).done()))


@pytest.mark.parametrize(
    "text,message",
    [
        (TEXT.replace("x[j, i]", "x[min(j, 9), i % 3]"), "along neither"),
        (TEXT.replace("x[j, i] * 2.0 + b[j]", "b[j]"), "no load runs along iv"),
        (TEXT.replace("y[i, j]", "y[i, 10 - j]"), "store is not unit stride"),
        (TEXT.replace("            y", "            y[i, j] = 0.0\n            y"), "one store alone"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        tiled(text, 4)


def test_a_tile_is_square_and_a_power_of_two() -> None:
    with pytest.raises(ScheduleError, match="square tile"):
        tiled(TEXT, 3)
