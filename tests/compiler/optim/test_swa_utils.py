"""Averages of models over steps, and statistics of batch norms computed anew, beside PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import swa_utils as of_torch

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.ir.errors import InputError
from dnnc.optim import swa_utils

RNG = np.random.default_rng(0)
BATCHES = [RNG.standard_normal((6, 3)) for _ in range(4)]


def nets() -> tuple[nn.Sequential, torch.nn.Sequential]:
    ours, theirs = (
        lib.Sequential(lib.Linear(3, 4), lib.BatchNorm1d(4), lib.Linear(4, 2)).double() for lib in (nn, torch.nn)
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def same(ours: Any, theirs: Any, counts: bool = True) -> None:
    got, want = ours.state_dict(), theirs.state_dict()
    assert list(got) == list(want)
    for name, a in want.items():
        if name.endswith("num_batches_tracked") and not counts:
            continue  # PyTorch averages this integer, rounding down
        np.testing.assert_allclose(got[name].numpy(), a.numpy(), rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_are_those_of_torch(ema: bool, use_buffers: bool) -> None:
    ours, theirs = nets()
    mean, other = (
        u.AveragedModel(m, avg_fn=u.get_ema_avg_fn(0.9) if ema else None, use_buffers=use_buffers)
        for u, m in ((swa_utils, ours), (of_torch, theirs))
    )
    step = dnnc.train_step(lambda m, x: xp.mean(m(x) ** 2), optim.SGD(lr=0.1), ours, threads=1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for x in BATCHES:
        step(x)
        mean.update_parameters(ours)
        optimizer.zero_grad()
        (theirs(torch.tensor(x)) ** 2).mean().backward()
        optimizer.step()
        other.update_parameters(theirs)
    same(mean, other, counts=not use_buffers)
    assert np.abs(mean.module[0].weight.numpy() - ours[0].weight.numpy()).max() > 1e-3
    swa_utils.update_bn([xp.asarray(x) for x in BATCHES], mean)
    of_torch.update_bn([torch.tensor(x) for x in BATCHES], other)
    same(mean, other)
    assert mean.module[1].momentum == 0.1


def test_another_model_is_refused() -> None:
    mean = swa_utils.AveragedModel(nn.Linear(3, 4))
    with pytest.raises(InputError, match="the model is not the one that was copied: weight"):
        mean.update_parameters(nn.Linear(2, 4))
    assert int(mean.n_averaged) == 0
    with pytest.raises(InputError, match="decay=2, expected a number from 0 to 1"):
        swa_utils.get_ema_avg_fn(2)
