"""Slots within the memory of results that are not written yet.

    results  dw2 |..................wwwwww|     the memory of a result is there from the first step to the last;
             dw1 |a a a a a a a a a a  www|     until its first kernel runs, a value that dies before may lie in it

A gradient's results are as large as its weights, and written late, while activations die. In: slots of the arena with
their lives, results with the step that first writes them. Out: for some slots a result and a byte within. Slots are
taken at the step where most bytes of the arena are alive, the largest first, as long as one fits: so each lowers the
peak. It takes of all results the one that is written soonest after the slot's end, for those written later can hold
what lives longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.arena import ALIGN, Piece

Array = np.ndarray[Any, Any]
LEAST_RESULT = 1 << 20  # bytes: fresh results of this size begin at a cache line, as the arena does
LEAST_SLOT = 1 << 12  # bytes: what is smaller does not show


@dataclass(frozen=True)
class Stretch:
    """Bytes, first and last step of a slot. `pieces`: see `dnnc.ir.arena`."""

    nbytes: int
    first: int
    last: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Result:
    """An output by number, its bytes, and the step that first writes it."""

    output: int
    nbytes: int
    written: int


def place_within(
    slots: Sequence[Stretch], movable: Collection[int], results: Sequence[Result]
) -> dict[int, tuple[int, int]]:
    """For some `movable` slots, by number: the output and the byte in it at which they lie."""
    out: dict[int, tuple[int, int]] = {}
    large = sorted((r for r in results if r.nbytes >= LEAST_RESULT), key=lambda r: r.written)
    waiting = sorted((k for k in movable if slots[k].nbytes >= LEAST_SLOT), key=lambda k: (-slots[k].nbytes, k))
    if not large or not waiting:
        return out
    held: dict[Result, list[tuple[int, Stretch]]] = {r: [] for r in large}
    alive = np.zeros(1 + max(s.last for s in slots), np.int64)
    for s in slots:
        _count(alive, s, 1)
    while True:
        peak = int(alive.argmax())
        k = next((k for k in waiting if slots[k].first <= peak <= slots[k].last), None)
        if k is None:
            return out
        waiting.remove(k)
        for r in large:
            at = _room(r, held[r], slots[k])
            if at is not None:
                held[r].append((at, slots[k]))
                out[k] = r.output, at
                _count(alive, slots[k], -1)
                break


def _room(r: Result, held: Sequence[tuple[int, Stretch]], s: Stretch) -> int | None:
    """The lowest byte of a result that is free throughout a slot's life; None: there is none."""
    if s.last >= r.written:
        return None
    at = 0
    for start, x in sorted((h for h in held if h[1].first <= s.last and s.first <= h[1].last), key=lambda h: h[0]):
        if at + s.nbytes <= start:
            break
        at = max(at, -(-(start + x.nbytes) // ALIGN) * ALIGN)
    return at if at + s.nbytes <= r.nbytes else None


def _count(alive: Array, s: Stretch, sign: int) -> None:
    """Add a slot's bytes to those alive at each step, or take them away."""
    for _, nbytes, start in s.pieces or ((0, s.nbytes, s.first),):
        alive[start : s.last + 1] += sign * nbytes
