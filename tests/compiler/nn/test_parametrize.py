"""Weights computed of other parameters beside PyTorch: numbers, gradients, states, training; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.parametrizations as of_torch

import dnnc
import dnnc.array as xp
from dnnc import nn
from dnnc.ir.errors import InputError
from dnnc.nn.utils import parametrizations, parametrize

X = np.random.default_rng(0).standard_normal((2, 3, 10))


def net(library: Any) -> Any:
    layers = library.Conv1d(3, 5, 3), library.ReLU(), library.ConvTranspose1d(5, 4, 3), library.Flatten()
    return library.Sequential(*layers, library.Linear(40, 2)).double()


def both(name: str, **options: Any) -> tuple[nn.Sequential, torch.nn.Sequential]:
    ours, theirs = net(nn), net(torch.nn)
    for k in (0, 2, 4):
        getattr(parametrizations, name)(ours[k], **options)
        getattr(of_torch, name)(theirs[k], **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,options",
    [("weight_norm", {}), ("weight_norm", {"dim": None}), ("spectral_norm", {}), ("spectral_norm", {"dim": 0})],
)
def test_as_in_torch(name: str, options: dict[str, Any]) -> None:
    ours, theirs = both(name, **options)
    for training in (True, False):
        want, got = theirs.train(training)(torch.tensor(X)), ours.train(training)(xp.asarray(X))
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=0, atol=1e-14)
        want.sum().backward()
        xp.sum(got).backward()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=0, atol=1e-13)
        ours.zero_grad()
        theirs.zero_grad()
    ours.train()
    theirs.train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = dnnc.train_step(lambda m, x: xp.mean(m(x) ** 2), dnnc.optim.SGD(lr=0.1), ours, threads=1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (theirs(torch.tensor(X)) ** 2).mean()
        loss.backward()
        optimizer.step()
        assert float(step(X)) == pytest.approx(loss.item(), rel=1e-12)
    for name, a in ours.state_dict().items():  # buffers, too
        np.testing.assert_allclose(a.numpy(), theirs.state_dict()[name].numpy(), rtol=0, atol=1e-13)


class Doubled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


class Halving(Doubled):
    def right_inverse(self, x: Any) -> Any:
        return x / 2


def test_functions_follow_one_another_and_are_removed() -> None:
    m = nn.Linear(3, 2)
    first = m.weight.numpy()
    assert parametrize.register_parametrization(m, "weight", Halving()) is m
    parametrize.register_parametrization(m, "weight", Doubled())
    assert parametrize.is_parametrized(m) and not parametrize.is_parametrized(m, "bias")
    np.testing.assert_array_equal(m.weight.numpy(), 2 * first)
    with pytest.raises(InputError, match="Doubled has no right_inverse"):
        m.weight = nn.Parameter(first)
    parametrize.remove_parametrizations(m, "weight")
    assert isinstance(m.weight, nn.Parameter) and list(m.state_dict()) == ["bias", "weight"]
    np.testing.assert_array_equal(m.weight.numpy(), 2 * first)


def test_an_assigned_weight_sets_the_originals() -> None:
    m = parametrizations.weight_norm(nn.Linear(3, 2))
    new = np.array([[3.0, 0, 4], [0, 5, 0]], np.float32)
    m.weight = xp.asarray(new)
    np.testing.assert_array_equal(m.state_dict()["parametrizations.weight.original0"].numpy(), [[5.0], [5.0]])
    np.testing.assert_allclose(m.weight.numpy(), new, rtol=1e-6)


def test_what_is_refused() -> None:
    m = nn.Linear(3, 2)
    with pytest.raises(InputError, match="Linear has no 'w'; its parameters and buffers: weight, bias"):
        parametrize.register_parametrization(m, "w", Doubled())
    flat = nn.Flatten(0)
    with pytest.raises(
        InputError, match="Flatten makes float32 of shape \\(6,\\) of weight, which is float32 of shape"
    ):
        parametrize.register_parametrization(m, "weight", flat)
    assert isinstance(m.weight, nn.Parameter) and not parametrize.is_parametrized(m)
    parametrizations.weight_norm(m)
    with pytest.raises(InputError, match="weight has more than one original"):
        parametrize.remove_parametrizations(m, "weight", leave_parametrized=False)
    with pytest.raises(InputError, match="'bias' of Linear has no parametrization"):
        parametrize.remove_parametrizations(m, "bias")
    with pytest.raises(InputError, match="n_power_iterations=0"):
        parametrizations.spectral_norm(nn.Linear(2, 2), n_power_iterations=0)
