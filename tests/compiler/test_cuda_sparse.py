"""Sparse weights and sparse arrays on a real CUDA device, against float64. `make gpu` runs these."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array import sparse as arrays
from dnnc.backends.cuda import block_weights, pair_weights, sparse_weights
from dnnc.backends.cuda.templates.contraction import immediates, sparse, sparse_blocks, two_of_four, two_of_four_rows
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.rewrites.sparse import MOST_DENSITY
from support import random_sparse

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
SEED = os.environ.get("DNNC_TEST_SEED", "").encode()


@pytest.fixture
def any_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Weights are sparse wherever there is a kernel for them, in blocks and encodings that chance ranks."""
    rng = np.random.default_rng([*request.node.name.encode(), *SEED])
    monkeypatch.setattr(sparse_weights, "GAIN", 0.0)
    monkeypatch.setattr(sparse, "cycles", lambda *_: float(rng.random()))
    return rng


def pruned(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """[rows, ...] of weights: even, with few long rows, with one dense row, or all of them zeros."""
    kind, density = rng.integers(4), rng.random() ** 2 * 0.9
    rows = (np.arange(shape[0]) + 1.0).reshape(-1, *[1] * (len(shape) - 1))
    keep = rng.random(shape) * (rows * density * 8 if kind == 1 else 1) < density * (kind != 3)
    if kind == 2:
        keep[rng.integers(shape[0])] = True
    return np.where(keep, rng.standard_normal(shape), 0).astype(np.float32)


def product(rng: np.random.Generator) -> Graph:
    pixels, k, rows = (int(rng.integers(low, high)) for low, high in ((16, 500), (8, 1200), (8, 700)))
    text = f"""def g(x: f32[{pixels}, {k}], *, w: f32[{k}, {rows}], b: f32[{rows}]):
    y = relu(add(matmul(x, w), b))
    return y"""
    w = np.ascontiguousarray(pruned(rng, (rows, k)).T)
    return parse(text, {"w": w, "b": rng.standard_normal(rows).astype(np.float32)})


def convolution(rng: np.random.Generator) -> Graph:
    n, c, o, h, w = (int(rng.integers(low, high)) for low, high in ((1, 4), (2, 40), (2, 70), (8, 20), (8, 20)))
    size, stride = int(rng.choice([1, 1, 3])), int(rng.choice([1, 1, 2]))
    c, o, p = 4 * c, 4 * o, size // 2
    text = f"""def g(x: f32[{n}, {c}, {h}, {w}], *, w: f32[{o}, {c}, {size}, {size}], b: f32[{o}]):
    y = relu(conv(x, w, b, pads=({p}, {p}, {p}, {p}), strides=({stride}, {stride})))
    return y"""
    return parse(text, {"w": pruned(rng, (o, c, size, size)), "b": rng.standard_normal(o).astype(np.float32)})


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("draw", [product, convolution])
def test_pruned_weights(any_block: Any, draw: Any, number: int) -> None:
    g = draw(any_block)
    x = any_block.standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    f = dnnc.compile(g.copy(), target="cuda", cache=False)
    (want,) = run(g, [x], "float64")
    got = f(x)
    assert np.abs(got - want).max() <= 1e-5 * max(np.abs(want).max(), 1e-30), f.report
    made = [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels]
    (w,) = (a for a in g.constants.values() if a.ndim > 1)
    assert "sparse" in made or not 0 < np.count_nonzero(w) <= MOST_DENSITY * w.size, made


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("draw", [product, convolution])
def test_weights_in_code(draw: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are in code wherever there is such a kernel, in blocks that chance ranks."""
    rng = np.random.default_rng([number, 1, *SEED])
    monkeypatch.setattr(sparse_weights, "CODE_OVER_GATHER", 0.0)
    monkeypatch.setattr(sparse_weights, "CODE_GAIN", 0.0)
    monkeypatch.setattr(sparse_weights, "best_bundles", lambda *_: (math.inf, None))
    monkeypatch.setattr(immediates, "MOST", 1 << 14)
    monkeypatch.setattr(immediates, "cycles", lambda *_: float(rng.random()))
    g = draw(rng)
    x = rng.standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    f = dnnc.compile(g.copy(), target="cuda", cache=False)
    (want,) = run(g, [x], "float64")
    assert np.abs(f(x) - want).max() <= 1e-5 * max(np.abs(want).max(), 1e-30), f.report
    assert ("in a piece of code" in str(f.report)) == ("immediates(" in str(f.report))


@pytest.mark.parametrize("number", range(24))
def test_blocks_of_16_bit_weights(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that tiles do not divide, rows of blocks that are empty or full, blocks of threads that chance ranks."""
    rng = np.random.default_rng([number, *SEED])
    monkeypatch.setattr(block_weights, "GAIN", 0.0)
    monkeypatch.setattr(sparse_blocks, "cycles", lambda *_: float(rng.random()))
    size, dtype = int(rng.choice([32, 64])), str(rng.choice(["f16", "bf16"]))
    terms, rows, pixels = size * int(rng.integers(1, 20)), size * int(rng.integers(1, 20)), int(rng.integers(16, 700))
    keep = rng.random((terms // size, rows // size)) < rng.random() ** 2 * 0.6
    keep[rng.integers(len(keep))] |= number % 4 == 0
    kind = np.float16 if dtype == "f16" else ml_dtypes.bfloat16
    w = (rng.standard_normal((terms, rows)) * keep.repeat(size, 0).repeat(size, 1)).astype(kind)
    text = f"def g(x: {dtype}[{pixels}, {terms}], *, w: {dtype}[{terms}, {rows}]):\n    return relu(matmul(x, w))\n"
    g, x = parse(text, {"w": w}), rng.standard_normal((pixels, terms)).astype(kind)
    f = dnnc.compile(g.copy(), target="cuda", cache=False)
    want = np.asarray(run(g, [x], "float64")[0], np.float64)
    error = np.abs(np.asarray(f(x)).astype(np.float64) - want).max()
    assert error <= (2e-3 if dtype == "f16" else 1.5e-2) * max(np.abs(want).max(), 1e-30), f.report


@pytest.mark.parametrize("number", range(24))
def test_two_of_four_16_bit_weights(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that tiles do not divide, groups with less than two numbers, tiles and shapes that chance ranks."""
    rng = np.random.default_rng([number, *SEED])
    monkeypatch.setattr(pair_weights, "GAIN", 0.0)
    for module in (two_of_four, two_of_four_rows):
        monkeypatch.setattr(module, "cycles", lambda *_: float(rng.random()))
    dtype, few = str(rng.choice(["f16", "bf16"])), number % 2
    terms, rows = (64 if few else 8) * int(rng.integers(1, 50)), 8 * int(rng.integers(1, 90))
    pixels, kind = int(rng.integers(1, 17 if few else 900)), np.float16 if dtype == "f16" else ml_dtypes.bfloat16
    places = np.argsort(rng.random((terms // 4, 4, rows)), 1)
    keep = ((places < 2) & (rng.random(places.shape) < rng.random() ** 0.3)).reshape(terms, rows)
    w, c = (rng.standard_normal((terms, rows)) * keep).astype(kind), rng.standard_normal(rows).astype(kind)
    made = ("relu(add(matmul(x, w), c))", "add(matmul(x, w), c)", "cast(matmul(x, w), to=f32)")[number % 3]
    text = f"def g(x: {dtype}[{pixels}, {terms}], *, w: {dtype}[{terms}, {rows}], c: {dtype}[{rows}]):\n"
    text += f"    return {made}\n"
    g, x = parse(text, {"w": w, "c": c}), rng.standard_normal((pixels, terms)).astype(kind)
    f = dnnc.compile(g.copy(), target="cuda", cache=False)
    assert f.report.programs[-1].kernels[0].choice.startswith("two_of_four"), f.report
    want = np.asarray(run(g, [x], "float64")[0], np.float64)
    error = np.abs(np.asarray(f(x)).astype(np.float64) - want).max()
    assert error <= (2e-3 if dtype == "f16" else 1.5e-2) * max(np.abs(want).max(), 1e-30), f.report


@pytest.mark.parametrize("number", range(6))
def test_two_of_four_convolutions(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of single pixels, with tiles that chance ranks."""
    rng = np.random.default_rng([number, *SEED])
    monkeypatch.setattr(pair_weights, "GAIN", 0.0)
    monkeypatch.setattr(two_of_four, "cycles", lambda *_: float(rng.random()))
    c, o, n, h, w = (int(rng.integers(1, k)) for k in (60, 40, 4, 20, 20))
    c, o = 8 * c, 8 * o
    keep = np.argsort(rng.random((o, c // 4, 4)), -1) < 2
    filters = (rng.standard_normal((o, c)) * keep.reshape(o, c)).astype(np.float16).reshape(o, c, 1, 1)
    text = f"def g(x: f16[{n}, {c}, {h}, {w}], *, w: f16[{o}, {c}, 1, 1]):\n    return relu(conv(x, w))\n"
    g, x = parse(text, {"w": filters}), rng.standard_normal((n, c, h, w)).astype(np.float16)
    f = dnnc.compile(g.copy(), target="cuda", cache=False)
    assert any(k.choice.startswith("two_of_four") for k in f.report.programs[-1].kernels), f.report
    want = np.asarray(run(g, [x], "float64")[0], np.float64)
    assert np.abs(f(x).astype(np.float64) - want).max() <= 2e-3 * max(np.abs(want).max(), 1e-30), f.report


def test_several_pruned_models_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernels differ in numbers alone."""
    monkeypatch.setattr(sparse_weights, "GAIN", 0.0)
    rng, x = np.random.default_rng(0), np.random.default_rng(1).standard_normal((784, 512)).astype(np.float32)
    text = """def g(x: f32[784, 512], *, w: f32[512, 512]):
    y = matmul(x, w)
    return y"""
    weights = [np.where(rng.random((512, 512)) < 0.05, rng.standard_normal((512, 512)), 0) for _ in range(4)]
    models = [dnnc.compile(parse(text, {"w": w.astype(np.float32)}), target="cuda", cache=False) for w in weights]
    for f, w in zip(models, weights):
        assert any(k.choice.startswith("sparse") for k in f.report.programs[-1].kernels)  # perhaps behind a copy
        want = x.astype(np.float64) @ w.astype(np.float32)
        assert np.abs(f(x) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("number", range(60))
def test_sparse_arrays(number: int) -> None:
    """The operations of random arrays, with all values on the device."""
    random_sparse.run(int.from_bytes(SEED[-8:], "little") % 10**9 + number, "cuda:0")


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32"])
@pytest.mark.parametrize("width", [1, 3, 33, 128])
def test_products_by_rows(dtype: str, width: int) -> None:
    """Few long rows among many short and empty ones."""
    rng = np.random.default_rng([width, *dtype.encode()])
    keep = rng.random((300, 500)) < (0.9 / (1 + np.arange(300)))[:, None]
    a = np.where(keep, rng.integers(-4, 5, keep.shape), 0).astype(dtype)
    x = rng.integers(-4, 5, (500, width)).astype(dtype)
    got = arrays.csr_array(a).to_device("cuda:0") @ xp.asarray(x, device="cuda:0")
    assert got.device == "cuda:0"
    np.testing.assert_array_equal(got.numpy(), a.astype(np.float64) @ x.astype(np.float64))
