"""Schedules against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
from dnnc import optim

Make = Callable[[Any, Any], Any]  # of lr_scheduler and an optimizer


def sequence(s: Any, o: Any) -> Any:
    return s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=4), s.CosineAnnealingLR(o, 10, 0.01)], [4])


CASES: dict[str, Make] = {
    "lambda": lambda s, o: s.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "step": lambda s, o: s.StepLR(o, 3),
    "multi": lambda s, o: s.MultiStepLR(o, [2, 5, 5], 0.5),
    "exponential": lambda s, o: s.ExponentialLR(o, 0.9),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 7, 0.01),
    "restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4, 1, 0.01),
    "longer restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 2, 2),
    "constant": lambda s, o: s.ConstantLR(o, 0.3, 4),
    "polynomial": lambda s, o: s.PolynomialLR(o, 9, 2.0),
    "linear": lambda s, o: s.LinearLR(o, 0.2, 0.9, 6),
    "one-cycle": lambda s, o: s.OneCycleLR(o, [0.3, 0.6], epochs=5, steps_per_epoch=5),
    "three phases": lambda s, o: s.OneCycleLR(o, 0.3, 25, anneal_strategy="linear", three_phase=True),
    "multiplicative": lambda s, o: s.MultiplicativeLR(o, [lambda t: 0.9, lambda t: 1 - 0.01 * t]),
    "cyclic": lambda s, o: s.CyclicLR(o, [0.1, 0.2], 0.5, 3, 2),
    "lower cycles": lambda s, o: s.CyclicLR(o, 0.1, 0.5, 4, mode="triangular2", cycle_momentum=False),
    "cycles of steps": lambda s, o: s.CyclicLR(o, 0.1, 0.5, 3, 0, "exp_range", 0.9),
    "cycles by a function": lambda s, o: s.CyclicLR(o, 0.1, 0.5, 2, 5, scale_fn=lambda c: 1 / c),
    "sequential": sequence,
    "chained": lambda s, o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 5), s.ExponentialLR(o, 0.9)]),
}


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        group = optimizer.param_groups
        found.append([*(g["lr"] for g in group), *(g["momentum"] for g in group), *scheduler.get_last_lr()])
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()  # without a gradient it changes nothing; torch's schedules count the calls
        scheduler.step()
    return found


@pytest.mark.slow  # the first one loads torch's optimizers
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str) -> None:
    def groups(array: Any) -> list[dict[str, Any]]:
        return [{"params": [array()]}, {"params": [array()], "lr": 0.2}]

    ours = optim.SGD(groups(lambda: xp.asarray(np.zeros(1))), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(groups(lambda: torch.zeros(1)), lr=0.1, momentum=0.9)
    a = CASES[name](optim.lr_scheduler, ours)
    b = CASES[name](torch.optim.lr_scheduler, theirs)
    assert np.allclose(rates(ours, a, 15), rates(theirs, b, 15), rtol=1e-12, atol=0)
    state = a.state_dict()
    now = a.get_last_lr()
    a.step()
    a.load_state_dict(state)
    assert a.get_last_lr() == now and a.last_epoch == 15


@pytest.mark.slow
def test_schedules_multiply() -> None:
    ours = optim.SGD([xp.asarray(np.zeros(1))], lr=0.5)
    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.5)

    def both(s: Any, o: Any) -> list[Any]:
        return [s.ExponentialLR(o, 0.9), s.LinearLR(o, 0.5, 1.0, 4)]

    a, b = both(optim.lr_scheduler, ours), both(torch.optim.lr_scheduler, theirs)
    for _ in range(6):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        theirs.step()
        for s in (*a, *b):
            s.step()
    del a, s
    optim.lr_scheduler.StepLR(ours, 10)
    assert ours.param_groups[0]["lr"] == 0.5  # those that are gone do not count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call")
def test_one_cycle_ends_with_its_last_batch() -> None:
    a = optim.lr_scheduler.OneCycleLR(optim.SGD([xp.asarray(np.zeros(1))], lr=0.1, momentum=0.9), 0.3, 5)
    b = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9), 0.3, 5)
    for _ in range(5):
        a.step()
        b.step()
        assert np.allclose(a.get_last_lr(), b.get_last_lr(), rtol=1e-12, atol=0)
    with pytest.raises(dnnc.InputError, match="step 6 of 5"):
        a.step()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateaus_against_torch(mode: str, threshold_mode: str, cooldown: int) -> None:
    rng = np.random.default_rng(cooldown)
    options = {"mode": mode, "threshold_mode": threshold_mode, "cooldown": cooldown, "factor": 0.5, "patience": 2}
    options |= {"threshold": 0.05, "min_lr": [1e-3, 0.04], "eps": 1e-3}

    def groups(array: Any) -> list[dict[str, Any]]:
        return [{"params": [array()]}, {"params": [array()], "lr": 0.2}]

    ours = optim.SGD(groups(lambda: xp.asarray(np.zeros(1))), lr=0.1)
    theirs = torch.optim.SGD(groups(lambda: torch.zeros(1)), lr=0.1)
    a = optim.lr_scheduler.ReduceLROnPlateau(ours, **options)
    b = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **options)
    for k, number in enumerate((np.abs(rng.standard_normal(60)) + np.linspace(1, 0, 60)).tolist()):
        if k == 30:
            a.load_state_dict(a.state_dict())
        number = float("nan") if k == 10 else number
        a.step(number)
        b.step(number)
        assert np.allclose(a.get_last_lr(), [g["lr"] for g in theirs.param_groups], rtol=1e-12, atol=0)
    assert a.reductions > 3
    with pytest.raises(dnnc.InputError, match="takes the number that should improve"):
        a.step()


def test_bad_schedules() -> None:
    o = optim.Adagrad([xp.asarray(np.zeros(1))])
    s = optim.lr_scheduler
    for message, call in (
        ("expected an optimizer", lambda: s.StepLR(3, 1)),
        ("no momentum to cycle", lambda: s.OneCycleLR(o, 0.1, 10)),
        ("no momentum to cycle", lambda: s.CyclicLR(o, 0.1, 0.5)),
        ("expected one of triangular", lambda: s.CyclicLR(o, 0.1, 0.5, mode="square")),
        ("give total_steps", lambda: s.OneCycleLR(o, 0.1)),
        ("need 1 milestones", lambda: s.SequentialLR(o, [s.StepLR(o, 1), s.StepLR(o, 1)], [])),
        ("2 functions for 1 group", lambda: s.LambdaLR(o, [float, float])),
        ("expected mode 'min' or 'max'", lambda: s.ReduceLROnPlateau(o, "least")),
        ("below 1, got 2", lambda: s.ReduceLROnPlateau(o, factor=2)),
    ):
        with pytest.raises(dnnc.InputError, match=message):
            call()
