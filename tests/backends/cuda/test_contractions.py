"""Tiled contractions: what is read off a naive nest, the scheduled kernels interpreted (values, races, bounds), and
compiled without spills.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.contraction import gemv, mma, simt, tf32, tf32x3
from dnnc.backends.cuda.templates.contraction.staging import plan_tile
from dnnc.backends.cuda.templates.reduction import reduce
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
from dnnc.passes.lower.form import Contraction
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.planning.fuse import FusionPlan, plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
SIMT = {"bm": 16, "bn": 32, "tm": 4, "tn": 4, "bk": 8, "slices": 1}
MMA = {"bm": 32, "bn": 32, "down": 1, "across": 2, "bk": 16, "stages": 3, "slices": 1}


def problem(text: str | Graph) -> tuple[Graph, Lowered, Problem]:
    """The one group of a graph, lowered."""
    g = parse(text) if isinstance(text, str) else text.copy()
    decompose(g, PassContext())
    (group,) = plan_fusion(g).groups
    low = lower(g, group.nodes, group.outputs)
    return g, low, classify(group.nodes, low)


def nest(text: str) -> Contraction:
    found = problem(text)[2].contraction
    assert found is not None
    return found


def draw(g: Graph) -> list[Any]:
    rng = np.random.default_rng(0)
    out = []
    for v in g.inputs:
        shape = [int(d) for d in v.type.shape]  # type: ignore[call-overload]
        a = rng.standard_normal(shape) if v.type.dtype.is_float else rng.integers(0, 9, shape)
        out.append(np.asarray(a).astype(v.type.dtype.numpy))
    return out


def interpret(g: Graph, low: Lowered, kernel: Kernel, bound: float = 2e-6) -> None:
    """Run a kernel on drawn inputs; the result must be the graph's within rounding."""
    values = dict(zip(g.inputs, draw(g)))
    out = g.outputs[0].type
    result = np.full([int(d) for d in out.shape], 99).astype(out.dtype.numpy)  # type: ignore[call-overload]
    run_kernel(kernel, {b.name: values.get(v, result) for v, b in zip(low.params, kernel.entry.buffers)})
    (want,) = run(g, list(values.values()), "float64")
    limit = {"f16": 2e-3, "bf16": 1e-2, "f64": 1e-13}.get(out.dtype.name, bound)
    assert np.abs(result.astype(np.float64) - want).max() <= limit * max(1.0, np.abs(want).max())


def check(module: ModuleType, text: str | Graph, knobs: Mapping[str, int | str], bound: float = 2e-6) -> Kernel:
    g, low, p = problem(text)
    kernel = verify_kernel(module.apply(p, knobs, H200))
    shown = show_kernel(kernel)
    assert show_kernel(parse_kernel(shown)) == shown
    interpret(g, low, kernel, bound)
    return kernel


def matmul(a: str, b: str, c: str, t: str = "f32") -> str:
    return f"def g(x: {t}[{a}], w: {t}[{b}]):\n    y: {t}[{c}] = matmul(x, w)\n    return y"


def conv(x: str, w: str, attrs: str = "", t: str = "f32") -> str:
    return f"def g(x: {t}[{x}], w: {t}[{w}]):\n    return conv(x, w{', ' if attrs else ''}{attrs})"


def transposed(m: int, k: int, n: int, t: str = "f32") -> str:
    return f"def g(w: {t}[{k}, {m}], x: {t}[{k}, {n}]):\n    return matmul(transpose(w, perm=(1, 0)), x)"


def dense(m: int, k: int, n: int, t: str = "f32") -> str:
    return f"""def g(x: {t}[{m}, {k}], w: {t}[{k}, {n}], c: {t}[{n}], r: {t}[{m}, {n}]):
    return add(gelu(add(matmul(x, w), c)), r)"""


