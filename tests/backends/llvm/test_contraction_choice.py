"""Which tiles the contraction recipe tries first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from native_check import one_node

from dnnc.backends.llvm.features import X86_CPUS, CpuTarget, core_rates, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.templates.contraction import candidates, nest_of
from dnnc.backends.llvm.templates.register_tiles import Nest, tiles
from dnnc.ir.expr import Expr, Ref, const, substitute, value
from dnnc.ir.graph import Graph
from dnnc.ir.loops.stmt import Block, Eval, For
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph, Step
from dnnc.passes.schedule.problem import classify
from dnnc.tools.sample_graphs import graph_of

CONV = Nest((), "i", "p", "pb", ("r",), 0, 1, 16)
MATMUL = Nest((), "i", "", "j", ("r",), 0, 1, 0)
WIDE, NARROW = parse_target("llvm -mcpu=skylake-avx512"), parse_target("llvm -mcpu=haswell")


def compiled(g: Graph, target: CpuTarget) -> ScheduledGraph:
    return compile_program(g, PassContext(TargetFacts(lanes=target.lanes)), templates(target))


@pytest.mark.parametrize("target", [WIDE, NARROW])
@pytest.mark.parametrize("nest", [CONV, MATMUL, replace(CONV, depthwise=True)])
def test_a_tile_and_its_operands_fit_into_the_registers(target: CpuTarget, nest: Nest) -> None:
    for pixels in (None, *range(1, 60)):
        for panels in (None, 1, 2, 3, 4, 12, 32):
            for mr, nv in tiles(pixels, panels, target, nest, False):
                assert mr * nv + nv + 1 <= target.registers, (pixels, panels, mr, nv)


def test_convolutions_leave_registers_for_what_neighbouring_taps_share() -> None:
    assert tiles(56, 4, WIDE, CONV, False)[0] == (8, 2)
    assert tiles(49, 32, WIDE, CONV, False)[0] == (7, 2)
    assert tiles(13, 4, WIDE, CONV, False)[0] == (13, 2)  # rather than one pixel of 14 for nothing
    assert tiles(56, 1, WIDE, replace(CONV, depthwise=True), False)[0] == (14, 1)
    assert tiles(128, 192, WIDE, MATMUL, False)[0] == (8, 3)


def test_rows_that_come_from_memory_for_each_panel_come_for_many_panels_at_once() -> None:
    large = replace(MATMUL, image_bytes=WIDE.l2)
    assert max(nv for _, nv in tiles(1024, 64, WIDE, large, False)[:1]) > max(
        nv for _, nv in tiles(1024, 64, WIDE, MATMUL, False)[:1]
    )


@pytest.mark.parametrize("pixels,ahead", [(16, False), (64, True)])
def test_pixels_of_large_images_are_asked_for_ahead(pixels: int, ahead: bool) -> None:
    p = compiled(one_node("conv", [f"f32 1 64 {pixels} {pixels}", "f32 64 64 1 1"]), replace(WIDE, l2=1 << 18))
    (step,) = (s for s in p.steps if isinstance(s, Step) and s.group.kind == "contraction")
    assert ("prefetch(addr(x0[" in step.text) == ahead == ("ahead=1" in str(step.choice))


@pytest.mark.parametrize("threads", [2, 16])
def test_threads_share_a_long_row_whose_ends_are_padding(threads: int) -> None:
    """A signal of one panel of channels has no other loop to share."""
    p = compiled(one_node("conv", ["f32 1 16 4000", "f32 16 16 3"], pads=(1, 1)), replace(WIDE, threads=threads))
    body = next(s.kernel for s in p.steps if any(n.op.name == "conv" for n in s.group.nodes)).entry.body
    shared = [value(x.extent) or 0 for x in body if isinstance(x, For) and x.kind == "parallel"]
    assert len(shared) == len(body) and max(shared) >= 4 * threads


@pytest.mark.parametrize("target", [WIDE, NARROW])
@pytest.mark.parametrize(
    ("image", "kernel", "chosen"),
    [("16 64 2 2", 3, True), ("16 64 1 1", 1, True), ("1 64 2 2", 3, False), ("16 64 16 16", 3, False)],
)
def test_images_are_the_rows_of_a_tile_where_they_have_few_pixels(
    image: str, kernel: int, chosen: bool, target: CpuTarget
) -> None:
    g = one_node("conv", [f"f32 {image}", f"f32 64 64 {kernel} {kernel}"], pads=(kernel // 2,) * 4)
    (step,) = (s for s in compiled(g, target).steps if isinstance(s, Step) and s.group.kind == "contraction")
    assert ("images=1" in str(step.choice)) == chosen


@pytest.mark.parametrize(("rows", "lines"), [(1, 0), (5, 0), (8, 12), (16, 6), (64, 2)])
def test_panels_are_prefetched_whole_or_not_at_all(rows: int, lines: int) -> None:
    layer = graph_of(f"def g(x: f32[{rows}, 128], *, w: f32[128, 768]):\n    return matmul(x, w)")
    p = compiled(layer, replace(WIDE, l2=1 << 16))
    (step,) = (s for s in p.steps if isinstance(s, Step) and s.group.kind == "contraction")
    assert step.text.count("prefetch(") == lines, step.text


@pytest.mark.slow
def test_many_tiles_ask_for_the_next_panel_once() -> None:
    """Each line as often as there are steps to spare, and no line of the panels behind the next."""
    layer = graph_of("def g(x: f32[512, 128], *, w: f32[128, 768]):\n    return matmul(x, w)")
    p = compiled(layer, replace(WIDE, l2=1 << 16))
    (step,) = (s for s in p.steps if isinstance(s, Step) and s.group.kind == "contraction")
    (outer,) = step.kernel.entry.body
    assert isinstance(outer, For)
    knobs = dict(step.choice.knobs)
    tiles_ = range(512 // int(knobs["mr"]))  # of the first panels
    asked = {line for k in tiles_ for line in lines_asked(outer.body, {outer.var: const(k)})}
    panels = 128 * int(knobs["nv"])
    assert set(range(panels, 2 * panels)) <= asked <= set(range(panels, 3 * panels))


@pytest.mark.slow
@pytest.mark.parametrize(("k", "ku"), [(128, 4), (131, 1)])
def test_panels_that_the_second_cache_does_not_hold_are_cut(k: int, ku: int) -> None:
    layer = graph_of(f"def g(x: f32[512, {k}], *, w: f32[{k}, 768]):\n    return matmul(x, w)")
    p = compiled(layer, replace(WIDE, l2=1 << 15))
    (step,) = (s for s in p.steps if isinstance(s, Step) and s.group.kind == "contraction")
    kc, (outer,) = int(dict(step.choice.knobs)["kc"]), step.kernel.entry.body
    assert "for ks in range(" in step.text and 0 < kc < 0.2 * (1 << 15) / (3 * 64) and kc % ku == 0
    assert isinstance(outer, For)
    asked = lines_asked(outer.body, {outer.var: const(0)})  # the next stretch of each of three panels
    assert set(range(kc, 2 * kc)) | set(range(k + kc, k + 2 * kc)) <= set(asked)
    assert max(asked) < 3 * k + 2 * kc + ku


def lines_asked(b: Block, env: dict[Expr, Expr]) -> list[int]:
    """The cache lines that a block prefetches, in order."""
    out: list[int] = []
    for s in b:
        if isinstance(s, For):
            lo, hi = (value(substitute(e, env)) for e in (s.lo, s.hi))
            assert lo is not None and hi is not None
            for k in range(lo, hi):
                out += lines_asked(s.body, {**env, s.var: const(k)})
        elif isinstance(s, Eval) and s.name == "prefetch":
            (place,) = s.args
            assert isinstance(place, Ref)
            at = value(substitute(place.idx[-1], env))
            assert at is not None and at % 16 == 0
            out.append(at // 16)
    return out


@pytest.mark.parametrize("channels", [16, 32, 20, 44])
def test_the_lines_of_the_next_panels_are_asked_for_once(channels: int) -> None:
    p = compiled(
        one_node("conv", [f"f32 1 {channels} 1 16", f"f32 96 {channels} 1 3"], pads=(0, 1, 0, 1)),
        replace(WIDE, l2=18 << 10),
    )
    (step,) = (s for s in p.steps if isinstance(s, Step) and s.group.kind == "contraction")
    (outer,) = step.kernel.entry.body
    assert isinstance(outer, For)
    asked = lines_asked(outer.body, {outer.var: const(0)})
    first = 2 * -(-channels // 16) * 3 * 16  # behind the two panels of this iteration
    assert sorted(asked) == list(range(first, first + len(asked)))
    assert len(asked) >= 2 * channels * 3


@pytest.mark.family("choices")
@pytest.mark.parametrize("cpu", X86_CPUS)
def test_every_cpu_has_rates_and_a_tile_that_hides_the_latency(cpu: str) -> None:
    target = parse_target(f"llvm -mcpu={cpu}")
    rates = target.rates
    assert 0 < rates.fma <= 2 and 0 < rates.stores <= rates.loads <= 2 and rates.memory < rates.l2
    mr, nv = tiles(128, 192, target, MATMUL, False)[0]
    assert mr * nv >= min(rates.chains, target.registers // 2)


def test_a_cpu_that_splits_wide_vectors_has_half_of_the_rates() -> None:
    wide, split = (parse_target(f"llvm -mcpu={cpu}").rates for cpu in ("znver5", "znver4"))
    assert (split.fma, split.loads, split.stores) == (wide.fma / 2, wide.loads / 2, wide.stores / 2)
    assert core_rates("znver4", parse_target("llvm -mcpu=znver4").features, 256).fma == 2


def test_features_tell_the_core_where_the_name_is_unknown_or_contradicts_them() -> None:
    features = parse_target("llvm -mcpu=sapphirerapids").features
    server = core_rates("sapphirerapids", features, 512)
    assert core_rates("rocketlake", features, 512) == server == core_rates("a CPU of next year", features, 512)
    assert core_rates("rocketlake", "+avx512f,+avx512vl", 512).fma == 1


def test_a_product_of_rows_that_a_norm_makes_has_another_schedule() -> None:
    g = graph_of("def g(x: f32[4, 64], s: f32[64], w: f32[64, 96]):\n    return matmul(rms_norm(x, s), w)")
    nodes = list(g.nodes())
    p = classify(nodes, lower(g, nodes, g.outputs))
    assert p.kind == "normed" and nest_of(p) is None and not candidates(p, WIDE)


def test_a_tile_of_filters_has_whole_groups() -> None:
    g = one_node("conv_backward_filter", ["f32 2 64 6 6", "f32 2 64 6 6"], kernel=(3, 3), pads=(1, 1, 1, 1), group=2)
    (step,) = (s for s in compiled(g, WIDE).steps if isinstance(s, Step) and s.group.kind == "contraction")
    assert dict(step.choice.knobs)["nv"] == 2 and "lanes(" not in step.text
