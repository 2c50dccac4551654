"""Steps: one per group, equal groups once, and schedules that fall back where sizes are not known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.errors import InternalError, ScheduleError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.base import PassContext
from dnnc.passes.lower.likeness import likeness
from dnnc.passes.lower.nests import Lowered, group_inputs
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.fuse import Group, plan_fusion
from dnnc.passes.planning.ladder import Ladder, Unfit
from dnnc.passes.planning.memory_plan import plan_memory
from dnnc.passes.planning.program import KnownGroups, ScheduledGraph, Step, build_steps, lower_group, plan_region
from dnnc.passes.schedule.problem import Choice, Problem, Template, classify
from dnnc.passes.schedule.step import first_choice
from dnnc.tools.sample_graphs import graph_of
from support.random_graphs import random_graph

TARGET = parse_target("llvm -mcpu=x86-64-v4", None)
RELUS = """def g(x: f32[6, 40], y: f32[6, 40], z: f32[6, 41]):
    a = relu(x)
    return softmax(a), relu(y), relu(z), a"""


def steps(text: str, made: Any = None, fuse: bool = False, down: bool = False) -> tuple[Step, ...]:
    g = graph_of(text)
    region = plan_region(g, fuse)
    return build_steps(
        region, plan_memory(g, region.fusion), made or templates(TARGET), first_choice, ladder=Ladder(down)
    )  # type: ignore[return-value]


def test_one_step_for_each_group_and_one_kernel_for_equal_ones() -> None:
    found = steps(RELUS)
    assert [s.kernel.name for s in found] == ["relu", "softmax", "relu", "relu"]
    assert found[0].kernel is found[2].kernel and found[0].text != found[3].text
    assert [[v.name for v in s.params] for s in found] == [["x", "a"], ["a", "v0"], ["y", "v1"], ["z", "v2"]]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that are lowered while a test runs."""
    seen: list[Group] = []

    def counted(graph: Graph, g: Group, inplace: Mapping[Value, Value] | None = None) -> Lowered:
        seen.append(g)
        return lower_group(graph, g, inplace)

    monkeypatch.setattr("dnnc.passes.planning.program.lower_group", counted)
    return seen


def test_groups_that_are_alike_are_lowered_once(lowered: list[Group]) -> None:
    """Each with its own values, in the places that they have in it."""
    found = steps(
        """def g(x: f32[6, 40], y: f32[6, 40], *, u: f32[40], v: f32[40]):
    return sub(x, u), sub(y, v), sub(u, x), sub(x, x), sub(y, u), sub(y, y)"""
    )
    assert len(lowered) == 3 and [[v.name for v in s.params[:-1]] for s in found] == [
        ["x", "u"],
        ["y", "v"],
        ["u", "x"],
        ["x"],
        ["y", "u"],
        ["y"],
    ]
    assert [v for s in found for v in s.params[-1:]] == [s.group.outputs[0] for s in found]
    assert (
        found[0].kernel is found[1].kernel is found[4].kernel is not found[2].kernel
        and found[3].kernel is found[5].kernel
    )


def test_groups_of_earlier_programs_are_not_lowered_again(lowered: list[Group]) -> None:
    """The last ones that were new; a step has the values of its own program."""
    kept = KnownGroups(2)

    def made(body: str) -> tuple[Step, ...]:
        lowered.clear()
        g = parse(f"def g(x: f32[6, 40], y: f32[6, 40]):\n    return {body}")
        region = plan_region(g)
        found = build_steps(region, plan_memory(g, region.fusion), templates(TARGET), first_choice, groups=kept)
        assert [v for s in found if isinstance(s, Step) for v in s.params[-1:]] == g.outputs
        return found  # type: ignore[return-value]

    (first,) = made("sub(x, y)")
    (again,) = made("sub(y, x)")
    assert (
        not lowered
        and again.kernel is first.kernel
        and [v.name for v in again.params[:-1]] == ["y", "x"]
        and again.params[0] not in first.params
    )
    assert len(made("relu(x), exp(y)")) == 2 and len(lowered) == 2  # the first one goes
    made("exp(x), relu(y)")
    assert not lowered
    made("sub(x, y)")
    assert len(lowered) == 1


UNLIKE = [
    "def g(x: f32[6, 40]):\n    return mul(x, 0.0), mul(x, -0.0)",
    "def g(x: f32[6, 40], y: f32[6, 41]):\n    return relu(x), relu(y)",
    'def g(x: f32[6, 40], y: f32[6, 40] @ "1 0"):\n    return relu(x), relu(y)',
    "def g(x: f32[6, 40], y: f16[6, 40]):\n    return relu(x), relu(y)",
    "def g(x: f32[6, 40], y: f32[6, 40]):\n    return sub(x, y), sub(x, x)",
    'def g(x: f32[6, 40]):\n    a: f32[6, 40] @ "1 0" = relu(x)\n    return a, relu(x)',
    "def g(x: f32[6, 40], *, w: f32[6, 40]):\n    return relu(x), relu(w)",
    "def g(x: f32[40, 40]):\n    return softmax(x, axis=0), softmax(x, axis=1)",
    "def g(x: f32[N, M]):\n    return reduce_sum(x, axes=(0,)), reduce_sum(x, axes=(1,))",
    "def g(x: f32[6, 40]):\n    return cast(x, to=i32), cast(x, to=i64)",
]