GRAPHS = {
    "whole tiles": matmul("32, 24", "24, 64", "32, 64"),
    "no multiple of anything": matmul("37, 27", "27, 41", "37, 41"),
    "batched": matmul("3, 20, 16", "3, 16, 36", "3, 20, 36"),
    "one matrix for all": matmul("2, 3, 20, 16", "16, 36", "2, 3, 20, 36"),
    "turned operand": transposed(24, 20, 40),
    "epilogue": dense(20, 24, 40),
    "conv": conv("2, 3, 9, 8", "24, 3, 3, 3", "pads=(1, 1, 1, 1), strides=(2, 2)"),
    "conv 1x1": conv("2, 8, 6, 6", "24, 8, 1, 1"),
    "conv in groups": conv("2, 8, 9, 7", "24, 4, 3, 3", "pads=(1, 1, 1, 1), group=2, dilations=(2, 2)"),
    "conv of two taps": conv(
        "1, 7, 8, 9", "20, 7, 2, 1", "pads=(2, 1, 1, 1), strides=(2, 1)"
    ),  # the sum ends within a step, between taps
    "conv of a row": conv("2, 9, 33", "17, 9, 5", "pads=(2, 2)"),
    "conv of a volume": conv("1, 3, 5, 6, 4", "9, 3, 2, 3, 2", "pads=(0, 1, 1, 1, 1, 0)"),
}


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_ordinary_cores(name: str) -> None:
    check(simt, GRAPHS[name], SIMT)


@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_tensor_cores(name: str) -> None:
    check(mma, GRAPHS[name].replace("f32", "f16"), MMA)


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_three_products_of_tf32(name: str) -> None:
    check(tf32x3, GRAPHS[name], MMA)


def test_three_products_of_tf32_are_as_exact_as_float32() -> None:
    """Both parts of both factors count: one part less would be off by 2^-11. Blocks begin with steps of their own."""
    kernel = check(tf32x3, matmul("16, 96", "96, 64", "16, 64"), {**MMA, "bm": 16}, 4e-7)
    assert re.search(r"block\w* \+ p\w*\) % 6|\(block % 6 \+ p\) % 6|block.*% 6", show_kernel(kernel))
    assert not [t for t in templates(H200, strict=True) if t.name == "tf32x3"]
    assert tf32x3.candidates(problem(matmul("64, 64", "64, 64", "64, 64"))[2], FACTS["sm_89"]) == []


UPDATE = """def g(x: f32[24, 32], d: f32[24, 40], m: f32[40, 32], p: f32[40, 32], r: f32):
    m2 = add(mul(m, r), matmul(transpose(d, perm=(1, 0)), x))
    p2 = sub(p, mul(m2, 0.1))
    return m2, p2"""


@pytest.mark.parametrize("module", [simt, tf32x3])
def test_a_product_and_the_update_that_it_feeds(module: ModuleType) -> None:
    """One kernel stores both arrays, in the memory of the old ones."""
    g = parse(UPDATE)
    g.donated = {0: 2, 1: 3}
    (group,) = plan_fusion(g, stores_several=simt.stores_several).groups
    assert [v.name for v in group.outputs] == ["m2", "p2"] and len(plan_fusion(g).groups) == 2
    inplace = find_inplace(g, FusionPlan((group,), ()))
    assert {y.name: x.name for y, x in inplace.items()} == {"m2": "m", "p2": "p"}
    low = lower(g, group.nodes, group.outputs, inplace)
    p = classify(group.nodes, low)
    assert p.contraction is None and p.product is not None and len(p.product.more) == 1
    kernel = verify_kernel(module.apply(p, SIMT if module is simt else MMA, H200))
    values = dict(zip(g.inputs, draw(g)))
    want = run(g, list(values.values()), "float64")
    run_kernel(kernel, {b.name: values[v] for v, b in zip(low.params, kernel.entry.buffers)})
    for got, exact in zip((values[g.inputs[2]], values[g.inputs[3]]), want, strict=True):
        assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [{"slices": 1}, {"slices": 2}])
def test_tiles_of_48_columns(sliced: Mapping[str, int]) -> None:
    """Three fragments of 16 columns a warp."""
    check(
        mma,
        matmul("70, 130", "130, 90", "70, 90", "f16"),
        {"bm": 64, "bn": 48, "down": 4, "across": 1, "bk": 16, "stages": 2, **sliced},
    )


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", GRAPHS)
def test_rounded_to_tf32(name: str) -> None:
    """Products of operands of 11 bits; sums as exact as ever."""
    check(tf32, GRAPHS[name], MMA, 2e-3)


