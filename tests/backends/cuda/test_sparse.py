"""Products of sparse weights on GPUs: kernels in the interpreter against float64, all blocks compiled; the choice."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda import sparse_weights
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.contraction import sparse, sparse_gather
from dnnc.ir.bundles import Bundles
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.channels_last import assign_channels_last
from dnnc.passes.schedule.problem import Problem, classify

RNG = np.random.default_rng(0)
H200 = GpuTarget()
Array = Any


def pruned(*shape: int, density: float = 0.1, pattern: str = "random") -> Array:
    """[rows, ...] of weights with zeros. `pattern`: "random", "skewed" (few long rows), "one" dense row among none."""
    keep = RNG.random(shape)
    if pattern == "skewed":
        rows = (np.arange(shape[0]) + 1.0).reshape(-1, *[1] * (len(shape) - 1))
        keep = keep * rows * density * 8
    w = np.where(keep < density, RNG.standard_normal(shape), 0).astype(np.float32)
    if pattern == "one":
        w[...] = 0
    w[1] = 0
    w[2] = 1
    return w


def product(pixels: int, k: int, rows: int, weights: Array | None = None) -> Graph:
    w = pruned(rows, k) if weights is None else weights
    text = f"""def g(x: f32[{pixels}, {k}], *, w: f32[{k}, {rows}], b: f32[{rows}]):
    y = relu(add(matmul(x, w), b))
    return y"""
    return parse(text, {"w": w.T.copy(), "b": RNG.standard_normal(rows).astype(np.float32)})


def conv(c: int, o: int, h: int, w: int, k: int = 1, n: int = 1, stride: int = 1) -> Graph:
    arrays = {"w": pruned(o, c, k, k), "b": RNG.standard_normal(o).astype(np.float32)}
    text = f"""def g(x: f32[{n}, {c}, {h}, {w}], *, w: f32[{o}, {c}, {k}, {k}], b: f32[{o}]):
    y = relu(conv(x, w, b, pads=({k // 2}, {k // 2}, {k // 2}, {k // 2}), strides=({stride}, {stride})))
    return y"""
    return parse(text, arrays)


CASES = {
    "product": lambda: product(33, 40, 24),
    "odd product": lambda: product(50, 37, 21),
    "skewed product": lambda: product(20, 96, 70, pruned(70, 96, pattern="skewed")),
    "one row": lambda: product(40, 64, 16, pruned(16, 64, pattern="one")),
    "batch": lambda: conv(20, 24, 5, 7, n=2),
    "window": lambda: conv(8, 20, 6, 7, k=3),
    "stride": lambda: conv(16, 16, 9, 9, k=3, stride=2),
}


def first(k: int, pixels: int, rows: int) -> Graph:
    """Weights as the first factor of a product, so that pixels lie side by side."""
    text = f"""def g(x: f32[{k}, {pixels}], *, w: f32[{rows}, {k}], b: f32[{rows}, 1]):
    y = relu(add(matmul(w, x), b))
    return y"""
    return parse(text, {"w": pruned(rows, k), "b": RNG.standard_normal((rows, 1)).astype(np.float32)})


GATHERED = {
    "first factor": lambda: first(20, 16, 8),
    "odd first factor": lambda: first(37, 51, 21),
    "one row": CASES["one row"],
    "images of odd size": lambda: conv(14, 18, 5, 7, n=2),
    "windows": lambda: conv(5, 9, 6, 7, k=3, n=2),
    "windows of one row": lambda: conv(3, 8, 1, 9, k=3, n=3),
    "large windows": lambda: conv(4, 8, 6, 5, k=5),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sparse wherever there is a kernel for them."""
    monkeypatch.setattr(sparse_weights, "GAIN", 0.0)
    monkeypatch.setattr(sparse_weights, "GATHER_GAIN", math.inf)
    monkeypatch.setattr(sparse_weights, "CODE_GAIN", math.inf)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sparse wherever pixels can be gathered."""
    monkeypatch.setattr(sparse_weights, "GATHER_GAIN", 0.0)
    monkeypatch.setattr(sparse_weights, "CODE_OVER_GATHER", math.inf)
    monkeypatch.setattr(sparse_weights, "best_bundles", lambda *_: (math.inf, None))


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize(
    "case", ["first factor", *(pytest.param(k, marks=pytest.mark.slow) for k in GATHERED if k != "first factor")]
)
def test_gathered_pixels_mean_the_product(case: str) -> None:
    g = GATHERED[case]()
    x = RNG.standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    x.reshape(-1)[:: x.size - 1] = np.inf  # of the columns 0 and -1, which padding must not reach
    f = dnnc.compile(g.copy(), target="cuda-interpreted", cache=False)
    assert "sparse_gather" in [p.choice.partition("(")[0] for p in f.report.programs[-1].kernels]
    with np.errstate(invalid="ignore"):
        want = np.asarray(expected(g, x))
        got = f(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want[np.isfinite(want)]).max())


def expected(g: Graph, x: Array) -> Array:
    """Relu of the product in float64, in which a weight of 0 has no term; plus a bias."""
    w, b = (g.constants[v].astype(np.float64) for v in g.constants)
    columns = x.astype(np.float64)
    if x.ndim == 4:
        near = w.shape[-1] // 2
        padded = np.pad(columns.transpose(1, 0, 2, 3), ((0, 0), (0, 0), (near, near), (near, near)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (2, 3))
        columns = windows.transpose(0, 4, 5, 1, 2, 3).reshape(x.shape[1] * w[0, 0].size, -1)
    elif w.shape[1] == b.size:  # the second factor
        w, columns = w.T, columns.T
    rows = w.reshape(w.shape[0], -1)
    y = np.stack([(r[r != 0, None] * columns[r != 0]).sum(0) for r in rows]) + b.reshape(-1, 1)
    y = np.maximum(y, 0)
    if x.ndim == 4:
        return y.reshape(len(rows), x.shape[0], *x.shape[2:]).swapaxes(0, 1)
    return y if len(b.shape) == 2 else y.T


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_random_gathered_products(number: int) -> None:
    """Sizes that nothing divides, rows that are empty, full or alone, all blocks; cases of a day."""
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    pixels, k, rows = (int(rng.integers(2, n)) for n in (150, 90, 40))
    kind, density = str(rng.choice(["random", "skewed", "none", "one", "all"])), rng.random() ** 2
    density = {"none": 0.0, "one": 0.0, "all": 1.0}.get(kind, density)
    w = np.where(rng.random((rows, k)) < density, rng.standard_normal((rows, k)), 0).astype(np.float32)
    w *= rng.random((rows, 1)) < (1 / (1 + np.arange(rows)[:, None]) if kind == "skewed" else 1)
    if kind == "one":
        w[int(rng.integers(rows))] = 1
    g, encoding = Graph("g"), sparse_gather.encoding_of(w, 0)
    x, v = g.add_input("x", tensor(f32, k, pixels)), g.add_input("w", TensorType(f32, w.shape, encoding))
    g.outputs = [Builder(g).matmul(v, x)]
    p = classify(list(g.nodes()), lower(g, list(g.nodes()), g.outputs))
    found = sparse_gather.candidates(p, H200)
    assert len(found) == len(sparse_gather.SHAPES)
    knobs = dict(found[int(rng.integers(len(found)))])
    kernel = verify_kernel(sparse_gather.apply(p, knobs, H200))
    assert launch_of(kernel).cached
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    data = rng.standard_normal((k, pixels)).astype(np.float32)
    arrays = dict(zip((b.name for b in p.kernel.entry.buffers), [encoding.pack(w)[0], data]))
    arrays[name := p.kernel.entry.buffers[-1].name] = np.full((rows, pixels), np.nan, np.float32)
    run_kernel(kernel, arrays)
    want = w.astype(np.float64) @ data
    assert np.abs(arrays[name] - want).max() <= 1e-5 * max(np.abs(want).max(), 1e-30), (pixels, k, rows, kind, knobs)


@pytest.mark.family("kernels")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_means_the_product(case: str) -> None:
    g = CASES[case]()
    x = RNG.standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    f = dnnc.compile(g.copy(), target="cuda-interpreted", cache=False)
    assert "sparse" in [p.choice.partition("(")[0] for p in f.report.programs[-1].kernels]
    (want,) = run(g, [x], "float64")
    assert np.abs(f(x) - want).max() <= 1e-5 * np.abs(want).max()


def problem(
    pixels: int, k: int, rows: int, height: int, depth: int, weights: Array | None = None
) -> tuple[Graph, Problem]:
    """A product with bundles of so many rows in pieces of so many columns."""
    g = product(pixels, k, rows, weights)
    n = next(n for n in g.nodes() if n.op.name == "matmul")
    w = g.constants[n.inputs[1]]  # type: ignore[index]
    n.set_input(1, g.constant(w, "w", (), TensorType(f32, w.shape, Bundles.of(w, 1, height, depth))))
    (group,) = plan_fusion(g).groups
    return g, classify(group.nodes, lower(g, group.nodes, group.outputs), g.constants)


def result(g: Graph, p: Problem, kernel: Kernel, x: Array) -> Array:
    """The output of a kernel in the interpreter."""
    values = {v: g.constants.get(v, x) for v in p.lowered.params[:-1]}
    arrays = {b.name: np.array(v.type.encoding.pack(values[v])[0]) for v, b in zip(values, p.kernel.entry.buffers)}
    name = p.kernel.entry.buffers[-1].name
    arrays[name] = np.full(p.lowered.params[-1].type.physical, np.nan, np.float32)
    run_kernel(kernel, arrays)
    return arrays[name]


@pytest.mark.slow
@pytest.mark.parametrize(("height", "depth"), [(16, 40), (32, 16), (64, 24)])
def test_all_blocks_agree(height: int, depth: int) -> None:
    """With sums in one piece and in several; texts are read back."""
    g, p = problem(70, 40, 50, height, depth)
    x = RNG.standard_normal((70, 40)).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    for knobs in sparse.candidates(p, H200):
        kernel = verify_kernel(sparse.apply(p, dict(knobs), H200))
        assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
        assert np.abs(result(g, p, kernel, x) - want).max() <= 1e-5 * np.abs(want).max(), knobs


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_random_patterns_and_blocks(number: int) -> None:
    """Sizes that nothing divides, rows that are empty, full or alone; cases of a day."""
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    while True:
        pixels, k, rows = (int(rng.integers(2, n)) for n in (80, 90, 70))
        height, depth = int(rng.choice([16, 32, 64, 128])), -(-k // int(rng.integers(1, 4)) // 8) * 8 + 8
        kind = str(rng.choice(["random", "skewed", "none", "one", "all"]))
        density = {"none": 0.0, "one": 0.0, "all": 1.0}.get(kind, rng.random() ** 2)
        w = np.where(rng.random((rows, k)) < density, rng.standard_normal((rows, k)), 0).astype(np.float32)
        w *= rng.random((rows, 1)) < (1 / (1 + np.arange(rows)[:, None]) if kind == "skewed" else 1)
        if kind == "one":
            w[int(rng.integers(rows))] = 1
        g, p = problem(pixels, k, rows, height, depth, w)
        if found := sparse.space(p, H200):
            break
    kernel = verify_kernel(sparse.apply(p, knobs := dict(found[int(rng.integers(len(found)))]), H200))
    x = rng.standard_normal((pixels, k)).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    gap = np.abs(result(g, p, kernel, x) - want).max()
    assert gap <= 1e-5 * max(np.abs(want).max(), 1e-30), (pixels, k, rows, height, depth, kind, knobs)


@pytest.mark.slow
def test_all_blocks_compile() -> None:
    """For an old and a new architecture: no spills, no local memory, registers for a block."""
    for arch in ("sm_80", "sm_90a"):
        target, made = FACTS[arch], {}
        for k, sizes in enumerate([(784, 512, 128, 64, 512), (300, 2048, 300, 128, 688), (3136, 64, 256, 256, 64)]):
            _, p = problem(*sizes)
            for n, knobs in enumerate(sparse.candidates(p, target)):
                made[f"sparse_{k}_{n}"] = sparse.apply(p, dict(knobs), target)
        assert len(made) > 8
        for symbol, c in compile_many({s: (emit_kernel(k, s, target), arch) for s, k in made.items()}).items():
            assert c.spills == 0 and c.local_bytes == 0, f"{symbol}: {c.log}"
            assert c.registers * launch_of(made[symbol]).block[0] <= target.registers


def test_density_and_sizes_decide() -> None:
    """Sparse where the estimate promises it, dense elsewhere; strict numerics have no sparse weights."""
    gains = {}
    for density in (0.02, 0.1, 0.5):
        g = product(6272, 512, 512, pruned(512, 512, density=density))
        n = next(n for n in g.nodes() if n.op.name == "matmul")
        verdict = sparse_weights.weigh_sparse(g, n, H200)
        assert verdict is not None and "times" in verdict.why
        gains[density] = verdict.encoding is not None
    assert gains[0.02] and not gains[0.5]
    g = product(6272, 512, 512, pruned(512, 512, density=0.02))
    for numerics, some in (("standard", True), ("strict", False)):
        manager, ctx = PassManager(), PassContext(facts(H200, numerics), numerics)
        made = compile_program(g.copy(), ctx, templates(H200, strict=numerics == "strict"), manager=manager)
        notes = [line for r in manager.records for line in r.notes if "sparse, " in line]
        found = any(isinstance(v.type.encoding, Bundles) for s in made.kernels for v in s.params)
        assert found == some == bool(notes)
        assert any(s.choice.template.startswith("sparse") for s in made.kernels) == some


@pytest.mark.family("kernels")
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 6])
def test_windows_in_pieces(pieces: int, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sparse only where their kernel takes them: rows of a window as pieces make loops of another order."""
    monkeypatch.setattr(sparse_weights, "DEPTHS", (pieces,))
    monkeypatch.setattr(sparse_weights, "LEAST_DEPTH", 8)
    f = dnnc.compile(conv(24, 20, 8, 8, k=3), target="cuda -arch=sm_90a", cache=False)
    made = {k.choice.partition("(")[0] for k in f.report.programs[-1].kernels}
    assert ("sparse" in made) == ("sparse, rows in bundles" in str(f.report))


@pytest.mark.family("kernels")
def test_a_small_image_is_gathered_only_where_its_kernel_takes_it(gathers: None) -> None:
    """Images of 2 x 2 have loops of another order: their weights stay dense."""
    f = dnnc.compile(conv(64, 64, 2, 2, k=3, n=8), target="cuda-interpreted", cache=False)
    made = [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels]
    assert "dense, " in str(f.report) and not any(name.startswith("sparse") for name in made)
    g = conv(64, 64, 2, 2, k=3, n=8)
    n = next(n for n in g.nodes() if n.op.name == "conv")
    verdict = sparse_weights.weigh_sparse(g, n, H200)
    assert verdict is not None and verdict.encoding is None


def test_a_group_without_a_sparse_kernel_is_split(always: None) -> None:
    """No other kernel looks up each zero of bundles: problems with such weights say so."""
    _, p = problem(40, 64, 48, 32, 64)
    assert p.sparse and {t.name for t in templates(H200) if t.sparse} >= {"sparse", "sparse_gather"}


def test_rows_are_asked_for_before_the_wait() -> None:
    """Where weights are constants; the other factor is read behind the wait."""
    w = np.where(np.random.default_rng(0).random((64, 48)) < 0.1, 1, 0).astype(np.float32)
    g = Graph("g")
    x = g.add_input("x", tensor(f32, 48, 80))
    v = g.add_input("w", TensorType(f32, w.shape, sparse_gather.encoding_of(w, 0)))
    g.outputs = [Builder(g).matmul(v, x)]
    for constants in ((v,), ()):
        p = classify(list(g.nodes()), lower(g, list(g.nodes()), g.outputs), constants)
        text = show_kernel(sparse_gather.apply(p, dict(sparse_gather.candidates(p, H200)[0]), H200))
        assert ("pdl_wait()" in text) == bool(constants)
        if constants:
            names = {v: b.name for v, b in zip(p.lowered.params, p.kernel.entry.buffers)}
            before, after = text[text.index("for block") :].split("pdl_wait()")
            assert f"{names[v]}[" in before and f"{names[x]}[" not in before and f"{names[x]}[" in after


@pytest.mark.parametrize("channels", [16, 32, 64, 96])
def test_windows_over_any_number_of_channels(channels: int, always: None) -> None:
    """A word of a bitmap has 32 columns: loops over a window keep the order of columns where channels fill words."""
    g = conv(channels, 24, 9, 9, k=3)
    n = next(n for n in g.nodes() if n.op.name == "conv")
    verdict = sparse_weights.weigh_sparse(g, n, H200)
    assert verdict is not None and verdict.encoding is not None, verdict


def test_reasons_to_stay_dense() -> None:
    for g, why in ((product(4, 64, 64), "too few pixels"), (conv(30, 64, 9, 9, k=3, stride=2), "multiples of 4")):
        n = next(n for n in g.nodes() if n.op.name in ("matmul", "conv"))
        verdict = sparse_weights.weigh_sparse(g, n, H200)
        assert verdict is not None and verdict.encoding is None and why in verdict.why


@pytest.mark.slow
def test_copies_count_where_neighbours_want_another_order() -> None:
    """Each of two products alone is not worth the copies of both its sides, and the two together are."""
    rng, notes = np.random.default_rng(0), []
    arrays = {}
    for name, shape in (("w", (768, 3072)), ("v", (3072, 768))):
        arrays[name] = np.where(rng.random(shape) < 0.16, rng.standard_normal(shape), 0).astype(np.float32)
    text = """def g(x: f32[128, 768], *, w: f32[768, 3072], v: f32[3072, 768]):
    y = matmul(relu(matmul(x, w)), v)
    return y"""
    for shown in (text, text.replace("relu(matmul(x, w))", "softmax(matmul(x, w), axis=1)")):
        assign_channels_last(parse(shown, arrays), lambda g, n: sparse_weights.weigh_sparse(g, n, H200), notes.append)
    assert ["sparse, rows" in n for n in notes] == [True, True, False, False], notes
