"""The spaces of the CPU's schedules: any choice of any problem verifies and means what the graph means; what the knobs
do that only a search sets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from kernels import TARGET, graphs, interpret, symbolic
from native_check import one_node

from dnnc.autotune.search.space import space
from dnnc.backends.llvm.compile import compile_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import TargetFacts
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph, Step
from dnnc.passes.schedule.problem import Choice, Problem, varied
from dnnc.tools.sample_graphs import graph_of

AVX512 = parse_target("llvm -mcpu=skylake-avx512 -threads=2")
AVX2 = parse_target("llvm -mcpu=haswell -threads=2")
DRAWS = 3  # choices of each kernel that are interpreted


def layer(m: int, k: int, n: int) -> Graph:
    """With constant weights, which are packed."""
    return graph_of(
        f"def g(x: f32[{m}, {k}], r: f32[{m}, {n}], *, w: f32[{k}, {n}], b: f32[{n}]):\n    return "
        "add(relu(add(matmul(x, w), b)), r)"
    )


def conv(image: str, weights: str, attrs: str = "") -> Graph:
    return graph_of(f"def g(x: f32[{image}], *, w: f32[{weights}]):\n    return relu(conv(x, w{attrs}))")


PADDED = ", pads=(1, 1, 1, 1)"
MODELS = {
    **graphs(),
    "layer": layer(26, 128, 70),
    "one row": layer(1, 256, 40),
    "panels of an input": graph_of("def g(x: f32[20, 30], w: f32[30, 100]):\n    return matmul(x, w)"),
    "transpose large": one_node("transpose", ["f32 40 70"], perm=(1, 0)),
    "long sum": layer(13, 512, 35),
    "conv 1x1": conv("1, 64, 6, 6", "40, 64, 1, 1"),
    "conv 1x1 long": conv("2, 256, 3, 3", "32, 256, 1, 1"),
    "winograd": conv("1, 32, 14, 14", "48, 32, 3, 3", PADDED),
    "images": conv("2, 16, 15, 9", "32, 16, 3, 3", PADDED + ", strides=(2, 2)"),
    "stem": conv("1, 3, 17, 17", "32, 3, 7, 7", ", pads=(3, 3, 3, 3), strides=(2, 2)"),
    "depthwise 5x5": conv("1, 32, 9, 9", "32, 1, 5, 5", ", pads=(2, 2, 2, 2), group=32"),
    "softmax large": one_node("softmax", ["f32 70 130"], axis=1),
    "norm large": one_node("layer_norm", ["f32 40 500", "f32 500"]),
    "columns": one_node("reduce_sum", ["f32 40 140"], axes=(0,)),
    "columns of squares": graph_of("def g(x: f32[3, 30, 70], y: f32[3, 70]):\n    return sqrt(add(reduce_mean(mul(x, "
                                   "x), axes=(1,)), y))"),
    "cumsum": one_node("cumsum", ["f32 12 50"], axis=1),
    "variance": graph_of("def g(x: f32[20, 170]):\n    d = sub(x, reduce_mean(x, axes=(1,), keepdims=True))\n    "
                         "return reduce_mean(mul(d, d), axes=(1,))"),
    "batch norm": graph_of("def g(x: f32[30, 300], *, w: f32[1, 300]):\n    return mul(mean_variance_norm(x, "
                           "axes=(0,)), w)"),
    "batch norm of images": graph_of("def g(x: f32[4, 9, 5, 8]):\n    return div(x, sqrt(reduce_sum(mul(x, x), "
                                     "axes=(0, 2, 3), keepdims=True)))"),
}  # fmt: skip


def drawn(g: Graph, seed: int, target: CpuTarget = TARGET, strict: bool = False) -> ScheduledGraph:
    """A program whose schedules are drawn at random."""
    rng, offered = random.Random(seed), templates(target, strict)

    def choose(problem: Problem, candidates: Sequence[Choice]) -> Choice:
        return rng.choice(space(problem, offered))

    return compile_program(
        g.copy(),
        PassContext(TargetFacts(lanes=target.lanes), numerics="strict" if strict else "standard"),
        offered,
        choose,
    )


def steps(p: ScheduledGraph) -> list[Step]:
    """The kernels of a program, each of which has the schedule that was chosen for it."""
    found = [s for s in p.steps if isinstance(s, Step)]
    assert not any(s.refusal for s in found), [str(s.refusal) for s in found]
    return found


@pytest.mark.family("choices")
@pytest.mark.parametrize("name", MODELS)
def test_any_choice_means_the_same(name: str) -> None:
    for seed in range(DRAWS):
        p = drawn(MODELS[name], seed, AVX2 if seed % 3 == 2 else TARGET)
        for step in steps(p):
            try:
                interpret(p.graph, step)
            except AssertionError as e:
                raise AssertionError(f"{step.choice}: {e}\n{step.text}") from e


@pytest.mark.slow
@pytest.mark.parametrize("name", symbolic())
def test_sizes_that_are_not_known(name: str) -> None:
    for seed in range(2):
        p = drawn(symbolic()[name], seed)
        for step in steps(p):
            interpret(p.graph, step, 17)


@pytest.mark.family("choices")
@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_convolutions_of_unknown_size(kernel: int, stride: int) -> None:
    n, f32 = dim("N", 1, 64), BY_NAME["f32"]
    attrs = {"strides": (stride, stride), "pads": (kernel // 2,) * 4}
    g = one_node("conv", [TensorType(f32, (1, 32, n, n)), TensorType(f32, (32, 32, kernel, kernel))], **attrs)
    for seed in range(4):
        for step in steps(drawn(g, seed, AVX2 if seed == 3 else TARGET)):
            if not seed:
                interpret(g, step, 9)


def result(step: Step) -> np.ndarray:
    """What a kernel makes of certain numbers."""
    rng = np.random.default_rng(0)
    arrays = {
        b.name: rng.standard_normal(v.type.physical).astype(v.type.dtype.numpy)
        for v, b in zip(step.params, step.kernel.entry.buffers)
    }
    run_kernel(step.kernel, arrays)
    return arrays[step.kernel.entry.buffers[-1].name]


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "name",
    ["layer", "long sum", "conv 1x1 long", "depthwise 5x5", "max_pool", "softmax", "layer_norm", "columns", "cumsum"],
)
def test_strict_choices_compute_the_same_bits(name: str) -> None:
    first, *others = ([result(s) for s in steps(drawn(MODELS[name], seed, strict=True))] for seed in range(4))
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other))


@pytest.mark.family("choices")
@pytest.mark.parametrize(
    ("types", "axis", "columns"),
    [
        (["f32 40 512"], 0, 8),
        (["f32 40 140"], 0, 4),  # two threads want two blocks
        (["f32 40 20"], 0, 0),
        (["f32 5 512"], 0, 0),  # too short to matter
        (["f32 8 30 70"], 1, 4),
        (["f32 512 40"], 1, 0),  # in one piece
    ],
)
def test_sums_across_memory_are_made_side_by_side(types: list[str], axis: int, columns: int) -> None:
    p = compile_program(
        one_node("reduce_sum", types, axes=(axis,)), PassContext(TargetFacts(lanes=AVX512.lanes)), templates(AVX512)
    )
    assert dict(steps(p)[0].choice.knobs).get("columns", 0) == columns


def test_rows_that_come_from_memory_are_asked_for_ahead() -> None:
    for rows, length, asked in ((2048, 1024, 1), (1024, 1024, 1), (512, 1024, 0), (2048, 128, 0), (64, 32768, 0)):
        p = compile_program(
            one_node("softmax", [f"f32 {rows} {length}"], axis=1),
            PassContext(TargetFacts(lanes=AVX512.lanes)),
            templates(AVX512),
        )
        (step,) = steps(p)
        assert dict(step.choice.knobs).get("pf", 0) == asked == step.text.count("prefetch")


@pytest.mark.family("choices")
@pytest.mark.parametrize("parts", [(24, 16), (160, 96), (192, 64), (33, 31)])
def test_rows_that_are_gathered_from_memory_verify(parts: tuple[int, int]) -> None:
    """Norms of channels that lie in blocks, joined from several images: what a vector reads is no line of the cache."""
    a, b = parts
    text = f"""def g(x: f32[4, 32, 64, 64], *, u: f32[{a}, 32, 1, 1], v: f32[{b}, 32, 1, 1], s: f32[{a + b}],
        t: f32[{a + b}]):
    c = concat(conv(x, u), conv(x, v), axis=1)
    y = layer_norm(transpose(c, perm=(0, 2, 3, 1)), s, t, axis=-1)
    return y"""
    p = compile_program(graph_of(text), PassContext(TargetFacts(lanes=TARGET.lanes)), templates(TARGET))
    for step in steps(p):
        verify_kernel(step.kernel)
        compile_text(emit_kernel(step.kernel, "k_row", TARGET.feature_set), TARGET.cpu, TARGET.features)


# --- what only a search sets ------------------------------------------------------------------------------------------


def built(g: Graph, template: str, **knobs: int | str) -> str:
    """The text of the first kernel of a graph that a template makes by itself, some knobs of that choice set.

    For the same CPU on any machine: the texts that are looked for name its lanes.
    """

    def choose(problem: Problem, candidates: Sequence[Choice]) -> Choice:
        first = candidates[0]
        return Choice(template, varied(first.knobs, **knobs)) if first.template == template else first

    p = compile_program(g.copy(), PassContext(TargetFacts(lanes=AVX512.lanes)), templates(AVX512), choose)
    return next(s.text for s in steps(p) if s.choice.template == template)


MAP, ROWS = graphs()["transpose"], one_node("softmax", ["f32 64 40"], axis=1)
WINDOWS = graph_of(
    "def g(x: f32[1, 32, 20, 20], *, w: f32[32, 32, 1, 1]):\n    return max_pool(conv(x, w), kernel=(3, 3), "
    "strides=(2, 2))"
)
LARGE = one_node("add", ["f32 300 450", "f32 300 450"])


@pytest.mark.slow
def test_knobs_that_are_not_set_have_their_old_meaning() -> None:
    """So schedules of old logs stay what they were."""
    for g, template, knobs in (
        (MODELS["layer"], "contraction", {"kc": 0, "serial": 0}),
        (MODELS["stem"], "contraction", {"kc": 0, "serial": 0}),
        (MAP, "map", {"turn": 1, "grain": 8}),
        (LARGE, "map", {"turn": 1, "grain": 8, "serial": 0}),
        (WINDOWS, "reduce", {"pixels": 0}),
        (ROWS, "reduce", {"straight": 16, "rows": 2}),
        (one_node("reduce_sum", ["f32 40 20"], axes=(0,)), "reduce", {"columns": 1}),
        (MODELS["variance"], "reduce", {"pf": 0}),
    ):
        assert built(g, template, **knobs) == built(g, template)


@pytest.mark.parametrize(
    "g, template, knobs, there, gone",
    [
        (
            MODELS["layer"],
            "contraction",
            {"order": "panels", "kc": 32},
            ["for ks in range(4)", "if 0 < ks", "acc_po["],
            ["if ks < 1"],
        ),
        (
            MODELS["layer"],
            "contraction",
            {"order": "panels", "kc": 32, "chain": 1},
            ["for ks in range(4)", "if ks < 1", "acc_po["],
            ["if 0 < ks"],
        ),
        (
            MODELS["layer"],
            "contraction",
            {"order": "panels", "kc": 48},
            ["for ks in range(3)", "if 0 < ks", "for ko in range(min("],
            [],
        ),
        (MODELS["layer"], "contraction", {"order": "tiles", "mr": 13, "nv": 2}, ["26"], ["acc_po"]),
        (MODELS["layer"], "contraction", {"order": "panels"}, ["prefetch("], []),
        (MODELS["layer"], "contraction", {"order": "panels", "pf": 0}, [], ["prefetch("]),
        (MODELS["layer"], "contraction", {"serial": 1}, ["for "], ["parallel("]),
        (MODELS["conv 1x1 long"], "contraction", {"ahead": 1, "pf": 0}, ["prefetch(addr(x0["], []),
        (MODELS["conv 1x1 long"], "contraction", {"ahead": 0, "pf": 0}, [], ["prefetch("]),
        (MODELS["conv 1x1 long"], "contraction", {"kc": 64}, ["for ks in range(4)"], []),
        (MAP, "map", {"turn": 0}, [], ["zip_low"]),
        (MODELS["panels of an input"], "map", {}, ["for n in unroll(4)"], []),
        (MODELS["transpose large"], "map", {}, ["for rn in range(2)", "zip_low"], []),
        (LARGE, "map", {"serial": 1}, ["for "], ["parallel("]),
        (graphs()["add"], "map", {"serial": 0}, ["parallel("], []),
        (WINDOWS, "reduce", {"pixels": 3}, ["acc: f32[3, 16]"], []),
        (MODELS["variance"], "reduce", {"pf": 1, "rows": 1}, ["prefetch(addr(x0[i0 + 1, "], []),
        (MODELS["columns"], "reduce", {"columns": 4}, ["acc: f32[4, 16]", "for vm_1 in unroll(4)"], []),
        (ROWS, "reduce", {"straight": 0}, ["in range(3)"], []),
        (ROWS, "reduce", {"rows": 4}, ["parallel(16)", "f32[4, 40]"], []),
    ],
)
def test_what_knobs_do(g: Graph, template: str, knobs: dict[str, int | str], there: list[str], gone: list[str]) -> None:
    text = built(g, template, **knobs)
    assert all(x in text for x in there), text
    assert not any(x in text for x in gone), text


@pytest.mark.parametrize(
    "g, template, knobs",
    [
        (MODELS["conv"], "contraction", {"kc": 16}),
        (MODELS["long sum"], "contraction", {"kc": 6, "ku": 4}),
    ],
)
def test_stretches_that_cannot_be(g: Graph, template: str, knobs: dict[str, int | str]) -> None:
    with pytest.raises(AssertionError, match=r"does not divide|stretches"):
        built(g, template, **knobs)
