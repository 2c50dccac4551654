"""The arena: offsets of symbolic slots for given dims."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir import arena as arena_of
from dnnc.ir.arena import ALIGN, WORK, Arena, place_slots
from dnnc.ir.expr import dim, unwrap

N = dim("N")


def test_offsets_follow_the_dims() -> None:
    arena = Arena((unwrap(N * 4), 100, unwrap(N * 8)), ((0, 1), (1, 2), (2, 3)), ((), (), ()))
    for n in (1, 16, 40):
        offsets, total = arena.offsets({N: n})
        spans = [(at, at + size, life) for at, size, life in zip(offsets, (4 * n, 100, 8 * n), arena.lives)]
        for k, (lo, hi, (first, last)) in enumerate(spans):
            assert lo % ALIGN == 0 and hi <= total
            for other_lo, other_hi, (other_first, other_last) in spans[:k]:
                assert hi <= other_lo or other_hi <= lo or last < other_first or other_last < first
        assert arena.lower_bound({N: n}) == max(4 * n + 100, 100 + 8 * n) <= total


def test_nothing_needs_nothing() -> None:
    assert Arena((), (), ()).offsets({}) == ([], 0) and Arena((), (), ()).lower_bound({}) == 0


def test_a_slot_that_fills_up_counts_what_is_written() -> None:
    arena = Arena((1024, 512), ((0, 4), (0, 1)), (((0, 256, 0), (256, 768, 3)), ()))
    assert arena.lower_bound({}) == 1024  # at step 3; 256 + 512 before
    assert arena.offsets({}) == ([0, 256], 1024)  # the second lies where the first is not yet written


def test_pieces_of_two_slots_interlock() -> None:
    arena = Arena((512, 512), ((0, 5), (0, 2)), (((0, 256, 0), (256, 256, 4)), ((0, 256, 0), (256, 256, 1))))
    offsets, total = arena.offsets({})
    assert total == arena.lower_bound({}) == 768 and offsets == [0, 256]


def test_slots_are_moved_until_they_fit() -> None:
    """Largest first leaves a hole that a slot placed earlier would have filled."""
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(200):
        lives = tuple(sorted((int(a), int(a + b)) for a, b in zip(rng.integers(0, 20, 16), rng.integers(0, 6, 16))))
        sizes = tuple(int(n) * ALIGN for n in rng.integers(1, 40, 16))
        offsets, total = place_slots(sizes, lives)
        spans = [(at, at + n, *life) for at, n, life in zip(offsets, sizes, lives)]
        for k, (lo, hi, first, last) in enumerate(spans):
            assert all(hi <= a or b <= lo or last < f or z < first for a, b, f, z in spans[:k])
        gaps.append(total / Arena(sizes, lives, ((),) * 16).lower_bound({}))
    assert min(gaps) >= 1 and sum(gaps) / len(gaps) < 1.02, sum(gaps) / len(gaps)


def test_steps_at_which_bytes_are_a_slots_own() -> None:
    arena = Arena((1024, 512), ((0, 4), (0, 1)), (((0, 256, 0), (256, 768, 3)), ()))
    assert arena.held(1) == (0, 1)
    assert arena.held(0) is None  # its second piece may be somebody else's until step 3


def test_a_plan_for_a_call_looks_at_a_bounded_number_of_pairs() -> None:
    """Many slots alive together, in an order that leaves holes: a call makes fewer tries than compiling."""
    rng = np.random.default_rng(1)
    firsts = rng.integers(0, 300, 400)
    lives = tuple((int(a), int(a + b)) for a, b in zip(firsts, rng.integers(1, 40, 400)))
    factors = [int(n) for n in rng.integers(1, 40, 400)]
    arena = Arena(tuple(unwrap(N * (64 * n)) for n in factors), lives, ((),) * 400)
    orders: list[int] = []
    places = arena._places
    place_in_order = places.in_order
    places.in_order = lambda order, padded: (orders.append(1), place_in_order(order, padded))[1]  # type: ignore[assignment,method-assign,func-returns-value]
    offsets, total = arena.offsets({N: 3})
    assert 1 <= len(orders) * places.cost <= WORK + 2 * places.cost
    spans = [(at, at + 192 * n, *life) for at, n, life in zip(offsets, factors, lives)]
    assert all(
        hi <= a or b <= lo or last < f or z < first
        for k, (lo, hi, first, last) in enumerate(spans)
        for a, b, f, z in spans[:k]
    )
    assert max(hi for _, hi, _, _ in spans) <= total


def test_many_slots_are_placed_by_arrays_where_few_are_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    firsts = rng.integers(0, 60, 120)
    lives = [(int(a), int(a + b)) for a, b in zip(firsts, rng.integers(1, 40, 120))]
    sizes = [64 * int(n) for n in rng.integers(0, 40, 120)]
    halves = [((0, n // 2, a), (n // 2, n - n // 2, a + 1)) for n, (a, _) in zip(sizes, lives)]
    pieces = [h if k % 9 == 0 else () for k, h in enumerate(halves)]
    order = list(map(int, rng.permutation(120)))
    found = []
    for many in (0, 1 << 60):
        monkeypatch.setattr(arena_of, "MANY", many)
        found.append(arena_of._Places(lives, pieces).in_order(order, sizes))
    assert found[0] == found[1]


def test_values_that_wait_for_their_gradients_are_a_stack() -> None:
    """Layers' values live from the forward to the backward part; those at work beside them leave no holes."""
    depth = 40
    sizes, lives = [], []
    for k in range(depth):
        sizes += [64 * (7 + k % 5) * 1000, 64 * (3 + k % 3) * 1000, 64 * 2000]
        lives += [(2 * k, 4 * depth - 2 * k), (2 * k, 2 * k + 1), (4 * depth - 2 * k - 1, 4 * depth - 2 * k)]
    arena = Arena(tuple(sizes), tuple(lives), ((),) * len(sizes))
    assert arena.offsets({})[1] <= 1.005 * arena.lower_bound({})
