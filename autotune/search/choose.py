"""The schedule that a cost model picks without measuring.

In: a machine. Out: a `choose` for `dnnc.passes.pipelines.compile_program` that ranks the whole space of a problem by
the model that ships for machines of its kind, by the roofline where there is none. The templates' first choice stays
unless another is predicted faster by a margin (found by benchmarks/autotune/evaluate.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.autotune.log.record import plain_choice, read_choice
from dnnc.autotune.model.cost_model import Analytic, CostModel
from dnnc.autotune.model.features import VERSION, features, seen
from dnnc.autotune.model.forest import Forest, load
from dnnc.autotune.search.space import space
from dnnc.autotune.search.task import Setting, workload_key
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.passes.schedule.step import Choose, first_choice

if TYPE_CHECKING:
    from dnnc.autotune.runners.machine import Machine

Array = np.ndarray[Any, Any]
NEVER = float(
    "inf"
)  # the margin of a model that has not shown its worth: the roofline is not believed against the templates


def pretrained(
    machine: Machine,
    setting: Setting | None = None,
    model: CostModel | None = None,
    margin: float | None = None,
    kept: KernelCache | None = None,
) -> Choose:
    """A `choose` for a machine.

    Args:
        machine: of `dnnc.autotune.runners.machine.machine_of`.
        setting: how kernels are to run there; default: as usual.
        model: default: the one that ships.
        margin: of predicted gain (0.1: ten percent faster) over the templates' own choice; default: the model's own.
        kept: where picks of the model that ships are kept, so that a kernel is ranked once.
    """
    setting = setting or Setting(machine.text)
    if setting.numerics == "strict":  # results may not depend on what has been learned
        return first_choice
    model = model or shipped(machine.limits.kind) or Analytic()
    given = None if margin is None else float(np.log1p(margin))
    templates, limits = machine.templates(setting), machine.limits

    def rank(problem: Problem, candidates: Sequence[Choice]) -> Choice:
        every = dict.fromkeys([*candidates, *space(problem, templates)])
        offered = [c for c in every if seen(c)]
        if len(offered) < 2 or not seen(candidates[0]):  # a model knows nothing of knobs that are no features
            return candidates[0]
        x, left = features(problem, offered, limits), list(range(len(offered)))
        while True:
            best, gain = surest(model, x[left])
            if not gain > least(candidates):
                return candidates[0]
            if machine.applies(problem, offered[left[best]], setting):
                return offered[left[best]]
            del left[best]

    def least(candidates: Sequence[Choice]) -> float:
        return margin_of(model, candidates[0].template) if given is None else given

    def choose(problem: Problem, candidates: Sequence[Choice]) -> Choice:
        if least(candidates) == NEVER or problem.lowered.dims or problem.form.elements == 0:
            return candidates[0]
        if kept is None or model is not shipped(limits.kind):
            return rank(problem, candidates)
        key = _kept_under(problem, setting, candidates, limits.kind)
        found = kept.get(key)
        if found is None:
            pick = rank(problem, candidates)
            kept.put(key, json.dumps(plain_choice(pick)).encode())
            return pick
        return read_choice(json.loads(found), key)

    return choose


def _kept_under(problem: Problem, setting: Setting, candidates: Sequence[Choice], kind: str) -> str:
    """The name of a pick: the workload, what the templates offer of themselves, and the model."""
    parts = (workload_key(problem, setting), *map(str, candidates), VERSION, _digest(kind))
    return hashlib.sha256("\0".join(["pick", *parts]).encode()).hexdigest()


@cache
def _digest(kind: str) -> str:
    """Of the model that ships."""
    return hashlib.sha256((files("dnnc.autotune") / "pretrained" / f"{kind}.npz").read_bytes()).hexdigest()


def surest(model: CostModel, x: Array) -> tuple[int, float]:
    """Of features float32 [n, F] the row that a model believes in most, and by how much it is better than row 0: the
    difference of their scores, less what the members of a forest disagree about them. The best score alone is too high.
    """
    scores, spread = model.judge(x) if isinstance(model, Forest) else (model.predict(x), np.zeros(len(x)))
    best = int(np.argmax(scores - spread))
    return best, float(scores[best] - scores[0] - np.hypot(spread[best], spread[0])) if best else 0.0


def margin_of(model: CostModel, template: str) -> float:
    """The gain over a template's own first choice from which a model is believed."""
    return float(model.facts.get("margins", {}).get(template, NEVER)) if isinstance(model, Forest) else NEVER


@cache
def shipped(kind: str) -> Forest | None:
    """The shipped model of a kind ("cpu", "gpu"); None where none fits this version's features."""
    file = files("dnnc.autotune") / "pretrained" / f"{kind}.npz"
    if not file.is_file():
        return None
    with as_file(file) as path:
        forest = load(path)
    return forest if forest.facts.get("features") == VERSION else None


def cost_model(machine: Machine) -> CostModel:
    """What knows most of a machine's kind without measuring: a start for a search."""
    return shipped(machine.limits.kind) or Analytic()
