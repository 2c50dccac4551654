"""Linear layers of few weights: the same training as by masks, conversions to and fro, states of other places."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.ir.errors import InputError


def pruned(rng: np.random.Generator, *sizes: int, density: float = 0.2) -> nn.Sequential:
    """Linear layers with few weights, ReLU between them, and a dense one of 5 at the end."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layer = nn.Linear(a, b)
        mask = rng.random((b, a)) < density
        mask[-1, -1] = True
        layer.weight = nn.Parameter(rng.standard_normal((b, a)).astype(np.float32) * mask)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 5))


@pytest.mark.slow
def test_training_is_that_of_masks() -> None:
    rng = np.random.default_rng([*os.environ["DNNC_TEST_SEED"].encode()])  # others every day
    sizes = [int(rng.integers(3, 40)) for _ in range(3)]
    dense = pruned(rng, *sizes)
    sparse = nn.utils.to_sparse(copy.deepcopy(dense), density=0.6)
    assert [type(m).__name__ for m in sparse][::2] == ["SparseLinear", "SparseLinear", "Linear"]
    batch = int(rng.integers(1, 40))
    x, y = rng.standard_normal((batch, sizes[0])).astype(np.float32), rng.integers(0, 5, batch)
    losses = []
    for net in (dense, sparse):
        optimizer = optim.Adam(lr=1e-2)
        if net is dense:
            optim.KeepZeros(optimizer)
        step = dnnc.train_step(lambda m, x, y: F.cross_entropy(m(x), y), optimizer, net)
        losses.append([float(step(x, y)) for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][-1] < losses[0][0]
    back = nn.utils.to_dense(sparse)
    assert list(back.state_dict()) == list(dense.state_dict())
    for n, a in dense.state_dict().items():
        assert np.allclose(a, back.state_dict()[n], atol=1e-4), n


@pytest.mark.slow
def test_one_layer_in_two_places_and_inputs_of_any_rank() -> None:
    rng = np.random.default_rng(0)
    net = pruned(rng, 6, 6, 6)
    net.add_module("again", nn.Linear(5, 6))
    net.add_module("shared", net[0])
    net.eval()
    x = rng.standard_normal((2, 3, 6)).astype(np.float32)
    want = net(x).numpy()
    nn.utils.to_sparse(net, 0.5)
    assert net[0] is net.shared and isinstance(net[0], nn.SparseLinear) and not net[0].training
    for made in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert np.allclose(made(x), want, atol=1e-6) and np.allclose(made(x[0, 0]), want[0, 0], atol=1e-6)
    loss = (net(x) ** 2).sum()
    loss.backward()
    optim.SGD(net.parameters(), lr=1e-3).step()
    assert float((net(x) ** 2).sum()) < float(loss)
    assert "50.0% of the weights" in repr(nn.SparseLinear(np.eye(2, dtype=np.float32)))


def test_what_cannot_be() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match=r"at most 30% of its weights; layers are 0 100%"):
        nn.utils.to_sparse(nn.Sequential(nn.Linear(3, 4)))
    tied = pruned(rng, 6, 6)
    tied.add_module("table", nn.Embedding(6, 6))
    tied.table.weight = tied[0].weight  # whose rows are read, too
    with pytest.raises(InputError, match="no linear layer"):
        nn.utils.to_sparse(tied, 0.5)
    one, other = (nn.utils.to_sparse(pruned(np.random.default_rng(k), 8, 8), 0.9) for k in (1, 2))
    with pytest.raises(InputError, match=r"0\.values_[0-9a-f]{8}"):
        other.load_state_dict(one.state_dict())
    for wrong in (np.zeros((2, 2), np.float32), np.ones((2, 2), np.int32)):
        with pytest.raises(InputError, match="expected floats that are not all 0"):
            nn.SparseLinear(wrong)
    with pytest.raises(InputError, match=r"expected a bias \[2\]"):
        nn.SparseLinear(np.eye(2, dtype=np.float32), np.zeros(3, np.float32))
    with pytest.raises(InputError, match="must have 2 elements"):
        nn.SparseLinear(np.eye(2, dtype=np.float32))(np.zeros((3, 4), np.float32))
