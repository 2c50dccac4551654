"""Attention in one kernel: what is read off the naive nest, the kernels interpreted (values, races, bounds), and
compiled without spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.attention import template as attention
from dnnc.backends.cuda.templates.attention.nest import Attention, attention_of
from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.ops import OPS
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
HALF = {"rows": 32, "warps": 2, "keys": 16, "stages": 2, "slices": 1}
FULL = {"rows": 16, "warps": 2, "keys": 16, "stages": 2, "slices": 1}
LIMITS = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 4e-6}
INF = float("inf")
LOWEST = float(np.finfo(np.float32).min)
Array = Any


def problem(text: str) -> tuple[Graph, Lowered, Problem]:
    """The one group of a graph, lowered."""
    g = parse(text)
    decompose(g, PassContext())
    nodes = list(g.nodes())
    low = lower(g, nodes, g.outputs)
    return g, low, classify(nodes, low)


def nest(text: str) -> Attention:
    found = attention_of(problem(text)[2])
    assert found is not None
    return found


def plain(b: str, m: int, n: int, d: int, e: int = 0, t: str = "f16", mask: str = "", more: str = "") -> str:
    """Attention of `b` batches, a comma and a blank after each dim; `mask`: its shape."""
    third = f", mask: f32[{mask}]" if mask else ""
    return f"""def g(q: {t}[{b}{m}, {d}], k: {t}[{b}{n}, {d}], v: {t}[{b}{n}, {e or d}]{third}):
    return attention(q, k, v{", mask" if mask else ""}, scale=0.3{more})"""


def draw(g: Graph, **given: Array) -> list[Array]:
    rng = np.random.default_rng(0)
    shapes = [[int(d) for d in v.type.shape] for v in g.inputs]  # type: ignore[call-overload]
    return [
        np.asarray(given.get(v.name, rng.standard_normal(s))).astype(v.type.dtype.numpy).reshape(s)
        for v, s in zip(g.inputs, shapes)
    ]


def interpret(g: Graph, low: Lowered, kernel: Kernel, arrays: list[Array]) -> Array:
    """Run a kernel; the result must be the graph's within rounding, and NaN where the graph's is."""
    values = dict(zip(g.inputs, arrays))
    out = g.outputs[0].type
    result = np.full([int(d) for d in out.shape], 99).astype(out.dtype.numpy)  # type: ignore[call-overload]
    run_kernel(kernel, {b.name: values.get(v, result) for v, b in zip(low.params, kernel.entry.buffers)})
    (want,) = run(g, arrays, "float64")
    got = result.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.nanmax(np.abs(got - want), initial=0.0) <= LIMITS[out.dtype.name] * np.nanmax(np.abs(want), initial=1.0)
    return got


def check(text: str, knobs: Mapping[str, int], **given: Array) -> Array:
    g, low, p = problem(text)
    kernel = verify_kernel(attention.apply(p, knobs, H200))
    shown = show_kernel(kernel)
    assert show_kernel(parse_kernel(shown)) == shown
    return interpret(g, low, kernel, draw(g, **given))


HEADS = """def g(q: T[2, 3, 20, 16], k: T[2, 3, 24, 16], v: T[2, 3, 24, 16], mask: f32[2, 1, 1, 24]):
    return reshape(transpose(attention(q, k, v, mask, scale=0.25), perm=(0, 2, 1, 3)), shape=(2, 20, 48))"""
TURNED = """def g(q: T[2, 20, 3, 16], k: T[2, 3, 16, 24], v: T[2, 3, 24, 16]):
    return attention(transpose(q, perm=(0, 2, 1, 3)), transpose(k, perm=(0, 1, 3, 2)), v, scale=0.25)"""
RESIDUAL = """def g(q: T[3, 20, 16], k: T[3, 24, 16], v: T[3, 24, 16], r: T[3, 20, 16], c: T[16]):
    return add(mul(attention(q, k, v, scale=0.25), c), r)"""
SCALED = """def g(q: T[3, 20, 16], k: T[3, 24, 16], v: T[3, 24, 16], c: T[16]):
    return attention(mul(q, c), k, v, scale=0.25)"""
TURNED_PAIRS = """def g(y: T[1, 96], cos: T[16], sin: T[16], k: T[2, 24, 16], v: T[2, 24, 16]):
    q = reshape(y, shape=(6, 16))
    low = slice(q, starts=(0, 0), steps=(1, 1), shape=(6, 8))
    high = slice(q, starts=(0, 8), steps=(1, 1), shape=(6, 8))
    turned = add(mul(q, cos), mul(concat(neg(high), low, axis=1), sin))
    return attention(reshape(turned, shape=(2, 3, 16)), k, v, scale=0.25)"""
GRAPHS = {
    "whole tiles": plain("2, ", 32, 32, 16),
    "no multiple of anything": plain("3, ", 37, 27, 20, 12),
    "element by element": plain("", 19, 21, 17, 9),
    "longer than the ring": plain("", 9, 90, 8),
    "one query": plain("4, ", 1, 40, 16),
    "heads side by side": HEADS,
    "operands turned": TURNED,
    "residual": RESIDUAL,
    "queries that are rotated": TURNED_PAIRS,
    "scaled queries": SCALED,
    "mask of keys": plain("2, 2, ", 18, 20, 16, mask="1, 1, 1, 20"),
    "mask of all rows": plain("2, 2, ", 18, 20, 16, mask="18, 20"),
    "mask of batches": plain("2, 2, ", 18, 21, 16, mask="2, 1, 1, 21"),
    "mask of everything": plain("2, 2, ", 18, 21, 16, mask="2, 2, 18, 21"),
    "mask of rows": plain("", 18, 20, 16, mask="18, 1"),
    "masked rows": plain("", 18, 20, 16, mask="18, 20", more=", masked_rows='zero'"),
    "scale below zero": plain("", 18, 20, 16).replace("0.3", "-0.3"),
}


@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_tensor_cores(name: str) -> None:
    check(GRAPHS[name].replace("T[", "f16["), HALF)


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_ordinary_cores(name: str) -> None:
    check(GRAPHS[name].replace("T[", "f32[").replace("f16[", "f32["), FULL)


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "t, m, n, knobs",
    [
        ("f16", 20, 70, {**HALF, "slices": 2}),
        ("f16", 1, 200, {**HALF, "rows": 16, "warps": 1, "slices": 4}),
        ("f16", 20, 17, {**HALF, "slices": 2}),  # one slice has no keys
        ("f16", 40, 40, {**HALF, "rows": 64, "warps": 2, "stages": 3}),  # 32 rows a warp
        ("f16", 40, 40, {**HALF, "rows": 64, "warps": 2, "slices": 2}),
        ("f16", 3, 170, {**HALF, "rows": 16, "warps": 1, "slices": 2, "parts": 4}),
        ("f32", 3, 170, {**FULL, "rows": 4, "warps": 1, "slices": 2, "parts": 2}),
        ("bf16", 20, 70, {**HALF, "keys": 32, "stages": 3}),
        ("f32", 3, 100, {**FULL, "rows": 4, "warps": 1, "keys": 32, "slices": 3}),
        ("f32", 33, 50, {**FULL, "rows": 32, "stages": 3, "keys": 8}),
    ],
)
def test_shapes_of_blocks(t: str, m: int, n: int, knobs: dict[str, int]) -> None:
    check(plain("2, ", m, n, 24, 40, t), knobs)
    check(plain("2, ", m, n, 24, 40, t, mask="1, 1, 1"), knobs)


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("d", [8, 72, 136, 256])
def test_sizes_of_heads(d: int) -> None:
    check(plain("", 17, 18, d), HALF)
    check(plain("", 9, 18, d, t="f32"), FULL)


# --- what is no number ------------------------------------------------------------------------------------------------

KINDS = [pytest.param("f16", {**HALF, "slices": z}, id=f"f16 {z}") for z in (1, 2)] + [
    pytest.param("f32", {**FULL, "slices": z}, id=f"f32 {z}") for z in (1, 2)
]


@pytest.mark.family("shapes")
@pytest.mark.parametrize("t, knobs", KINDS)
@pytest.mark.parametrize("masked_rows", ["nan", "zero"])
def test_rows_without_keys(t: str, knobs: dict[str, int], masked_rows: str) -> None:
    mask = np.zeros((18, 70))
    mask[3], mask[5, :40], mask[6, 30:], mask[7, 1:] = -INF, -INF, -INF, -INF
    got = check(plain("", 18, 70, 16, t=t, mask="18, 70", more=f", masked_rows='{masked_rows}'"), knobs, mask=mask)
    assert np.isnan(got[3]).all() if masked_rows == "nan" else (got[3] == 0).all()
    assert np.isfinite(np.delete(got, 3, 0)).all()


@pytest.mark.family("cases")
@pytest.mark.parametrize("t, knobs", KINDS)
def test_masks_of_the_lowest_number(t: str, knobs: dict[str, int]) -> None:
    """A row in which every key is masked so is the mean of all values: no score is -inf."""
    mask = np.zeros((18, 70))
    mask[3], mask[5, :69] = LOWEST, LOWEST
    assert np.isfinite(check(plain("", 18, 70, 16, t=t, mask="18, 70"), knobs, mask=mask)).all()


@pytest.mark.family("choices")
@pytest.mark.parametrize("t, knobs", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_scores_that_are_no_numbers(t: str, knobs: dict[str, int], bad: float) -> None:
    """They make their row NaN, and no other."""
    mask = np.zeros((18, 70))
    mask[2, 0], mask[4, 69] = bad, bad
    got = check(plain("", 18, 70, 16, t=t, mask="18, 70"), knobs, mask=mask)
    assert np.isnan(got[[2, 4]]).all() and np.isfinite(np.delete(got, (2, 4), 0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("t, knobs", KINDS)
def test_large_scores(t: str, knobs: dict[str, int]) -> None:
    """Each later tile has a larger score: what was summed before fades."""
    k = np.linspace(0.1, 8, 70)[:, None] * np.ones((1, 16))
    check(plain("", 18, 70, 16, t=t), knobs, k=k, q=np.ones((18, 16)))


# --- every sample of the record ---------------------------------------------------------------------------------------


@pytest.mark.family("samples")
@pytest.mark.parametrize("k", range(len(OPS["attention"].samples)))
def test_samples(k: int) -> None:
    from dnnc.ir.graph.builder import Builder

    s = OPS["attention"].samples[k]
    g = Graph("g")
    values = [g.add_input(f"x{i}", t) for i, t in enumerate(s.inputs) if t is not None]
    g.outputs = [Builder(g).op("attention", *values, **dict(s.attrs))]
    nodes = list(g.nodes())
    low = lower(g, nodes, g.outputs)
    p = classify(nodes, low)
    for knobs in attention.candidates(p, H200)[:2]:
        interpret(g, low, verify_kernel(attention.apply(p, dict(knobs), H200)), draw(g))


# --- the nest ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_compute_few_queries() -> None:
    """What makes the queries of one token runs in the kernel of the attention; of many tokens it does not."""
    g = parse(TURNED_PAIRS.replace("T[", "f16["))
    f = dnnc.compile(parse(TURNED_PAIRS.replace("T[", "f16[")), target="cuda-interpreted", cache=False)
    assert [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels] == ["attention"]
    (first,) = (line.strip() for line in f.source("operator").splitlines() if line.strip().startswith("first:"))
    assert ", 8] @ register" in first  # halves of a row are read in whole vectors
    given = draw(g)
    (want,) = run(g, given, "float64")
    assert np.abs(f(*given).astype(np.float64) - want).max() <= LIMITS["f16"] * np.abs(want).max()
    many = parse(SCALED.replace("T[", "f16["))
    assert len(dnnc.compile(many, target="cuda-interpreted", cache=False).report.programs[-1].kernels) == 2


def test_sides() -> None:
    a = nest(HEADS.replace("T[", "f16["))
    assert a.sizes == (6, 20, 24, 16, 16)
    assert [v.name for v in a.batch.loops] == ["i0", "i2g"] and [v.name for v in a.rows.loops] == ["i1"]
    assert nest(plain("4, ", 1, 40, 16)).sizes == (4, 1, 40, 16, 16)


def test_what_is_no_such_attention() -> None:
    _, _, p = problem(plain("", 18, 20, 16, t="f32").replace("f32", "f64"))
    assert attention_of(p) is None and not attention.candidates(p, H200)
    with pytest.raises(ScheduleError, match="f16, bf16 or f32"):
        attention.apply(p, FULL, H200)
    assert attention_of(problem("def g(x: f32[4, 5]):\n    return softmax(x)")[2]) is None
    assert not attention.candidates(problem(plain("", 18, 20, 264))[2], H200)  # a head too long for registers
    with pytest.raises(ScheduleError, match="no clusters"):
        attention.apply(problem(plain("", 18, 20, 16))[2], {**HALF, "parts": 2}, FACTS["sm_80"])


@pytest.mark.parametrize(
    "text", [plain("", 18, 20, 16, t="f32").replace("f32", "f64"), plain("2, ", 5, 6, 264), plain("2, ", 5, 1, 8)]
)
def test_others_take_what_this_one_declines(text: str) -> None:
    _, _, p = problem(text)
    other = [(t, t.candidates(p)[0]) for t in templates(H200) if t.candidates(p)]
    assert other and all(t.name != "attention" for t, _ in other)


# --- planted bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "t, knobs, old, new, message",
    [
        ("f16", HALF, "barrier()", "syncwarp()", "race"),
        ("f16", HALF, "cp_async_wait(0)", "cp_async_wait(1)", "in flight"),
        ("f16", {**HALF, "slices": 2}, "barrier()", "syncwarp()", "race"),
        ("f32", FULL, "syncwarp()", "prefetch(addr(x0[0, 0]))", "race"),
        ("f32", {**FULL, "slices": 2}, "barrier()", "syncwarp()", "race"),
    ],
)
def test_planted_bugs_are_found(t: str, knobs: dict[str, int], old: str, new: str, message: str) -> None:
    g, low, p = problem(plain("", 32, 64, 16, t=t))
    text = show_kernel(attention.apply(p, knobs, H200))
    assert old in text
    with pytest.raises(VerifyError, match=message):
        interpret(g, low, parse_kernel(text.replace(old, new)), draw(g))


# --- the choice of tiles ----------------------------------------------------------------------------------------------

SIZES = [
    (1, 12, 128, 128, 64),
    (8, 16, 2048, 2048, 64),
    (8, 16, 2048, 2048, 128),
    (2, 8, 100, 100, 256),
    (1, 12, 1, 1024, 64),
    (64, 3, 49, 49, 32),
]


@pytest.mark.family("choices")
@pytest.mark.parametrize("b, h, m, n, d", SIZES)
@pytest.mark.parametrize("t", ["f16", "f32"])
def test_candidates_fit(b: int, h: int, m: int, n: int, d: int, t: str) -> None:
    _, _, p = problem(plain(f"{b}, {h}, ", m, n, d, t=t))
    for arch in ("sm_80", "sm_86", "sm_90a"):
        found = attention.candidates(p, FACTS[arch])
        assert found and len(set(found)) == len(found)
        launch = launch_of(verify_kernel(attention.apply(p, dict(found[0]), FACTS[arch])))
        assert launch.shared_bytes <= FACTS[arch].shared_bytes and launch.block[0] <= FACTS[arch].max_threads


def test_few_heads_fill_the_machine() -> None:
    few = dict(attention.candidates(problem(plain("1, 12, ", 1, 2048, 64))[2], H200)[0])
    assert few["rows"] == 16 and int(few["slices"]) * int(few["parts"]) >= 8  # one query: its keys are divided
    old = dict(attention.candidates(problem(plain("1, 12, ", 1, 2048, 64))[2], FACTS["sm_80"])[0])
    assert int(old["slices"]) >= 4 and old["parts"] == 1
    some = dict(attention.candidates(problem(plain("1, 12, ", 128, 128, 64))[2], H200)[0])
    assert 12 * -(-128 // int(some["rows"])) >= 48
    many = dict(attention.candidates(problem(plain("8, 16, ", 2048, 2048, 64))[2], H200)[0])
    assert int(many["rows"]) >= 64 and many["slices"] == 1


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(text: str, arch: str, knobs: Mapping[str, int | str]) -> None:
    target = FACTS[arch]
    kernel = verify_kernel(attention.apply(problem(text)[2], knobs, target))
    made = compile_cuda(emit_kernel(kernel, "attention", target), arch)
    assert made.spills == 0 and made.local_bytes == 0, f"{arch} {knobs}"
    assert made.registers * launch_of(kernel).block[0] <= target.registers


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [plain("1, 12, ", 128, 128, 64, mask="1, 1, 1, 128"), plain("1, 12, ", 128, 128, 64, t="f32")]
)
def test_compiles(text: str) -> None:
    compiled(text, "sm_90a", dict(attention.candidates(problem(text)[2], H200)[0]))


CORNERS = [
    plain("8, 16, ", 2048, 2048, 64),
    plain("8, 16, ", 2048, 2048, 128, t="bf16", mask="8, 1, 1, 2048"),
    plain("2, 8, ", 1024, 1024, 256),
    plain("2, 8, ", 333, 77, 40, t="bf16"),
    plain("2, 8, ", 197, 197, 63, mask="197, 197"),
    plain("1, 32, ", 1, 4096, 128),
    plain("8, 16, ", 1024, 1024, 64, t="f32"),
    plain("2, 8, ", 77, 77, 255, t="f32"),
    plain("32, 32, ", 1, 1000, 80, t="f32"),
]


@pytest.mark.family("shapes")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("k", range(len(CORNERS)))
def test_corners_compile(k: int, arch: str) -> None:
    for knobs in attention.candidates(problem(CORNERS[k])[2], FACTS[arch])[:1]:
        compiled(CORNERS[k], arch, dict(knobs))