@pytest.mark.parametrize("text", UNLIKE)
def test_what_makes_groups_unlike(text: str) -> None:
    g = graph_of(text)
    of = [(n, v) for n in g.nodes() for v in n.outputs if v in g.outputs]
    assert len({likeness(g, [n], [v]) for n, v in of}) == len(of) == 2


def test_the_input_that_is_written_over_makes_groups_unlike() -> None:
    g = graph_of("def g(x: f32[6, 40], y: f32[6, 40]):\n    return sub(x, y)")
    (n,) = g.nodes()
    assert len({likeness(g, [n], n.outputs, {n.output: v} if v else {}) for v in (None, *g.inputs)}) == 3


def test_the_dims_that_a_graph_declares_make_groups_unlike() -> None:
    """An index may hold those of the graph at any depth of the loops."""
    g = graph_of("def g(x: f32[6, 40]):\n    return relu(x)")
    (n,) = g.nodes()
    before = likeness(g, [n], n.outputs)
    assert likeness(g, [n], n.outputs) == before
    g.declare(dim("N", 1, 9))
    assert likeness(g, [n], n.outputs) != before


def test_how_nodes_are_wired_makes_groups_unlike() -> None:
    g = graph_of("def g(x: f32[6, 40]):\n    a = exp(x)\n    return sub(a, x), sub(x, a), a")
    a, b, c = g.nodes()
    assert len({likeness(g, [a, n], [v]) for n, v in ((b, b.output), (c, c.output), (c, a.output))}) == 3


@pytest.mark.slow
def test_groups_that_are_alike_are_the_same_problem() -> None:
    """Of many graphs: whatever makes a kernel or a problem another one makes the groups unlike."""
    first: dict[Hashable, tuple[object, ...]] = {}
    same = 0
    for seed in range(130):
        graph, _ = random_graph(seed)
        for g in plan_fusion(graph, fuse=seed % 2 == 0).groups:
            if g.kind in ("control", "host") or any(n.op.compute is None for n in g.nodes):
                continue
            low = lower_group(graph, g)
            p = classify(g.nodes, low, {*graph.constants, *graph.parameters})
            values = (*group_inputs(g.nodes), *g.outputs)
            got = (
                show_kernel(low.kernel),
                p.kind,
                str(p.flops),
                p.constants,
                low.out_loops,
                low.reductions,
                tuple(map(values.index, low.params)),
            )
            like = likeness(graph, g.nodes, g.outputs)
            same += like in first
            assert first.setdefault(like, got) == got, seed
    assert same > 20


def test_scalars_that_differ_make_different_kernels() -> None:
    a, b, c = steps("def g(x: f32[6, 40]):\n    return mul(x, 2.0), mul(x, 3.0), mul(x, 2.0)")
    assert a.text == c.text != b.text and "2.0" in a.text


def test_work_is_counted() -> None:
    (s,) = steps("def g(x: f32[8, 32], *, w: f32[32, 16]):\n    return matmul(x, w)")
    assert s.flops == 2 * 8 * 32 * 16
    (t,) = steps("def g(x: f32[N, 32]):\n    return relu(x)")
    assert repr(t.flops) == "32*N" and [v.name for v in t.dims] == ["N"]


def test_large_kernels_are_parallel_and_small_ones_are_not() -> None:
    large, small = steps("def g(x: f32[256, 256], y: f32[4, 4]):\n    return exp(x), exp(y)")
    assert large.parallel and "parallel(" in large.text
    assert not small.parallel and "parallel(" not in small.text


def test_dims_of_a_program_are_in_order() -> None:
    g = parse("def g(x: f32[Z, A], y: f32[M]):\n    return relu(x), relu(y)")
    p: ScheduledGraph = compile_program(g, PassContext(), templates(TARGET))
    assert [v.name for v in p.dims] == ["A", "M", "Z"]


def test_every_kernel_verifies() -> None:
    for s in steps(RELUS, fuse=True):
        assert show_kernel(verify_kernel(s.kernel)) == s.text


# --- schedules that do not apply --------------------------------------------------------------------------------------


def refusing(name: str) -> Template:
    def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        raise ScheduleError("not here")

    return Template(name, lambda problem: [(("lanes", 16),)], apply)


def test_a_schedule_that_fails_is_an_error_where_all_sizes_are_known() -> None:
    with pytest.raises(InternalError, match=r"schedule broken\(lanes=16\) does not apply to relu: not here"):
        steps("def g(x: f32[6, 40]):\n    return relu(x)", [refusing("broken"), *templates(TARGET)])


