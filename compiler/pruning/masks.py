"""Which weights stay: boolean masks, chosen by scores of weights, of groups of four, or of blocks.

Weights are in the form [output channels, taps, input channels], so a group or block lies along channels at one place of
a filter, as products read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dnnc.pruning.options import PruneOptions
    from dnnc.quantization.layers import Layer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Scores:
    """What a choice is made by.

    Attributes:
        values: f64[n]: the lowest go first.
        sizes: i64[n]: weights that stand behind each value.
        spread: maps bool[n] to the mask of the weights, [output channels, taps, input channels].
    """

    values: Array
    sizes: Array
    spread: Any

    @property
    def total(self) -> int:
        return int(self.sizes.sum())


def rows(w: Array, layer: Layer) -> Array:
    """Weights as [output channels, taps, input channels]."""
    if layer.kind != "Conv":
        return np.moveaxis(w, layer.axis, 0).reshape(w.shape[layer.axis], 1, -1)
    return np.moveaxis(w, 1, -1).reshape(w.shape[0], -1, w.shape[1])


def unrows(mask: Array, w: Array, layer: Layer) -> Array:
    """The inverse of `rows` for a mask of the weights `w`."""
    if layer.kind != "Conv":
        return np.moveaxis(mask.reshape(np.moveaxis(w, layer.axis, 0).shape), 0, layer.axis)
    return np.moveaxis(mask.reshape(w.shape[0], *w.shape[2:], w.shape[1]), -1, 1)


def single(w: Array, rng: np.random.Generator | None = None) -> Scores:
    """Each weight by its magnitude, or by chance."""
    values = np.abs(w).reshape(-1) if rng is None else rng.random(w.size)
    return Scores(values, np.ones(w.size, np.int64), lambda kept: kept.reshape(w.shape))


def blocks(w: Array, extents: tuple[int, int]) -> Scores:
    """Blocks of output and input channels by the root of their mean square; those at the edges are smaller."""
    o, taps, i = w.shape
    p, q = min(extents[0], o), min(extents[1], i)
    rows_of, columns_of = np.arange(o) // p, np.arange(i) // q
    count = (int(rows_of[-1]) + 1, int(columns_of[-1]) + 1)
    by_row = np.add.reduceat(np.square(w, dtype=np.float64), np.arange(0, o, p), 0)
    squares = np.add.reduceat(by_row, np.arange(0, i, q), 2)  # [blocks, taps, blocks]
    extent = np.bincount(rows_of)[:, None, None] * np.bincount(columns_of)[None, None, :]
    sizes = np.broadcast_to(extent, (count[0], taps, count[1]))

    def spread(kept: Array) -> Array:
        whole: Array = kept.reshape(sizes.shape)[rows_of][:, :, columns_of]
        return whole

    return Scores(np.sqrt(squares / sizes).reshape(-1), sizes.reshape(-1), spread)


def two_of_four(w: Array) -> Array:
    """The mask of the two largest of each four input channels; channels behind the last four stay."""
    groups = w.shape[-1] // 4
    head = np.abs(w[..., : 4 * groups]).reshape(*w.shape[:-1], groups, 4)
    order = np.argsort(-head, axis=-1, kind="stable")
    kept = np.zeros(head.shape, bool)
    np.put_along_axis(kept, order[..., :2], True, -1)
    out = np.ones(w.shape, bool)
    out[..., : 4 * groups] = kept.reshape(*w.shape[:-1], 4 * groups)
    return out


def lamp(s: Scores) -> Scores:
    """Scores that can be compared between layers: a weight's square over the sum of all squares that are not smaller.

    Source: Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning, 2021.
    """
    squares = np.square(s.values, dtype=np.float64) * s.sizes
    order = np.argsort(s.values, kind="stable")
    rest = np.cumsum(squares[order][::-1])[::-1]
    values = np.empty_like(squares)
    values[order] = np.divide(squares[order], rest, out=np.zeros_like(rest), where=rest > 0)
    return Scores(values / s.sizes, s.sizes, s.spread)


def chosen(
    weights: Mapping[str, Array], o: PruneOptions, shares: Mapping[str, float], share: float
) -> dict[str, Array]:
    """Masks of weights by a method and a scope.

    Args:
        weights: by name, [output channels, taps, input channels].
        shares: that go, by name, with the scope "layer".
        share: that goes, with the other scopes.
    """
    if o.method == "2:4":
        return {n: two_of_four(w) for n, w in weights.items()}
    rng = np.random.default_rng(o.seed) if o.method == "random" else None
    scores = {n: blocks(w, o.block) if o.method == "block" else single(w, rng) for n, w in weights.items()}
    if o.scope == "layer":
        return {n: kept_of(s, shares[n]) for n, s in scores.items()}
    compared = [lamp(s) if o.scope == "lamp" else s for s in scores.values()]
    return dict(zip(scores, kept_together(compared, share))) if compared else {}


def kept_of(s: Scores, share: float) -> Array:
    """The mask of weights where the lowest scores go, up to this share of the weights."""
    return np.asarray(s.spread(_kept(s.values, s.sizes, share)))


def kept_together(scores: Sequence[Scores], share: float) -> list[Array]:
    """Masks of several layers with one order of all scores; of each layer at least the highest score stays."""
    values = np.concatenate([s.values for s in scores])
    kept = _kept(values, np.concatenate([s.sizes for s in scores]), share)
    out, at = [], 0
    for s in scores:
        mine = kept[at : at + s.values.size]
        if not mine.any():
            mine[int(s.values.argmax())] = True
        out.append(np.asarray(s.spread(mine)))
        at += s.values.size
    return out


def _kept(values: Array, sizes: Array, share: float) -> Array:
    """bool[n]: False for the lowest values, as long as what they stand for is within the share of all."""
    limit = share * float(sizes.sum()) * (1 + 1e-12)
    kept = np.ones(values.size, bool)
    if sizes[0] == sizes.min() == sizes.max():
        count = int(limit // sizes[0])
        if count:
            kept[np.argpartition(values, count - 1)[:count]] = False
        return kept
    order = np.argsort(values, kind="stable")
    kept[order[np.cumsum(sizes[order]) <= limit]] = False
    return kept
