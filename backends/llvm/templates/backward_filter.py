"""Recipe for the filters' gradient of a convolution: a register tile of input channels x panels of output channels.

    for w in parallel(panels/nv * blocks):         a block of inputs; with few of them, also taps and channels/mr
        for ks in stretches of pixels:             what they read stays in the L1 cache while all taps pass
            for t in taps * channels/mr:           sums of all tiles lie in memory between stretches
                acc[mr, nv, V]
                for pixels of the stretch: acc[im, jn, :] += x[pixel*stride + tap, im] * g[pixel, jn, :]
                w = acc

The vectors are output channels, which lie side by side in g and in the filters; pixels are the long sum. Padding is the
bounds of the loops over pixels, so no product is masked. A stretch is added up apart from those before it, so that no
chain of additions is long, except with strict numerics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import try_fuse
from dnnc.ir.expr import Var, const, extent, value
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.op import ContractionForm
from dnnc.passes.lower.form import Contraction, Normed
from dnnc.passes.schedule.cascade import cascade
from dnnc.passes.schedule.k_blocking import stretches
from dnnc.passes.schedule.loops import annotate, fuse, hoist_guards, narrow, reorder, split
from dnnc.passes.schedule.memory import distribute, vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule

ORDER = ("px", "chain")
PIXELS = 192  # of a stretch: 6 KB of each panel
MANY = 4  # pieces of a thread: with more of them one more or less makes little difference


@dataclass(frozen=True)
class Nest:
    """Which loop of the naive nest plays which part."""

    panel: Var  # blocks of output channels
    lane: Var
    channel: Var  # the rows of a tile: channels of a block, or the taps of a row where channels are few
    outer: tuple[Var, ...]  # the others: blocks of channels, taps
    pixels: tuple[Var, ...]  # images, then pixels: what is summed over
    depthwise: bool  # every lane has inputs of its own
    together: int = 1  # panels of a group, which read the same inputs


def nest_of(problem: Problem) -> Nest | None:
    """The parts of the loops; None where the kernel is no such sum, or its operands do not lie in blocks."""
    c, anchor = problem.form, problem.anchor
    if anchor is None or anchor.op.contraction is not ContractionForm.FILTERS:
        return None
    if not isinstance(c, Contraction) or isinstance(c, Normed) or c.empty or not c.outer:
        return None
    lane = c.outer[-1]
    if lane not in c.panels or lane not in c.around or any(value(extent(v)) is None for v in c.outer):
        return None
    panel = c.panels[lane]
    others = [v for v in c.outer if v not in (lane, panel)]
    sizes = [value(extent(v)) or 0 for v in others]
    depthwise = bool(c.batch.loops) and lane in c.batch.vars
    if depthwise:
        channel = others[-1]
    else:
        blocked = [v for v in others if v in c.panels]
        channel = blocked[-1] if blocked else others[max(range(len(others)), key=lambda k: (sizes[k], k))]
    return Nest(
        panel,
        lane,
        channel,
        tuple(v for v in others if v is not channel),
        c.red.loops,
        depthwise,
        _together(anchor, lane),
    )


def _together(anchor: Node, lane: Var) -> int:
    """The number of panels of a group."""
    made, lanes = anchor.output.type.shape[0], value(extent(lane)) or 1
    each = made // anchor.attrs["group"] if isinstance(made, int) else 0
    return max(each // lanes, 1) if anchor.attrs["group"] > 1 else 1


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return _settings(problem, target)[:4]


def _settings(problem: Problem, target: CpuTarget) -> list[Knobs]:
    nest = nest_of(problem)
    if nest is None:
        return []
    panels, rows = (value(extent(v)) or 1 for v in (nest.panel, nest.channel))
    others, rates, scored = math.prod(value(extent(v)) or 1 for v in nest.outer), target.rates, []
    for nv in (1, 2, 3, 4, 6):
        for mr in range(1, rows + 1):
            overlap = panels % nv or rows % mr  # elements computed twice, which nothing may be read again for
            if nv > panels or mr * nv + nv + 1 > target.registers or (overlap and problem.inplace):
                continue
            pieces = -(-panels // nv) * -(-rows // mr) * others
            each = -(-pieces // target.threads) if pieces < MANY * target.threads else pieces / target.threads
            loads = nv + mr * (nv if nest.depthwise else 1)
            cycles = max(mr * nv / rates.fma, loads / rates.loads, rates.latency)
            scored.append((each * cycles, -mr * nv, nv, mr))
    # which inputs a tile of parts of groups reads would depend on the lane
    whole = [tile for tile in scored if tile[2] % nest.together == 0]
    return [(("mr", mr), ("nv", nv), ("px", PIXELS)) for *_, nv, mr in sorted(whole or scored)]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Register tiles, and lengths of stretches for the best of them."""
    every = _settings(problem, target)
    return [*every, *(varied(k, px=px) for k in every[:6] for px in (0, 48, 96, 384, 768))]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    nest = nest_of(problem)
    assert nest is not None
    s = Schedule(problem.kernel)
    apart = not knobs.get("chain")
    lane, mr, nv = nest.lane.name, int(knobs["mr"]), int(knobs["nv"])
    pixels = _joined_pixels(s, nest)
    outer = [v.name for v in nest.outer]
    s.apply(split, nest.panel.name, nv, ("jo", "jn"), tail="overlap")
    s.apply(split, nest.channel.name, mr, ("mo", "im"), tail="overlap")
    s.apply(reorder, "jo", *outer, "mo", "im", "jn", lane)
    s.apply(distribute, "im", 3)
    pixels = _stretched(s, pixels, int(knobs["px"]))
    s.apply(reorder, *pixels, "im_1", "jn_1", f"{lane}_1")
    s.apply(vectorize, *(f"{lane}{k}" for k in ("", "_1", "_2")))
    s.apply(annotate, "unroll", *(f"{n}{k}" for n in ("im", "jn") for k in ("", "_1", "_2")))
    s.apply(hoist_guards)
    every = ["jo", *outer, "mo"]
    units = [_size(s, n) for n in every]
    first = 2 if pixels[0] == "ks" and outer and units[1] != 1 else 1
    k = next((k for k in range(first, len(every)) if _balanced(math.prod(units[:k]), target.threads)), len(every))
    shared, tiles = _fused(s, every[:k], "w"), _fused(s, every[k:], "t")
    if pixels[0] == "ks" and tiles and s.extent(tiles) != 1:  # a single tile keeps its sums in registers throughout
        s.apply(stretches, tiles, "ks", apart)
    s.apply(narrow)
    if apart:  # also of a single tile, and of sums without stretches
        s.apply(cascade)
    if s.extent(shared) != 1:
        s.apply(annotate, "parallel", shared)
    return s.done()


