"""The contraction that the schedules of a GPU tile."""

from __future__ import annotations

from dnnc.passes.lower.form import Contraction
from dnnc.passes.schedule.problem import Problem


def contraction_of(problem: Problem) -> Contraction | None:
    """The contraction of a problem of constant sizes, with as few loops as can be; None of any other problem."""
    form = problem.form
    return (
        form.joined
        if isinstance(form, Contraction) and problem.kind == "contraction" and not problem.lowered.dims
        else None
    )
