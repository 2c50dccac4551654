"""The rule of pad: an element gets what it has sent to itself and to the border, in pieces that lie side by side.

y = pad(x: [4], (2, 1), mode="reflect")  # x2 x1 x0 x1 x2 x3 x2
cot x = pad(flip(g[0:3]), to 4) + pad(g[3:6], from 1) + pad(g[6:7], from 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.autodiff.reverse import derived, zeros
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node

Cotangents = Mapping[int, Any]
Run = tuple[int, int, int, int]  # the first place, the length, the first source, and its step
MOST = 8  # pieces along an axis; more of them are scattered


def pad(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Cotangents:
    x, (g,) = n.inputs[0], cotangents
    pads, mode = n.attrs["pads"], n.attrs["mode"]
    assert x is not None
    rank = x.type.rank
    if mode == "constant":
        out = {0: b.pad(g, pads=tuple(-p for p in pads))} if 0 in needed else {}
        return {**out, **derived(b, n, cotangents, [1])} if 1 in needed else out
    every = []
    for size, begin, end in zip(x.type.shape, pads[:rank], pads[rank:]):
        if not (isinstance(size, int) and isinstance(begin, int) and isinstance(end, int)):
            return derived(b, n, cotangents, needed)
        every.append((size, _runs(size, begin, end, mode)))
    if any(len(runs) > MOST for _, runs in every):
        return derived(b, n, cotangents, needed)
    if x.type.size == 0 or g.type.size == 0:
        return {0: zeros(b, x.type)}
    for axis, (size, runs) in enumerate(every):
        if (pads[axis], pads[rank + axis]) != (0, 0):
            g = _collected(b, g, axis, runs, size)
    return {0: g}


def _runs(size: int, begin: int, end: int, mode: Any) -> list[Run]:
    """The result of pad along an axis, as runs of sources that go up or down by one, or stay."""
    source = np.pad(np.arange(size), (max(begin, 0), max(end, 0)), mode)
    source = source[max(-begin, 0) : len(source) - max(-end, 0)]
    runs: list[Run] = []
    at = 0
    while at < len(source):
        step = int(source[at + 1] - source[at]) if at + 1 < len(source) else 1
        step = step if abs(step) <= 1 else 1
        stop = at + 1
        while stop < len(source) and source[stop] - source[stop - 1] == step:
            stop += 1
        runs.append((at, stop - at, int(source[at]), step))
        at = stop
    return runs


def _collected(b: Builder, g: Any, axis: int, runs: Sequence[Run], size: int) -> Any:
    """The sum of the runs of an axis, each at its sources."""
    rank, total = g.type.rank, None
    for start, length, first, step in runs:
        starts, steps, shape = [0] * rank, [1] * rank, list(g.type.shape)
        starts[axis], shape[axis] = (start + length - 1 if step < 0 else start), length
        steps[axis] = step or 1
        part = b.slice(g, starts=tuple(starts), steps=tuple(steps), shape=tuple(shape))
        if not step:
            part, length = b.reduce_sum(part, axes=(axis,), keepdims=True), 1
        low = first - length + 1 if step < 0 else first
        before, after = [0] * rank, [0] * rank
        before[axis], after[axis] = low, size - low - length
        part = b.pad(part, pads=(*before, *after))
        total = part if total is None else b.add(total, part)
    return total
