"""Recipe for the filters' gradient of a convolution: a register tile of input channels x panels of output channels.

    for jo in parallel(panels/nv * blocks):        a block of inputs
        for ks in stretches of pixels:             what they read stays in the L1 cache while all taps pass
            for taps, channels/mr:                 sums of all tiles lie in memory between stretches
                acc[mr, nv, V]
                for pixels of the stretch: acc[im, jn, :] += x[pixel*stride + tap, im] * g[pixel, jn, :]
                w = acc

The vectors are output channels, which lie side by side in g and in the filters; pixels are the long sum. Padding is the
bounds of the loops over pixels, so no product is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import try_fuse
from dnnc.ir.expr import Var, extent, value
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.op import ContractionForm
from dnnc.passes.lower.form import Contraction, Normed
from dnnc.passes.schedule.k_blocking import stretches
from dnnc.passes.schedule.loops import annotate, fuse, hoist_guards, narrow, reorder, split
from dnnc.passes.schedule.memory import distribute, vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule

ORDER = ("px",)  # stretches do not change the order of a sum; their length is here for those that are not whole
PIXELS = 192  # of a stretch: 6 KB of each panel


@dataclass(frozen=True)
class Nest:
    """Which loop of the naive nest plays which part."""

    panel: Var  # blocks of output channels
    lane: Var
    channel: Var  # the rows of a tile: channels of a block, or the taps of a row where channels are few
    outer: tuple[Var, ...]  # the others: blocks of channels, taps
    pixels: tuple[Var, ...]  # images, then pixels: what is summed over


def nest_of(problem: Problem) -> Nest | None:
    """The parts of the loops; None where the kernel is no such sum, or its operands do not lie in blocks."""
    c, anchor = problem.form, problem.anchor
    if anchor is None or anchor.op.contraction is not ContractionForm.FILTERS or problem.inplace:
        return None
    if not isinstance(c, Contraction) or isinstance(c, Normed) or c.empty or not c.outer:
        return None
    lane = c.outer[-1]
    if lane not in c.panels or lane not in c.around or any(value(extent(v)) is None for v in c.outer):
        return None
    panel = c.panels[lane]
    others = [v for v in c.outer if v not in (lane, panel)]
    sizes = [value(extent(v)) or 0 for v in others]
    if c.batch.loops and lane in c.batch.vars:  # every lane has inputs of its own
        channel = others[-1]
    else:
        blocked = [v for v in others if v in c.panels]
        channel = blocked[-1] if blocked else others[max(range(len(others)), key=lambda k: (sizes[k], k))]
    return Nest(panel, lane, channel, tuple(v for v in others if v is not channel), c.red.loops)


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return _settings(problem, target)[:4]


def _settings(problem: Problem, target: CpuTarget) -> list[Knobs]:
    nest = nest_of(problem)
    if nest is None:
        return []
    panels, rows = (value(extent(v)) or 1 for v in (nest.panel, nest.channel))
    scored = []
    for nv in (1, 2, 3, 4, 6):
        for mr in range(1, rows + 1):
            if nv > panels or mr * nv + nv + 1 > target.registers:
                continue
            tiles = -(-panels // nv) * -(-rows // mr)
            cycles = max(mr * nv / target.rates.fma, (mr + nv) / target.rates.loads, target.rates.latency)
            scored.append((tiles * cycles, -mr * nv, nv, mr))
    return [(("mr", mr), ("nv", nv), ("px", PIXELS)) for *_, nv, mr in sorted(scored)]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Register tiles, and lengths of stretches for the best of them."""
    every = _settings(problem, target)
    return [*every, *(varied(k, px=px) for k in every[:6] for px in (0, 48, 96, 384, 768))]


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    nest = nest_of(problem)
    assert nest is not None
    s = Schedule(problem.kernel)
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
    names = [*outer, "mo"]
    shared = "jo"
    blocks = [n for n in outer if nest.panel.name != n and s.extent(n) != 1][:1]
    if blocks and pixels[0] == "ks" and blocks[0] == outer[0]:
        s.apply(fuse, "jo", outer[0], "w")
        shared, names = "w", names[1:]
    while len(names) > 1:
        b, a = names.pop(), names.pop()
        s.apply(fuse, a, b, f"t{len(names)}")
        names.append(f"t{len(names)}")
    if pixels[0] == "ks":
        s.apply(stretches, names[0], "ks")
    s.apply(narrow)
    if s.extent(shared) != 1:
        s.apply(annotate, "parallel", shared)
    return s.done()


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
