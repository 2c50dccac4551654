"""Optimizers that divide the gradient by the root of a sum or running mean of its squares."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import full_like, zeros_like
from dnnc.array.elementwise import maximum, sqrt
from dnnc.array.statistical import mean
from dnnc.ir.errors import InputError
from dnnc.optim.hyper import Hyper, choose
from dnnc.optim.hyper import sqrt as root
from dnnc.optim.optimizer import Optimizer, State

Group = Mapping[str, Any]


class Adagrad(Optimizer):
    """Divide by the root of the sum of all squares so far. Source: Duchi, Hazan and Singer, 2011.

    s = s + g g                   p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
                initial_accumulator_value=initial_accumulator_value, eps=eps, maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def init(self, param: Array, group: Group) -> State:
        return {"sum": full_like(param, group["initial_accumulator_value"])}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        return {"rate": h.lr / (1 + (h.step - 1) * h.lr_decay)}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        squares = s["sum"] + g * g
        return p - g * h.rate / (sqrt(squares) + h.eps), {"sum": squares}


class RMSprop(Optimizer):
    """Divide by the root of the running mean of squares; `centered`: by the standard deviation. Source: Hinton, 2012.

    v = alpha v + (1 - alpha) g g          b = momentum b + g / (sqrt(v) + eps)          p = p - lr b
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
                maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def init(self, param: Array, group: Group) -> State:
        names = ["square_avg", *["momentum_buffer"] * bool(group["momentum"]), *["grad_avg"] * group["centered"]]
        return {n: zeros_like(param) for n in names}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        return {"rest": 1 - h.alpha}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        v = s["square_avg"] * h.alpha + g * g * h.rest
        state = {"square_avg": v}
        if group["centered"]:
            mean = s["grad_avg"]
            mean = state["grad_avg"] = mean + (g - mean) * h.rest
            v = v - mean * mean
        step = g / (sqrt(v) + h.eps)
        if group["momentum"]:
            step = state["momentum_buffer"] = s["momentum_buffer"] * h.momentum + step
        return p - step * h.lr, state


class Adadelta(Optimizer):
    """Steps in the unit of the parameters: by the running mean of squared steps. Source: Zeiler, 2012.

    v = rho v + (1 - rho) g g       d = sqrt((u + eps) / (v + eps)) g       u = rho u + (1 - rho) d d       p = p - lr d
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(params, dict(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize, half=half))

    def init(self, param: Array, group: Group) -> State:
        return {"square_avg": zeros_like(param), "acc_delta": zeros_like(param)}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        return {"rest": 1 - h.rho}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        v = s["square_avg"] * h.rho + g * g * h.rest
        step = sqrt(s["acc_delta"] + h.eps) / sqrt(v + h.eps) * g
        return p - step * h.lr, {"square_avg": v, "acc_delta": s["acc_delta"] * h.rho + step * step * h.rest}


class Adafactor(Optimizer):
    """Adam's memory of squares as one row and one column for each matrix. Source: Shazeer and Stern, 2018.

        r = beta r + (1 - beta) mean(g g, -1)          beta = 1 - t^beta2_decay
        c = beta c + (1 - beta) mean(g g, -2)
        u = g / max(sqrt(r c / max(mean(r), eps1)), eps1)
        p = p - max(eps2, rms(p)) min(lr, 1 / sqrt(t)) u / max(1, rms(u) / d)

    A vector has its own mean of squares. `eps[0]` of None is the distance from 1 to the next number of the dtype.
    """

    signed = frozenset({"beta2_decay"})

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, maximize=maximize, half=half
            ),
        )  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        if group["beta2_decay"] > 0:
            raise InputError(f"Adafactor: beta2_decay={group['beta2_decay']!r}, expected no positive number")
        if not group["d"] >= 1:
            raise InputError(f"Adafactor: d={group['d']!r}, expected a number of at least 1")

    def init(self, param: Array, group: Group) -> State:
        if param.ndim < 2:
            return {"variance": zeros_like(param)}
        return {"row_var": zeros_like(param[..., :1]), "col_var": zeros_like(param[..., :1, :])}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        most = 1 / root(h.step)
        return {
            "rest": h.step**h.beta2_decay,
            "rate": choose(h.lr < most, h.lr, most),
            "kept": 1 - h.lr * h.weight_decay,
        }

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        smallest = h.ep1 if group["eps"][0] is not None else float(np.finfo(p.dtype).eps)
        rate = maximum(sqrt(mean(p * p)), h.ep2) * h.rate
        if group["weight_decay"]:
            p = p * h.kept
        means = {n: mean(g * g, axis=axis, keepdims=True) for n, axis in (("row_var", -1), ("col_var", -2)) if n in s}
        state = {n: a + (means.get(n, g * g) - a) * h.rest for n, a in s.items()}
        if means:
            rows = state["row_var"]
            variance = rows * state["col_var"] / maximum(mean(rows, axis=-2, keepdims=True), smallest)
        else:
            variance = state["variance"]
        step = g / maximum(sqrt(variance), smallest)
        return p - step * (rate / maximum(sqrt(mean(step * step)) / h.d, 1.0)), state
