"""What a kernel does and what knobs make of it, as numbers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest

from dnnc.autotune.model.features import ABSENT, KNOBS, NAMES, TEMPLATES, VERSION, WORDS, features, seen
from dnnc.autotune.model.roofline import plan, roofline
from dnnc.autotune.model.work import Work, work_of
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.search.space import space
from dnnc.autotune.search.task import Setting
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Choice, Problem, classify
from support.times import in_a_quiet_round, quiet

LAST = '@ "0 2 3 1"'
CPU, GPU = "llvm -mcpu=x86-64-v4 -threads=2", "cuda -arch=sm_90a"
MATMUL = (
    "def g(x: f32[100, 300], w: f32[300, 64], c: f32[64]):\n    h = matmul(x, w)\n    s = add(h, c)\n"
    "    y = relu(s)\n    return y"
)
HALF = MATMUL.replace("f32", "f16")
PACKED = '"0 1/16 2 3 1%16"'


def problem(text: str) -> Problem:
    g: Graph = parse(text)
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, g.outputs))


def text(inputs: str, *lines: str) -> str:
    return f"def g({inputs}):\n" + "".join(f"    {x}\n" for x in lines) + "    return y\n"


def choices(p: Problem, target: str) -> list[Choice]:
    m = machine_of(target)
    return space(p, m.templates(Setting(m.text)))


def column(name: str) -> int:
    return NAMES.index(name)


# --- the nest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (MATMUL, (1, 100, 64, 300, 100)),
        (text("x: f32[4, 20, 30], w: f32[4, 30, 50]", "y = matmul(x, w)"), (4, 20, 50, 30, 20)),
        (text("x: f32[4, 20, 30], w: f32[30, 50]", "y = matmul(x, w)"), (1, 80, 50, 30, 80)),
        (
            text(
                f"x: f16[2, 32, 9, 11] {LAST}, w: f16[48, 32, 1, 1] {LAST}", f"y: f16[2, 48, 9, 11] {LAST} = conv(x, w)"
            ),
            (1, 198, 48, 32, 198),
        ),
        (
            text(
                f"x: f16[2, 32, 9, 11] {LAST}, w: f16[48, 32, 3, 3] {LAST}",
                f"y: f16[2, 48, 9, 11] {LAST} = conv(x, w, pads=(1, 1, 1, 1))",
            ),
            (1, 198, 48, 288, 11),
        ),
        (
            text("x: f32[1, 64, 8, 8], w: f32[64, 1, 3, 3]", "y = conv(x, w, pads=(1, 1, 1, 1), group=64)"),
            (64, 64, 1, 9, 8),
        ),
        (text("x: f32[7, 500]", "y = reduce_sum(x, axes=(1,))"), (1, 7, 1, 500, 7)),
        (text("x: f32[7, 500]", "y = reduce_sum(x, axes=(0,))"), (1, 500, 1, 7, 500)),
        (text("x: f32[6, 40, 50]", "y = softmax(x, axis=2)"), (1, 240, 1, 50, 240)),
        (text("x: f32[6, 40, 50]", "y = relu(x)"), (1, 240, 50, 1, 240)),
    ],
    ids=["matmul", "batched", "shared", "conv1x1", "conv3x3", "depthwise", "rows", "columns", "softmax", "map"],
)
def test_sizes(source: str, want: tuple[int, ...]) -> None:
    w = work_of(problem(source))
    assert (w.batch, w.rows, w.cols, w.red, w.run) == want


def test_work_counts_arithmetic_and_reuse() -> None:
    w = work_of(problem(MATMUL))
    ops = dict(zip(("cheap", "compared", "divided", "transcendental"), w.ops))
    assert ops == {"cheap": 100 * 64 * 300 + 100 * 64, "compared": 100 * 64, "divided": 0, "transcendental": 0}
    by_size = {b.nbytes: b for b in w.buffers}
    x, weights, y = by_size[100 * 300 * 4], by_size[300 * 64 * 4], by_size[100 * 64 * 4]
    assert (x.reuse, weights.reuse, y.reuse) == (64, 100, 1) and y.written and not x.written
    assert (x.inner, weights.inner) == (4, 64 * 4)  # along the sum
    assert (x.across, weights.across) == (0, 4)  # along the columns
    assert w.flops >= 2 * 100 * 64 * 300 and w.nbytes == sum(b.nbytes for b in w.buffers)


def test_work_sees_padding_and_windows() -> None:
    conv = "x: f32[1, 16, 20, 20], w: f32[8, 16, 3, 3]"
    padded, inner = (work_of(problem(text(conv, f"y = conv(x, w, pads=({p}, {p}, {p}, {p}))"))) for p in (1, 0))
    assert padded.guarded and not inner.guarded and padded.taps == inner.taps == 9


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("source", "want"),
    [
        (HALF, [4, 8]),  # rows of 300 halves begin at multiples of 8 bytes, those of the transposed factor at 16
        (HALF.replace("300", "296"), [8, 8]),
        (HALF.replace("300", "125"), [1, 8]),
        (
            text(
                f"x: f16[2, 32, 9, 11] {LAST}, w: f16[48, 32, 3, 3] {LAST}", f"y: f16[2, 48, 7, 9] {LAST} = conv(x, w)"
            ),
            [8, 8],
        ),
        (
            text(f"x: f16[2, 3, 9, 11] {LAST}, w: f16[48, 3, 3, 3] {LAST}", f"y: f16[2, 48, 7, 9] {LAST} = conv(x, w)"),
            [1, 1],
        ),
    ],
)
def test_vectors_that_factors_are_read_in(source: str, want: list[int]) -> None:
    assert [b.grain for b in work_of(problem(source)).fetched] == want


def test_vectors_of_a_pass_over_memory() -> None:
    """Loops become one where all operands lie as if they were, so that an odd innermost size does not matter; a
    broadcast row prevents it.
    """
    together = work_of(problem(text("x: f16[31, 464, 35, 91], z: f16[31, 464, 35, 91]", "y = mul(x, z)")))
    apart = work_of(problem(text("x: f16[24, 2973], z: f16[2973]", "y = mul(x, z)")))
    assert {b.grain for b in together.buffers} == {8} and 1 in {b.grain for b in apart.buffers}
    limits, knobs = machine_of(GPU).limits, Choice("map", (("tile", 0), ("bytes", 16), ("chunks", 1), ("threads", 128)))
    assert plan(together, knobs, limits).pieces == -(-31 * 464 * 35 * 91 // (8 * 128))
    assert plan(apart, knobs, limits).pieces == -(-24 * 2973 // 128)


def test_what_fetching_costs() -> None:
    """Elements read one by one cost more instructions than the products, and registers on their way."""
    limits, knobs = (
        machine_of(GPU).limits,
        Choice("mma", tuple(dict(bm=128, bn=128, down=4, across=2, bk=32, stages=3, slices=1, split=1).items())),
    )
    odd, even = (plan(work_of(problem(HALF.replace("300", n))), knobs, limits) for n in ("301", "304"))
    assert odd.fetch > 4 * even.fetch > 0 and odd.registers > even.registers and odd.compute > even.compute


def test_attention_is_two_products() -> None:
    q = "q: f16[6, 70, 64], k: f16[6, 90, 64], v: f16[6, 90, 32]"
    w = work_of(problem(text(q, "y = attention(q, k, v, scale=0.125)")))
    assert (w.batch, w.rows, w.cols, w.red) == (6, 70, 90, 96)


# --- the columns ------------------------------------------------------------------------------------------------------

SOURCES = {
    "matmul": MATMUL,
    "half": HALF,
    "few_rows": MATMUL.replace("100", "2"),
    "softmax": text("x: f32[600, 500]", "y = softmax(x)"),
    "columns": text("x: f32[600, 500]", "y = reduce_max(x, axes=(0,))"),
    "chain": text("x: f32[600, 500], c: f32[500]", "a = mul(x, c)", "y = tanh(a)"),
    "transpose": text("x: f32[600, 500]", "y = transpose(x, perm=(1, 0))"),
    "pool": text(
        f"x: f32[1, 64, 30, 30] {LAST}", f"y: f32[1, 64, 14, 14] {LAST} = max_pool(x, kernel=(3, 3), strides=(2, 2))"
    ),
    "blocked": text(
        f"x: f32[1, 64, 30, 30] @ {PACKED}",
        f"y: f32[1, 64, 14, 14] @ {PACKED} = max_pool(x, kernel=(3, 3), strides=(2, 2))",
    ),
    "running": text("x: f32[200, 300]", "y = cumsum(x, axis=1)"),
    "attention": text("q: f16[6, 70, 64], k: f16[6, 90, 64], v: f16[6, 90, 64]", "y = attention(q, k, v, scale=0.125)"),
}


@pytest.mark.family("choices")
@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", SOURCES)
def test_features_of_whole_spaces(name: str, target: str) -> None:
    p = problem(SOURCES[name])
    found = choices(p, target)
    limits = machine_of(target).limits
    x = features(p, found, limits)
    assert x.shape == (len(found), len(NAMES)) and x.dtype == np.float32
    assert np.isfinite(x).all()
    assert np.array_equal(x, features(p, found, limits))
    assert np.array_equal(x[1:2], features(p, found[1:2], limits))  # the others do not matter
    estimates = [roofline(p, c, limits) for c in found]
    assert np.allclose(np.log2(estimates), x[:, column("plan seconds")], rtol=1e-5) and min(estimates) > 0


# templates with a model of their own, which the model that ships does not know
UNSEEN = (
    "tf32x3", "decoded", "stored", "sparse", "sparse_blocks", "sparse_gather", "sparse_windows", "segments",
    "sampled", "two_of_four", "two_of_four_rows", "immediates", "matrix_tiles",
)  # fmt: skip


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
def test_all_that_templates_offer_has_a_column(target: str) -> None:
    m: Machine = machine_of(target)
    known = {(k, v) for k, v in WORDS}
    for name, source in SOURCES.items():
        p = problem(source)
        for c in space(p, m.templates(Setting(m.text))):
            assert c.template in TEMPLATES or c.template in UNSEEN, f"{name}: add {c.template} to TEMPLATES"
            for k, v in c.knobs:
                assert (k, v) in known if isinstance(v, str) else k in KNOBS, (
                    f"{name}: add {k}={v} of {c.template} to KNOBS or WORDS"
                )


def test_templates_of_a_target_are_known() -> None:
    names = {t.name for target in (CPU, GPU) for t in machine_of(target).templates(Setting(target, rounded=True))}
    assert names <= {*TEMPLATES, *UNSEEN}
    assert not any(seen(Choice(name, ())) for name in UNSEEN)


def test_names_are_unique_and_decide_the_version() -> None:
    assert len(set(NAMES)) == len(NAMES) and len(VERSION) == 16


def test_knobs_are_logarithms() -> None:
    p = problem(MATMUL)
    row = features(p, [Choice("contraction", (("mr", 7), ("nv", 3), ("order", "rows")))], machine_of(CPU).limits)[0]
    assert row[column("knob mr")] == 3 and row[column("knob nv")] == 2 and row[column("knob bm")] == ABSENT
    assert (
        row[column("knob order=rows")] == 1
        and row[column("knob order=panels")] == 0
        and row[column("template contraction")] == 1
    )


# --- the roofline -----------------------------------------------------------------------------------------------------


def estimates(source: str, target: str, found: Sequence[Choice]) -> list[float]:
    p, limits = problem(source), machine_of(target).limits
    return [roofline(p, c, limits) for c in found]


def test_roofline_counts_what_is_computed_in_vain() -> None:
    """100 rows are ten tiles of 10, and as many of 11, of which the last is nearly empty."""
    tiles = [Choice("contraction", (("mr", mr), ("nv", 2), ("ku", 4), ("order", "rows"))) for mr in (10, 11)]
    exact, wasteful = (plan(work_of(problem(MATMUL)), c, machine_of(CPU).limits) for c in tiles)
    assert exact.waste == pytest.approx(1.0) and wasteful.waste == pytest.approx(1.1)
    assert wasteful.compute > exact.compute


def test_roofline_prefers_tiles_that_fill_the_registers() -> None:
    small, large = (
        Choice("contraction", (("mr", mr), ("nv", nv), ("ku", 4), ("order", "rows"))) for mr, nv in ((1, 1), (14, 2))
    )
    slow, fast = estimates(MATMUL.replace("100", "1400"), CPU, [small, large])
    assert slow > 2 * fast


def test_roofline_grows_with_the_work() -> None:
    for target, source in ((CPU, MATMUL), (GPU, HALF)):
        first = choices(problem(source), target)[:1]
        (small,), (large,) = (
            estimates(source, target, first),
            estimates(source.replace("100,", "100000,"), target, first),
        )
        assert large > 10 * small


def test_roofline_is_not_below_the_limits() -> None:
    for target, source in ((CPU, MATMUL.replace("100,", "5000,")), (GPU, HALF.replace("100,", "50000,"))):
        limits = machine_of(target).limits
        p = problem(source)
        w: Work = work_of(p)
        least = max(2.0 * w.batch * w.rows * w.cols * w.red / limits.matrix_flops, w.nbytes / limits.bandwidth)
        assert min(roofline(p, c, limits) for c in choices(p, target)) > 0.8 * least


# --- time and imports -------------------------------------------------------------------------------------------------


@in_a_quiet_round
def test_features_are_quick() -> None:
    p, limits = problem(MATMUL), machine_of(CPU).limits
    found = choices(p, CPU)
    hundred = (found * (100 // len(found) + 1))[:100]
    start = time.perf_counter()
    features(p, hundred, limits)
    quiet(time.perf_counter() - start < 0.02)  # 2 to 3 ms on an idle machine


@pytest.mark.slow
@pytest.mark.parametrize("target, other", [(GPU, "llvmlite"), (CPU, "dnnc.backends.cuda")])
def test_nothing_of_another_backend_is_loaded(target: str, other: str) -> None:
    code = (
        "import sys; from dnnc.autotune.search import choose; from dnnc.autotune.runners.machine import machine_of; "
        "from dnnc.autotune.model import features, forest, cost_model, roofline; "
        f"m = machine_of('{target}'); m.limits; choose.cost_model(m); print([n for n in ('xgboost', '{other}', 'ray', "
        "'plotly') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
