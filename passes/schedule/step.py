"""Schedules lowered groups: applies the templates and the choice that the driver passes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dnnc.ir.errors import InternalError, ScheduleError, VerifyError, locations
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.schedule.problem import Choice, Problem, Template

NAIVE = Choice("naive", ())  # the nest as it was lowered, which needs no template
# The same as a template, for backends that have no better schedule.
AS_LOWERED = Template(NAIVE.template, lambda problem: [NAIVE.knobs], lambda problem, knobs: problem.kernel)
# which of the candidates (best guess first, never empty) to build
Choose = Callable[[Problem, Sequence[Choice]], Choice]


def first_choice(problem: Problem, candidates: Sequence[Choice]) -> Choice:
    """The templates' own best guess."""
    return candidates[0]


def candidates(problem: Problem, templates: Sequence[Template]) -> list[Choice]:
    """Every schedule that some template offers, in the templates' order."""
    return [Choice(t.name, knobs) for t in templates for knobs in t.candidates(problem)]


def schedule(problem: Problem, templates: Sequence[Template], choose: Choose = first_choice) -> tuple[Kernel, Choice]:
    """Schedule a problem. InternalError names the nodes when a chosen schedule does not apply."""
    choice = choose(problem, offer(problem, templates))
    return apply_choice(problem, templates, choice), choice


def offer(problem: Problem, templates: Sequence[Template]) -> list[Choice]:
    """The candidates, of which there is at least one; else an InternalError names the nodes."""
    offered = candidates(problem, templates)
    if not offered:
        raise InternalError(f"no template schedules {problem.kernel.name}{locations(problem.kernel.locs)}")
    return offered


def apply_choice(problem: Problem, templates: Sequence[Template], choice: Choice) -> Kernel:
    """The kernel by one schedule. InternalError where there is no such template, or it does not apply."""
    if choice == NAIVE:
        return problem.kernel
    template = next((t for t in templates if t.name == choice.template), None)
    where = f"{problem.kernel.name}{locations(problem.kernel.locs)}"
    if template is None:
        raise InternalError(f"schedule {choice} does not apply to {where}: there is no template {choice.template!r}")
    try:
        return template.apply(problem, dict(choice.knobs))
    except (ScheduleError, VerifyError) as e:
        raise InternalError(f"schedule {choice} does not apply to {where}: {e}") from e