def test_tf32_only_where_it_is_asked_for() -> None:
    assert "tf32" not in [t.name for t in templates(H200)]
    assert "tf32" in [t.name for t in templates(H200, rounded=True)]
    assert not tf32.candidates(problem(matmul("32, 24", "24, 64", "32, 64", "f16"))[2], H200)


@pytest.mark.slow
@pytest.mark.parametrize("name, tile", [("f64", (16, 32, 4, 4)), ("i32", (16, 16, 4, 2)), ("u8", (16, 32, 4, 4))])
def test_other_types(name: str, tile: tuple[int, ...]) -> None:
    text = matmul("19, 24", "24, 33", "19, 33", name)
    check(simt, text, {**SIMT, **dict(zip(("bm", "bn", "tm", "tn"), tile))})


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(8))
def test_random_convolutions(seed: int) -> None:
    """Sizes, strides, pads and groups that nobody chose, with either template's smallest tiles."""
    r = np.random.default_rng(seed)
    group, images, rows, columns = (int(r.integers(1, n)) for n in (3, 3, 4, 4))
    size, stride, pads = r.integers(4, 10, 2), r.integers(1, 3, 2), r.integers(0, 3, 4)
    taken, made = int(r.integers(1, 10)), int(r.integers(1, 13)) * group
    attrs = f"group={group}, strides=({stride[0]}, {stride[1]}), pads=({', '.join(map(str, pads))})"
    shapes = f"{images}, {taken * group}, {size[0]}, {size[1]}", f"{made}, {taken}, {rows}, {columns}"
    module, knobs, t = ((simt, SIMT, "f32"), (mma, MMA, "f16"))[seed % 2]
    check(module, conv(*shapes, attrs, t), {**knobs, "slices": seed // 2 % 2 + 1})


def test_bfloat16() -> None:
    check(mma, matmul("37, 48", "48, 40", "37, 40", "bf16"), {**MMA, "stages": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, knobs, t",
    [(simt, {**SIMT, "slices": 3}, "f32"), (mma, {**MMA, "slices": 2, "down": 2, "across": 1}, "f16")],
)
def test_the_sum_in_slices(module: ModuleType, knobs: dict[str, int], t: str) -> None:
    """The last round of slices is not full."""
    check(module, matmul("21, 100", "100, 40", "21, 40", t), knobs)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "module, knobs, t",
    [
        (simt, {**SIMT, "split": 2}, "f32"),
        (simt, {**SIMT, "split": 8, "slices": 2, "stages": 3}, "f32"),
        (tf32, {**MMA, "split": 4}, "f32"),
        (mma, {**MMA, "split": 2, "slices": 2}, "f16"),
    ],
)
def test_the_sum_in_a_cluster(module: ModuleType, knobs: dict[str, int], t: str) -> None:
    """Shares that are no whole steps, rows and columns that are no whole tiles, a guard between taps."""
    kernel = check(module, dense(20, 104, 40).replace("f32", t), knobs, 2e-3 if module is tf32 else 2e-6)
    assert launch_of(kernel).cluster == knobs["split"]
    check(module, GRAPHS["conv of two taps"].replace("f32", t), knobs, 2e-3)


def test_shares_of_a_sum_meet_in_one_order() -> None:
    """A result does not depend on timing: the blocks of a cluster are added in their order."""
    text = show_kernel(simt.apply(problem(matmul("32, 64", "64, 64", "32, 64"))[2], {**SIMT, "split": 4}, H200))
    assert text.count("cluster_barrier()") == 1 and "for part in cluster(4):" in text
    assert text.index("cluster_arrive()") < text.index("y[") < text.index("cluster_wait()")
    assert re.search(
        r"for (q\w*) in unroll\(4\):\n +(theirs\w*)\[\1, 0:\+4\] = peer\(addr\(sums\[.*\]\), \1\)\n"
        r" +for (q\w*) in unroll\(4\):\n +totals\[(.*)\] = totals\[\4\] \+ \2\[\3, 0:\+4\]",
        text,
    )


def test_only_f32_is_split_and_only_on_new_devices() -> None:
    few = problem(matmul("64, 2048", "2048, 64", "64, 64"))[2]
    assert dict(simt.candidates(few, H200)[0])["split"] == 8
    assert {dict(k)["split"] for k in simt.candidates(few, FACTS["sm_80"])} == {1}
    assert {
        dict(k)["split"] for k in simt.candidates(problem(matmul("64, 2048", "2048, 64", "64, 64", "f64"))[2], H200)
    } == {1}
    with pytest.raises(ScheduleError, match="cannot be shared by 3 blocks"):
        simt.apply(few, {**SIMT, "split": 3}, H200)


@pytest.mark.family("choices")
@pytest.mark.slow
@pytest.mark.parametrize("tile", simt.TILES, ids=str)
def test_every_tile(tile: simt.Blocking) -> None:
    """More than one tile each way, none of them full."""
    m, n = tile.bm + 3, tile.bn + 4
    check(simt, matmul(f"{m}, 36", f"36, {n}", f"{m}, {n}"), {**tile._asdict(), "bk": 16, "slices": 1})


@pytest.mark.family("shapes")
@pytest.mark.slow
@pytest.mark.parametrize("shape", mma.SHAPES, ids=lambda s: f"{s.bm}x{s.bn}x{s.down}x{s.across}")
@pytest.mark.parametrize("module", [mma, tf32])
def test_every_shape(module: ModuleType, shape: mma.Shape) -> None:
    m, n = shape.bm + 3, shape.bn + 8
    text = matmul(f"{m}, 72", f"72, {n}", f"{m}, {n}", "f16" if module is mma else "f32")
    knobs = {
        "bm": shape.bm,
        "bn": shape.bn,
        "down": shape.down,
        "across": shape.across,
        "bk": 32,
        "stages": 3,
        "slices": 1,
    }
    check(module, text, knobs, 2e-3)


def test_fewer_steps_than_stages() -> None:
    check(mma, matmul("16, 16", "16, 16", "16, 16", "f16"), {**MMA, "stages": 4})


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "text, knobs",
    [
        (matmul("1, 96", "96, 80", "1, 80"), {"wide": 8, "threads": 128}),  # the matrix lies along its columns
        (matmul("3, 100", "100, 72", "3, 72", "f16"), {"wide": 4, "threads": 64}),
        (matmul("5, 99", "99, 71", "5, 71"), {"wide": 16, "threads": 64}),
        (matmul("2, 3, 70, 64", "2, 3, 64, 1", "2, 3, 70, 1"), {"per": 1, "parts": 1, "threads": 64}),  # along its rows
        (matmul("70, 640", "640", "70"), {"per": 2, "parts": 2, "threads": 128}),
        (matmul("50, 300", "300, 3", "50, 3", "bf16"), {"per": 2, "parts": 4, "threads": 128}),
        (matmul("70, 10", "10", "70"), {"per": 1, "parts": 1, "threads": 64, "lanes": 8}),  # a sum of few vectors
        (matmul("70, 24", "24, 5", "70, 5"), {"per": 2, "parts": 1, "threads": 64, "lanes": 4}),
        (dense(2, 64, 40), {"wide": 8, "threads": 64}),
    ],
)
def test_one_short_side(text: str, knobs: dict[str, int]) -> None:
    check(gemv, text, knobs)


def test_guards_that_keep_indices_inside_speak_of_axes() -> None:
    """One channel, few taps: the schedule for rows of threads. Were the image's axes joined, nothing would show that
    its end is not passed.
    """
    text = conv("1, 1, 9, 5", "1, 1, 2, 2", "dilations=(2, 1), pads=(0, 0, 0, 1)")
    assert not simt.candidates(problem(text)[2], H200)
    check(reduce, text, dict(reduce.candidates(problem(text)[2], H200)[0]))


def test_in_place_residual() -> None:
    """The output takes the memory of the residual: the thread that writes an element has read it before."""
    g = parse("def g(x: f32[20, 24], w: f32[24, 40], r: f32[20, 40]):\n    return add(matmul(x, w), r)")
    (group,) = plan_fusion(g).groups
    low = lower(g, group.nodes, group.outputs, inplace={group.outputs[0]: g.inputs[2]})
    kernel = verify_kernel(simt.apply(classify(group.nodes, low), SIMT, H200))
    x, w, r = draw(g)
    want = x.astype(np.float64) @ w + r
    run_kernel(kernel, {b.name: {"x": x, "w": w, "r": r}[v.name] for v, b in zip(low.params, kernel.entry.buffers)})
    assert np.abs(r - want).max() < 1e-5


# --- every sample of the records --------------------------------------------------------------------------------------

SAMPLES = [
    pytest.param(name, k, id=f"{name}-{k}")
    for name in ("matmul", "conv", "conv_transpose")
    for k in range(len(OPS[name].samples))
]


@pytest.mark.family("samples")
@pytest.mark.parametrize("name, k", SAMPLES)
def test_samples(name: str, k: int) -> None:
    """Every template that takes a sample computes it; those that no template takes have a short side and a sum of few
    terms, or no side at all.
    """
    from dnnc.ir.graph.builder import Builder

    s = OPS[name].samples[k]
    g = Graph("g")
    values = [g.add_input(f"x{i}", t) if t is not None else None for i, t in enumerate(s.inputs)]
    g.outputs = [Builder(g).op(name, *values, **dict(s.attrs))]
    g, low, p = problem(g)
    c = p.contraction
    if c is None:
        assert name == "matmul" and len(low.out_loops) == 0
        return
    interpret(g, low, verify_kernel(simt.apply(p, SIMT, H200)))
    if mma.half_contraction(p) is not None:
        interpret(g, low, verify_kernel(mma.apply(p, MMA, H200)))
    if gemv.candidates(p, H200):
        interpret(g, low, verify_kernel(gemv.apply(p, dict(gemv.candidates(p, H200)[0]), H200)))


# --- the nest ---------------------------------------------------------------------------------------------------------


def test_sides_of_a_convolution() -> None:
    """Pixels are the columns: along them the output lies in memory. Taps and channels are one sum."""
    c = nest(conv("2, 8, 9, 7", "24, 4, 3, 3", "pads=(1, 1, 1, 1), group=2"))
    assert c.sizes == (2, 12, 2 * 63, 36)
    assert c.swapped and len(c.b.conds) == 4 and not c.a.conds
    assert [len(axis.loops) for axis in (c.batch, c.rows, c.cols, c.red)] == [1, 1, 2, 1]


def test_sides_of_matrices() -> None:
    assert nest(matmul("2, 3, 20, 16", "16, 36", "2, 3, 20, 36")).sizes == (1, 120, 36, 16)
    assert nest(matmul("2, 3, 20, 16", "3, 16, 36", "2, 3, 20, 36")).sizes == (3, 40, 36, 16)
    assert nest(matmul("20, 16", "16", "20")).sizes == (1, 1, 20, 16)


def test_what_is_no_tiled_contraction() -> None:
    assert (
        problem(matmul("4, 5", "5, 6", "4, 6", "i64"))[2].contraction is None
    )  # sums of indices are not sums of products
    assert problem("def g(x: f32[4, 5]):\n    return softmax(x)")[2].contraction is None
    _, _, p = problem(matmul("20, 24", "24, 40", "20, 40"))
    assert mma.half_contraction(p) is None and not mma.candidates(p, H200)
    with pytest.raises(ScheduleError, match="half-precision"):
        mma.apply(p, MMA, H200)


@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "text, a, b",
    [
        (matmul("32, 24", "24, 64", "32, 64"), ("sum", 4), ("side", 4)),
        (matmul("32, 27", "27, 64", "32, 64"), ("sum", 1), ("side", 4)),
        (matmul("32, 26", "26, 66", "32, 66"), ("sum", 2), ("side", 2)),
        (transposed(32, 24, 64), ("side", 4), ("side", 4)),
        (conv("2, 8, 6, 6", "24, 8, 1, 1"), ("sum", 4), ("side", 4)),
        (
            conv("2, 8, 6, 6", "24, 8, 3, 3", "pads=(1, 1, 1, 1)"),
            ("sum", 4),
            ("side", 1),
        ),  # padding may cut any vector of pixels
    ],
)
def test_how_tiles_are_read(text: str, a: tuple[str, int], b: tuple[str, int]) -> None:
    c = nest(text)
    made = [plan_tile(c, o, 64, 16, 128, 1) for o in (c.a, c.b)]
    assert [(t.along, t.lanes) for t in made] == [a, b]


