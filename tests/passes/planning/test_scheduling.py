"""Schedules of one nest, in turn: the chosen one, then the templates' others, at last the nest as it was lowered."""

from __future__ import annotations

from typing import Any

import pytest

from dnnc.ir.errors import InternalError, ScheduleError
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.lower.expand import decompose
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.ladder import Ladder
from dnnc.passes.planning.program import lower_group
from dnnc.passes.planning.scheduling import applied, try_schedules
from dnnc.passes.schedule.problem import Choice, Problem, Template, classify
from dnnc.passes.schedule.step import NAIVE, first_choice
from dnnc.tools.sample_graphs import graph_of


@pytest.fixture
def problem() -> Problem:
    g = graph_of("def g(x: f32[6, 40]): return relu(x)")
    (group,) = plan_fusion(g).groups
    return classify(group.nodes, lower_group(g, group))


def template(fails: set[int], count: int = 3) -> Template:
    """Offers schedules by number, of which some fail; the others leave the nest as it is."""

    def apply(problem: Problem, knobs: Any) -> Any:
        if knobs["k"] in fails:
            raise ScheduleError(f"{knobs['k']} fails")
        return problem.kernel

    return Template("t", lambda problem: [(("k", k),) for k in range(count)], apply)


def test_the_chosen_schedule_is_taken(problem: Problem) -> None:
    kernel, choice, refusal = try_schedules(problem, [template(set())], lambda p, c: c[2], (), Ladder(), "", 1)
    assert (choice, refusal) == (Choice("t", (("k", 2),)), None)
    assert show_kernel(kernel) == show_kernel(applied(problem, [template(set())], choice, ()))
    assert show_kernel(kernel) == show_kernel(decompose(problem.kernel, ()))


def test_where_it_fails_the_next_one_is_and_the_ladder_knows(problem: Problem) -> None:
    ladder = Ladder(True)
    _, choice, refusal = try_schedules(problem, [template({0, 1})], first_choice, (), ladder, "nest", 1)
    assert choice == Choice("t", (("k", 2),)) and refusal is not None and "0 fails" in refusal.why
    assert len(ladder.refused("nest")) == 2


def test_at_last_a_single_node_stays_as_it_was_lowered_and_several_are_split(problem: Problem) -> None:
    _, choice, _ = try_schedules(problem, [template({0, 1, 2})], first_choice, (), Ladder(True), "", 1)
    assert choice == NAIVE
    with pytest.raises(InternalError, match="0 fails"):
        try_schedules(problem, [template({0, 1, 2})], first_choice, (), Ladder(True), "", 2)


def test_without_a_ladder_a_failure_is_an_error(problem: Problem) -> None:
    with pytest.raises(InternalError, match="0 fails"):
        try_schedules(problem, [template({0})], first_choice, (), Ladder(), "", 1)
