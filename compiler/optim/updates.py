"""The updates of one step of define-by-run as one call on lazy arrays, as `backward` is one.

In: for each parameter its value, its gradient, its state, and how it is updated. Out: one call, whose body has the
updates of all. It is found again by what the parameters are, so that Python's part is little more than the operands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dnnc.array.lazy import Lazy, Untracked, results
from dnnc.frontends.trace.functions import Recorded
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import extract, inline
from dnnc.ir.lru import LRU
from dnnc.ir.ops import OPS


@dataclass(frozen=True, eq=False)
class Form:
    """How the parameters of one type in one group are updated.

    Attributes:
        graph: gives the next value and states. Its inputs are the value, the gradient, the states, then `own` and, if
            the update draws, a key of random numbers; then `shared` and `captured`.
        states: how many there are.
        own, shared: names of numbers: those that depend on how often a parameter was updated, and others.
        captured: values of around the rule.
    """

    graph: Graph
    states: int
    own: tuple[str, ...]
    shared: tuple[str, ...]
    draws: bool
    captured: tuple[Lazy, ...]

    @property
    def operands(self) -> int:
        """How many there are of each parameter."""
        return 2 + self.states + len(self.own) + self.draws


def form_of(recorded: Recorded, states: int, numbers: Sequence[str], own: Collection[str]) -> Form:
    """The form of a rule that was recorded for a value, a gradient, states, numbers and a key, in this order."""
    inputs = recorded.graph.inputs
    first = 2 + states
    of_name = dict(zip(numbers, inputs[first:]))
    used = {v for n in recorded.graph.nodes() for v in n.inputs} | set(recorded.graph.outputs)
    mine, common = (tuple(n for n in numbers if of_name[n] in used and (n in own) == m) for m in (True, False))
    key = inputs[first + len(numbers)]
    given = [*inputs[:first], *(of_name[n] for n in mine), *([key] if key in used else ())]
    given += [*(of_name[n] for n in common), *inputs[first + len(numbers) + 1 :]]
    graph = extract(recorded.graph, "update", given, recorded.graph.outputs)
    return Form(graph, states, mine, common, key in used, recorded.captured)


class Batch:
    """The updates of one step, while they are collected."""

    def __init__(self) -> None:
        self.forms: list[tuple[int, Form]] = []  # of each parameter, with the number of its group
        self.operands: list[Lazy] = []
        self.common: dict[tuple[int, Form], list[Lazy]] = {}  # shared numbers and what was captured

    def values(self, plans: LRU[tuple[tuple[int, Form], ...], Plan]) -> list[Lazy]:
        """The next value and states of each parameter in turn, as results of one call."""
        key = tuple(self.forms)
        plan = plans.find(key)
        if plan is None:
            plan = plans[key] = Plan(self)
        given = (*self.operands, *(x for common in self.common.values() for x in common))
        return results(Untracked(OPS["call"], given, plan.attrs, plan.types, plan.key))


class Plan:
    """The call of all updates of a step."""

    def __init__(self, batch: Batch) -> None:
        body = Graph("update")
        operands = [body.add_input(f"x{k}", x.type) for k, x in enumerate(batch.operands)]
        common = {
            at: [body.add_input(f"c{k}_{j}", x.type) for j, x in enumerate(values)]
            for k, (at, values) in enumerate(batch.common.items())
        }
        b, start = Builder(body), 0
        for number, form in batch.forms:
            own = operands[start : start + form.operands]
            body.outputs += inline(b, form.graph, [*own, *common[number, form]])
            start += form.operands
        self.attrs = {"body": body}
        self.types = tuple(v.type for v in body.outputs)
        self.key = ("call", body.structural_hash())
