"""Packed sequences, bags of embeddings, whole transformers and sampled images beside PyTorch's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn
from dnnc.nn.utils import rnn

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)


def beside(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    assert np.allclose(ours.numpy(), theirs.detach().numpy(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind, sorted_", [("LSTM", False), ("GRU", True)])
def test_packed_sequences(kind: str, sorted_: bool) -> None:
    lengths = [5, 3, 1] if sorted_ else [3, 5, 1]
    x = RNG.standard_normal((5, 3, 4)).astype(np.float32)
    theirs = getattr(torch.nn, kind)(4, 6, 2, bidirectional=True)
    ours = getattr(nn, kind)(4, 6, 2, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    given = torch.tensor(x, requires_grad=True)
    p = torch.nn.utils.rnn.pack_padded_sequence(given, torch.tensor(lengths), enforce_sorted=sorted_)
    mine = xp.asarray(x)
    mine.requires_grad = True
    q = rnn.pack_padded_sequence(mine, lengths, enforce_sorted=sorted_)
    beside(q.data, p.data)
    assert q.batch_sizes.tolist() == p.batch_sizes.tolist()
    (y, last), (z, end) = theirs(p), ours(q)
    for a, b in zip(end if kind == "LSTM" else [end], last if kind == "LSTM" else [last]):
        beside(a, b)
    beside(z.data, y.data)
    padded, n = torch.nn.utils.rnn.pad_packed_sequence(y, padding_value=-1.0, total_length=6)
    own, m = rnn.pad_packed_sequence(z, padding_value=-1.0, total_length=6)
    beside(own, padded)
    assert m.tolist() == n.tolist() == lengths
    (padded**2).sum().backward()
    xp.sum(own**2).backward()
    assert mine.grad is not None
    beside(mine.grad, given.grad, 1e-4)


def test_sequences_are_padded() -> None:
    parts = [RNG.standard_normal((n, 2)).astype(np.float32) for n in (3, 1)]
    beside(rnn.pad_sequence(parts), torch.nn.utils.rnn.pad_sequence([torch.tensor(a) for a in parts]))
    with pytest.raises(dnnc.InputError, match="lengths rise"):
        rnn.pack_sequence(parts[::-1])
    with pytest.raises(dnnc.InputError, match="do not fit"):
        rnn.pack_padded_sequence(rnn.pad_sequence(parts), [4, 1])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("flat", [False, True])
def test_bags(mode: str, flat: bool) -> None:
    w = RNG.standard_normal((7, 3)).astype(np.float32)
    bags = np.array([0, 3, 3, 5, 6, 2, 1, 1]) if flat else np.array([[0, 3], [6, 6], [2, 5]])
    offsets = np.array([0, 3, 3, 6]) if flat else None
    scales = RNG.standard_normal(bags.shape).astype(np.float32) if mode == "sum" else None
    theirs = torch.tensor(w, requires_grad=True)
    ours = xp.asarray(w)
    ours.requires_grad = True
    turn = torch.tensor if flat else lambda x: x
    y = torch.nn.functional.embedding_bag(
        torch.tensor(bags), theirs, turn(offsets), mode=mode, padding_idx=6,
        per_sample_weights=None if scales is None else torch.tensor(scales),
    )  # fmt: skip
    z = F.embedding_bag(bags, ours, offsets, mode=mode, padding_idx=6, per_sample_weights=scales)
    beside(z, y)
    (y**2).sum().backward()
    xp.sum(z**2).backward()
    assert ours.grad is not None
    beside(ours.grad, theirs.grad)


def test_bags_of_a_module() -> None:
    theirs = torch.nn.EmbeddingBag(5, 2, mode="sum", include_last_offset=True)
    ours = nn.EmbeddingBag(5, 2, mode="sum", include_last_offset=True)
    ours.load_state_dict(theirs.state_dict())
    bags, ends = np.array([1, 2, 4]), np.array([0, 2, 3])
    beside(ours(bags, ends), theirs(torch.tensor(bags), torch.tensor(ends)))


def test_a_whole_transformer() -> None:
    sizes = (8, 2, 1, 2, 16, 0.0)
    theirs, ours = torch.nn.Transformer(*sizes, batch_first=True), nn.Transformer(*sizes, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    src, tgt = (RNG.standard_normal((2, n, 8)).astype(np.float32) for n in (5, 4))
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert mask.tolist() == torch.nn.Transformer.generate_square_subsequent_mask(4).tolist()
    y = theirs(torch.tensor(src), torch.tensor(tgt), tgt_mask=torch.tensor(mask.numpy()))
    beside(ours(src, tgt, tgt_mask=mask), y, 1e-4)


EVERY = list(itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)))
QUICK = (("bilinear", "zeros", False), ("bilinear", "reflection", True), ("nearest", "border", False))


@pytest.mark.parametrize(
    "mode, padding, corners", [c if c in QUICK else pytest.param(*c, marks=pytest.mark.thorough) for c in EVERY]
)
def test_sampled_images(mode: str, padding: str, corners: bool) -> None:
    x = RNG.standard_normal((2, 3, 5, 4))
    grid = RNG.uniform(-1.6, 1.6, (2, 6, 7, 2))
    given, places = torch.tensor(x, requires_grad=True), torch.tensor(grid, requires_grad=True)
    mine, at = xp.asarray(x), xp.asarray(grid)
    mine.requires_grad = at.requires_grad = True
    y = torch.nn.functional.grid_sample(given, places, mode, padding, corners)
    z = F.grid_sample(mine, at, mode, padding, corners)
    beside(z, y)
    (y**2).sum().backward()
    xp.sum(z**2).backward()
    assert mine.grad is not None
    beside(mine.grad, given.grad)
    if mode != "nearest":
        assert at.grad is not None
        beside(at.grad, places.grad)


def test_pixels_that_no_place_reaches_may_be_infinite() -> None:
    x = np.ones((1, 1, 4, 4))
    x[:, :, 0], x[:, :, -1] = np.inf, np.nan
    grid = np.array([[[[0.0, -2.0], [0.1, 0.1], [3.0, 2.0], [0.0, 1e30]]]])
    given, places = torch.tensor(x), torch.tensor(grid[..., :3, :], requires_grad=True)
    y = torch.nn.functional.grid_sample(given, places, align_corners=False)
    at = xp.asarray(grid)
    at.requires_grad = True
    z = F.grid_sample(x, at)
    beside(z[..., :3], y)
    assert z.numpy()[..., 3] == 0
    y.sum().backward()
    xp.sum(z).backward()
    assert at.grad is not None
    beside(at.grad[..., :3, :], places.grad)


@pytest.mark.parametrize("sizes, corners", [((3, 4), False), ((2, 3, 4), True)])
def test_grids_of_affine_maps(sizes: tuple[int, ...], corners: bool) -> None:
    d = len(sizes)
    theta = RNG.standard_normal((2, d, d + 1)).astype(np.float32)
    x = RNG.standard_normal((2, 1, *(5,) * d)).astype(np.float32)
    places = torch.nn.functional.affine_grid(torch.tensor(theta), [2, 1, *sizes], corners)
    own = F.affine_grid(theta, (2, 1, *sizes), corners)
    beside(own, places)
    beside(F.grid_sample(x, own), torch.nn.functional.grid_sample(torch.tensor(x), places, align_corners=False))
