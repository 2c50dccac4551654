"""The arena: offsets of symbolic slots for given dims."""

from __future__ import annotations

from dnnc.ir.arena import ALIGN, Arena
from dnnc.ir.expr import dim, unwrap

N = dim("N")


def test_offsets_follow_the_dims() -> None:
    arena = Arena((unwrap(N * 4), 100, unwrap(N * 8)), ((0, 1), (1, 2), (2, 3)))
    for n in (1, 16, 40):
        offsets, total = arena.offsets({N: n})
        spans = [(at, at + size, life) for at, size, life in zip(offsets, (4 * n, 100, 8 * n), arena.lives)]
        for k, (lo, hi, (first, last)) in enumerate(spans):
            assert lo % ALIGN == 0 and hi <= total
            for other_lo, other_hi, (other_first, other_last) in spans[:k]:
                assert hi <= other_lo or other_hi <= lo or last < other_first or other_last < first
        assert arena.lower_bound({N: n}) == max(4 * n + 100, 100 + 8 * n) <= total


def test_nothing_needs_nothing() -> None:
    assert Arena((), ()).offsets({}) == ([], 0) and Arena((), ()).lower_bound({}) == 0
