"""Which weights with zeros become sparse: by density, sizes, types, and the room for code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.text import parse
from dnnc.ir.sparse import Sparse
from dnnc.ir.target import WIDE_CORE
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.passes.rewrites.sparse import MOST_CODE, weigh_sparse
from dnnc.passes.rewrites.sparse_windows import window_of

RNG = np.random.default_rng(0)


def convolution(
    density: float, channels: int = 128, size: int = 28, dtype: str = "f32", k: int = 1
) -> tuple[Graph, Node]:
    kind = {"f32": np.float32, "f64": np.float64}[dtype]
    w = np.where(RNG.random((channels, channels, k, k)) < density, 1.0, 0.0).astype(kind)
    g = parse(
        f"""def g(x: {dtype}[1, {channels}, {size}, {size}], *, w: {dtype}[{channels}, {channels}, {k}, {k}]):
    y = conv(x, w)
    return y""",
        {"w": w},
    )
    return g, next(iter(g.nodes()))


@pytest.mark.parametrize(
    ("density", "room", "group"), [(0.1, MOST_CODE, 24), (0.1, 0, 1), (0.1, 1000, 1), (0.5, 0, 0), (1.0, MOST_CODE, -1)]
)
def test_density_and_room_decide(density: float, room: int, group: int) -> None:
    g, n = convolution(density)
    verdict = weigh_sparse(g, n, 16, WIDE_CORE, room)
    assert (verdict is None) == (group < 0)
    if verdict is not None:
        assert (verdict.encoding.group if verdict.encoding is not None else 0) == group
        assert verdict.why.startswith("w, ") and "not 0" in verdict.why


@pytest.mark.parametrize(("density", "sparse"), [(0.3, False), (0.1, False), (0.02, True)])
def test_products_of_one_pixel_weigh_gathers_against_cached_weights(density: float, sparse: bool) -> None:
    w = (np.random.default_rng(0).random((1280, 1000)) < density).astype(np.float32)
    text = """def g(x: f32[1, 1280], *, w: f32[1280, 1000]):
    y = matmul(x, w)
    return y"""
    g = parse(text, {"w": w})
    narrow = replace(WIDE_CORE, fma=1.0, loads=1.0)
    verdict = weigh_sparse(g, next(iter(g.nodes())), 16, narrow)
    assert verdict is not None and (verdict.encoding is not None) == sparse


@pytest.mark.parametrize(("rows", "lanes", "block"), [(1, 16, (4, 8)), (1, 8, (4, 8)), (1000, 8, (4, 1))])
def test_blocks_of_zeros_decide(rows: int, lanes: int, block: tuple[int, int]) -> None:
    blocks = np.random.default_rng(0).permuted(np.arange(64 * 64) < 410).reshape(64, 64)
    text = f"""def g(x: f32[{rows}, 512], *, w: f32[512, 512]):
    y = matmul(x, w)
    return y"""
    g = parse(text, {"w": blocks.repeat(8, 0).repeat(8, 1).astype(np.float32)})
    verdict = weigh_sparse(g, next(iter(g.nodes())), lanes, WIDE_CORE)
    assert verdict is not None and isinstance(verdict.encoding, Sparse) and "sparse, blocks of" in verdict.why
    assert (verdict.encoding.pattern.height, verdict.encoding.pattern.width) == block


def test_reasons_to_stay_dense() -> None:
    few, images = convolution(0.1, size=2), convolution(0.1, size=4, k=3)
    double = convolution(0.1, dtype="f64")
    for (g, n), why in ((few, "0.3 times"), (images, "too few pixels"), (double, "float32")):
        verdict = weigh_sparse(g, n, 16, WIDE_CORE)
        assert verdict is not None and verdict.encoding is None and why in verdict.why


@pytest.mark.parametrize(("l2", "lanes", "sparse"), [(1 << 20, 8, True), (1 << 17, 8, False), (1 << 20, 4, True)])
def test_strips_of_many_channels_fit_the_cache_or_wait(l2: int, lanes: int, sparse: bool) -> None:
    """A strip of one vector has one sum for each row, whose latency nothing hides."""
    w = (np.random.default_rng(0).random((128, 1600, 1, 1)) < 0.3).astype(np.float32)
    g = parse(
        """def g(x: f32[1, 1600, 12, 12], *, w: f32[128, 1600, 1, 1]):
    y = conv(x, w)
    return y""",
        {"w": w},
    )
    verdict = weigh_sparse(g, next(iter(g.nodes())), lanes, replace(WIDE_CORE, latency=5.0), 0, l2)
    assert verdict is not None and (verdict.encoding is not None) == sparse


@pytest.mark.parametrize(("stride", "taken"), [(2, True), (4, False)])
def test_windows_of_many_phases_have_no_code_of_their_own(stride: int, taken: bool) -> None:
    text = f"""def g(x: f32[1, 32, 32, 32], *, w: f32[32, 32, {stride}, {stride}]):
    y = conv(x, w, strides=({stride}, {stride}))
    return y"""
    g = parse(text, {"w": np.ones((32, 32, stride, stride), np.float32)})
    assert (window_of(next(iter(g.nodes()))) is not None) == taken


def test_layouts_take_the_encoding_and_note_it() -> None:
    notes: list[str] = []
    for strict, sparse in ((False, True), (True, False)):
        g, _ = convolution(0.1)
        assign_layouts(g, 16, strict, note=notes.append)
        weights = next(n for n in g.nodes() if n.op.name == "conv").inputs[1]
        assert weights is not None and isinstance(weights.type.encoding, Sparse) == sparse
    assert len(notes) == 1 and "CSR" in notes[0]
