"""Masks of weights: counts, groups, blocks, scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dnnc.pruning import masks
from dnnc.pruning.codebook import clustered, shared
from dnnc.quantization.layers import Layer

RNG = np.random.default_rng(0)
CONV = Layer("c", "Conv", "x", "y", "w", 0)
GEMM = replace(CONV, kind="Gemm", axis=1)


@pytest.mark.parametrize("layer, shape", [(CONV, (5, 7, 3, 2)), (CONV, (4, 3, 5)), (GEMM, (6, 8))])
def test_rows_and_back(layer: Layer, shape: tuple[int, ...]) -> None:
    w = RNG.standard_normal(shape)
    wide = masks.rows(w, layer)
    assert wide.shape[0] == w.shape[layer.axis]
    assert (masks.unrows(wide, w, layer) == w).all()
    if layer is CONV:
        assert (wide[1, 0] == w[(1, slice(None), *(0,) * (w.ndim - 2))]).all()  # input channels at one tap


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_the_smallest_weights_go(share: float) -> None:
    w = RNG.standard_normal((10, 4, 25)).astype(np.float32)
    kept = masks.kept_of(masks.single(w), share)
    assert (~kept).sum() == int(share * 1000 + 1e-9)
    assert not share or np.abs(w[~kept]).max() <= np.abs(w[kept]).min()


def test_equal_weights_are_cut_to_the_count_too() -> None:
    assert (~masks.kept_of(masks.single(np.ones((4, 1, 25))), 0.9)).sum() == 90
    assert masks.two_of_four(np.zeros((1, 1, 8))).sum() == 4


def test_two_of_four_along_input_channels() -> None:
    w = RNG.standard_normal((3, 2, 10)).astype(np.float32)
    kept = masks.two_of_four(w)
    assert (kept[..., :8].reshape(3, 2, 2, 4).sum(-1) == 2).all() and kept[..., 8:].all()
    groups, chosen = np.abs(w[..., :8]).reshape(-1, 4), kept[..., :8].reshape(-1, 4)
    assert all(a[k].min() >= a[~k].max() for a, k in zip(groups, chosen))


def test_blocks_with_ragged_edges() -> None:
    w = RNG.standard_normal((10, 2, 13)).astype(np.float32)
    s = masks.blocks(w, (4, 8))
    assert s.total == w.size and s.values.size == 3 * 2 * 2
    kept = masks.kept_of(s, 0.5)
    for o in (slice(0, 4), slice(4, 8), slice(8, 10)):
        for i in (slice(0, 8), slice(8, 13)):
            part = kept[o, 0, i]
            assert part.all() or not part.any()
    assert w.size * 0.5 - 32 <= (~kept).sum() <= w.size * 0.5
    assert masks.blocks(w[:2, :, :3], (8, 8)).values.size == 2


def test_one_order_of_all_layers() -> None:
    small, large = (masks.single(k * RNG.standard_normal((10, 1, 10))) for k in (0.01, 1.0))
    together = masks.kept_together([small, large], 0.5)
    assert together[0].sum() == 1 and (~together[1]).sum() == 0  # a layer keeps its largest weight
    balanced = masks.kept_together([masks.lamp(small), masks.lamp(large)], 0.5)
    assert all(30 < k.sum() < 70 for k in balanced)


def test_lamp_is_a_square_over_those_that_are_not_smaller() -> None:
    values = masks.lamp(masks.single(np.array([[[1.0, -3.0, 2.0]]]))).values
    assert np.allclose(values, [1 / 14, 1.0, 4 / 13])
    assert (masks.lamp(masks.single(np.zeros((1, 1, 3)))).values == 0).all()


def test_a_codebook_of_few_values() -> None:
    w = RNG.standard_normal((64, 50)).astype(np.float32)
    w[np.abs(w) < 1] = 0
    for bits in (1, 3, 8):
        made = shared(w, bits)
        assert np.unique(made).size <= 1 << bits and ((made == 0) == (w == 0)).all()
        assert made.dtype == w.dtype
    error = [np.abs(shared(w, b) - w).max() for b in (2, 4, 6)]
    assert error == sorted(error, reverse=True) and error[-1] < 0.15
    few = np.array([[0.0, 1.0], [2.0, 1.0]], np.float32)
    assert (shared(few, 2) == few).all() and (shared(np.zeros((2, 2), np.float32), 4) == 0).all()
    dense = np.abs(w) + 1
    assert np.unique(shared(dense, 2)).size == 4  # no zero takes a place


def test_k_means_of_clusters_that_are_apart() -> None:
    order = np.sort(np.concatenate([c + 0.01 * RNG.standard_normal(50) for c in (-2.0, 0.5, 3.0)]))
    assert np.allclose(clustered(order, 3), [-2, 0.5, 3], atol=0.01)
