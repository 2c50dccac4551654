"""What the contraction recipe does for weights that are stored in few bits: their codes are decoded in registers.

    for rb in range(blocks):                     a block of rows that share scales
        t[mr, nv, V] = 0
        for ko in range(words): for ku in unroll(8):           a word holds 8 codes of a column
            t[im, jn, :] += a[im, k] * lookup(word[jn, :] >> 4 * ku)
        acc[im, jn, :] += t[im, jn, :] * scale[rb, jn, :]

Few rows wait for memory, so each panel's codes are asked for ahead of their use.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from dnnc.backends.llvm.templates.register_tiles import Nest
from dnnc.ir.encodings import Packed
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import const, substitute
from dnnc.ir.graph import Node, Value
from dnnc.ir.loops.stmt import accesses
from dnnc.ir.op import Trait
from dnnc.passes.schedule.factor import factor
from dnnc.passes.schedule.memory import prefetch
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.state import Schedule

AHEAD = 1024  # bytes of a panel between what is read and what is asked for
LINE = 64  # bytes of a line of the cache
FEW_ROWS = 6  # up to which memory, and not arithmetic, takes the time
BESIDE = 4  # registers that hold no sum


def decoder(problem: Problem) -> Node | None:
    """The node of the kernel that decodes the second factor of its product."""
    w = problem.anchor.inputs[1] if problem.anchor is not None and len(problem.anchor.inputs) > 1 else None
    n = w.node if w is not None else None
    held = n is not None and Trait.STORED in n.op.traits and n.inputs[0] in problem.lowered.params
    return n if held else None


def weights_of(problem: Problem) -> Value | None:
    """The second factor of a product as it lies in memory."""
    n = decoder(problem)
    return n.inputs[0] if n is not None else problem.anchor.inputs[1] if problem.anchor is not None else None


def blocked(problem: Problem, nest: Nest) -> Nest:
    """The nest with its sum in blocks that share scales, and in words of codes."""
    n = decoder(problem)
    if n is None or n.inputs[0] is None:
        return nest
    t = n.inputs[0].type
    codes = t.encoding.layout.parts[-1].mod if isinstance(t.encoding, Packed) else 4
    rows, block = t.shape[-2] if t.rank > 1 else 0, n.attrs["block"]
    along = n.attrs["axis"] % t.rank == t.rank - 2 and isinstance(rows, int)
    if not along or rows % codes or block % codes:
        return replace(nest, codes=1)
    return replace(nest, codes=codes, block=block if block < rows else 0)


def scale_sums(s: Schedule, nest: Nest, knobs: Mapping[str, int | str], registers: int, tag: str) -> None:
    """Multiply the sums of blocks by their scales, where there are registers for both sums."""
    sums = 2 * int(knobs["mr"]) * int(knobs["nv"])
    if nest.codes and not knobs.get("scaled") and sums + BESIDE <= registers:
        with suppress(ScheduleError):
            s.apply(factor, "ko" + tag)


def prefetch_codes(s: Schedule, problem: Problem, knobs: Mapping[str, int | str], tag: str) -> None:
    """Ask for the codes of each panel ahead of their use."""
    at, w = "ko" + tag, weights_of(problem)
    if decoder(problem) is None or w is None or int(knobs["mr"]) > FEW_ROWS or not s.has(at):
        return
    buf = s.kernel.entry.buffers[problem.lowered.params.index(w)]
    inner = {s.loop(n + tag + "_1").var for n in ("im", "jn") if s.has(n + tag + "_1")} | {s.loop("ku" + tag).var}
    read = next((x for x in accesses(s.loop(at).body) if x.buf is buf), None)
    if read is None:
        return
    row = LINE // (int(str(buf.shape[-1])) * buf.dtype.bytes) or 1
    for j in range(int(knobs["nv"])):
        place = [substitute(i, {v: const(j if v.name.startswith("jn") else 0) for v in inner}) for i in read.idx]
        later, rows = place[-2] + AHEAD // LINE * row, buf.shape[-2]  # behind a panel's end comes the tile's next panel
        place[-3:-1] = [place[-3] + later // rows * int(knobs["nv"]), later % rows]
        s.apply(prefetch, at, buf.name, tuple(place))
