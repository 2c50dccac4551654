"""A network learns scikit-learn's digits, by both styles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import dnnc
import dnnc.array as xp
from dnnc import optim

pytestmark = pytest.mark.slow


def logits(p: Any, x: Any) -> Any:
    return xp.maximum(x @ p["w"] + p["b"], 0) @ p["v"] + p["c"]


def cross_entropy(p: Any, x: Any, y: Any) -> Any:
    z = logits(p, x)
    z = z - xp.max(z, axis=1, keepdims=True)
    return xp.mean(xp.log(xp.sum(xp.exp(z), axis=1)) - xp.take_along_axis(z, y[:, None], axis=1)[:, 0])


def test_digits_are_learnt() -> None:
    rng = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    order = rng.permutation(len(x))
    train, test = order[:1400], order[1400:]
    params = {
        "w": (rng.standard_normal((64, 96)) * np.sqrt(2 / 64)).astype(np.float32), "b": np.zeros(96, np.float32),
        "v": (rng.standard_normal((96, 10)) * np.sqrt(2 / 96)).astype(np.float32), "c": np.zeros(10, np.float32),
    }  # fmt: skip
    batches = [part for _ in range(12) for part in np.split(rng.permutation(train), 14)]

    opt = optim.AdamW(lr=5e-3)
    schedule = optim.lr_scheduler.OneCycleLR(opt, 1e-2, len(batches) + 1)
    step = dnnc.train_step(cross_entropy, opt, params, threads=1, clip_norm=5.0)
    arrays = {n: xp.asarray(a) for n, a in params.items()}
    for a in arrays.values():
        a.requires_grad = True
    other = optim.AdamW(arrays.values(), lr=5e-3)
    again = optim.lr_scheduler.OneCycleLR(other, 1e-2, len(batches) + 1)
    for part in batches:
        loss = step(x[part], y[part])
        schedule.step()
        other.zero_grad()
        cross_entropy(arrays, xp.asarray(x[part]), xp.asarray(y[part])).backward()
        optim.clip_grad_norm_(arrays.values(), 5.0)
        other.step()
        again.step()
    assert float(loss) < 0.05 and step.traces == 1
    for found in (step.params, arrays):
        guess = np.asarray(xp.argmax(logits(found, xp.asarray(x[test])), axis=1))
        assert np.mean(guess == y[test]) >= 0.97
