"""Schedules of the learning rate, in PyTorch's names and order of arguments.

A schedule writes `lr` into the groups of an optimizer; `step()` goes to the next value, that of a closed form at
`last_epoch`. Several schedules of one optimizer multiply: each is a factor of the base rate. `SequentialLR` puts them
one after the other instead. Neither `Optimizer.step` nor `dnnc.train_step` compiles anything for a new value.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from dnnc.ir import checks
from dnnc.ir.errors import InputError, count
from dnnc.optim.optimizer import Optimizer


class LRScheduler(ABC):
    """Base of all schedules.

    Args:
        optimizer: whose groups are written. Their learning rates now are the base ones, unless another schedule has
            noted these as `initial_lr`.
        last_epoch: the step from which to go on; -1 begins.
    """

    around: LRScheduler | None = None  # the schedule that this one is a part of

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"{type(self).__name__}: expected an optimizer of dnnc.optim, got {optimizer!r}")
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [float(g["initial_lr"]) for g in optimizer.param_groups]
        self.last_epoch = last_epoch
        optimizer.schedules.append(weakref.ref(self))
        self._at(self.last_epoch + 1)

    @abstractmethod
    def rate(self, base: float, t: int, k: int) -> float:
        """The learning rate of group `k` at step `t`."""

    def step(self) -> None:
        """Go to the next step."""
        self._at(self.last_epoch + 1)

    def _at(self, t: int) -> None:
        self.last_epoch = t
        for k, (group, base) in enumerate(zip(self.optimizer.param_groups, self.base_lrs)):
            group["lr"] = self.rate(base, t, k) * self._others(k)
        self._last_lr = [g["lr"] for g in self.optimizer.param_groups]

    def _others(self, k: int) -> float:
        """The product of the other schedules' factors for group `k`, as they stand."""
        product = 1.0
        for s in (ref() for ref in self.optimizer.schedules):
            if s is not None and s is not self and s is not self.around and s.base_lrs[k]:
                product *= s.rate(s.base_lrs[k], s.last_epoch, k) / s.base_lrs[k]
        return product

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands; functions are no part of it."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another schedule of this kind stood."""
        self.base_lrs = [float(b) for b in state_dict["base_lrs"]]
        self._at(int(state_dict["last_epoch"]))


class LambdaLR(LRScheduler):
    """The base rate times a function of the step; one function for all groups, or a list with one for each."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        groups = len(optimizer.param_groups)
        self.lr_lambdas: list[Any] = list(lr_lambda) if isinstance(lr_lambda, (list, tuple)) else [lr_lambda] * groups
        if len(self.lr_lambdas) != groups:
            raise InputError(f"LambdaLR: {count(len(self.lr_lambdas), 'function')} for {count(groups, 'group')}")
        for f in self.lr_lambdas:
            checks.function(f, "LambdaLR")
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return base * float(self.lr_lambdas[k](t))


class MultiplicativeLR(LambdaLR):
    """Times a function of the step, from step 1 on; one function for all groups, or a list with one for each."""

    def rate(self, base: float, t: int, k: int) -> float:
        return base * math.prod(float(self.lr_lambdas[k](i)) for i in range(1, t + 1))


class StepLR(LRScheduler):
    """Times `gamma` every `step_size` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = checks.integer(step_size, "step_size", 1), gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return base * self.gamma ** (t // self.step_size)


class MultiStepLR(LRScheduler):
    """Times `gamma` at each of the milestones."""

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return base * self.gamma ** bisect_right(self.milestones, t)


class ExponentialLR(LRScheduler):
    """Times `gamma` in each step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return base * self.gamma**t


class CosineAnnealingLR(LRScheduler):
    """Half a cosine from the base rate down to `eta_min` in `T_max` steps, and up again (Loshchilov and Hutter)."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max, self.eta_min = checks.integer(T_max, "T_max", 1), eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * t / self.T_max)) / 2


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a cosine down to `eta_min` in `T_0` steps, then again in `T_mult` times as many (Loshchilov and Hutter)."""

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.T_0, self.T_mult = checks.integer(T_0, "T_0", 1), checks.integer(T_mult, "T_mult", 1)
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        length, within = self.T_0, t
        if self.T_mult == 1:
            within %= length
        while within >= length:
            within, length = within - length, length * self.T_mult
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * within / length)) / 2


class ConstantLR(LRScheduler):
    """Times `factor` in the first `total_iters` steps."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1) -> None:
        if not 0 <= factor <= 1:
            raise InputError(f"ConstantLR: factor={factor!r}: expected a number from 0 to 1")
        self.factor, self.total_iters = factor, checks.integer(total_iters, "total_iters", 1)
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return base * (self.factor if t < self.total_iters else 1.0)


class PolynomialLR(LRScheduler):
    """The share of `total_iters` steps that is left, to a power: down to 0."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = checks.integer(total_iters, "total_iters", 1), power
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return float(base * (1 - min(t, self.total_iters) / self.total_iters) ** self.power)


class LinearLR(LRScheduler):
    """A factor that goes from `start_factor` to `end_factor` in `total_iters` steps: warm-up."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1:
            raise InputError(
                f"LinearLR: start_factor={start_factor!r}, end_factor={end_factor!r}: expected numbers up to 1, the "
                "first above 0"
            )
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = checks.integer(total_iters, "total_iters", 1)
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        share = min(t, self.total_iters) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * share)


