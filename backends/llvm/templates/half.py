"""What the contraction recipe does for operands that are stored in 16 bits: the broadcast one is widened a tile ahead.

In the inner loop an element of the rows' operand is broadcast to all lanes: converted there, it costs as much as
several multiply-adds. Converted ahead, a vector at a time, into a tile that stays in the L1 cache, it costs 1/16 of
that; the panels' operand is converted as it is loaded (2 instructions for as many multiply-adds as rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import accesses
from dnnc.passes.schedule.loops import split
from dnnc.passes.schedule.stage import stage
from dnnc.passes.schedule.state import Schedule

TILE = 8192  # elements of a widened tile: 32 KB, most of an L1 cache


def narrow_reads(s: Schedule, loop: str) -> list[str]:
    """The buffers of small floats of which a loop reads single elements."""
    reads = [x for x in accesses(s.loop(loop).body) if x.buf.space == "global" and x.lanes == 1]
    return sorted({x.buf.name for x in reads if x.buf.dtype.is_float and x.buf.dtype.computed is not x.buf.dtype})


def widen_rows(s: Schedule, taps: Sequence[str], tag: str, rows: int, lanes: int) -> None:
    """Stage the broadcast operand of a tile's reduction: all taps of a channel block, or a stretch of a matmul's k."""
    at = (taps[0] if taps else "ko") + tag
    if not s.has(at):
        return
    whole = not taps and s.has("rb" + tag) and _elements(s, ("rb", "ko", "ku"), tag) * rows <= TILE
    at = "rb" + tag if whole else at  # once for all blocks that share a scale
    for name in narrow_reads(s, at):
        mark = s.mark()
        try:
            if not taps and not whole:
                _stretch(s, tag, rows)
            s.apply(stage, at, name, f32, lanes)
        except ScheduleError:  # it is read in a way that no copy serves: it is converted where it is read
            s.restore(mark)


def _elements(s: Schedule, names: Sequence[str], tag: str) -> float:
    """Iterations of nested loops, infinite where one of them is not known."""
    extents = [s.extent(n + tag) for n in names]
    return math.prod(n if isinstance(n, int) else math.inf for n in extents)


def _stretch(s: Schedule, tag: str, rows: int) -> None:
    """Split a long `ko` so that a stretch's tile stays in L1: by the largest divisor, if not too short."""
    steps, unroll = s.extent("ko" + tag), s.extent("ku" + tag)
    if not isinstance(steps, int) or not isinstance(unroll, int) or steps * unroll * rows <= TILE:
        return
    best = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * unroll * rows <= TILE))
    if best * unroll >= 128:
        s.apply(split, "ko" + tag, best, ("kc" + tag, "ko" + tag))
