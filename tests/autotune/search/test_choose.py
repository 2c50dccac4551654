"""Schedules picked by a model without measuring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.autotune.model.cost_model import Analytic
from dnnc.autotune.model.features import NAMES
from dnnc.autotune.model.forest import Forest
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.search.choose import cost_model, margin_of, pretrained, shipped, surest
from dnnc.autotune.search.task import Setting
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.passes.schedule.step import Choose, candidates, first_choice

Array = np.ndarray[Any, Any]
CPU, GPU = "llvm -mcpu=x86-64-v4 -threads=2", "cuda -arch=sm_90a"
MODEL = """
def g(x: f32[60, 100], *, w: f32[100, 80]):
    h = matmul(x, w)
    y = relu(h)
    return y
"""
ROWS = NAMES.index("knob mr")


class Few:
    """Likes few rows of register tiles: a tenth faster for each row fewer; other templates not at all."""

    def predict(self, x: Array) -> Array:
        return np.where(x[:, ROWS] > 0, -0.1 * (2.0 ** x[:, ROWS] - 1), -100.0)


def program(choose: Choose, target: str = CPU, dims: str = "") -> ScheduledGraph:
    text = MODEL if not dims else f"{dims}\n{MODEL.strip()}".replace("f32[60,", "f32[N,")
    graph = parse(text, {"w": np.ones((100, 80), np.float32)})
    setting = Setting(target)
    return compile_program(graph, PassContext(TargetFacts(lanes=16)), machine_of(target).templates(setting), choose)


def rows(p: ScheduledGraph) -> int:
    return int(dict(next(p.kernels).choice.knobs)["mr"])


def default() -> int:
    return rows(program(first_choice))


def test_the_model_decides() -> None:
    assert default() > 2
    assert rows(program(pretrained(machine_of(CPU), model=Few(), margin=0.0))) == 1


def test_a_gain_below_the_margin_is_none() -> None:
    best = float(np.expm1(0.1 * (default() - 1)))  # what the model expects of one row
    machine = machine_of(CPU)
    assert rows(program(pretrained(machine, model=Few(), margin=best * 1.01))) == default()
    assert rows(program(pretrained(machine, model=Few(), margin=best * 0.99))) == 1


def test_a_model_that_has_not_shown_its_worth_changes_nothing() -> None:
    assert margin_of(Analytic(), "contraction") == margin_of(Few(), "contraction") == float("inf")
    assert rows(program(pretrained(machine_of(CPU), model=Few()))) == default()


def test_a_pick_that_does_not_apply_is_no_candidate() -> None:
    """The best schedule by the model fails: the next best is picked."""
    tried = []

    class Partial(Machine):
        def applies(self, problem: Problem, choice: Choice, setting: Setting) -> bool:
            tried.append(dict(choice.knobs)["mr"])
            return tried[-1] != 1 and super().applies(problem, choice, setting)

    assert rows(program(pretrained(Partial(machine_of(CPU).backend), model=Few(), margin=0.0))) == 2
    assert tried[0] == 1 and tried[-1] == 2


def test_a_machine_knows_what_applies() -> None:
    machine, setting, seen = machine_of(CPU), Setting(CPU), []

    def watching(problem: Problem, offered: Any) -> Any:
        seen.extend(
            machine.applies(problem, c, setting) for c in (offered[0], Choice("contraction", ()), Choice("none", ()))
        )
        return offered[0]

    program(watching)
    assert seen == [True, False, False]


def test_a_forest_knows_its_margin() -> None:
    nodes = (
        np.zeros((1, 1), np.int16),
        np.zeros((1, 1), np.float32),
        np.zeros((1, 2), np.float32),
        np.zeros(1, np.int16),
    )
    known = Forest(*nodes, {"margins": {"map": 0.25}})
    assert margin_of(known, "map") == 0.25 and margin_of(known, "reduce") == margin_of(Forest(*nodes), "map") == float(
        "inf"
    )


def test_what_the_members_of_a_forest_disagree_about_is_no_gain() -> None:
    """Three members of two trees: all see a gain of 1 at 1; at 2 one sees 4, and the others nothing or less."""
    feature, threshold = np.zeros((6, 1), np.int16), np.float32([[0.5]] * 3 + [[1.5]] * 3)
    leaf = np.float32([[0, 1]] * 3 + [[0, 3], [0, -1.5], [0, -1]])
    forest = Forest(feature, threshold, leaf, np.int16([0, 1, 2, 0, 1, 2]), {})
    best, gain = surest(forest, np.float32([[0], [1], [2]]))
    assert forest.predict(np.float32([[0], [1], [2]])).argmax() == 2
    assert best == 1 and 0 < gain < 1


def test_strict_numerics_do_not_depend_on_a_model() -> None:
    assert pretrained(machine_of(CPU), Setting(CPU, "strict"), Few(), 0.0) is first_choice


def test_sizes_known_at_run_time_keep_the_templates_choice() -> None:
    chosen, usual = (
        program(c, dims="N: dim[1, 500]") for c in (pretrained(machine_of(CPU), model=Few(), margin=0.0), first_choice)
    )
    assert [s.choice for s in chosen.kernels] == [s.choice for s in usual.kernels]


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
def test_what_ships_is_asked_by_default(target: str) -> None:
    machine = machine_of(target)
    model = shipped(machine.limits.kind)
    assert cost_model(machine) is model if model is not None else isinstance(cost_model(machine), Analytic)
    assert model is None or all(m > 0 for m in model.facts["margins"].values())  # type: ignore[union-attr]


def test_the_same_choice_twice() -> None:
    machine, seen = machine_of(CPU), []

    def watching(problem: Problem, offered: Any) -> Any:
        choose = pretrained(machine, model=Few(), margin=0.0)
        seen.append([choose(problem, offered), choose(problem, candidates(problem, machine.templates(Setting(CPU))))])
        return seen[-1][0]

    texts = [[s.text for s in program(watching).kernels] for _ in range(2)]
    assert texts[0] == texts[1] and all(a == b for a, b in seen)