@pytest.mark.parametrize("rows", ["N", "6"])
def test_other_schedules_are_tried(rows: str) -> None:
    (s,) = steps(f"def g(x: f32[{rows}, 40]):\n    return relu(x)", [refusing("broken"), *templates(TARGET)], down=True)
    assert s.choice.template == "map" and s.refusal is not None and s.refusal.choice.template == "broken"
    (s,) = steps(f"def g(x: f32[{rows}, 40]):\n    return relu(x)", [refusing("broken"), refusing("too")], down=True)
    assert str(s.choice) == "naive()" and not s.parallel


def test_a_group_without_a_schedule_is_told_to_be_split() -> None:
    text = "def g(x: f32[{rows}, 40]):\n    return relu(exp(x))"
    with pytest.raises(Unfit, match="not here") as e:
        steps(text.format(rows=6), [refusing("broken")], fuse=True, down=True)
    ((group, _),) = e.value.groups
    assert [n.op.name for n in group.nodes] == ["exp", "relu"]
    (s,) = steps(text.format(rows="N"), [refusing("broken")], fuse=True, down=True)  # holds for all sizes
    assert str(s.choice) == "naive()"


def test_a_group_is_split_behind_its_reduction_or_in_the_middle() -> None:
    def split(text: str, times: int = 1) -> list[list[str]]:
        g, ladder = graph_of(text), Ladder(True)
        for _ in range(times):
            groups = plan_region(g, cut=ladder.cut).fusion.groups
            ladder.split([(grp, "planted") for grp in groups if len(grp.nodes) > 1])
        return [[n.op.name for n in grp.nodes] for grp in plan_region(g, cut=ladder.cut).fusion.groups]

    maps = "def g(x: f32[6, 40]):\n    return relu(tanh(exp(abs(x))))"
    assert split(maps) == [["abs", "exp"], ["tanh", "relu"]] or split(maps) == [["abs", "exp", "tanh"], ["relu"]]
    assert split(maps, 3) == [["abs"], ["exp"], ["tanh"], ["relu"]]
    product = "def g(x: f32[6, 40], w: f32[40, 8]):\n    return relu(exp(matmul(x, w)))"
    assert split(product) == [["matmul"], ["exp", "relu"]]


def test_a_choice_that_no_template_made_may_fail() -> None:
    region = plan_region(g := graph_of("def g(x: f32[6, 40]):\n    return relu(x)"))
    memory, bad = plan_memory(g, region.fusion), Choice("gone", (("lanes", 3),))
    (s,) = build_steps(region, memory, templates(TARGET), lambda problem, offered: bad)
    assert isinstance(s, Step) and s.choice.template == "map" and s.refusal is not None and s.refusal.choice is bad
    assert str(s.refusal).startswith(
        "schedule gone(lanes=3) does not apply: "
    ) and "there is no template 'gone'" in str(s.refusal)
    (t,) = build_steps(region, memory, templates(TARGET), first_choice)
    assert isinstance(t, Step) and t.text == s.text and t.refusal is None
    with pytest.raises(InternalError, match="not here"):  # what the templates choose themselves must apply
        build_steps(region, memory, [refusing("broken"), *templates(TARGET)], lambda problem, offered: bad)


# Sizes of which too little can be shown for vectors: a reduction that starts anywhere, rows that are a product of two
# sizes.
HARD = [
    "N: dim[1, 24]\ndef g(x: f32[12, 15, N]):\n    return cumsum(x, axis=2, reverse=True)",
    "N: dim[1, 24]\ndef g(x: f32[9, 1, 31, N], y: f32[9, 1, 31, N]):\n    return layer_norm(x, y, axis=0, "
    "epsilon=0.001)",
    "N: dim[2, 24]\ndef g(x: f32[4, 2, 15, N], w: f32[8, 2, 2, 2], b: f32[8]):\n    return conv(x, w, b, pads=(0, 1, "
    "0, 0))",
    "N: dim[3, 24]\ndef g(x: f32[4, 7, 15, N], *, w: f32[16, 7, 2, 3]):\n    return conv(x, w, strides=(2, 1), "
    "pads=(1, 0, 1, 0))",
    "N: dim[3, 24]\ndef g(x: f32[4, 6, 9], y: f32[9, N], w: f32[4, 4, 3]):\n    return conv(transpose(matmul(x, y), "
    "perm=(1, 0, 2)), w)",
]


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("level", [0, 3])
def test_symbolic_sizes_that_are_hard_to_schedule(text: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_STRICT")
    g = graph_of(text) if "*," in text else parse(text)
    low = int(text[7])
    f = dnnc.compile(g, dims={"N": (low, 24)}, cache=False, opt_level=level)
    rng = np.random.default_rng(0)
    for n in (low, 5, 24):
        inputs = [
            rng.standard_normal([d if isinstance(d, int) else n for d in v.type.shape]).astype(np.float32)
            for v in g.inputs
        ]
        want = run(g, inputs, "float64")[0]
        got = f(*inputs)
        assert got.shape == want.shape and np.abs(got - want).max() < 1e-4
    assert len(f.programs) == 1