# --- planted bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, knobs, old, new, message",
    [
        (simt, SIMT, "barrier()", "syncwarp()", "race|nobody has written"),
        (simt, SIMT, "cp_async_wait(0)", "syncwarp()", "in flight"),
        (simt, {**SIMT, "split": 2}, "cluster_barrier()", "barrier()", "race|cluster_barrier"),
        (mma, MMA, "cp_async_wait(1)", "cp_async_wait(2)", "in flight"),
        (mma, MMA, "barrier()", "syncwarp()", "race"),
        (mma, MMA, "syncwarp()", "prefetch(addr(x0[0, 0]))", "race"),
    ],
)
def test_planted_bugs_are_found(module: ModuleType, knobs: dict[str, int], old: str, new: str, message: str) -> None:
    t = "f32" if module is simt else "f16"
    wide = {**knobs, "bm": 32} if module is simt else knobs  # two warps
    g, low, p = problem(matmul("32, 64", "64, 64", "32, 64", t))
    text = show_kernel(module.apply(p, wide, H200))
    assert old in text
    with pytest.raises(VerifyError, match=message):
        interpret(g, low, parse_kernel(text.replace(old, new)))


# --- the choice of tiles ----------------------------------------------------------------------------------------------

SIZES = (
    (4096, 4096, 4096),
    (1024, 1024, 1024),
    (128, 768, 768),
    (128, 3072, 768),
    (16, 4096, 4096),
    (197, 384, 1536),
    (50, 1000, 2048),
    (9, 33, 65),
)


