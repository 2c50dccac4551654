"""Scans: both ends, with and without the element itself, several operations, one warp and several."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.scan import scan
from dnnc.passes.schedule.state import Schedule
from support.schedules import same_results

pytestmark = pytest.mark.family("cases")

TEXT = """\
def sums(x: f32[5, 300], y: f32[5, 300]):
    for p in range(5):
        for s in range(300):
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(300):
                if r <= s:
                    acc[0] = acc[0] + x[p, r]
            y[p, s] = acc[0] + 1.0
"""
MAXIMA = TEXT.replace("0.0", "f32(-inf)").replace("acc[0] + x[p, r]", "max(acc[0], x[p, r])")


def scanned(text: str, size: int = 32, rows: int = 1, width: int = 4) -> Schedule:
    return Schedule(parse_kernel(text)).apply(scan, "p", size, rows, width)


@pytest.mark.parametrize("size,rows,width", [(32, 1, 4), (32, 4, 1), (64, 1, 8), (256, 1, 2)])
@pytest.mark.parametrize("guard", ["r <= s", "r < s", "s <= r", "s < r"])
def test_meaning(guard: str, size: int, rows: int, width: int) -> None:
    for text in (TEXT, MAXIMA):
        old = parse_kernel(text.replace("r <= s", guard))
        new = verify_kernel(scanned(text.replace("r <= s", guard), size, rows, width).done())
        assert show_kernel(parse_kernel(show_kernel(new))) == show_kernel(new)
        same_results(old, new)


@pytest.mark.slow
def test_integers_and_products_of_pairs() -> None:
    counts = TEXT.replace("f32", "i64").replace("0.0", "0").replace("1.0", "1")
    pairs = TEXT.replace("acc[0] + x[p, r]", "fma(x[p, r], x[p, 0], acc[0])")
    for text in (counts, pairs):
        same_results(parse_kernel(text), scanned(text, 64).done())


def test_text() -> None:
    text = show_kernel(scanned(TEXT, 64).done())
    assert "for g in range(2):" in text and text.count("barrier()") == 2 and "for o in unroll(5):" in text
    assert "barrier()" not in show_kernel(scanned(TEXT, 32, 4).done())


@pytest.mark.parametrize(
    "step,message",
    [
        (lambda: scanned(TEXT, 48), "cannot meet"),
        (lambda: scanned(TEXT, 64, 2), "cannot meet"),
        (lambda: scanned(TEXT.replace("r <= s", "r <= s + 1")), "no condition of a scan"),
        (lambda: scanned(TEXT.replace("r <= s", "r <= 2*s")), "no condition of a scan"),
        (lambda: scanned(TEXT.replace("x[p, r]", "x[p, s]")), "depends on where the sum ends"),
        (lambda: scanned(TEXT.replace("y[p, s] =", "y[0, s] =")), "every iteration writes y|may write the same"),
        (lambda: scanned("def k(y: f32[3]):\n    for p in range(3):\n        y[p] = 1.0\n"), "p holds no scan"),
    ],
)
def test_refusals(step: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        step()
