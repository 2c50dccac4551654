"""Convolutions with under half a vector of outputs: lanes go over inputs, then add up.

    for w in parallel(images * rows * tiles):
        part[mr, nv, V] = 0
        for blocks of channels, taps: part[im, jn, :] += x[im, :] * w[jn, :]
        y = epilogue(hsum(part[im, jn, :]))

Filters lie as images do, in blocks of input channels. Whole blocks waste nothing; loads equal products.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import CHAIN, PART, parallel_outer, worth
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import For, Kernel, walk_stmts
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.window import node_window
from dnnc.ir.types import Dense
from dnnc.passes.schedule.cascade import cascade
from dnnc.passes.schedule.loops import annotate, fuse, hoist_guards, narrow, reorder, single, split
from dnnc.passes.schedule.memory import distribute
from dnnc.passes.schedule.problem import Knobs, Problem
from dnnc.passes.schedule.rfactor import rfactor, round_up
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.version import version

HELD = 4  # registers for operands


def applies(problem: Problem) -> bool:
    """Are the filters of a convolution in blocks of its inputs, and its results in rows?"""
    conv = problem.anchor
    if (
        conv is None
        or conv.op.contraction is not ContractionForm.CONVOLUTION
        or conv.inputs[1] is None
        or not conv.output.type.row_major
    ):
        return False
    weights = conv.inputs[1].type.encoding
    if not isinstance(weights, Dense) or weights.block(1) == 1 or weights.block(0) > 1:
        return False
    s, pixel = _rows(problem)
    return any(
        isinstance(x, For) and x.var.name == problem.lowered.reductions[0][0] for x in walk_stmts(s.loop(pixel).body)
    )


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Tiles of as many pixels as there are registers for, of all outputs or half of them."""
    s, pixel = _rows(problem)
    outputs, pixels = s.extent(problem.lowered.out_loops[1]), s.extent(pixel)
    if not isinstance(outputs, int):
        return []
    found: list[Knobs] = []
    for nv in (n for n in range(min(outputs, target.registers // 4), 0, -1) if outputs % n == 0):
        most = max((target.registers - HELD) // nv, 1)
        mr = min(most, pixels) if isinstance(pixels, int) else most
        if isinstance(pixels, int):  # as even tiles as there can be
            mr = -(-pixels // -(-pixels // mr))
        if problem.inplace:  # no pixel may be computed twice
            mr = (
                next(m for m in range(mr, 0, -1) if isinstance(pixels, int) and pixels % m == 0)
                if isinstance(pixels, int)
                else 1
            )
        found.append((("mr", mr), ("nv", nv), ("ku", 1), ("order", "rows"), ("pf", 0)))
    return found[:2]


def _rows(problem: Problem) -> tuple[Schedule, str]:
    """The nest with its pixels in one loop: those of the last axis, or all where a pixel has one tap."""
    conv, s = problem.anchor, Schedule(problem.kernel)
    assert conv is not None and conv.inputs[1] is not None
    spatial = problem.lowered.out_loops[2:]
    flat = node_window(conv.inputs[1].type.shape[2:], conv.attrs).flat
    pixel = next((n for n in reversed(spatial) if s.extent(n) != 1), spatial[-1])
    if flat and pixel == spatial[-1] != spatial[0]:
        with suppress(ScheduleError):
            s.apply(fuse, spatial[-2], pixel, "p")
            pixel = "p"
    return s, pixel


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s, pixel = _rows(problem)
    image, output = problem.lowered.out_loops[:2]
    rows = [n for n in problem.lowered.out_loops[2:] if s.has(n) and n != pixel]
    channels, *taps = problem.lowered.reductions[0]
    lanes = problem.anchor.inputs[1].type.encoding.block(1)  # type: ignore[union-attr]
    fixed = isinstance(s.extent(pixel), int)
    s.apply(round_up, channels, lanes).apply(split, channels, lanes, ("rb", "rl")).apply(
        reorder, "rb", *taps, "rl"
    ).apply(rfactor, "rb", "rl")
    s.apply(split, output, int(knobs["nv"]), ("jo", "jn"))
    s.apply(split, pixel, int(knobs["mr"]), ("po", "im"), tail="overlap" if fixed else "clamp")
    s.apply(single, *(n for n in rows if s.extent(n) == 1))
    rows = [n for n in rows if s.has(n)]
    s.apply(reorder, image, "jo", *rows, "po", "im", "jn").apply(distribute, "im", 2)
    tiles = [t for t in ("", *(f"_{k}" for k in range(1, 9))) if s.has("im" + t)]
    sums = next(
        t for t in tiles if any(isinstance(x, For) and x.var.name == "rb" for x in walk_stmts(s.loop("im" + t).body))
    )
    s.apply(reorder, "rb", *taps, "im" + sums, "jn" + sums)
    s.apply(annotate, "unroll", *(n + t for t in tiles for n in ("im", "jn"))).apply(hoist_guards)
    tap = problem.lowered.reductions[0][1 + problem.lowered.out_loops[2:].index(pixel)] if pixel != "p" else taps[-1]
    with suppress(ScheduleError):  # pixels of which some are the last one again are asked one by one
        s.apply(version, tap, "im" + sums)
    s.apply(annotate, "unroll", *(n for n in (f"im{sums}_b", f"jn{sums}_b") if s.has(n))).apply(narrow)
    if not knobs.get("chain"):
        s.apply(cascade, PART, CHAIN)
    parallel_outer(s, [image, "jo", *rows, "po"], worth(knobs, problem.form.elements))
    return s.done()
