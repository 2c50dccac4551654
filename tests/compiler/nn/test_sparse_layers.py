"""Linear layers of few weights: the same training as by masks, conversions to and fro, states of other places."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import pairwise

import numpy as np
import onnx
import onnx.reference
import pytest

import dnnc
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.ir.errors import InputError
from dnnc.nn.parameter import overwrite


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
    with pytest.raises(InputError, match="no layer"):
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


NET = """
<ir_version: 8, opset_import: ["" : 18]>
g (double[N, 4, 6, 6] x) => (double[N, 3] y) <double[5] b1, double[6] b3> {
  a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)  c = Conv<group = 5>(a, w2)  d = Tanh(c)  e = ConvTranspose(d, w5)
  m = ReduceMean<keepdims = 0>(e, axes)  p = MatMul(m, w3)  q = Add(p, b3)  r = Sigmoid(q)  y = Gemm<transB = 1>(r, w4)
}"""


def few_weights(rng: np.random.Generator) -> onnx.ModelProto:
    """A model in float64 with about a quarter of its weights."""
    proto = onnx.parser.parse_model(NET.replace(")  ", ")\n"))
    shapes = dict(w1=(5, 4, 3, 3), b1=(5,), w2=(5, 1, 3, 3), w5=(5, 6, 2, 2), w3=(6, 6), b3=(6,), w4=(3, 6))
    for n, s in shapes.items():
        a = rng.standard_normal(s)
        if len(s) > 1:
            a *= rng.random(s) < 0.25
            a.flat[0] = 1.0
        proto.graph.initializer.append(onnx.numpy_helper.from_array(a, n))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3]), "axes"))
    return proto


@pytest.mark.slow
def test_few_weights_of_an_onnx_model_by_differences() -> None:
    rng = np.random.default_rng([*os.environ["DNNC_TEST_SEED"].encode()])
    proto = few_weights(rng)
    net = nn.utils.to_sparse(nn.from_onnx(proto), 0.6)
    x, target = rng.standard_normal((2, 4, 6, 6)), rng.standard_normal((2, 3))
    whole = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})[0]
    assert np.allclose(net(x).numpy(), whole, atol=1e-12)
    sizes = {w.name: np.count_nonzero(onnx.numpy_helper.to_array(w)) for w in proto.graph.initializer}
    values = {n.split(".")[1]: p for n, p in net.named_parameters() if "original" in n}
    assert {n: p.size for n, p in values.items()} == {n: sizes[n] for n in ("w1", "w2", "w3", "w4", "w5")}

    def loss() -> dnnc.array.Array:
        return ((net(x) - target) ** 2).sum()

    loss().backward()
    for name, p in values.items():
        got, before = p.grad.numpy(), p.numpy()
        for k in rng.integers(0, p.size, 2):
            ends = []
            for step in (1e-5, -1e-5):
                moved = before.copy()
                moved[k] += step
                overwrite(p, dnnc.array.asarray(moved))
                ends.append(float(loss()))
            overwrite(p, dnnc.array.asarray(before))
            assert got[k] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8), (name, k)


@pytest.mark.slow
def test_fine_tuning_after_pruning() -> None:
    rng = np.random.default_rng(3)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    small = dnnc.prune(net, inputs=(np.zeros((2, 3, 6, 6), np.float32),), sparsity=0.8, measure=False).model
    x, y = rng.standard_normal((2, 3, 6, 6)).astype(np.float32), rng.integers(0, 5, 2)
    states, losses = [], []
    for kind in ("masks", "few"):
        module, optimizer = nn.from_onnx(small), optim.Adam(lr=1e-2)
        if kind == "few":
            nn.utils.to_sparse(module)
        else:
            optim.KeepZeros(optimizer)
        step = dnnc.train_step(lambda m, x, y: F.cross_entropy(m(x), y), optimizer, module)
        losses.append([float(step(x, y)) for _ in range(5)])
        states.append(nn.utils.to_dense(module).state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][-1] < losses[0][0]
    assert states[0].keys() == states[1].keys()
    for n, a in states[0].items():
        assert np.allclose(a, states[1][n], atol=1e-4) and np.array_equal(np.equal(a, 0), np.equal(states[1][n], 0)), n


@pytest.mark.slow
def test_convolutions_of_few_weights() -> None:
    rng = np.random.default_rng(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 2))
    for m in net:
        m.weight = nn.Parameter((m.weight.numpy() * (rng.random(m.weight.shape) < 0.2)).astype(np.float32))
    x = rng.standard_normal((1, 3, 5, 5)).astype(np.float32)
    want, names = net(x).numpy(), net.state_dict().keys()
    nn.utils.to_sparse(net, 0.5)
    assert np.allclose(net(x).numpy(), want, atol=1e-6) and "of 108 weights" in repr(net)
    state = net.state_dict()
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 2))
    for m in other:
        m.weight = nn.Parameter((m.weight.numpy() * (rng.random(m.weight.shape) < 0.2)).astype(np.float32))
    with pytest.raises(dnnc.DnncError, match="places_"):
        nn.utils.to_sparse(other, 0.5).load_state_dict(state)
    nn.utils.to_dense(net)
    assert net.state_dict().keys() == names and np.allclose(net(x).numpy(), want, atol=1e-6)
