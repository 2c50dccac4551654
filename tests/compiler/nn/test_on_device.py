"""Modules and random numbers on a CUDA device, which is the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_device import GPU, one_device

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim, random
from dnnc.array import sparse

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    yield from one_device(monkeypatch, tmp_path)


def test_equal_bits() -> None:
    host = random.key(5)
    there = host.to_device(GPU)
    draws = (
        lambda k: random.bits(k, (3, 5)),
        lambda k: random.uniform(k, (3,), "float64", -2, 5),
        lambda k: random.bernoulli(k, 0.3, (9,)),
        lambda k: random.randint(k, (6,), -5, 5),
        lambda k: random.split(random.fold_in(k, 8), 3),
    )
    for draw in draws:
        a, b = draw(host), draw(there)
        assert b.device == GPU and np.array_equal(a.numpy(), b.numpy())
    np.testing.assert_allclose(random.normal(there, (9,)).numpy(), random.normal(host, (9,)).numpy(), 1e-5, 1e-6)


def test_a_step() -> None:
    nets = []
    for place in ("cpu", GPU):
        random.seed(2)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
        nets.append(net.to(place))
        assert all(p.device == place and p.requires_grad for p in net.parameters())
        x = xp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4) ** 2, device=place)
        y = F.dropout(net(x), 0.5, key=random.key(1))
        F.cross_entropy(y, xp.asarray([0, 2, 1], device=place)).backward()
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        np.testing.assert_allclose(b.grad.numpy(), a.grad.numpy(), 1e-3, 1e-5)
    for a, b in zip(nets[0].buffers(), nets[1].buffers()):
        np.testing.assert_allclose(b.numpy(), a.numpy(), 1e-4, 1e-6)


def test_what_layers_make_lives_there() -> None:
    x = xp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32), device=GPU)
    gru, attention = nn.GRU(4, 4, batch_first=True).to(GPU), nn.MultiheadAttention(4, 2, batch_first=True).to(GPU)
    y, _ = attention(gru(x)[0], x, x, need_weights=False, is_causal=True)
    z = F.adaptive_avg_pool1d(y, 3) + xp.sum(F.unfold(y[None, ...], 2)) + F.gumbel_softmax(y)[..., :3]
    here = [m.cpu() for m in (gru, attention)]
    x = x.to_device("cpu")
    want, _ = here[1](here[0](x)[0], x, x, need_weights=False, is_causal=True)
    assert z.device == GPU and z.shape == (2, 3, 3) and bool(np.isfinite(z.numpy()).all())
    np.testing.assert_allclose(y.numpy(), want.numpy(), 1e-4, 1e-6)
    step = dnnc.jit(lambda w, x, k: nn.functional_call(gru, w, F.dropout(x, key=k))[0])
    weights = gru.state_dict()
    a = step({n: w.to_device(GPU) for n, w in weights.items()}, x.to_device(GPU), random.key(1).to_device(GPU))
    np.testing.assert_allclose(a.numpy(), step(weights, x, random.key(1)).numpy(), 1e-4, 1e-6)


def test_an_imported_model_trains_there() -> None:
    source = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
    proto = dnnc.to_onnx(source, inputs=[dnnc.Spec(("N", 4))])
    x, y = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4) ** 2, np.array([0, 2, 1])
    found = []
    for target in ("llvm", "cuda"):
        net = nn.from_onnx(proto)
        step = dnnc.train_step(lambda net, x, y: F.cross_entropy(net(x), y), optim.SGD(lr=0.1), net, target=target)
        found.append([float(step(x, y)) for _ in range(3)] + [np.asarray(net.get_buffer("1.running_mean").numpy())])
    assert found[0][0] > found[0][2]
    for a, b in zip(*found):
        np.testing.assert_allclose(b, a, 1e-4, 1e-6)


def test_gradients_of_sparse_arrays() -> None:
    """Indices of a matrix that is traced lie where the call's values do."""
    dense, x = np.diag([1.0, 2.0, 3.0])[:, :2], np.ones((2, 4))
    loss = dnnc.grad(lambda a, x: xp.sum((a @ x) ** 2) + xp.sum(a.toarray()), argnums=(0, 1))
    for a, b in (
        (sparse.csr_array(dense), xp.asarray(x)),
        (sparse.csr_array(dense, device=GPU), xp.asarray(x, device=GPU)),
    ):
        of_a, of_x = loss(a, b)
        assert of_x.device == b.device
        np.testing.assert_allclose(of_a.toarray().numpy(), (8 * dense + 1) * (dense != 0))
        np.testing.assert_allclose(of_x.numpy(), 2 * dense.T @ dense @ x)
