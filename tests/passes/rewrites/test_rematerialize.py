"""A budget of memory: lower peaks, the same bits, and an answer where the budget cannot be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.ir.errors import InputError

rng = np.random.default_rng(5)
LAYERS, ROWS, WIDTH = 8, 512, 32


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = xp.tanh(x @ w) + xp.sin(x)
    return xp.mean(x * x)


def compiled(memory: Any, fn: Any = None) -> Any:
    specs = [[dnnc.Spec((WIDTH, WIDTH)) for _ in range(LAYERS)], dnnc.Spec((ROWS, WIDTH))]
    return dnnc.compile(fn or dnnc.grad(loss), inputs=specs, memory=memory, threads=1)


def peak(f: Any) -> int:
    return int(f.report.programs[-1].memory.lower_bound)


@pytest.mark.slow
def test_a_budget_lowers_the_peak_and_keeps_the_bits() -> None:
    args = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6 for _ in range(LAYERS)]
    args.append(rng.standard_normal((ROWS, WIDTH)).astype(np.float32))
    free = compiled(None)
    want, most = free(*args), peak(free)
    for share in (0.75, 0.5):
        f = compiled(int(most * share))
        for got, w in zip(f(*args), want):
            np.testing.assert_array_equal(got, w)
        assert peak(f) <= 1.05 * most * share
        assert len(f.report.programs[-1].passes) == len(free.report.programs[-1].passes)


@pytest.mark.slow
def test_a_budget_that_is_kept_anyway_changes_nothing() -> None:
    free, wide = compiled(None), compiled("1GiB")
    assert free.source("graph") == wide.source("graph")


@pytest.mark.slow
def test_what_cannot_be_kept_is_said() -> None:
    f = compiled("1KB")
    notes = [n for p in f.report.programs[-1].passes if p.name == "rematerialize" for n in p.notes]
    assert len(notes) == 1 and "above the budget" in notes[0]
    args = [np.zeros((WIDTH, WIDTH), np.float32)] * LAYERS + [np.ones((ROWS, WIDTH), np.float32)]
    assert all(np.isfinite(g).all() for g in f(*args))


@pytest.mark.slow
def test_inference_has_little_to_compute_again() -> None:
    forward = compiled(None, loss)
    assert peak(compiled("1KB", loss)) <= peak(forward)


def test_budgets_are_sizes() -> None:
    assert dnnc.CompileOptions(memory="1.5 kib").memory == 1536
    assert dnnc.CompileOptions(memory="2GB").memory == 2_000_000_000
    for bad in ("much", 0, -1, True, 1.5, "1XB"):
        with pytest.raises(InputError, match="memory="):
            dnnc.CompileOptions(memory=bad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_outputs_that_are_inputs_or_each_other_and_loops() -> None:
    """They have no copies yet where the budget is planned."""

    def scanned(x: Any, ws: Any) -> Any:
        state, ys = dnnc.scan(lambda s, w: (s, xp.tanh(s @ w)), x, ws)
        y = xp.sin(ys.sum(0))
        return x, y, state, y

    specs = [dnnc.Spec((WIDTH, WIDTH)), dnnc.Spec((5, WIDTH, WIDTH))]
    args = [rng.standard_normal(s.shape).astype(np.float32) for s in specs]
    small, free = (dnnc.compile(scanned, inputs=specs, memory=m, threads=1) for m in ("4KB", None))
    for got, want in zip(small(*args), free(*args)):
        np.testing.assert_array_equal(got, want)