@pytest.mark.parametrize("m, n, k", SIZES)
def test_candidates_fit(m: int, n: int, k: int) -> None:
    for t, module in (("f32", simt), ("f16", mma)):
        _, _, p = problem(matmul(f"{m}, {k}", f"{k}, {n}", f"{m}, {n}", t))
        found = module.candidates(p, H200)
        assert found and len(set(found)) == len(found)
        kernel = verify_kernel(module.apply(p, dict(found[0]), H200))
        launch = launch_of(kernel)
        assert launch.shared_bytes <= H200.shared_bytes and launch.block[0] <= H200.max_threads


def test_few_rows() -> None:
    """Rows that memory outlasts are streamed past; more of 16-bit floats are for the tensor cores."""
    for rows, t, streamed in (
        (1, "f16", True),
        (4, "f16", True),
        (5, "f16", False),
        (8, "f32", True),
        (9, "f32", False),
    ):
        p = problem(matmul(f"{rows}, 512", "512, 512", f"{rows}, 512", t))[2]
        assert bool(gemv.candidates(p, H200)) == streamed and any(m.candidates(p, H200) for m in (gemv, mma, simt))


def test_small_problems_fill_the_machine() -> None:
    """Fewer tiles than SMs: smaller tiles are chosen, or sums are split. Many: the tile with the most reuse."""
    few = dict(simt.candidates(problem(matmul("128, 768", "768, 768", "128, 768"))[2], H200)[0])
    many = dict(simt.candidates(problem(matmul("4096, 512", "512, 4096", "4096, 4096"))[2], H200)[0])
    assert -(-128 // int(few["bm"])) * -(-768 // int(few["bn"])) * int(few["split"]) >= 90
    old = dict(simt.candidates(problem(matmul("128, 768", "768, 768", "128, 768"))[2], FACTS["sm_80"])[0])
    assert -(-128 // int(old["bm"])) * -(-768 // int(old["bn"])) >= 90
    assert int(many["bm"]) * int(many["bn"]) >= 128 * 64


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(module: ModuleType, text: str, arch: str, knobs: Mapping[str, int | str] | None = None) -> None:
    target = FACTS[arch]
    _, _, p = problem(text)
    kernel = verify_kernel(module.apply(p, knobs or dict(module.candidates(p, target)[0]), target))
    made = compile_cuda(emit_kernel(kernel, "contraction", target), arch)
    launch = launch_of(kernel)
    assert made.spills == 0 and made.local_bytes == 0
    assert made.registers * launch.block[0] <= target.registers


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, text",
    [
        (simt, dense(1024, 768, 1024)),
        (mma, dense(256, 768, 768, "f16")),
        (gemv, matmul("1, 768", "768, 3072", "1, 3072", "f16")),
    ],
)
def test_compiles(module: ModuleType, text: str) -> None:
    compiled(module, text, "sm_90a")
