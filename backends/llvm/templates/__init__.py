"""The schedules of the CPU backend, in the order in which a problem tries them."""

from __future__ import annotations

from types import ModuleType

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import contraction, maps, reduce, sequence, winograd
from dnnc.ir.operator.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem, Template


def templates(target: CpuTarget, strict: bool = False) -> list[Template]:
    """`strict`: the order of a sum is the same whether its length is known or not, so that programs for all sizes give the same bits."""
    return [
        _template("contraction", contraction, target),
        _template("winograd", winograd, target),
        _template("reduce", reduce, target, (("short", 1),) if strict else ()),
        _template("sequence", sequence, target),
        _template("map", maps, target),
    ]


def _template(name: str, module: ModuleType, target: CpuTarget, more: Knobs = ()) -> Template:
    def candidates(problem: Problem) -> list[Knobs]:
        return [(*knobs, *more) for knobs in module.candidates(problem, target)]

    def apply(problem: Problem, knobs: object) -> Kernel:
        kernel: Kernel = module.apply(problem, knobs, target)
        return kernel

    return Template(name, candidates, apply)


__all__ = ["templates"]
