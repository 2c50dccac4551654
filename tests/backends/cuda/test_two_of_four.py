"""2:4 sparse weights of 16-bit floats: the encoding, the kernels in the interpreter, and when they are chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda import pair_weights
from dnnc.backends.cuda.emit import emit_kernel
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates.contraction import two_of_four, two_of_four_rows
from dnnc.ir.dtype import from_numpy
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run as run_graph
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.interp_values import KernelError
from dnnc.ir.loops.stmt import Eval, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.pairs import LINES, Pairs, is_two_of_four
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

Array = np.ndarray[Any, Any]
H200 = GpuTarget(sms=3)  # blocks then have several tiles
RNG = np.random.default_rng(0)
MODULES = {"tiles": two_of_four, "lanes": two_of_four_rows}


def pruned(rng: Any, terms: int, rows: int, dtype: Any = np.float16, share: float = 1.0) -> Array:
    """[terms, rows] of which two of each four neighbours of a column are not 0, or less."""
    whole = -(-terms // 4) * 4
    keep = np.zeros((whole // 4, 4, rows), np.bool_)
    np.put_along_axis(keep, np.argsort(rng.random(keep.shape), 1)[:, :2], True, 1)
    keep &= rng.random(keep.shape) < share
    w: Array = (rng.standard_normal((terms, rows)) * keep.reshape(whole, rows)[:terms]).astype(dtype)
    return w


def problem_of(pixels: int, w: Array, order: str, constant: bool = True) -> Problem:
    g, dtype = Graph("g"), from_numpy(w.dtype)
    x, v = (
        g.add_input("x", tensor(dtype, pixels, w.shape[0])),
        g.add_input("w", TensorType(dtype, w.shape, Pairs.of(w, 1, order))),
    )
    g.outputs = [Builder(g).matmul(x, v)]
    return classify(list(g.nodes()), lower(g, list(g.nodes()), g.outputs), constants=[v] if constant else [])


def run(pixels: int, w: Array, order: str, number: int) -> None:
    """A kernel in the interpreter against float64; also its text."""
    p, module = problem_of(pixels, w, order, number % 3 > 0), MODULES[order]
    found = module.space(p, H200)
    kernel = verify_kernel(module.apply(p, dict(found[number % len(found)]), H200))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    x = RNG.standard_normal((pixels, w.shape[0])).astype(w.dtype)
    check(p, kernel, x, w, order)


def check(p: Problem, kernel: Any, x: Array, w: Array, order: str) -> None:
    names = [b.name for b in p.kernel.entry.buffers]
    y = np.full((len(x), w.shape[1]), np.nan, w.dtype)
    run_kernel(kernel, dict(zip(names, (x, Pairs.of(w, 1, order).pack(w)[0], y))))
    want = x.astype(np.float64) @ w.astype(np.float64)
    error = np.abs(y.astype(np.float64) - want).max()
    assert error <= (2e-3 if w.dtype == np.float16 else 1.5e-2) * max(np.abs(want).max(), 1e-30)


@pytest.mark.parametrize("order", MODULES)
def test_elements_are_the_constant(order: str) -> None:
    """By `load`, in the kernel as it is lowered; of groups with two, one and no number, padded rows and columns."""
    w = pruned(RNG, 70, 3, share=0.7)
    e = Pairs.of(w, 1, order)
    assert parse_encoding(str(e)) == e and e.pack(w)[0].shape == (2 * LINES * 64,)
    p = problem_of(70, w, order)
    check(p, p.kernel, np.eye(70, dtype=np.float16), w, order)


def test_what_an_encoding_holds() -> None:
    w = RNG.standard_normal((12, 5)).astype(np.float16)
    held = Pairs.of(w, 1).held(w)
    assert not is_two_of_four(w) and is_two_of_four(held)
    np.testing.assert_array_equal(held.reshape(3, 4, 5)[:, :2], w.reshape(3, 4, 5)[:, :2])
    assert not held.reshape(3, 4, 5)[:, 2:].any()
    with pytest.raises(ValueError, match="more than 2 numbers"):
        Pairs.of(w, 1).pack(w)
    with pytest.raises(ValueError, match="'rows'"):
        Pairs.parse("pairs 1 12x5 rows")


def test_kernel_of_tiles() -> None:
    """More steps than stages."""
    w, order = pruned(RNG, 192, 72), "tiles"
    p = problem_of(20, w, order)
    kernel = verify_kernel(two_of_four.apply(p, {"bn": 64, "stages": 2, "group": 1, "split": 1}, H200))
    check(p, kernel, RNG.standard_normal((20, 192)).astype(np.float16), w, order)


@pytest.mark.slow
def test_blocks_share_a_tile() -> None:
    w, order = pruned(RNG, 256, 72), "tiles"
    p = problem_of(20, w, order)
    kernel = verify_kernel(two_of_four.apply(p, {"bn": 64, "stages": 2, "group": 1, "split": 2}, H200))
    check(p, kernel, RNG.standard_normal((20, 256)).astype(np.float16), w, order)


def test_kernel_of_few_rows() -> None:
    run(3, pruned(RNG, 192, 136), "lanes", 1)


def test_sums_are_waited_for_in_the_loop() -> None:
    """ptxas reads sums ahead of a wait behind the loop."""
    p = problem_of(40, pruned(RNG, 192, 136), "tiles")
    kernel = two_of_four.apply(p, {"bn": 64, "stages": 2, "group": 1, "split": 1}, H200)
    names = [s.name for s in walk_stmts(kernel.entry.body) if isinstance(s, Eval) and s.name.startswith("wgmma")]
    assert names == ["wgmma_fence", "wgmma_sp", "wgmma_sp", "wgmma_commit", "wgmma_wait"]


def test_places_must_rise() -> None:
    w = pruned(RNG, 64, 8)
    p = problem_of(8, w, "tiles")
    packed = Pairs.of(w, 1).pack(w)[0].copy()
    packed.view(np.uint16)[64 * 64] = 0
    kernel = two_of_four.apply(p, {"bn": 64, "stages": 1, "group": 1, "split": 1}, H200)
    arrays = np.ones((8, 64), np.float16), packed, np.zeros((8, 8), np.float16)
    with pytest.raises(KernelError, match="must rise"):
        run_kernel(kernel, dict(zip([b.name for b in p.kernel.entry.buffers], arrays)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_random_products(number: int) -> None:
    """All tiles and shapes, both types; cases of a day."""
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    order, dtype = list(MODULES)[number % 2], (np.float16, ml_dtypes.bfloat16)[number // 2 % 2]
    terms = 64 * int(rng.integers(1, 9)) if order == "lanes" else 8 * int(rng.integers(1, 40))
    rows, pixels = 8 * int(rng.integers(1, 40)), int(rng.integers(1, 16 if order == "lanes" else 200))
    run(pixels, pruned(rng, terms, rows, dtype, rng.random()), order, int(rng.integers(10**6)))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "pixels", "arch"), [
    (two_of_four, 300, "sm_90a"), (two_of_four_rows, 1, "sm_80"), (two_of_four_rows, 16, "sm_90a"),
])  # fmt: skip
def test_kernels_fit_into_registers(module: ModuleType, pixels: int, arch: str) -> None:
    """Every other tile and shape, compiled."""
    target = FACTS[arch]
    p = problem_of(pixels, np.zeros((2048, 384), np.float16), next(k for k, v in MODULES.items() if v is module))
    texts = {}
    for n, knobs in enumerate(module.candidates(p, target)[::2]):
        kernel = decompose(module.apply(p, dict(knobs), target), supported("standard"))
        texts[f"kernel_{n}"] = (emit_kernel(kernel, f"kernel_{n}", target), arch)
    codes = compile_many(texts, 1)
    assert codes and all(c.spills == c.local_bytes == 0 for c in codes.values())


@pytest.mark.parametrize(("pixels", "sizes", "lines"), [
    (4096, (1024, 2048), "two of each four not 0: sparse, 2:4, 1."),
    (1, (3072, 4096), "two of each four not 0: sparse, 2:4, 1."),
    (64, (768, 768), "two of each four not 0: dense, 0."),
    (64, (70, 70), "two of each four not 0: dense, there is no kernel"),
])  # fmt: skip
def test_choice(pixels: int, sizes: tuple[int, int], lines: str) -> None:
    w = np.zeros(sizes, np.float16)
    w[1::2] = 1
    text = f"def g(x: f16[{pixels}, {sizes[0]}], *, w: f16[{sizes[0]}, {sizes[1]}]):\n    return matmul(x, w)\n"
    g = parse(text, {"w": w})
    verdict = pair_weights.weigh_pairs(g, next(iter(g.nodes())), GpuTarget())
    assert verdict is not None and lines in verdict.why
    assert isinstance(verdict.encoding, Pairs) == ("sparse, 2:4" in lines)
    assert pixels > 1 or str(verdict.encoding) == "pairs 1 3072x4096 lanes"
    older = pair_weights.weigh_pairs(g, next(iter(g.nodes())), FACTS["sm_80"])
    assert older is not None and (older.encoding is None) == (pixels > 1)
    w[:3] = 1
    assert pair_weights.weigh_pairs(parse(text, {"w": w}), next(iter(g.nodes())), replace(H200)) is None


@pytest.mark.parametrize("number", range(4))
def test_what_is_chosen_has_a_kernel(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes are; cases of a day."""
    monkeypatch.setattr(pair_weights, "GAIN", 0.0)
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    pixels, terms, rows = (int(rng.choice(x)) for x in ((1, 2, 16, 300), (8, 64, 70, 136), (1, 2, 6, 8, 136)))
    w = np.zeros((terms, rows), np.float16)
    w[::2] = 1
    g = parse(f"def g(x: f16[{pixels}, {terms}], *, w: f16[{terms}, {rows}]):\n    return matmul(x, w)\n", {"w": w})
    verdict = pair_weights.weigh_pairs(g, next(iter(g.nodes())), GpuTarget())
    assert verdict is not None
    if isinstance(verdict.encoding, Pairs):
        order = verdict.encoding.order
        assert MODULES[order].candidates(problem_of(pixels, w, order), GpuTarget()), (pixels, terms, rows)
    else:
        assert min(pixels, rows) < 2 or terms % 8, (pixels, terms, rows)