class OneCycleLR(LRScheduler):
    """From `max_lr / div_factor` up to `max_lr`, and down to a `final_div_factor`-th of the beginning; momentum goes
    the other way. Source: Smith and Topin, 2018, in the form of PyTorch's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise InputError("OneCycleLR: give total_steps, or epochs and steps_per_epoch")
            total_steps = epochs * steps_per_epoch
        self.total_steps = checks.integer(total_steps, "total_steps", 1)
        if anneal_strategy not in ("cos", "linear"):
            raise InputError(f"OneCycleLR: anneal_strategy={anneal_strategy!r}, expected 'cos' or 'linear'")
        if not 0 <= pct_start <= 1:
            raise InputError(f"OneCycleLR: pct_start={pct_start!r}, expected a number from 0 to 1")
        self._cosine = anneal_strategy == "cos"
        groups = len(optimizer.param_groups)
        self._most, low, high = (_each(v, groups) for v in (max_lr, base_momentum, max_momentum))
        first = [m / div_factor for m in self._most]
        last = [f / final_div_factor for f in first]
        up = float(pct_start * self.total_steps) - 1
        if three_phase:
            ends = [up, 2 * up, float(self.total_steps - 1)]
            self._rates, self._momenta = [first, self._most, first, last], [high, low, high, high]
        else:
            ends = [up, float(self.total_steps - 1)]
            self._rates, self._momenta = [first, self._most, last], [high, low, high]
        self._ends = ends
        self._momentum_name = _momentum_of(optimizer, "OneCycleLR") if cycle_momentum else None
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return self._value(self._rates, t, k)

    def _value(self, levels: list[list[float]], t: int, k: int) -> float:
        start = 0.0
        for j, end in enumerate(self._ends):
            if t <= end or j == len(self._ends) - 1:
                share = (t - start) / (end - start)
                a, b = levels[j][k], levels[j + 1][k]
                return b + (a - b) / 2 * (1 + math.cos(math.pi * share)) if self._cosine else (b - a) * share + a
            start = end
        raise AssertionError

    def _at(self, t: int) -> None:
        if t > self.total_steps:  # that many calls of `step`, as in PyTorch: one after each batch
            raise InputError(f"OneCycleLR: step {t} of {self.total_steps}; the schedule has ended")
        super()._at(t)
        for k, group in enumerate(self.optimizer.param_groups):
            if self._momentum_name is not None:
                _set_momentum(group, self._momentum_name, self._value(self._momenta, t, k))


class CyclicLR(LRScheduler):
    """Up from `base_lr` to `max_lr` in `step_size_up` steps and down again, over and over; momentum goes the other way.

    Source: Smith, 2017, in the form of PyTorch's. Cycle c counts from 1, step t from 0; the height of a peak is scaled
    by 1 ("triangular"), 2 ** (1 - c) ("triangular2"), `gamma ** t` ("exp_range"), or by `scale_fn` of c or of t
    (`scale_mode` "cycle" or "iterations").
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float],
        max_lr: float | Sequence[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[int], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.8,
        max_momentum: float | Sequence[float] = 0.9,
        last_epoch: int = -1,
    ) -> None:
        scales: dict[str, tuple[Callable[[int], float], str]] = {
            "triangular": (lambda c: 1.0, "cycle"),
            "triangular2": (lambda c: 0.5 ** (c - 1), "cycle"),
            "exp_range": (lambda t: gamma**t, "iterations"),
        }
        if scale_fn is None and mode not in scales:
            raise InputError(f"CyclicLR: mode={mode!r}, expected one of {', '.join(scales)}, or give scale_fn")
        if scale_mode not in ("cycle", "iterations"):
            raise InputError(f"CyclicLR: scale_mode={scale_mode!r}, expected 'cycle' or 'iterations'")
        self._scale, of = (scale_fn, scale_mode) if scale_fn is not None else scales[mode]
        self._by_cycle = of == "cycle"
        self._up = checks.integer(step_size_up, "step_size_up", 1)
        down = self._up if step_size_down is None else checks.integer(step_size_down, "step_size_down", 0)
        self._total = self._up + down
        groups = len(optimizer.param_groups)
        self._least, self._most, self._low, self._high = (
            _each(v, groups) for v in (base_lr, max_lr, base_momentum, max_momentum)
        )
        self._momentum_name = _momentum_of(optimizer, "CyclicLR") if cycle_momentum else None
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        return self._least[k] + (self._most[k] - self._least[k]) * self._height(t)

    def _height(self, t: int) -> float:
        """Where between the least and the most step `t` is."""
        cycle, place = t // self._total + 1, t % self._total
        share = place / self._up if place <= self._up else (self._total - place) / (self._total - self._up)
        return share * float(self._scale(cycle if self._by_cycle else t))

    def _at(self, t: int) -> None:
        super()._at(t)
        for k, group in enumerate(self.optimizer.param_groups):
            if self._momentum_name is not None:
                m = self._high[k] - (self._high[k] - self._low[k]) * self._height(t)
                _set_momentum(group, self._momentum_name, m)


