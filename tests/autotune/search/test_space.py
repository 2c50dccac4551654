"""The list of choices that a search draws from: what comes first, that each is there once, how long it is, and what
strict numerics leave out.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dnnc.autotune.search.space import MOST, space
from dnnc.backends.cuda.target import FACTS
from dnnc.backends.cuda.templates import templates as gpu_templates
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates as cpu_templates
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Choice, Knobs, Problem, Template, classify, varied
from dnnc.passes.schedule.step import candidates
from dnnc.tools.sample_graphs import graph_of

CPU = parse_target("llvm -mcpu=skylake-avx512 -threads=2")
GPU = FACTS["sm_90a"]
TEXTS = {
    "matmul": "def g(x: f32[64, 512], w: f32[512, 384]):\n    return matmul(x, w)",
    "half": "def g(x: f16[64, 512], w: f16[512, 384]):\n    return matmul(x, w)",
    "softmax": "def g(x: f32[64, 300]):\n    return softmax(x)",
    "columns": "def g(x: f32[2048, 64]):\n    return reduce_sum(x, axes=(0,))",
    "map": "def g(x: f32[640, 300], y: f32[300]):\n    return relu(add(x, y))",
    "transpose": "def g(x: f32[640, 300]):\n    return transpose(x, perm=(1, 0))",
}


def problem(text: str) -> Problem:
    g = graph_of(text)
    decompose(g, PassContext())
    (group,) = plan_fusion(g).groups
    return classify(group.nodes, lower(g, group.nodes, group.outputs))


def offered(kind: str, strict: bool = False) -> list[Template]:
    return list(cpu_templates(CPU, strict) if kind == "llvm" else gpu_templates(GPU, True, strict))


def fake(
    name: str, first: list[Knobs], more: list[Knobs], order: tuple[str, ...] = (), strict: bool = False
) -> Template:
    def apply(problem: Problem, knobs: object) -> Kernel:
        raise AssertionError("nothing is applied to list a space")

    return Template(name, lambda _: first, apply, lambda _: more, order, strict)


@pytest.mark.parametrize("kind, name", [*itertools.product(("llvm", "cuda"), TEXTS)])
def test_the_default_first_then_the_guesses_then_all(kind: str, name: str) -> None:
    p = problem(TEXTS[name])
    found, guesses = space(p, offered(kind)), candidates(p, offered(kind))
    assert found[: len(guesses)] == list(dict.fromkeys(guesses))
    assert len(guesses) < len(found) == len(set(found)) <= MOST
    assert len(found) >= 20
    assert space(p, offered(kind)) == found  # nothing of it is left to chance
    assert {(c.template, c.knobs) for c in found} <= {(t.name, k) for t in offered(kind) for k in t.space(p)}


def test_templates_take_turns() -> None:
    a = fake("a", [(("n", 1),)], [(("n", k),) for k in range(1, 5)])
    b = fake("b", [(("m", 1),), (("m", 2),)], [(("m", 9),)])
    absent = fake("c", [], [(("q", 1),)])
    p = problem(TEXTS["map"])
    found = space(p, [a, b, absent])
    assert [str(c) for c in found] == ["a(n=1)", "b(m=1)", "b(m=2)", "a(n=2)", "a(n=3)", "b(m=9)", "a(n=4)"]
    assert space(p, [a, b, absent], most=4) == found[:4]
    assert space(p, [absent]) == [] and absent.space(p) == []


def test_strict_numerics_keep_the_order_of_sums() -> None:
    first: list[Knobs] = [(("parts", 1), ("rows", 1))]
    more: list[Knobs] = [
        (("parts", 2), ("rows", 1)),
        (("parts", 1), ("rows", 4)),
        (("parts", 1), ("rows", 1), ("keep", 3)),
        (("rows", 2),),
    ]
    a, b = fake("a", first, more, ("parts",), True), fake("b", first, more, (), True)
    found = space(problem(TEXTS["softmax"]), [a, b])
    assert [str(c) for c in found] == ["a(parts=1, rows=1)", "a(parts=1, rows=4)", "a(parts=1, rows=1, keep=3)"]
    assert {c.template for c in space(problem(TEXTS["map"]), [a, b])} == {"a", "b"}  # of which there are none here


@pytest.mark.parametrize("kind, name", [*itertools.product(("llvm", "cuda"), TEXTS)])
def test_strict_spaces(kind: str, name: str) -> None:
    p = problem(TEXTS[name])
    found = space(p, offered(kind, True))
    order = next(t.order for t in offered(kind) if t.name == found[0].template)
    if p.kind != "map":
        assert {tuple(dict(c.knobs).get(k) for k in order) for c in found} == {
            tuple(dict(found[0].knobs).get(k) for k in order)
        }
        assert {c.template for c in found} == {found[0].template}
    if order:
        assert len(found) < len(space(p, offered(kind)))


def test_orders_name_knobs_that_there_are() -> None:
    """A knob that has another name by now would let everything through."""
    for kind in ("llvm", "cuda"):
        seen: dict[str, set[str]] = {}
        for text in TEXTS.values():
            for c in space(problem(text), offered(kind)):
                seen.setdefault(c.template, set()).update(k for k, _ in c.knobs)
        for t in offered(kind):
            if t.name in seen:
                assert set(t.order) & seen[t.name] == set(t.order) - {"short"}, t.name


@pytest.mark.slow
def test_every_knob_is_explained() -> None:
    """The tables of docs/internals/schedules.md have a line for each knob of each template."""
    text = (Path(__file__).parents[3] / "docs/internals/schedules.md").read_text()
    for kind, title in (("llvm", "## CPU"), ("cuda", "## GPU")):
        explained: dict[str, set[str]] = {}
        names: list[str] = []
        for row in text.split(title)[1].split("## ")[0].splitlines():
            cells = [c.strip() for c in row.split("|")[1:3]] if row.startswith("|") else []
            names = re.findall("`(\\w+)`", cells[0]) or names if cells else names
            for name in names if cells else ():
                explained.setdefault(name, set()).update(re.findall("`(\\w+)`", cells[1]))
        assert explained.keys() == {t.name for t in offered(kind)}
        for strict, graph in itertools.product((False, True), TEXTS.values()):
            for c in space(problem(graph), offered(kind, strict)):
                assert {k for k, _ in c.knobs} <= explained[c.template], c
        for t in offered(kind):
            assert set(t.order) <= explained[t.name]


def test_knobs_are_set_at_their_place() -> None:
    knobs: Knobs = (("a", 1), ("b", 2))
    assert varied(knobs, b=3, a=0) == (("a", 0), ("b", 3))
    assert varied(knobs, c="x") == (*knobs, ("c", "x"))
    assert Choice("t", varied(knobs, a=1)) == Choice("t", knobs)
