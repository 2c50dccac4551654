"""The spaces of the GPU's schedules: any choice of any problem verifies and, interpreted, leaves in memory what the
naive nest does.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduled import arguments, check_same

from dnnc.autotune.search.space import space
from dnnc.backends.cuda.target import FACTS
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.contraction.gemv_norm import takes
from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.expand import decompose as expanded
from dnnc.passes.lower.nests import lower
from dnnc.passes.lower.recurrence import lower_recurrence
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Choice, Problem, classify, varied
from dnnc.tools.sample_graphs import graph_of

H200 = "sm_90a"
LAST = '@ "0 2 3 1"'
DECODING = "def g(q: f16[1, 1, 32], k: f16[1, 700, 32], v: f16[1, 700, 32]):\n    return attention(q, k, v)"
RECURRENCE = """def net(h: f32[2, 24], x: f32[3, 2, 24], *, w: f32[24, 24]):
    def body(k: i64, h: f32[2, 24], r: f32[2, 24], w: f32[24, 24]):
        y = tanh(add(r, matmul(h, w)))
        return y, y
    (a, s) = loop(None, None, h, x, w, body=body, carried=1, scanned=1, length=3)
    return a, s
"""


def product(m: int, k: int, n: int, t: str, end: str = "{}") -> str:
    return f"def g(x: {t}[{m}, {k}], w: {t}[{k}, {n}], c: {t}[{n}]):\n    return {end.format('matmul(x, w)')}"


# problem -> (graph, templates of its space)
PROBLEMS = {
    "half": (product(70, 64, 72, "f16", "relu(add({}, c))"), {"wgmma", "mma", "reduce", "threads"}),
    "bf16 batches": ("def g(x: bf16[2, 40, 48], w: bf16[2, 48, 64]):\n    return matmul(x, w)",
    {"wgmma", "mma", "reduce", "threads"}),
    "long sum": (product(20, 384, 24, "f16"), {"wgmma", "mma", "reduce", "threads"}),
    "single": (product(37, 80, 41, "f32", "relu(add({}, c))"), {"tf32", "simt", "reduce", "threads"}),
    "double": (product(20, 48, 24, "f64"), {"simt", "reduce", "threads"}),
    "image": ("def g(x: f32[1, 8, 7, 9], w: f32[16, 8, 3, 3]):\n    return conv(x, w, pads=(1, 1, 1, 1))",
    {"tf32", "simt", "reduce", "threads"}),
    "few rows": (product(2, 256, 200, "f16"), {"gemv", "reduce", "threads"}),
    "few rows turned": ("def g(x: f32[1, 300], w: f32[90, 300]):\n    return matmul(x, transpose(w, perm=(1, 0)))",
    {"gemv", "map", "reduce", "threads"}),
    "norm": ("def g(x: f32[2, 256], *, s: f32[256], w: f32[256, 96]):\n    return matmul(layer_norm(x, s), w)",
    {"gemv_norm", "reduce", "threads"}),
    "attention half": ("def g(q: f16[1, 40, 32], k: f16[1, 70, 32], v: f16[1, 70, 32]):\n    return attention(q, k, v, "
                       "scale=0.3)", {"attention", "threads"}),
    "attention single": ("def g(q: f32[1, 20, 16], k: f32[1, 50, 16], v: f32[1, 50, 16]):\n    return attention(q, k, "
                         "v)", {"attention", "threads"}),
    "depthwise": (f'def g(x: f16[2, 16, 7, 9] {LAST}, w: f16[16, 1, 3, 3] @ "1 2 3 0"):\n    y: f16[2, 16, 7, 9] '
                  f'{LAST} = '
                  "conv(x, w, group=16, pads=(1, 1, 1, 1))\n    return y", {"patch", "window", "threads"}),
    "pool": (f"def g(x: f32[2, 8, 9, 9] {LAST}):\n    y: f32[2, 8, 4, 4] {LAST} = max_pool(x, kernel=(3, 3), "
             "strides=(2, 2))\n    return y",
             {"window", "reduce", "threads"}),
    "softmax": ("def g(x: f16[6, 300]):\n    return softmax(x)", {"reduce", "threads"}),
    "columns": ("def g(x: f32[60, 40]):\n    return reduce_sum(x, axes=(0,))", {"reduce", "threads"}),
    "map": ("def g(x: f16[9, 1001]):\n    return gelu(x)", {"map", "threads"}),
    "transpose": ("def g(x: f32[70, 45]):\n    return transpose(x, perm=(1, 0))", {"map", "threads"}),
    "scan": ("def g(x: f32[3, 90]):\n    return cumsum(x, axis=1)", {"sequence", "reduce", "threads"}),
}  # fmt: skip
DRAWS = 3  # choices of each problem that are interpreted


def problems(text: str) -> list[Problem]:
    g = graph_of(text)
    decompose(g, PassContext(TargetFacts(fuses_attention=True)))
    groups = plan_fusion(g, normed=takes).groups
    return [classify(group.nodes, lower(g, group.nodes, group.outputs), g.constants) for group in groups]


def spaces(text: str, arch: str = H200) -> list[tuple[Problem, list[Choice]]]:
    offered = templates(FACTS[arch], rounded=True)
    return [(p, space(p, offered)) for p in problems(text)]


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("name", PROBLEMS)
def test_any_choice_means_the_same(name: str) -> None:
    """Those that say at once that they do not apply are few."""
    text, expected = PROBLEMS[name]
    found = spaces(text)
    assert {c.template for _, every in found for c in every} <= expected
    by_name = {t.name: t for t in templates(FACTS[H200], rounded=True)}
    for p, every in found:
        refused = 0
        for choice in random.Random(0).sample(every, min(DRAWS, len(every))):
            try:
                kernel = verify_kernel(by_name[choice.template].apply(p, dict(choice.knobs)))
            except ScheduleError:
                refused += 1
                continue
            check_same(p, kernel, f"{p.kernel.name} by {choice}", 20.0 if choice.template == "tf32" else 1.0)
        assert refused <= DRAWS // 2


@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "name", ["half", "single", "few rows", "norm", "attention half", "softmax", "depthwise", "scan"]
)
def test_strict_choices_compute_the_same_bits(name: str) -> None:
    offered = templates(FACTS[H200], strict=True)
    by_name = {t.name: t for t in offered}
    for p in problems(PROBLEMS[name][0]):
        every = space(p, offered)
        results = []
        for choice in [every[0], *random.Random(1).sample(every, min(2, len(every)))]:
            arrays = arguments(p)
            run_kernel(verify_kernel(by_name[choice.template].apply(p, dict(choice.knobs))), arrays)
            results.append(arrays[p.kernel.entry.buffers[-1].name])
        assert all(np.array_equal(results[0], r, equal_nan=True) for r in results[1:]), f"{every[0]} of {p.kernel.name}"


def test_older_architectures_have_no_clusters() -> None:
    for text, knob in (
        (product(64, 512, 96, "f32"), "split"),
        (product(64, 512, 96, "f16"), "split"),
        (DECODING, "parts"),
    ):
        values = {
            arch: {dict(c.knobs).get(knob, 1) for _, every in spaces(text, arch) for c in every}
            for arch in ("sm_80", H200)
        }
        assert values["sm_80"] == {1} < values[H200]


@pytest.mark.slow
def test_every_plan_of_a_recurrence_verifies() -> None:
    g = graph_of(RECURRENCE)
    PassManager().run(
        g,
        LEVELS[3],
        PassContext(
            TargetFacts(supports_scan_kernel=lambda form: True, lanes=1, channels_last=True, reductions=GPU_SPLIT)
        ),
    )
    (n,) = (n for n in g.nodes() if n.op.name == "recurrence")
    p = classify([n], lower_recurrence(g, n), g.constants)
    template = next(t for t in templates(FACTS[H200]) if t.name == "recurrence")
    found = template.space(p)
    assert len(found) > len(template.candidates(p)) > 1
    for knobs in found[:: max(len(found) // 6, 1)]:
        verify_kernel(expanded(template.apply(p, dict(knobs))))


@pytest.mark.parametrize(
    "name, template, knobs",
    [
        ("few rows", "gemv", {"flight": 8}),
        ("norm", "gemv_norm", {"flight": 8}),
        ("softmax", "reduce", {"keep": 192, "ahead": 64}),
    ],
)
def test_knobs_that_are_not_set_have_their_old_meaning(name: str, template: str, knobs: dict[str, int]) -> None:
    """And other values of theirs mean something else."""
    (t,) = (t for t in templates(FACTS[H200]) if t.name == template)
    p = next(p for p in problems(PROBLEMS[name][0]) if t.candidates(p))
    first = t.candidates(p)[0]
    usual, same, other = (
        show_kernel(t.apply(p, dict(k)))
        for k in (first, varied(first, **knobs), varied(first, **{k: 1 for k in knobs}))
    )
    assert usual == same != other


@pytest.mark.parametrize("knobs", [{"rows": 40, "warps": 4}, {"rows": 32, "warps": 8}])
def test_rows_that_are_no_whole_fragments(knobs: dict[str, int]) -> None:
    (p,) = problems(PROBLEMS["attention half"][0])
    (t,) = (t for t in templates(FACTS[H200]) if t.name == "attention")
    with pytest.raises(ScheduleError, match="rows are not 16 or more for each of"):
        t.apply(p, {**dict(t.candidates(p)[0]), **knobs})
