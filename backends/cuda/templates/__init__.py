"""The schedules of the CUDA backend, in the order in which a problem tries them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates import attention, gemv, maps, mma, reduce, simt, threads, wgmma, window
from dnnc.ir.operator.stmt import Kernel
from dnnc.passes.schedule.problem import Knobs, Problem, Template

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget


def templates(target: GpuTarget) -> tuple[Template, ...]:
    return (
        _template("attention", attention, target),
        _template("gemv", gemv, target),  # few rows: bandwidth counts
        _template("wgmma", wgmma, target),  # tensor cores, where shapes and types allow
        _template("mma", mma, target),
        _template("simt", simt, target),
        _template("window", window, target),  # depthwise convolutions and pooling
        _template("map", maps, target),
        _template("reduce", reduce, target),
        _template("threads", threads, target),  # every kernel
    )


def _template(name: str, module: ModuleType, target: GpuTarget) -> Template:
    def candidates(problem: Problem) -> list[Knobs]:
        return list(module.candidates(problem, target))

    def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        kernel: Kernel = module.apply(problem, knobs, target)
        return kernel

    return Template(name, candidates, apply)


__all__ = ["templates"]