@pytest.mark.slow
def test_convolutions_of_single_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a row, channels last between them; one by windows stays dense."""
    monkeypatch.setattr(pair_weights, "GAIN", 0.0)
    w, v, u = (pruned(RNG, c, o).T.reshape(o, -1, k, k) for c, o, k in ((64, 72, 1), (72, 40, 1), (360, 8, 3)))
    text = """def g(x: f16[2, 64, 5, 7], *, w: f16[72, 64, 1, 1], v: f16[40, 72, 1, 1], u: f16[8, 40, 3, 3]):
    return conv(conv(relu(conv(x, w)), v), u)
"""
    g = parse(text, {"w": w, "v": v, "u": u})
    f = dnnc.compile(g.copy(), target="cuda-interpreted", cache=False)
    assert sum(k.choice.startswith("two_of_four(") for k in f.report.programs[-1].kernels) == 2
    x = RNG.standard_normal((2, 64, 5, 7)).astype(np.float16)
    want = np.asarray(run_graph(g, [x], "float64")[0], np.float64)
    assert np.abs(f(x).astype(np.float64) - want).max() <= 4e-3 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kernel"), [("2, 17", "two_of_four"), ("1, 3", "two_of_four_rows")])
def test_a_model_of_pairs(shape: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leading axes, an epilogue, a result in float32, and the same results as dense weights have."""
    monkeypatch.setattr(pair_weights, "GAIN", 0.0)
    monkeypatch.setattr(two_of_four_rows, "best_cycles", lambda pixels, *_: 1.0 if pixels < 16 else 1e9)
    w, v, c = pruned(RNG, 128, 64), pruned(RNG, 64, 24), RNG.standard_normal(64).astype(np.float16)
    text = f"""def g(x: f16[{shape}, 128], *, w: f16[128, 64], v: f16[64, 24], c: f16[64]):
    h = relu(add(matmul(x, w), c))
    return cast(matmul(h, v), to=f32)
"""
    f = dnnc.compile(parse(text, {"w": w, "v": v, "c": c}), target="cuda-interpreted", cache=False)
    assert [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels] == [kernel, kernel]
    x = RNG.standard_normal([*map(int, shape.split(",")), 128]).astype(np.float16)
    want = np.maximum(x.astype(np.float64) @ w.astype(np.float64) + c, 0) @ v.astype(np.float64)
    assert np.abs(f(x).astype(np.float64) - want).max() <= 4e-3 * max(np.abs(want).max(), 1)
