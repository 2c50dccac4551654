"""What a search may choose from: all schedules of a problem that are worth measuring.

In: a problem and the templates of the machine and the numerics that it is for. Out: choices, the default first. The
templates know what the hardware can hold; here their settings become one list, short enough to score in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from dnnc.autotune.runners.machine import Machine
from dnnc.autotune.search.task import Task
from dnnc.passes.schedule.problem import Choice, Problem, Template

MOST = 512  # choices of a problem


def space(problem: Problem, templates: Sequence[Template], most: int = MOST) -> list[Choice]:
    """Return the schedules to search: the default, quick guesses of all templates, then others in turns.

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


def with_libraries(machine: Machine) -> Callable[[Task], list[Choice]]:
    """Library calls that a search may measure beside our schedules. TuneError: none for the target, or none here."""
    machine.backend.library_choices(None, "standard", False)

    def choices(task: Task) -> list[Choice]:
        return machine.backend.library_choices(task.rebuilt[2], task.setting.numerics, task.setting.rounded)

    return choices


def as_known(choices: Sequence[Choice], machine: Machine) -> list[Choice]:
    """The choices as a cost model sees them: library calls, which it does not know, become the default, the first."""
    libraries = {t.name for t in machine.backend.library_templates("standard")}
    return [choices[0] if c.template in libraries else c for c in choices]
