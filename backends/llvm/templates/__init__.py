"""The schedules of the CPU backend, in the order in which a problem tries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import (
    backward_filter,
    contraction,
    maps,
    matrix_tiles,
    recurrence,
    reduce,
    sampled,
    scan,
    scatter,
    segments,
    sequence,
    sparse,
    sparse_windows,
    winograd,
)
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem, Template


def templates(target: CpuTarget, strict: bool = False) -> list[Template]:
    """`strict`: the order of a sum depends neither on knowing its length nor on the choice: same bits."""
    made = [
        _template("matrix_tiles", matrix_tiles, target, (("chain", 1),) if strict else ()),
        _template("contraction", contraction, target, (("scaled", 1), ("chain", 1)) if strict else ()),
        _template("backward_filter", backward_filter, target, (("chain", 1),) if strict else ()),
        _template("winograd", winograd, target),
        replace(_template("sparse_windows", sparse_windows, target), sparse=True),
        replace(_template("sparse", sparse, target), sparse=True),
        _template("recurrence", recurrence, target),
        _template("scan", scan, target),
        _template("segments", segments, target),
        _template("sampled", sampled, target),
        _template("reduce", reduce, target, (("short", 1),) if strict else ()),
        _template("sequence", sequence, target),
        _template("scatter", scatter, target),
        _template("map", maps, target),
    ]
    return [replace(t, strict=strict) for t in made]


def _template(name: str, module: ModuleType, target: CpuTarget, last: Knobs = ()) -> Template:
    def candidates(problem: Problem) -> list[Knobs]:
        return [(*knobs, *last) for knobs in module.candidates(problem, target)]

    def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        kernel: Kernel = module.apply(problem, knobs, target)
        return kernel

    def more(problem: Problem) -> list[Knobs]:
        return [(*knobs, *last) for knobs in module.space(problem, target)]

    return Template(name, candidates, apply, more, module.ORDER)
