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
    """Bytes of each slot, and the first and the last step at which it is alive."""

    sizes: tuple[Dim, ...]
    lives: tuple[tuple[int, int], ...]

    def offsets(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets of the slots and the arena's size, for given dims."""
        return place_slots(self._numbers(dims), self.lives)

    def lower_bound(self, dims: Mapping[Var, int]) -> int:
        """The most bytes that are alive at any step: no placement can need less."""
        live: dict[int, int] = {}
        for n, (first, last) in zip(self._numbers(dims), self.lives):
            for k in range(first, last + 1):
                live[k] = live.get(k, 0) + n
        return max(live.values(), default=0)

    def _numbers(self, dims: Mapping[Var, int]) -> list[int]:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        return [_number(d, env) for d in self.sizes]


def _number(d: Dim, env: dict[Expr, Expr]) -> int:
    n = value(substitute(const(d), env))
    assert n is not None, f"{d!r} is not fixed by the dims of the call"
    return n


def place_slots(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Greedy by size: offsets and the total. Slots whose lives meet never overlap."""
    offsets = [0] * len(sizes)
    placed: list[int] = []
    total = 0
    for k in sorted(range(len(sizes)), key=lambda i: (-sizes[i], lives[i])):
        first, last = lives[k]
        size = -(-sizes[k] // ALIGN) * ALIGN
        at = 0
        taken = sorted((offsets[j], offsets[j] + -(-sizes[j] // ALIGN) * ALIGN) for j in placed if lives[j][0] <= last and first <= lives[j][1])
        for lo, hi in taken:
            if at + size <= lo:
                break
            at = max(at, hi)
        offsets[k] = at
        placed.append(k)
        total = max(total, at + size)
    return offsets, total
