"""Recipe for matmul and convolution: a register tile of pixels (rows) x panels of vectors.

    for p in parallel(panels/nv * outer):          contiguous shares; a panel's weights stay in the L2 cache while
                                                   pixels pass,
        for po in range(pixels/mr):                or all weights do while rows pass; first and last tile peeled where
                                                   padding guards them
            acc[mr, nv, V] = 0
            for r ...: acc[im, jn, :] += a[im, r] * b[r, jn, :]      broadcast times vector, mr*nv accumulators in
                                                                     registers
            y = epilogue(acc)

The tile must hide the FMA latency (4 cycles, 2 a cycle: >= 8 accumulators) and load less than it computes: mr + nv
loads for mr * nv FMAs at 2 loads a cycle. Padding is loop bounds and peeled tiles, never a mask: as fast as a halo.
Parts of a long sum are added up apart, so that no chain of additions is long, except with strict numerics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import dots
from dnnc.backends.llvm.templates.common import CHAIN, PART, try_fuse
from dnnc.backends.llvm.templates.half import widen_rows
from dnnc.backends.llvm.templates.prefetching import prefetch_next_panel, prefetch_next_pixels
from dnnc.backends.llvm.templates.register_tiles import NARROW, Nest, streams, tiles, window_cycles
from dnnc.backends.llvm.templates.stored import blocked, prefetch_codes, scale_sums, weights_of
from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.encodings import Winograd, neighbours, quads_of
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Var, const, extent, free, unwrap, value
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.conv import panels_of
from dnnc.ir.ops.window import node_window
from dnnc.ir.sparse import Sparse
from dnnc.ir.types import product
from dnnc.passes.lower.form import Axis, Contraction, Normed
from dnnc.passes.schedule.cascade import cascade
from dnnc.passes.schedule.k_blocking import LIMIT, stretches
from dnnc.passes.schedule.loops import annotate, fuse, hoist_guards, join, narrow, peel, reorder, single, split
from dnnc.passes.schedule.matrix_tiles import matrix_tiles
from dnnc.passes.schedule.memory import distribute, fission, vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.quads import quads
from dnnc.passes.schedule.rfactor import round_up
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.version import version

GAIN = 1.1  # over rows of pixels that rows of images must promise, which lie far apart
FEW_ROWS = 256  # of all tiles of a panel: with more of them a panel's first reading is a small part of its time


EVERY = (1, 2, 3, 4, 5, 6, 8)  # panels of a tile in a search
UNROLLS = (1, 2, 3, 4, 5, 7, 8, 16)
# of a sum, between which the sums of all tiles lie in memory
STRETCHES = (64, 128, 192, 256, 384, 512, 768, 1024, 2048)
LONG_PANELS = 0.5  # of the L2 cache: longer panels, which every row of tiles reads anew, are cut into stretches
STRETCH = 0.15  # of the L2 cache: the panels' share of a stretch, beside the rows that pass and their sums
# tiles at each end of a row that are code of their own: more of them make more code than is worth a branch for each tap
PEELED = 2
REST = 16  # rows whose half is a tile of vectors, for what is left of tiles of matrices
UNEVEN = 1.15  # the slowest thread's share of the work over the average, from which on more loops are shared
SMALL = 1 << 22  # operations up to which one thread alone may be as fast
ORDER: tuple[str, ...] = ()  # with strict numerics every sum is one chain, whatever the other knobs


def nest_of(problem: Problem, images: bool = False) -> tuple[Schedule, Nest] | None:
    """The nest with its pixels in one loop; None when the group is no contraction that this recipe can tile.

    `images`: the rows of a tile are images in place of pixels, None where that cannot be.
    """
    anchor, c = problem.anchor, problem.form
    if anchor is None or not isinstance(c, Contraction) or isinstance(c, Normed) or len(c.outer) < 2:
        return None
    weights = anchor.inputs[1] if len(anchor.inputs) > 1 else None
    if weights is not None and isinstance(weights.type.encoding, (Winograd, Sparse)):
        return None  # these have recipes of their own
    s = Schedule(problem.kernel)
    convolves = anchor.op.contraction is ContractionForm.CONVOLUTION
    if anchor.op.contraction is ContractionForm.PRODUCT:
        found = None if images else _matmul_nest(c, s)
        found = found and blocked(problem, found)
    else:
        found = _conv_nest(anchor, c, s, images) if convolves and c.outer[-1] in c.panels else None
    size = anchor.inputs[0].type.nbytes if anchor.inputs[0] is not None else 0
    if found is None:
        return None
    if weights is not None and quads_of(weights.type) is not None:
        found = _quads(s, found, neighbours(weights.type.dtype))
    return s, replace(found, image_bytes=size if isinstance(size, int) else 0)


def _quads(s: Schedule, nest: Nest, of: int) -> Nest:
    """The reduction goes by fours of bytes or pairs of bf16, whose sum is one instruction; what fills up the last block
    holds 0.
    """
    first, *taps = nest.reduction
    n = s.extent(first)
    # of fewer inputs than a block has the nest knows that they are in one
    whole = nest.block if not isinstance(n, int) or n >= nest.block else 0
    s.apply(round_up, first, whole or of).apply(split, first, of, ("rk", "rd"))
    block = whole // of if whole or not nest.block else unwrap(s.extent("rk"))
    return replace(nest, reduction=("rk", *taps), block=block, quad="rd")


def _matmul_nest(c: Contraction, s: Schedule) -> Nest | None:
    *outer, lane = c.outer
    panels = [x for x in (*c.a.loads, *c.b.loads) if lane in free(x)]
    shared = [
        v for v in outer if panels and not any(v in free(x) for x in panels)
    ]  # rows share what is loaded of a panel
    if lane in c.panels or not shared:
        return None
    pixel = shared[-1].name
    if outer[-1] is shared[-1]:  # rows in several axes are one axis where they lie one behind the other
        outer.pop()
        while outer and outer[-1] in shared and try_fuse(s, outer[-1].name, pixel, f"p{len(outer)}"):
            pixel = f"p{len(outer)}"
            outer.pop()
    else:
        outer.remove(shared[-1])
    columns = tuple(v.name for v in outer if v not in shared)
    return Nest(tuple(v.name for v in outer), pixel, "", lane.name, _names(c.red), 0, 1, 0, columns=columns)


def _conv_nest(anchor: Node, c: Contraction, s: Schedule, images: bool) -> Nest | None:
    x, w = anchor.inputs[:2]
    assert x is not None and w is not None
    lane, panel = c.outer[-1], c.panels[c.outer[-1]]
    spatial = c.outer[c.outer.index(panel) + 1 : -1]
    group, by_panels, lanes = anchor.attrs["group"], bool(anchor.attrs["panel"]), value(extent(lane)) or 0
    depthwise = group != 1 and not by_panels
    if not spatial or (depthwise and w.type.row_major):
        return None
    if lane not in c.around or c.empty:
        return None  # a single channel: its sum is the same for all lanes
    if by_panels and lanes != anchor.attrs["panel"]:
        return None
    kernel = w.type.shape[2:]
    win = node_window(kernel, anchor.attrs)
    at = next((k for k in reversed(range(len(spatial))) if value(extent(spatial[k])) != 1), len(spatial) - 1)
    row = c.outer[0] if images else spatial[at]
    outer, pixel = [v.name for v in c.outer[:-1] if v not in (panel, row)], row.name
    if images and (depthwise or row in (panel, *spatial) or not _several(row, spatial)):
        return None
    padding = max((p for p in (win.begin[at], win.end[at]) if isinstance(p, int)), default=0)
    if images:  # all rows of a tile see the same taps
        padding = 0
    elif win.flat and len(spatial) == 2 and at == 1 and nonneg(extent(spatial[1]) - 1):
        s.apply(fuse, outer.pop(), pixel, "p")  # a 1x1 convolution of stride 1 sees its image as one row of pixels
        pixel = "p"
    block = 0 if x.type.row_major or depthwise else x.type.encoding.block(1)
    together = shuffled = 0
    if group != 1:
        sizes = x.type.shape[1], anchor.output.type.shape[1]
        panels = panels_of(*sizes, group, lanes or 1)  # type: ignore[arg-type]
        together = panels.outputs // panels.width if panels.outputs % panels.width == 0 else 1
        shuffled = panels.of_a_block if depthwise and sizes != (group, group) else 0
        block = (
            block if block and panels.inputs % block == 0 and len(set(panels.counts)) == 1 else 0
        )  # all panels read whole blocks
        if depthwise and sizes != (group, group) and not shuffled:
            return None
    red, size = _names(c.red), value(const(product([*w.type.shape[1:], w.type.dtype.bytes]))) or 0
    return Nest(
        tuple(outer), pixel, panel.name, lane.name, red, padding, win.strides[at], block, red[1 + at],
        depthwise, shuffled,
        taps=value(const(kernel[at])) or 1, together=together if by_panels else 0, panel_bytes=size * lanes,
        window=value(const(product(kernel))) or 1, images=images,
    )  # fmt: skip


def _several(images: Var, pixels: Sequence[Var]) -> bool:
    """Are there several images, and are their sizes known?"""
    return (value(extent(images)) or 1) > 1 and all(value(extent(v)) for v in pixels)


def _names(axis: Axis) -> tuple[str, ...]:
    return tuple(v.name for v in axis.loops)


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return dots.candidates(problem, target) if dots.applies(problem) else settings(problem, target)[:6]


def settings(problem: Problem, target: CpuTarget, most: tuple[int, ...] = NARROW) -> list[Knobs]:
    """Every register tile, best guess first, with the other knobs as they are by default."""
    found = [_settings_of(problem, target, most, images) for images in (False, True)]
    return [k for settings in sorted(found, key=lambda x: x[0]) for k in settings[1]]


def _settings_of(problem: Problem, target: CpuTarget, most: tuple[int, ...], images: bool) -> tuple[float, list[Knobs]]:
    """Settings whose tiles have pixels or images as rows, and the estimated cycles of the best of them."""
    found = nest_of(problem, images)
    if found is None:
        return math.inf, []
    s, nest = found
    pixels, panels = extents(s, nest, target.lanes)
    if panels is None and problem.inplace:
        return math.inf, []
    ku = _unroll(s.extent(nest.reduction[0]), nest) if nest.block or not nest.panel else 1
    order = _order(problem, target, s, nest)
    rows = bounds(const(s.extent(nest.pixel)))[1]  # of the largest size
    every = [t for t in tiles(pixels, panels, target, nest, problem.inplace, most) if rows is None or t[0] <= rows]
    fits = [
        (mr, nv) for k, (mr, nv) in enumerate(every) if not k or not nest.depthwise or _peels_borders(pixels, nest, mr)
    ]
    blocks = nest.block and not nest.codes
    ahead = (("ahead", 1),) if blocks and nest.window == 1 and streams(nest, target) else ()
    more = (("pf", int(not images)), *ahead, *((("images", 1),) if images else ()))
    cycles = window_cycles(problem, nest, fits[0], target) * (GAIN if images else 1) if fits else math.inf
    out: list[Knobs] = []
    for mr, nv in fits:
        kc = _stretch(s, nest, problem, target, (mr, nv, ku)) if order == "panels" else 0
        stretch = (("kc", kc),) if kc else ()
        out.append((("mr", mr), ("nv", nv), ("ku", ku), ("order", order), *more, *stretch))
    return cycles, out


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """All register tiles; the best of them with other orders, unrolling, prefetching, and stretches of the sum."""
    every, found = settings(problem, target, EVERY), nest_of(problem)
    if not every or found is None:
        return []
    s, nest = found
    best, out = every[:12], list(every)
    orders = _orders(s, nest, problem)
    unrolls = _unrolls(s.extent(nest.reduction[0]), nest) if nest.block or not nest.panel else [1]
    out += [varied(k, order=o) for k in best for o in orders]
    out += [varied(k, order="panels", pf=0) for k in best if "panels" in orders]
    out += [
        varied(k, ahead=1 - int(dict(k).get("ahead", 0)))
        for k in best
        if nest.block and nest.window == 1 and not nest.depthwise and not nest.codes
    ]
    out += [varied(k, ku=ku) for k in best[:8] for ku in unrolls]
    out += [
        varied(k, order=o, kc=kc)
        for k in best[:6]
        for kc in _stretches(s, nest, problem)
        for o in orders
        if o != "tiles"
    ]
    if isinstance(problem.flops, int) and problem.flops <= SMALL:
        out += [varied(k, serial=1) for k in best[:4]]
    out += [varied(k, order=o, ku=ku) for k in best[:6] for o in orders for ku in unrolls]
    return [k for k in dict.fromkeys(out) if not dict(k).get("kc") or dict(k)["kc"] % int(dict(k)["ku"]) == 0]


def _border_tiles(nest: Nest, mr: int) -> int:
    """Tiles at each end of a row of which a pixel may see padding."""
    return -(-nest.padding // (mr * nest.stride))


def _versions(nest: Nest, pixels: int | None, mr: int) -> bool:
    """True if padding taps are found at run time: for any row size, many padded tiles, or inner ones."""
    return nest.padding > 0 and (
        pixels is None or _border_tiles(nest, mr) > PEELED or not _peels_borders(pixels, nest, mr)
    )


def _peels_borders(pixels: int | None, nest: Nest, mr: int) -> bool:
    """True if the tiles that see padding behind a row are peeled; an overlapping last tile adds one."""
    if pixels is None:
        return True
    whole = (pixels - 1) // mr  # tiles ahead of the last one
    seeing = sum(nest.padding > (pixels - (whole - k) * mr) * nest.stride for k in range(whole))
    return seeing < max(-(-nest.padding // (mr * nest.stride)), 1)


def _orders(s: Schedule, nest: Nest, problem: Problem) -> list[str]:
    """The orders of the outer loops that differ: a single row, or a single panel, has one."""
    rows, panels = s.extent(nest.pixel), s.extent(nest.panel or nest.lane)
    if panels == 1 or nest.depthwise or (rows == 1 and all(s.extent(n) == 1 for n in nest.outer)):
        return ["rows"]
    whole = isinstance(rows, int) and not problem.inplace and not nest.padding
    return ["rows", "panels", *(["tiles"] if whole else [])]


def _unrolls(k: int | Expr, nest: Nest) -> list[int]:
    """Steps of the sum that may be one step of the loop."""
    every = (nest.codes, 2 * nest.codes) if nest.codes > 1 else UNROLLS
    return [u for u in every if isinstance(k, int) and k % u == 0 and nest.block % u == 0] or [1]


def _stretches(s: Schedule, nest: Nest, problem: Problem) -> list[int]:
    """Parts into which a long sum may be divided, none where it is short, or tiles are of several kinds."""
    k = s.extent(nest.reduction[0])
    if not isinstance(k, int) or nest.codes or not _alike(s, nest, problem):
        return []
    return [n for n in STRETCHES if k >= 2 * n and k % n == 0 and n % (nest.block or 1) == 0]


def _alike(s: Schedule, nest: Nest, problem: Problem) -> bool:
    """Are all tiles of one kind, so that their sums may wait in memory?"""
    return isinstance(s.extent(nest.pixel), int) and not (nest.padding or problem.inplace or nest.depthwise)


def _stretch(s: Schedule, nest: Nest, problem: Problem, target: CpuTarget, tile: tuple[int, int, int]) -> int:
    """Elements of the sum in a stretch of a product whose panels the L2 cache does not hold; 0: all in one.

    tile: (mr, nv, ku) of the register tile; a stretch is a multiple of ku.
    """
    mr, nv, ku = tile
    k, rows = s.extent(nest.reduction[0]), s.extent(nest.pixel)
    if nest.panel or nest.codes or len(nest.reduction) > 1 or not isinstance(k, int) or not _alike(s, nest, problem):
        return 0
    step = nv * target.vector_bits // 8  # bytes of the panels
    tiles_ = -(-rows // mr) if isinstance(rows, int) else 0
    if k * step <= LONG_PANELS * target.l2 or tiles_ < 2 or tiles_ * mr * nv * target.lanes > LIMIT:
        return 0
    count = -(-k // max(int(STRETCH * target.l2) // step, ku))
    return -(-k // (count * ku)) * ku


def _order(problem: Problem, target: CpuTarget, s: Schedule, nest: Nest) -> str:
    """What the outer loops run over first. All weights stay in half of the L2 cache while rows pass, or else they are
    read once, a panel at a time, with all rows passing each; so, too, where rows are few: then the next panel, asked
    for ahead, comes to the L1 cache meanwhile.
    """
    weights = weights_of(problem)
    size = weights.type.nbytes if weights is not None else 0
    rows = product([s.extent(n) for n in (*nest.outer, nest.pixel) if n not in nest.columns])
    few = isinstance(rows, int) and rows <= FEW_ROWS and nest.window == 1 and not nest.depthwise
    return "rows" if isinstance(size, int) and size <= (target.l1 if few else target.l2 // 2) else "panels"


def _unroll(k: int | Expr, nest: Nest) -> int:
    """Steps of the reduction unrolled: a divisor, so that no tail is needed, and a whole word of codes."""
    steps = (nest.codes,) if nest.codes > 1 else (4, 5, 3, 2, 7, 1)
    return next(u for u in steps if k % u == 0 and nest.block % u == 0) if isinstance(k, int) else 1


def extents(s: Schedule, nest: Nest, lanes: int) -> tuple[int | None, int | None]:
    """Pixels of a row of tiles (None: symbolic) and panels."""
    n = s.extent(nest.pixel)
    panels = s.extent(nest.panel or nest.lane)
    count = panels if nest.panel else -(-panels // lanes) if isinstance(panels, int) else None
    return (n if isinstance(n, int) else None), (count if isinstance(count, int) else None)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    if dots.applies(problem):
        return dots.apply(problem, knobs, target)
    found = nest_of(problem, bool(knobs.get("images")))
    assert found is not None
    s, nest = found
    if knobs.get("matrix"):
        nest = _straight(s, nest)
    pixel, panel, lane, apart = nest.pixel, nest.panel, nest.lane, not knobs.get("chain")
    if not panel:
        s.apply(split, lane, target.lanes, ("jp", "jv"), tail="guard")
        panel, lane = "jp", "jv"
    s.apply(
        split, panel, int(knobs["nv"]), ("jo", "jn"), tail="overlap" if isinstance(s.extent(panel), int) else "clamp"
    )
    outer = nest.order(str(knobs["order"]))
    mr = int(knobs["mr"])
    pixels = s.extent(pixel)
    rest = not isinstance(pixels, int) or (problem.inplace and pixels % mr != 0)
    if knobs.get("kc") and (rest or nest.padding):
        raise ScheduleError(f"a sum in stretches of {knobs['kc']} needs tiles that are all alike")
    if rest:  # nests of their own for the pixels that fill no tile
        s.apply(reorder, pixel, *(n for n in outer if n != "po"), "jn", lane)
    s.apply(split, pixel, mr, ("po", "im"), tail="peel" if rest else "overlap")
    tags = _smaller_tiles(s, pixel, REST if knobs.get("matrix") else mr, problem.inplace)
    for tag in tags:
        _tile(s, nest, outer, lane, knobs, tag)
        scale_sums(s, nest, knobs, target.registers, tag)
    s.apply(hoist_guards)
    if _versions(nest, pixels if isinstance(pixels, int) else None, mr):
        for tag in tags:
            s.apply(annotate, "unroll", f"im{tag}_1")
            with suppress(ScheduleError):  # else each pixel asks for itself
                s.apply(version, nest.tap + tag, f"im{tag}_1")
    s.apply(narrow)
    first, *others = [_finish(s, problem, nest, outer, knobs, tag, target) for tag in tags]
    if (
        not problem.inplace and knobs["order"] == "panels"
    ):  # a panel's weights then come once for all, which is what few rows wait for
        with suppress(ScheduleError):
            for other in others:
                s.apply(join, first, other)
    if apart:
        s.apply(cascade, PART, CHAIN)
    return s.done()


def _smaller_tiles(s: Schedule, pixel: str, mr: int, inplace: bool) -> list[str]:
    """Tile leftover pixels by smaller tiles, so that few rows cost little. Returns all nests' suffixes.

    Half a tile, and what is left then: up to two by one tile of their number, more by a tile that repeats the last
        pixel.
    """
    half = max(mr // 2, 1)
    sizes = tuple(range(half, 0, -1)) if half <= 3 else (half, 1) if inplace else (half, -(-half // 2))
    tags = [""]
    for rows in sizes:
        left, tag = pixel + tags[-1] + "_t", tags[-1] + "_t"
        if not s.has(left):
            break
        s.apply(split, left, rows, ("po" + tag, "im" + tag), tail="peel" if rows in (1, half) or half <= 3 else "clamp")
        tags.append(tag)
    return tags


def _tile(s: Schedule, nest: Nest, outer: list[str], lane: str, knobs: Mapping[str, int | str], tag: str) -> None:
    """Bring one nest, whose loops carry the suffix `tag`, into the form of a register tile."""
    if knobs.get("matrix") and not tag:
        _matrix_tile(s, nest, outer, lane, knobs)
        return
    s.apply(reorder, *(n + tag for n in (*outer, *(["po"] if "po" not in outer else []), "im", "jn", lane)))
    s.apply(distribute, "im" + tag, 3)
    red = _split_reduction(s, nest, int(knobs["ku"]), int(knobs.get("kc", 0)), tag)
    quad = [nest.quad + tag] if nest.quad else []
    s.apply(reorder, *red, *(f"{n}{tag}_1" for n in ("im", "jn", lane)), *quad)
    if quad:
        s.apply(quads, f"{lane}{tag}_1", *quad)
    s.apply(vectorize, *(f"{lane}{tag}{k}" for k in ("", "_1", "_2") if not (quad and k == "_1")))


def _straight(s: Schedule, nest: Nest) -> Nest:
    """A nest without loops over single taps: pixels of several rows then lie one behind the other."""
    single_taps = [n for n in nest.reduction[1:] if s.extent(n) == 1]
    s.apply(single, *single_taps).collapse()
    return replace(nest, reduction=tuple(n for n in nest.reduction if n not in single_taps))


def _matrix_tile(s: Schedule, nest: Nest, outer: list[str], lane: str, knobs: Mapping[str, int | str]) -> None:
    """The same in registers of two dimensions, for whole tiles."""
    s.apply(split, "im", int(knobs["matrix"]), ("it", "ir"))
    s.apply(reorder, *outer, *(["po"] if "po" not in outer else []), "it", "jn", "ir", lane)
    s.apply(distribute, "it", 4)
    *red, step = _split_reduction(s, nest, int(knobs["ku"]), 0, "")
    steps = ("it_1", "jn_1", "ir_1", step, f"{lane}_1", nest.quad)
    s.apply(reorder, *red, *steps).apply(matrix_tiles, *steps).apply(vectorize, f"{lane}_2")
    s.apply(annotate, "unroll", "jn_2")


def _finish(
    s: Schedule,
    problem: Problem,
    nest: Nest,
    outer: list[str],
    knobs: Mapping[str, int | str],
    tag: str,
    target: CpuTarget,
) -> str:
    """Unroll, prefetch, widen, peel for padding, and share outer loops among threads; return the shared loop."""
    lanes, threads = target.lanes, target.threads
    if nest.shuffled:
        s.apply(annotate, "unroll", *(n for n in (nest.reduction[0] + tag, f"{nest.reduction[0]}{tag}_b") if s.has(n)))
    unrolled = [f"{n}{tag}{k}" for n in ("im", "jn") for k in ("", "_1", "_2", "_1_b")] + ["ku" + tag, f"ku{tag}_b"]
    tap = nest.tap + tag
    if nest.depthwise and s.has(tap) and isinstance(s.extent(tap), int):  # no loop where all taps lie on padding
        unrolled.append(tap)
    s.apply(annotate, "unroll", *(n for n in unrolled if s.has(n)))
    if knobs.get("pf") and s.has("ko" + tag) and knobs["order"] == "panels":
        prefetch_next_panel(s, problem, knobs, outer, nest, tag)
    if knobs.get("pf") and knobs["order"] == "panels":
        prefetch_codes(s, problem, knobs, tag)
    if knobs.get("ahead") and not tag and s.has("rb"):
        prefetch_next_pixels(s, problem, int(knobs["mr"]))
    by_matrix = bool(knobs.get("matrix")) and not tag
    if not by_matrix:
        widen_rows(s, nest.reduction[1:], tag, int(knobs["mr"]), lanes)
    po = "po" + tag
    peeled = _border_tiles(nest, int(knobs["mr"]))
    if (
        peeled and not s.has(f"im{tag}_1_b") and s.has(po) and isinstance(s.extent(po), int)
    ):  # a row of symbolic size keeps its checks
        s.apply(peel, po, first=peeled, last=peeled)
        # the taps of a row at the borders: whether one falls on padding is then known per pixel, and costs nothing
        taps = [x for x in (f"{tap}_{end}{k}" for end in "fl" for k in range(peeled)) if s.has(x)]
        s.apply(annotate, "unroll", *taps)
        widen_rows(s, nest.reduction[1:], tag, int(knobs["mr"]), lanes)  # of tiles that reach no border any more
    if knobs.get("kc"):
        s.apply(stretches, po, "ks" + tag, not knobs.get("chain"))
    return _parallel(s, [n + tag for n in outer], po, tag, 0 if knobs.get("serial") else threads)


def _split_reduction(s: Schedule, nest: Nest, ku: int, kc: int, tag: str) -> list[str]:
    """Order the reduction loops: stretches of kc elements, channel blocks, taps, channels (unrolled ku times)."""
    first, *taps = (n + tag for n in nest.reduction)
    steps, unroll, block, stretch = "ko" + tag, "ku" + tag, "rb" + tag, "ks" + tag
    if kc and ((nest.panel and not nest.block) or kc % (nest.block or ku)):
        raise ScheduleError(f"a sum over {first} cannot be divided into stretches of {kc}")
    if nest.shuffled:  # the inputs of a group inside, but around the taps of a row, which share shuffled pixels
        return [*(t for t in taps if t != nest.tap + tag), first, nest.tap + tag]
    if not nest.block and nest.panel:
        return [first, *taps]
    if not nest.block:
        s.apply(split, first, ku, (steps, unroll))
        if kc:
            s.apply(split, steps, kc // ku, (stretch, steps), tail="guard")  # the last one may be shorter
        return [*taps, *([stretch] if kc else []), steps, unroll]
    s.apply(split, first, ku, ("rq" + tag, unroll))
    s.apply(split, "rq" + tag, nest.block // ku, (block, steps), tail="guard")  # the last block may not be full
    if kc:
        s.apply(split, block, kc // nest.block, (stretch, block))
    return [*([stretch] if kc else []), block, *taps, steps, unroll]


def _parallel(s: Schedule, outer: list[str], po: str, tag: str, threads: int) -> str:
    """Fuse outer loops, with tiles unless peeled, into one named parallel loop. 0 threads: it is not shared."""
    names = [*outer, po] if po not in outer and s.has(po) and len(s.loop(outer[-1]).body) == 1 else list(outer)
    while len(names) > 1:
        b, a = names.pop(), names.pop()
        made = f"w{len(names)}{tag}"
        try:
            s.apply(fuse, a, b, made)
        except ScheduleError:  # the inner loop may be empty: one that is outside of it
            made = a
        names.append(made)
    if threads:
        _share(s, names[0], po, f"{names[0]}{tag}_t", threads)
    return names[0]


def _share(s: Schedule, loop: str, po: str, tiles: str, threads: int) -> None:
    """Share a loop among threads. Where it leaves some of them idle, peeled tiles become nests of their own, and those
    between them (a long row of a signal) are shared too, as a loop called `tiles`.
    """
    n, mark = s.extent(loop), s.mark()
    uneven = isinstance(n, int) and -(-n // threads) * threads > UNEVEN * n
    if uneven and s.has(po) and isinstance(row := s.extent(po), int) and row >= threads:
        with suppress(ScheduleError):
            s.apply(fission, loop, po).apply(fuse, loop + "_m", po, tiles)
            s.apply(annotate, "parallel", *(x for x in (loop, tiles, loop + "_l") if s.has(x)))
            return
        s.restore(mark)
    s.apply(annotate, "parallel", loop)