def _momentum_of(optimizer: Optimizer, what: str) -> str:
    """The name of an optimizer's momentum."""
    name = next((n for n in ("betas", "momentum") if n in optimizer.defaults), None)
    if name is None:
        raise InputError(f"{what}: {type(optimizer).__name__} has no momentum to cycle; give cycle_momentum=False")
    return name


def _set_momentum(group: dict[str, Any], name: str, m: float) -> None:
    group[name] = (m, *group["betas"][1:]) if name == "betas" else m


class SequentialLR(LRScheduler):
    """Schedules one after the other: the next one begins at each of the milestones."""

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        if len(schedulers) != len(milestones) + 1:
            raise InputError(
                f"SequentialLR: {count(len(schedulers), 'schedule')} need {len(schedulers) - 1} milestones, got "
                f"{len(milestones)}"
            )
        if any(s.optimizer is not optimizer for s in schedulers):
            raise InputError("SequentialLR: the schedules must be of the optimizer that is given")
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        for s in schedulers:
            s.around = self
        optimizer.schedules[:] = [r for r in optimizer.schedules if (x := r()) is not None and x.around is None]
        super().__init__(optimizer, last_epoch)

    def rate(self, base: float, t: int, k: int) -> float:
        which, first = self._which(t)
        return self.schedulers[which].rate(base, t - first, k)

    def _which(self, t: int) -> tuple[int, int]:
        """The number of the schedule at step `t`, and the step at which it begins."""
        k = bisect_right(self.milestones, t)
        return k, self.milestones[k - 1] if k else 0

    def _at(self, t: int) -> None:
        self.last_epoch = t
        which, first = self._which(t)
        self.schedulers[which]._at(t - first)
        self._last_lr = [g["lr"] for g in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See LRScheduler.load_state_dict."""
        for s in self.schedulers:
            s.base_lrs = [float(b) for b in state_dict["base_lrs"]]
        super().load_state_dict(state_dict)


class ChainedScheduler:
    """Schedules of one optimizer, of which `step` makes a step together. Their factors multiply, as always.

    Args:
        schedulers: in any order.
        optimizer: of all of them; by default that of the first.

    Raises:
        InputError: there are none, or not all are of the optimizer.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        self.schedulers = list(schedulers)
        if not self.schedulers:
            raise InputError("ChainedScheduler: expected at least one schedule, got none")
        self.optimizer = optimizer if optimizer is not None else self.schedulers[0].optimizer
        if any(s.optimizer is not self.optimizer for s in self.schedulers):
            raise InputError("ChainedScheduler: the schedules must be of one optimizer")

    @property
    def last_epoch(self) -> int:
        return self.schedulers[-1].last_epoch

    def step(self) -> None:
        """Go to the next step of each schedule."""
        for s in self.schedulers:
            s.step()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self.schedulers[-1].get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedules stand."""
        return {"schedulers": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where other schedules of these kinds stood."""
        for s, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            s.load_state_dict(state)


_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "reductions")


