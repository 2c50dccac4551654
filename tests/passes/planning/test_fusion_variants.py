"""Fusion variants: which there are, that they group the same nodes, that they compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.encodings import Winograd
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.target import TargetFacts
from dnnc.ir.types import Encoding
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.pipelines import PASSES, compile_program
from dnnc.passes.planning.fuse import Group, plan_fusion
from dnnc.passes.planning.fusion_variants import MOST_CUTS, Variant, cut, variants, vary
from dnnc.passes.planning.memory_plan import MemoryPlan, Region, plan_memory
from dnnc.passes.planning.program import ScheduledGraph, plan_region
from support.random_graphs import random_graph

EPILOGUE = "def f(x: f32[8, 24], w: f32[24, 32], b: f32[32]):\n    return relu(add(matmul(x, w), b))"
PROLOGUE = "def f(x: f32[8, 24], y: f32[8, 24]):\n    return reduce_sum(mul(x, y), axes=(1,), keepdims=False)"
BOTH = "def f(x: f32[8, 24], y: f32[8, 24]):\n    return relu(reduce_sum(mul(x, y), axes=(1,), keepdims=False))"
BROADCAST = "def f(x: f32[8, 24], b: f32[24], c: f32[24]):\n    return mul(x, add(b, c))"
TURNED = "def f(x: f32[8, 8]):\n    return add(x, transpose(relu(x), perm=(1, 0)))"
CHAIN = "def f(x: f32[8, 24]):\n    return relu(mul(x, tanh(x)))"
CONV = """\
def f(x: f32[1, 32, {n}, {n}], *, w: f32[32, 32, 3, 3]):
    return relu(conv(x, w, strides=(1, 1), pads=(1, 1, 1, 1), dilations=(1, 1), group=1))
