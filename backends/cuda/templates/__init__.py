"""The schedules of the CUDA backend, in the order in which a problem tries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates import maps, threads
from dnnc.backends.cuda.templates.attention import template as attention
from dnnc.backends.cuda.templates.contraction import (
    decoded,
    gemv,
    gemv_norm,
    immediates,
    mma,
    patch,
    simt,
    sparse,
    sparse_blocks,
    sparse_gather,
    tf32,
    tf32x3,
    two_of_four,
    two_of_four_rows,
    wgmma,
    window,
)
from dnnc.backends.cuda.templates.reduction import recurrence, reduce, scatter, segments, sequence
from dnnc.ir.loops.stmt import Eval, For, Kernel, walk_stmts
from dnnc.passes.schedule.problem import Knobs, Problem, Template
from dnnc.passes.schedule.state import replace_stmt

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget


THREADS = ("thread.x", "warp", "lane")


def templates(target: GpuTarget, rounded: bool = False, strict: bool = False) -> tuple[Template, ...]:
    """`rounded`: f32 contraction operands may become TF32. `strict`: any choice gives the same bits."""
    made = (
        _template("attention", attention, target),
        _template("recurrence", recurrence, target),  # loops that are one kernel
        replace(_template("sparse", sparse, target), sparse=True),  # weights with zeros that are not stored
        replace(_template("sparse_gather", sparse_gather, target), sparse=True),
        replace(_template("immediates", immediates, target), sparse=True),  # weights in code
        replace(_template("sparse_blocks", sparse_blocks, target), sparse=True),
        replace(_template("two_of_four", two_of_four, target), sparse=True),
        replace(_template("two_of_four_rows", two_of_four_rows, target), sparse=True),
        _template("decoded", decoded, target),  # weights of few bits
        _template("gemv", gemv, target),  # few rows: bandwidth counts
        _template("gemv_norm", gemv_norm, target),
        _template(
            "patch", patch, target, rounded
        ),  # convolutions of few channels, where that promises more than a product's tiles
        _template("wgmma", wgmma, target),  # tensor cores, where shapes and types allow
        _template("mma", mma, target),
        *([_template("tf32", tf32, target)] if rounded else []),
        *([] if strict else [_template("tf32x3", tf32x3, target)]),
        _template("simt", simt, target),
        _template("window", window, target),  # depthwise convolutions and pooling
        _template("map", maps, target),
        _template("sequence", sequence, target),
        _template("scatter", scatter, target),
        _template("segments", segments, target),  # rows that begin where memory says
        _template("reduce", reduce, target),
        _template("threads", threads, target),  # every kernel
    )
    return tuple(replace(t, strict=strict) for t in made)


def _template(name: str, module: ModuleType, target: GpuTarget, *more_facts: bool) -> Template:
    def candidates(problem: Problem) -> list[Knobs]:
        return list(module.candidates(problem, target, *more_facts))

    def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        kernel: Kernel = module.apply(problem, knobs, target)
        return overlapped(kernel) if target.major >= 9 else kernel

    def more(problem: Problem) -> list[Knobs]:
        return list(module.space(problem, target))

    return Template(name, candidates, apply, more, module.ORDER)


def overlapped(kernel: Kernel) -> Kernel:
    """A kernel that starts while the one before it still runs, and waits for it before it touches memory (programmatic
    dependent launch): the launch, and what threads compute from their numbers alone, are hidden. Kernels that place the
    wait themselves stay as they are.
    """
    if any(isinstance(s, Eval) and s.name == "pdl_wait" for f in kernel.funcs for s in walk_stmts(f.body)):
        return kernel
    first = next((s for s in walk_stmts(kernel.entry.body) if isinstance(s, For) and s.kind in THREADS), None)
    if first is None:
        return kernel
    begun = replace(first, body=(Eval("pdl_launch", ()), Eval("pdl_wait", ()), *first.body))
    return kernel.with_body(replace_stmt(kernel.entry.body, first, lambda: (begun,)))
