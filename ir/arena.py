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


@dataclass(frozen=True)
class Arena:
    """Bytes of each slot, the first and the last step at which it is alive, and where several kernels fill it one after another, the pieces:
    bytes, and the step that writes them."""

    sizes: tuple[Dim, ...]
    lives: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        return place_slots(self._numbers(dims), self.lives)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        env = _env(dims)
        live: dict[int, int] = {}
        for pieces, size, (begin, last) in zip(self.pieces, self.sizes, self.lives):
            for n, first in pieces or ((_number(size, env), begin),):
                for k in range(first, last + 1):
                    live[k] = live.get(k, 0) + n
        return max(live.values(), default=0)

    def _numbers(self, dims: Mapping[Var, int]) -> list[int]:
        env = _env(dims)
        return [_number(d, env) for d in self.sizes]


def _env(dims: Mapping[Var, int]) -> dict[Expr, Expr]:
    return {v: const(n) for v, n in dims.items()}


def _number(d: Dim, env: dict[Expr, Expr]) -> int:
    n = value(substitute(const(d), env))
    assert n is not None, f"{d!r} is not fixed by the dims of the call"
    return n


TRIES = 24  # orders of placement that are tried before the best is taken


def place_slots(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offsets and the total; slots whose lives meet never overlap.

    Slots are placed one after another, each at the lowest address that is free throughout its life: the largest first, or those first
    that are alive when most bytes are (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, sections 5.2
    and 5.3). Where that leaves more than the most bytes alive at once, the slot that ends highest is placed first and all is tried again.
    """
    padded = [-(-n // ALIGN) * ALIGN for n in sizes]
    live = _alive(padded, lives)
    least = max(live, default=0)
    by_size = sorted(range(len(sizes)), key=lambda i: (-padded[i], lives[i]))
    crowded = [max(live[first : last + 1]) for first, last in lives]
    best: tuple[list[int], int] | None = None
    for order in (by_size, sorted(by_size, key=lambda i: -crowded[i])):
        for _ in range(TRIES // 2):
            offsets, total = _place(order, padded, lives)
            if best is None or total < best[1]:
                best = offsets, total
            if total == least:
                return offsets, total
            top = max(order, key=lambda i: offsets[i] + padded[i])
            if order[0] == top:
                break
            order = [top, *(i for i in order if i != top)]
    assert best is not None
    return best


def _alive(padded: Sequence[int], lives: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes alive at each step."""
    live = [0] * (1 + max((last for _, last in lives), default=-1))
    for n, (first, last) in zip(padded, lives):
        for k in range(first, last + 1):
            live[k] += n
    return live


def _place(order: Sequence[int], padded: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    offsets = [0] * len(padded)
    placed: list[int] = []
    total = 0
    for k in order:
        first, last = lives[k]
        at = 0
        taken = sorted((offsets[j], offsets[j] + padded[j]) for j in placed if lives[j][0] <= last and first <= lives[j][1])
        for lo, hi in taken:
            if at + padded[k] <= lo:
                break
            at = max(at, hi)
        offsets[k] = at
        placed.append(k)
        total = max(total, at + padded[k])
    return offsets, total
