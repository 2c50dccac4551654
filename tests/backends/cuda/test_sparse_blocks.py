"""Block-sparse weights of 16-bit floats: the encoding, the kernels in the interpreter, and when they are chosen."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda import block_weights
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import sparse_blocks
from dnnc.ir.blocks import DIGITS, Blocks
from dnnc.ir.dtype import from_numpy
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

Array = np.ndarray[Any, Any]
H200 = GpuTarget()
RNG = np.random.default_rng(0)


def pruned(rng: Any, terms: int, rows: int, size: int, share: float, dtype: Any = np.float16) -> Array:
    """[terms, rows] of which a share of the square blocks is not 0."""
    keep = rng.random((terms // size, rows // size)) < share
    w: Array = (rng.standard_normal((terms, rows)) * keep.repeat(size, 0).repeat(size, 1)).astype(dtype)
    return w


def problem_of(pixels: int, w: Array, encoding: Blocks) -> Problem:
    g, dtype = Graph("g"), from_numpy(w.dtype)
    x, v = g.add_input("x", tensor(dtype, pixels, w.shape[0])), g.add_input("w", TensorType(dtype, w.shape, encoding))
    g.outputs = [Builder(g).matmul(x, v)]
    return classify(list(g.nodes()), lower(g, list(g.nodes()), g.outputs))


def run(pixels: int, w: Array, size: int, number: int) -> None:
    """A kernel in the interpreter against float64; also its text."""
    encoding = Blocks.of(w, 1, size)
    p = problem_of(pixels, w, encoding)
    found = sparse_blocks.space(p, H200)
    kernel = verify_kernel(sparse_blocks.apply(p, dict(found[number % len(found)]), H200))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    x = RNG.standard_normal((pixels, w.shape[0])).astype(w.dtype)
    names = [b.name for b in p.kernel.entry.buffers]
    y = np.full((pixels, w.shape[1]), np.nan, w.dtype)
    run_kernel(kernel, dict(zip(names, (x, encoding.pack(w)[0], y))))
    want = x.astype(np.float64) @ w.astype(np.float64)
    error = np.abs(y.astype(np.float64) - want).max()
    assert error <= (2e-3 if w.dtype == np.float16 else 1.5e-2) * max(np.abs(want).max(), 1e-30)


def test_stored_blocks_are_the_constant() -> None:
    """Long rows first; the text, and elements by `pack` where `load` says they are."""
    w = pruned(RNG, 96, 64, 32, 0.6)
    w[:32, 32:] = 1
    w[32:, :32] = 0
    e = Blocks.of(w, 1, 32)
    assert parse_encoding(str(e)) == e and list(e.starts) == sorted(e.starts)
    (buffer,) = e.pack(w)
    assert buffer.shape == e.buffers(TensorType(from_numpy(w.dtype), w.shape, e))[0].shape
    np.testing.assert_array_equal(e.held(np.ones_like(w)), np.ones_like(w) * (e.held(w) == w) * e.pattern.mask.T)
    at, n = e.sections["slots"]
    slots = buffer[at : at + n * DIGITS].astype(int).reshape(-1, DIGITS)[:, 0].reshape(e.pattern.blocks.shape)
    for row, column in np.ndindex(*slots.shape):
        tile = w[column * 32 : column * 32 + 32, row * 32 : row * 32 + 32].T
        stored = buffer[: e.pattern.stored].reshape(-1, 32, 32)[slots[row, column] - 1] if slots[row, column] else 0
        np.testing.assert_array_equal(tile, np.broadcast_to(stored, tile.shape))


def test_numbers_beyond_what_a_half_holds() -> None:
    """More than 2,048 blocks, which digits count."""
    w = np.ones((2080, 2080), np.float16)
    e = Blocks.of(w, 1, 32)
    (buffer,) = e.pack(w)
    at, n = e.sections["starts"]
    digits = buffer[at : at + n * DIGITS].astype(np.int64).reshape(-1, DIGITS)
    np.testing.assert_array_equal(digits @ 256 ** np.arange(DIGITS), np.arange(66) * 65)


def test_kernel_of_blocks() -> None:
    run(40, pruned(RNG, 96, 64, 32, 0.5), 32, int(RNG.integers(10**6)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_random_products_of_blocks(number: int) -> None:
    """All blocks of threads, both sizes, both types, empty rows and a full one; cases of a day."""
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    size = (64, 32)[number % 2]
    terms, rows = (size * int(rng.integers(least, 4)) for least in (2, 1))  # sums of one block are dense
    w = pruned(rng, terms, rows, size, rng.random(), (np.float16, ml_dtypes.bfloat16)[number // 2])
    w[:, :size] = (0.0, 1.0)[number // 2]
    w[:size, -size:] = 1
    run(int(rng.integers(1, 150)), w, size, int(rng.integers(10**6)))


@pytest.mark.parametrize(
    ("dtype", "size", "share", "lines"),
    [
        ("f16", 32, 0.02, "of 32 x 32 not 0: sparse, blocks"),
        ("bf16", 64, 0.05, "of 64 x 64 not 0: sparse, blocks"),
        ("f16", 32, 0.5, "of 32 x 32 not 0: dense"),
        ("f16", 1, 0.05, "dense, sparse kernels are of float32"),
    ],
)
def test_choice(dtype: str, size: int, share: float, lines: str) -> None:
    """Of blocks that are worth it, and of zeros that are no blocks."""
    kind = np.float16 if dtype == "f16" else ml_dtypes.bfloat16
    w = pruned(np.random.default_rng(0), 1024, 1024, size, share, kind)
    g = parse(f"def g(x: {dtype}[4096, 1024], *, w: {dtype}[1024, 1024]):\n    return matmul(x, w)\n", {"w": w})
    verdict = block_weights.weigh_blocks(g, next(iter(g.nodes())), H200)
    if "float32" in lines:
        assert verdict is None
    else:
        assert verdict is not None and lines in verdict.why
        assert (verdict.encoding is not None) == ("sparse, blocks" in lines)


@pytest.mark.slow
def test_a_model_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leading axes, an epilogue, and the same results as dense weights have."""
    monkeypatch.setattr(block_weights, "GAIN", 0.0)
    w, c = pruned(RNG, 128, 96, 32, 0.3), RNG.standard_normal(96).astype(np.float16)
    text = """def g(x: f16[2, 17, 128], *, w: f16[128, 96], c: f16[96]):
    return relu(add(matmul(x, w), c))
"""
    f = dnnc.compile(parse(text, {"w": w, "c": c}), target="cuda-interpreted", cache=False)
    assert [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels] == ["sparse_blocks"]
    x = RNG.standard_normal((2, 17, 128)).astype(np.float16)
    want = np.maximum(x.astype(np.float64) @ w.astype(np.float64) + c, 0)
    assert np.abs(f(x).astype(np.float64) - want).max() <= 2e-3 * want.max()
