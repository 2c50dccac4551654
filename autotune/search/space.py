"""What a search may choose from: all schedules of a problem that are worth measuring.

In: a problem and the templates of the machine and the numerics that it is for. Out: choices, the default first. The
templates know what the hardware can hold; here their settings become one list, short enough for a model to score in one
go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from dnnc.autotune.search.task import Task
from dnnc.ir.errors import TuneError, install
from dnnc.ir.target import parse_target
from dnnc.passes.schedule.problem import Choice, Problem, Template

MOST = 512  # choices of a problem


def space(problem: Problem, templates: Sequence[Template], most: int = MOST) -> list[Choice]:
    """The schedules to search, each once: the default, the other quick guesses of all templates, then what else these
    offer, in turns.

    None of them has been applied: a schedule that does not apply to the problem says so by a ScheduleError when it is
        built. Of strict
    templates only that of the default is searched where there are sums, for another one adds up in an order of its own.
    """
    offered = [(t, found) for t in templates if (found := t.candidates(problem))]
    if offered and offered[0][0].strict and problem.kind != "map":
        offered = offered[:1]
    spaces = [[Choice(t.name, knobs) for knobs in t.widened(problem, found)] for t, found in offered]
    guesses = [c for s, (_, found) in zip(spaces, offered) for c in s if c.knobs in found]
    turns = [c for row in zip_longest(*spaces) for c in row if c is not None]
    return list(dict.fromkeys([*guesses, *turns]))[:most]


def with_libraries(target: str) -> Callable[[Task], list[Choice]]:
    """What calls of vendor libraries a search may measure beside our own schedules: of the libraries that are here, for
    a GPU.

    Raises:
        TuneError: the target is no GPU, or no library is here.
    """
    from dnnc.backends.cuda.library import VENDORS, installed
    from dnnc.backends.cuda.templates.library import library_choices

    if parse_target(target).kind != "cuda":
        raise TuneError(f"libraries=True: {target!r} has none; cuBLASLt and cuDNN are for GPUs, target='cuda'")
    names = installed()
    if not names:
        missing = " and ".join(v.title for v in VENDORS.values())
        raise TuneError(f"libraries=True: {missing} are not here: {install('libraries')}, or tune without libraries")

    def choices(task: Task) -> list[Choice]:
        setting = task.setting
        return [] if setting.numerics == "strict" else library_choices(task.rebuilt[2], names, setting.rounded)

    return choices


def as_known(choices: Sequence[Choice]) -> list[Choice]:
    """The choices as a cost model is to see them: calls of libraries, of which it knows nothing, as the default, which
    is the first.
    """
    from dnnc.backends.cuda.library import is_library

    return [choices[0] if is_library(c.template) else c for c in choices]
