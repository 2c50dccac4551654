"""Schedules that are calls of vendor libraries. Only a search asked for libraries offers them, and a log replays them.

In: a problem that a library can do whole. Out: a `Called` kernel: the nest as it was lowered, under a name that tells
the call, and the call. The knob `algo` of cublaslt, and `plan` of cudnn, is the number of the library's own suggestion;
`math` is there where it is not float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dnnc.backends.cuda.library import FEW_PLANS, PLANS, VENDORS, Called
from dnnc.backends.cuda.library_match import call_for, work_of
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.problem import Choice, Knobs, Problem, Template

NUMBER = {"cublaslt": "algo", "cudnn": "plan"}  # what the number of a suggestion is called


def library_templates() -> tuple[Template, ...]:
    """What applies choices out of a log. None has candidates, so none is ever taken without having been measured."""
    return tuple(_template(name) for name in VENDORS)


def library_choices(problem: Problem, names: Sequence[str], rounded: bool = False) -> list[Choice]:
    """Return library calls for a problem, each library's first suggestions. `rounded`: float32 as TF32 too."""
    return [c for name in names for c in _choices(problem, name, rounded)]


def _choices(problem: Problem, name: str, rounded: bool) -> list[Choice]:
    work = work_of(problem, name)
    if work is None:
        return []
    tf32 = rounded and work.types[0] == "f32"
    few = name == "cudnn" and work.types[0] == "f32"
    numbers: list[Knobs] = [((NUMBER[name], k),) for k in range(PLANS)]
    plain = numbers[:FEW_PLANS] if few else numbers
    return [Choice(name, knobs) for knobs in (*plain, *((*knobs, ("math", "tf32")) for knobs in numbers if tf32))]


def _nothing(problem: Problem) -> list[Knobs]:
    return []


def _template(name: str) -> Template:
    def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        return called(problem, name, knobs)

    return Template(name, _nothing, apply, order=(NUMBER[name], "math"))


def called(problem: Problem, name: str, knobs: Mapping[str, int | str]) -> Called:
    """A problem as a library's call. ScheduleError where the library cannot do all of it."""
    plan, math = knobs.get(NUMBER[name]), str(knobs.get("math", "f32"))
    if not isinstance(plan, int) or plan < 0:
        raise ScheduleError(
            f"{name} has the knob {NUMBER[name]}, the number of a suggestion of the library, not {dict(knobs)}"
        )
    call = call_for(problem, name, plan, math)
    if call is None:
        raise ScheduleError(
            f"{VENDORS[name].title} cannot compute all of {problem.kernel.name} as it lies in memory, with {math} "
            "products"
        )
    entry = problem.kernel.entry
    marked = "_".join(
        [name, *(["tf32"] if math == "tf32" else []), str(plan), entry.name]
    )  # kernels are known by their texts
    return Called((*problem.kernel.funcs[:-1], replace(entry, name=marked)), problem.kernel.locs, call)