"""


def only(text: str) -> tuple[Graph, Group]:
    g = parse(text)
    (group,) = plan_fusion(g).groups
    return g, group


def shown(text: str) -> list[list[str]]:
    """The kernels of each variant."""
    g, group = only(text)
    return [["+".join(n.op.name for n in p.nodes) for p in cut(group, v.cuts)] for v in variants(g, group)]


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "text, expected",
    [
        (EPILOGUE, [["matmul", "add+relu"]]),
        (PROLOGUE, [["mul", "reduce_sum"]]),
        (BOTH, [["mul+reduce_sum", "relu"], ["mul", "reduce_sum+relu"], ["mul", "reduce_sum", "relu"]]),
        (BROADCAST, [["add", "mul"]]),
        (TURNED, [["relu", "transpose+add"]]),
        (CHAIN, []),
    ],
)
def test_what_may_be_kept_in_memory(text: str, expected: list[list[str]]) -> None:
    assert shown(text) == expected


def test_what_two_parts_would_need_is_kept_itself_or_nothing_is() -> None:
    g = parse("def f(x: f32[8, 24]):\n    y = relu(x)\n    return add(neg(y), exp(y))")
    (group,) = plan_fusion(g).groups
    names = [n.op.name for n in group.nodes]
    assert cut(group, (names.index("neg"),)) == ()  # relu is read by both kernels
    parts = cut(group, (names.index("relu"), names.index("neg")))
    assert [[n.op.name for n in p.nodes] for p in parts] == [["relu"], ["neg"], ["exp", "add"]]
    assert cut(group, (len(names) - 1,)) == cut(group, (99,)) == ()


def test_host_steps_and_control_flow_have_no_variants() -> None:
    g = parse("def f(x: f32[8]):\n    return relu(x)")
    (group,) = plan_fusion(g).groups
    assert variants(g, group) == [] and variants(g, Group(group.nodes, group.outputs, "host")) == []


# --- plans ------------------------------------------------------------------------------------------------------------


def made(text: str, pick: int | None = None, constants: Any = None) -> tuple[ScheduledGraph, list[Variant]]:
    """The program of a text, with a variant of each group that has so many."""
    found: list[Variant] = []

    def revise(region: Region, memory: MemoryPlan) -> tuple[Region, MemoryPlan]:
        chosen = {}
        for g in region.fusion.groups:
            found.extend(options := variants(region.graph, g))
            if pick is not None and pick < len(options):
                chosen[g] = options[pick]
        new = vary(region, chosen)
        return new, plan_memory(new.graph, new.fusion, new.inplace, new.nested)

    cpu = parse_target("llvm -mcpu=x86-64-v3 -threads=1")
    return compile_program(
        parse(text, constants), PassContext(TargetFacts(lanes=cpu.lanes), check=True), templates(cpu), revise=revise
    ), found


def run_program(p: ScheduledGraph, inputs: list[Any]) -> Any:
    """Its kernels, one after the other, by the interpreter."""
    arrays = dict(zip(p.graph.inputs, inputs))
    for s in p.kernels:
        (made,) = s.group.outputs
        out = p.memory.inplace.get(made, made)
        arrays.setdefault(out, np.full(out.type.physical, np.nan, np.float32))
        run_kernel(s.kernel, {b.name: arrays[v] for b, v in zip(s.kernel.entry.buffers, s.params)})
        arrays[made] = arrays[out]
    return arrays[p.graph.outputs[0]]


def test_results_stay() -> None:
    rng = np.random.default_rng(0)
    for text in (EPILOGUE, BOTH, BROADCAST):
        inputs = [rng.standard_normal(tuple(v.type.shape), np.float32) for v in parse(text).inputs]
        (expected,) = run(parse(text), inputs, precision="float64")
        for pick in range(len(made(text)[1])):
            p, _ = made(text, pick)
            assert len(list(p.kernels)) > 1
            assert np.allclose(run_program(p, inputs), expected, atol=1e-4)


def test_a_part_works_in_place_where_it_may() -> None:
    p, _ = made(EPILOGUE, 0)
    assert [s.kernel.name for s in p.kernels] == [
        "matmul",
        "add_relu",
    ] and not p.memory.inplace  # an output has memory of its own
    text = EPILOGUE.replace(
        "return relu(add(matmul(x, w), b))", "return matmul(relu(add(matmul(x, w), b)), v)"
    ).replace("b: f32[32]", "b: f32[32], v: f32[32, 8]")
    p, _ = made(text, 0)
    (g,) = (s.group for s in p.kernels if s.kernel.name == "add_relu")
    assert p.memory.inplace[g.outputs[0]] is g.nodes[0].inputs[0]


@pytest.mark.slow
def test_plans_of_random_graphs() -> None:
    """Every node has one kernel, and each kernel reads what others have written before."""
    seen = 0
    for seed in range(40):
        g, _ = random_graph(seed, 20)
        PassManager().run(g, PASSES, PassContext())
        region = plan_region(g)
        options = {
            grp: found for grp in region.fusion.groups if (found := [v for v in variants(g, grp) if v.tile is None])
        }
        for pick in range(MOST_CUTS):
            chosen = {grp: found[pick] for grp, found in options.items() if pick < len(found)}
            seen += len(chosen)
            plan = vary(region, chosen).fusion
            assert sorted(id(n) for grp in plan.groups for n in grp.nodes) == sorted(
                id(n) for grp in region.fusion.groups for n in grp.nodes
            )
            written: set[Value] = set()
            for grp in plan.groups:
                made_later = {v for other in plan.groups for v in other.outputs} - written
                assert not made_later & set(group_inputs(grp.nodes)), f"seed {seed}: {grp}"
                written.update(grp.outputs)
    assert seen > 20


def test_loops_have_variants_too() -> None:
    region = plan_region(parse(EPILOGUE))
    (g,) = region.fusion.groups
    outer = Region(region.graph, region.fusion, {}, {g: (region,)})
    assert len(vary(outer, {g: Variant((0,))}).nested[g][0].fusion.groups) == 2


def test_a_group_has_few_variants() -> None:
    text = "def f(x: f32[8, 24], {}):\n    return {}"
    names = [f"b{k}: f32[24], c{k}: f32[24]" for k in range(6)]
    value = "x"
    for k in range(6):
        value = f"mul({value}, add(b{k}, c{k}))"
    assert len(shown(text.format(", ".join(names), value))) == MOST_CUTS


# --- algorithms -------------------------------------------------------------------------------------------------------


def tile_of(weights: Encoding) -> int:
    return weights.m if isinstance(weights, Winograd) else 0


def tiles(n: int) -> tuple[int, list[int | None]]:
    """The tile of the compiler's own convolution, and those of its variants."""
    p, found = made(CONV.format(n=n), None, {"w": np.zeros((32, 32, 3, 3), np.float32)})
    weights = next(s for s in p.kernels if "conv" in s.kernel.name).group.nodes[0].inputs[1].type.encoding  # type: ignore[union-attr]
    return tile_of(weights), [v.tile for v in found if v.tile is not None]


def test_other_algorithms_of_a_convolution() -> None:
    assert tiles(28) == (4, [2])  # the direct one would be three times as slow
    assert tiles(8) == (2, [0, 4]) and tiles(6) == (0, [2, 4])


def test_strict_numerics_leave_groups_alone() -> None:
    assert variants(*only(EPILOGUE), strict=True) == [] != variants(*only(EPILOGUE))


def test_a_direct_convolution_instead() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 32, 3, 3), np.float32)
    _, found = made(CONV.format(n=8), None, {"w": w})
    direct = found.index(Variant(tile=0))
    before, after = (made(CONV.format(n=8), pick, {"w": w})[0] for pick in (None, direct))
    assert [len(p.graph.constants) for p in (before, after)] == [1, 1]  # the old weights are gone
    assert [tile_of(next(iter(p.graph.constants)).type.encoding) for p in (before, after)] == [2, 0]
    assert [s.choice.template for p in (before, after) for s in p.kernels if "conv" in s.kernel.name] == [
        "winograd",
        "contraction",
    ]