def _size(s: Schedule, name: str) -> int:
    return value(const(s.extent(name))) or 1


def _balanced(pieces: int, threads: int) -> bool:
    """Do all threads have about as much to do?"""
    return pieces % threads == 0 or pieces >= MANY * threads


def _fused(s: Schedule, names: list[str], prefix: str) -> str:
    """A nest of loops as one loop, whose name begins so; "" where there is none."""
    while len(names) > 1:
        *names, a, b = names
        s.apply(fuse, a, b, f"{prefix}{len(names)}")
        names.append(f"{prefix}{len(names)}")
    return names[0] if names else ""


def _joined_pixels(s: Schedule, nest: Nest) -> list[str]:
    """The loops of the sum, those of an image as one where no tap moves and nothing is padded."""
    names = [v.name for v in nest.pixels]
    while len(names) > 2 and try_fuse(s, names[-2], names[-1], f"p{len(names)}"):
        names[-2:] = [f"p{len(names)}"]
    return names


def _stretched(s: Schedule, pixels: list[str], most: int) -> list[str]:
    """Cut the outermost loops of a sum into stretches of about `most` pixels, the loop `ks`."""
    images, rows, *row = pixels
    each = 1
    for n in row:
        size = s.extent(n)
        each *= size if isinstance(size, int) else 1
    count, number = s.extent(rows), s.extent(images)
    if not most or not isinstance(count, int) or not isinstance(number, int):
        return pixels
    if count * each * number <= 2 * most:
        return pixels
    if count * each > most:
        s.apply(split, rows, max(most // each, 1), ("ro", "ri"), tail="guard")
        s.apply(reorder, images, "ro", "ri", *row)
        s.apply(fuse, images, "ro", "ks")
        return ["ks", "ri", *row]
    s.apply(split, images, max(most // (count * each), 1), ("ks", "ni"), tail="guard")
    return ["ks", "ni", rows, *row]
