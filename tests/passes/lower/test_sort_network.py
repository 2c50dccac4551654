"""Sorts of rows side by side: networks of any size against NumPy, by the interpreter and as machine code."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import sequence
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import For, walk_stmts
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.sort_network import lower_network, stages
from dnnc.passes.schedule.problem import classify


@pytest.mark.parametrize("n", [1, 2, 4, 16, 64, 512])
def test_each_stage_has_each_key_in_one_pair_at_most(n: int) -> None:
    """And the whole sorts zeros and ones, hence all keys (the 0-1 principle; Knuth, volume 3, 5.3.4)."""
    rows = np.random.default_rng(n).random((200, n)) < np.linspace(0, 1, 200)[:, None]
    pairs = 0
    for s in stages(n):
        a, k, c = np.ogrid[: s.blocks, : s.runs, : s.apart]
        first = (a * s.step + k * 2 * s.apart + s.begin + c).ravel()
        both = np.concatenate([first, first + s.apart])
        assert len(set(both)) == len(both) and (not both.size or both.max() < n)
        low, high = rows[:, first], rows[:, first + s.apart]
        rows[:, first], rows[:, first + s.apart] = low & high, low | high
        pairs += len(first)
    assert (np.diff(rows.astype(int), axis=1) >= 0).all()
    m = n.bit_length() - 1
    assert pairs == (((m * m - m + 4) << m) >> 2) - 1 or n == 1


@pytest.mark.parametrize("rows,n,keep", [(1, 1, 1), (3, 2, 2), (8, 5, 3), (13, 33, 33), (17, 16, 1)])
def test_nest(rows: int, n: int, keep: int) -> None:
    g = parse(f"def g(x: u64[{rows}, {n}]):\n    return sort_network(x, keep={keep})")
    p = classify(list(g.nodes()), lower_network(next(iter(g.nodes()))))
    keys = np.random.default_rng(n).integers(0, 1 << 63, (rows, n), dtype=np.uint64) * np.uint64(2)
    keys[::2, -1] = np.uint64((1 << 64) - 1)
    target = parse_target("llvm", 2)
    for kernel in (p.kernel, sequence.apply(p, dict(sequence.candidates(p, target)[0]), target)):
        got = np.zeros((rows, keep), np.uint64)
        run_kernel(verify_kernel(kernel), {"x0": keys, "y": got})
        np.testing.assert_array_equal(got, np.sort(keys, 1)[:, :keep])


def test_the_longest_rows_have_a_schedule_and_are_shared() -> None:
    g = parse("def g(x: u64[64, 512]):\n    return sort_network(x, keep=512)")
    p, target = classify(list(g.nodes()), lower_network(next(iter(g.nodes())))), parse_target("llvm", 2)
    kernel = verify_kernel(sequence.apply(p, dict(sequence.candidates(p, target)[0]), target))
    assert any(isinstance(s, For) and s.kind == "parallel" for s in walk_stmts(kernel.entry.body))


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["skylake-avx512", "haswell", "x86-64"])
def test_largest_of_many_rows(cpu: str) -> None:
    """Ties, NaN and signed zeros, along any axis; rows of a size that a call tells."""
    rng = np.random.default_rng(0)
    for shape, axis, keep in (((40, 100), 1, 20), ((2, 70, 9), 1, 70), ((31, 3, 300), -1, 5), ((9, 12), 1, 12)):
        x = np.round(rng.standard_normal(shape) * 3).astype(np.float32)
        x[rng.random(shape) < 0.1] = np.nan
        x[rng.random(shape) < 0.1] = -0.0
        sizes = ", ".join(map(str, shape[1:]))
        text = f"def g(x: f32[n, {sizes}]):\n    y, i = sort(x, axis={axis}, keep={keep})\n    return y, i"
        _, index = dnnc.compile(parse(text), target=f"llvm -mcpu={cpu}", threads=2, strict_compile=True)(x)
        want = np.argsort(x, axis, kind="stable")
        np.testing.assert_array_equal(index, np.take(want, np.arange(keep), axis))
