"""The arena of a program: stretches of memory with lifetimes -> byte offsets.

Sizes may be symbolic: which stretches there are is decided once, while compiling; their offsets are evaluated here for
each shape that is called, also by a saved model, which has no passes at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.types import Dim

ALIGN = 64  # bytes: a cache line
TRIES = 24  # orders of placement that are tried before the best is taken
LEAST_TRIES, MOST_WORK = 4, 2_000_000  # of those, and pairs looked at while compiling: half a second
WORK = 16_000  # slots and pairs looked at, at most, while a call waits for its plan: 3 ms
NEAR, MUCH = 200, 1 << 22  # a plan is good enough that needs a 200th more than the bound, where that is 4 MB
MANY = 48  # others that a slot meets on average from which arrays of them are faster than lists
FAR = 1 << 60  # an offset behind all others
Array = np.ndarray[Any, Any]
Piece = tuple[int, int, int]  # byte within a slot, bytes, and the step that writes them
Life = tuple[int, int]  # first and last step


@dataclass(frozen=True)
class Arena:
    """Bytes of each slot, its first and last step, and the pieces that kernels fill in turn until then."""

    sizes: tuple[Dim, ...]
    lives: tuple[Life, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        places = self._places
        return places.place(self._numbers(dims), min(TRIES, 2 + WORK // places.cost) if dims else TRIES)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        return self._places.least(self._numbers(dims))

    def alive(self, dims: Mapping[Var, int]) -> list[int]:
        """Bytes that are alive at each step."""
        return self._places.alive(self._numbers(dims))

    def held(self, slot: int) -> Life | None:
        """Return the steps in which all bytes of a slot are live at any size; None where pieces follow one another."""
        return None if self.pieces[slot] else self.lives[slot]

    @cached_property
    def _places(self) -> _Places:
        return _Places(self.lives, self.pieces)

    def _numbers(self, dims: Mapping[Var, int]) -> list[int]:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        known = {d: _number(d, env) for d in set(self.sizes)}  # a network's layers repeat: few sizes are different
        return [known[d] for d in self.sizes]


def _number(d: Dim, env: dict[Expr, Expr]) -> int:
    if isinstance(d, int):
        return d
    n = value(substitute(d, env))
    assert n is not None, f"{d!r} is not fixed by the dims of the call"
    return n


def place_slots(
    sizes: Sequence[int], lives: Sequence[Life], pieces: Sequence[Sequence[Piece]] = ()
) -> tuple[list[int], int]:
    """Offsets and the total; bytes that are alive at the same time never overlap."""
    return _Places(lives, pieces or [()] * len(lives)).place(sizes)


class _Places:
    """Who is alive together, found once; then offsets for any sizes, in time that grows with the pairs of those.

    A *part* is a piece of a slot, or a slot that has none as a whole.
    """

    def __init__(self, lives: Sequence[Life], pieces: Sequence[Sequence[Piece]]) -> None:
        self.lives = lives
        self.parts = [
            (k, *p) for k, life in enumerate(lives) for p in (pieces[k] or ((0, -1, life[0]),))
        ]  # slot, byte, bytes, first step
        self.meeting: list[list[tuple[int, int]]] = [
            [] for _ in lives
        ]  # of each slot: a part of it, and one of another alive with it
        alive: list[int] = []
        for p in sorted(range(len(self.parts)), key=lambda p: self.parts[p][3]):
            slot, _, _, first = self.parts[p]
            alive = [q for q in alive if lives[self.parts[q][0]][1] >= first]
            for q in alive:
                other = self.parts[q][0]
                if other != slot:
                    self.meeting[slot].append((p, q))
                    self.meeting[other].append((q, p))
            alive.append(p)
        self.last: tuple[tuple[tuple[int, ...], int], tuple[list[int], int]] | None = None  # what was asked, the answer
        self._apart: tuple[tuple[int, ...], list[tuple[Array, Array, Array]]] | None = None  # see _distances
        self.cost = 1 + len(lives) + sum(map(len, self.meeting))  # of one order of placement

    def least(self, sizes: Sequence[int]) -> int:
        """The most bytes that are alive at any step."""
        return max(self.alive(sizes), default=0)

    def alive(self, sizes: Sequence[int]) -> list[int]:
        """Bytes alive at each step."""
        change = [0] * (2 + max((last for _, last in self.lives), default=-1))
        for slot, _, n, first in self.parts:
            n = sizes[slot] if n < 0 else n
            change[first] += n
            change[self.lives[slot][1] + 1] -= n
        return list(accumulate(change))[:-1]

    def place(self, sizes: Sequence[int], tries: int = TRIES) -> tuple[list[int], int]:
        """Offsets and the total, of the best of so many orders; fewer where there are very many pairs."""
        tries = min(tries, max(LEAST_TRIES, MOST_WORK // self.cost))
        key = (tuple(sizes), tries)
        if self.last is None or self.last[0] != key:
            self.last = key, self._best(sizes, tries)
        offsets, total = self.last[1]
        return list(offsets), total

    def _best(self, sizes: Sequence[int], tries: int) -> tuple[list[int], int]:
        """The best of so many orders.

        Slots are placed one after another, each at the lowest address that is free throughout its life: the largest
        first, or those first that are alive when most bytes are (Pisarchyk and Lee, "Efficient Memory Management for
        Deep Neural Net Inference", 2020, sections 5.2 and 5.3), of these the largest, or those that begin first: what a
        gradient waits for is a stack. Where all leave more than the most bytes alive at once (by a two-hundredth where
        that is much), a slot that ends above that is placed earlier, drawn from a fixed seed; what is no worse stays.
        """
        padded = [_aligned(n) for n in sizes]
        live = self.alive(padded)
        least = _aligned(max(live, default=0))
        enough = least + (least // NEAR if least > MUCH else 0)
        by_size = sorted(range(len(sizes)), key=lambda i: (-padded[i], self.lives[i]))
        crowded = [max(live[first : last + 1]) for first, last in self.lives]
        orders = (
            by_size,
            sorted(by_size, key=lambda i: -crowded[i]),
            sorted(by_size, key=lambda i: (-crowded[i], self.lives[i][0])),
        )
        best: tuple[list[int], int] | None = None
        for order in orders[: max(tries, 1)]:
            found = self.in_order(order, padded)
            if best is None or found[1] < best[1]:
                best, chosen = found, order
            if best[1] <= enough:
                return best
        assert best is not None
        rng = Random(0)
        for _ in range(tries - len(orders)):
            offsets, total = best
            place = rng.choice([p for p, i in enumerate(chosen) if offsets[i] + padded[i] > least])
            tried = list(chosen)
            tried.insert(rng.randrange(place + 1), tried.pop(place))
            found = self.in_order(tried, padded)
            if found[1] <= total:
                best, chosen = found, tried
            if best[1] <= enough:
                break
        return best

    def in_order(self, order: Sequence[int], padded: Sequence[int]) -> tuple[list[int], int]:
        """Offsets where slots are placed in this order, and the total."""
        if self.cost > MANY * (1 + len(padded)):
            return self._in_order_by_arrays(order, padded)
        offsets = [-1] * len(padded)
        begins = [at for _, at, _, _ in self.parts]
        lengths = [padded[slot] if n < 0 else n for slot, _, n, _ in self.parts]
        owners = [slot for slot, _, _, _ in self.parts]
        total = 0
        for k in order:
            # the slot may not begin at any c with c + byte < to and from < c + byte + n, for its n bytes at `byte`
            forbidden = []
            for p, q in self.meeting[k]:
                at = offsets[owners[q]]
                if at >= 0 and lengths[q]:
                    start = at + begins[q] - begins[p]
                    forbidden.append((start - lengths[p], start + lengths[q]))
            forbidden.sort()
            c = 0
            for lo, hi in forbidden:
                if c <= lo:
                    break
                if c < hi:
                    c = _aligned(hi)
            offsets[k] = c
            total = max(total, c + padded[k])
        return offsets, total

    def _in_order_by_arrays(self, order: Sequence[int], padded: Sequence[int]) -> tuple[list[int], int]:
        """The same, where a slot meets so many others that arrays pay off."""
        apart = self._distances(tuple(padded))
        offsets, total = np.full(len(padded), FAR), 0
        for k in order:
            others, below, above = apart[k]
            starts = offsets[others]
            low, high = starts + below, starts + above
            by = low.argsort()
            # behind all that begin before the one that it ends ahead of; those without a place are far away
            free = np.maximum.accumulate(np.append(0, high[by]))
            free += -free % ALIGN
            fits = free[:-1] <= low[by]
            at = int(free[fits.argmax() if fits.any() else -1])
            offsets[k] = at
            total = max(total, at + padded[k])
        return offsets.tolist(), total

    def _distances(self, padded: tuple[int, ...]) -> list[tuple[Array, Array, Array]]:
        """For each slot those that meet it, and the two distances from where one begins between which it may not."""
        if self._apart is None or self._apart[0] != padded:
            slots, begins, lengths, _ = np.array(self.parts, np.int64).T
            lengths = np.where(lengths < 0, np.array(padded)[slots], lengths)
            found = []
            for pairs in self.meeting:
                p, q = np.array(pairs, np.int64).reshape(-1, 2).T
                p, q = p[lengths[q] > 0], q[lengths[q] > 0]
                shift = begins[q] - begins[p]
                found.append((slots[q], shift - lengths[p], shift + lengths[q]))
            self._apart = padded, found
        return self._apart[1]


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