class ReduceLROnPlateau(LRScheduler):
    """Times `factor` when a number has not improved for `patience` steps; `step(metrics)` takes the number.

    Args:
        mode: "min" if smaller numbers are better, or "max".
        factor: below 1.
        patience: steps without improvement that are tolerated.
        threshold: the least improvement: a share of the best number, or with `threshold_mode="abs"` a difference.
        cooldown: steps after a reduction in which nothing is counted.
        min_lr: the least rate, one for all groups or one for each.
        eps: smaller reductions are left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise InputError(
                f"ReduceLROnPlateau: expected mode 'min' or 'max' and threshold_mode 'rel' or 'abs', got {mode!r} and "
                f"{threshold_mode!r}"
            )
        if not 0 <= factor < 1:
            raise InputError(f"ReduceLROnPlateau: factor must be at least 0 and below 1, got {factor!r}")
        self.mode, self.factor, self.threshold, self.threshold_mode = mode, factor, threshold, threshold_mode
        self.patience = checks.integer(patience, "patience", 0)
        self.cooldown = checks.integer(cooldown, "cooldown", 0)
        self.min_lrs, self.eps = _each(min_lr, len(optimizer.param_groups), type(self).__name__), eps
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = self.reductions = 0
        super().__init__(optimizer)

    def rate(self, base: float, t: int, k: int) -> float:
        lr = base
        for _ in range(self.reductions):
            lower = max(lr * self.factor, self.min_lrs[k])
            lr = lower if lr - lower > self.eps else lr
        return lr

    def step(self, metrics: float | None = None) -> None:
        """Go to the next step. `metrics`: the number, such as the loss of the validation set; NaN is no improvement."""
        if metrics is None:
            raise InputError("ReduceLROnPlateau: step(metrics) takes the number that should improve, such as a loss")
        number = float(metrics)
        if self._is_better(number):
            self.best, self.num_bad_epochs = number, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self.reductions += 1
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        super().step()

    def _is_better(self, number: float) -> bool:
        sign = -1.0 if self.mode == "min" else 1.0
        bar = (
            self.best * (1 + sign * self.threshold)
            if self.threshold_mode == "rel"
            else self.best + sign * self.threshold
        )
        return sign * number > sign * bar

    def state_dict(self) -> dict[str, Any]:
        """See LRScheduler.state_dict."""
        return {**super().state_dict(), **{name: getattr(self, name) for name in _PLATEAU}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See LRScheduler.load_state_dict."""
        for name in _PLATEAU:
            setattr(self, name, state_dict[name])
        super().load_state_dict(state_dict)


def _each(value: float | Sequence[float], groups: int, of: str = "OneCycleLR") -> list[float]:
    """One number for each group."""
    many: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(many) != groups:
        raise InputError(f"{of}: expected one number for each of {count(groups, 'group')}, got {len(many)}")
    return [float(v) for v in many]
