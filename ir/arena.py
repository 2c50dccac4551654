"""The arena of a program: stretches of memory with lifetimes -> byte offsets.

Sizes may be symbolic: which stretches there are is decided once, while compiling; their offsets are evaluated here for each shape that is
called, also by a saved model, which has no passes at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.types import Dim

ALIGN = 64  # bytes: a cache line
TRIES = 24  # orders of placement that are tried before the best is taken
Piece = tuple[int, int, int]  # byte within a slot, bytes, and the step that writes them
Life = tuple[int, int]  # first and last step


@dataclass(frozen=True)
class Arena:
    """Bytes of each slot, the first and the last step at which it is alive, and where several kernels fill it one after another, the pieces:
    until one is written, its bytes may belong to somebody else."""

    sizes: tuple[Dim, ...]
    lives: tuple[Life, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        return place_slots(self._numbers(dims), self.lives, self.pieces)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        return max(_alive(_filled(self._numbers(dims), self.lives, self.pieces), self.lives), default=0)

    def _numbers(self, dims: Mapping[Var, int]) -> list[int]:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        return [_number(d, env) for d in self.sizes]


def _number(d: Dim, env: dict[Expr, Expr]) -> int:
    n = value(substitute(const(d), env))
    assert n is not None, f"{d!r} is not fixed by the dims of the call"
    return n


def place_slots(sizes: Sequence[int], lives: Sequence[Life], pieces: Sequence[Sequence[Piece]] = ()) -> tuple[list[int], int]:
    """Offsets and the total; bytes that are alive at the same time never overlap.

    Slots are placed one after another, each at the lowest address that is free throughout its life: the largest first, or those first
    that are alive when most bytes are (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, sections 5.2
    and 5.3). Where that leaves more than the most bytes alive at once, the slot that ends highest is placed first and all is tried again.
    """
    padded = [_aligned(n) for n in sizes]
    filled = _filled(padded, lives, pieces)
    live = _alive(filled, lives)
    least = max(live, default=0)
    by_size = sorted(range(len(sizes)), key=lambda i: (-padded[i], lives[i]))
    crowded = [max(live[first : last + 1]) for first, last in lives]
    best: tuple[list[int], int] | None = None
    for order in (by_size, sorted(by_size, key=lambda i: -crowded[i])):
        for _ in range(TRIES // 2):
            offsets, total = _place(order, padded, lives, filled)
            if best is None or total < best[1]:
                best = offsets, total
            if total <= _aligned(least):
                return offsets, total
            top = max(order, key=lambda i: offsets[i] + padded[i])
            if order[0] == top:
                break
            order = [top, *(i for i in order if i != top)]
    assert best is not None
    return best


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _filled(sizes: Sequence[int], lives: Sequence[Life], pieces: Sequence[Sequence[Piece]]) -> list[Sequence[Piece]]:
    """The pieces of every slot: one for those that a single kernel writes."""
    return [p or ((0, n, life[0]),) for n, life, p in zip(sizes, lives, pieces or [()] * len(sizes))]


def _alive(filled: Sequence[Sequence[Piece]], lives: Sequence[Life]) -> list[int]:
    """Bytes alive at each step."""
    live = [0] * (1 + max((last for _, last in lives), default=-1))
    for pieces, (_, last) in zip(filled, lives):
        for _, n, first in pieces:
            for k in range(first, last + 1):
                live[k] += n
    return live


def _place(order: Sequence[int], padded: Sequence[int], lives: Sequence[Life], filled: Sequence[Sequence[Piece]]) -> tuple[list[int], int]:
    offsets = [0] * len(padded)
    taken: list[tuple[int, int, int, int]] = []  # from byte, to byte, first and last step
    total = 0
    for k in order:
        last = lives[k][1]
        # the slot may not begin at any c with from < c + byte + n and c + byte < to
        forbidden = sorted((lo - at - n, hi - at) for at, n, first in filled[k] for lo, hi, f, z in taken if f <= last and first <= z)
        c = 0
        for lo, hi in forbidden:
            if c <= lo:
                break
            if c < hi:
                c = _aligned(hi)
        offsets[k] = c
        taken += [(c + at, c + at + n, first, last) for at, n, first in filled[k]]
        total = max(total, c + padded[k])
    return offsets, total
