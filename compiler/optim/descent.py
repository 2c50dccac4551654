"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dnnc.array.core import Array
from dnnc.array.creation import full_like, zeros_like
from dnnc.array.elementwise import greater, less, maximum, minimum, sign, where
from dnnc.ir.errors import InputError
from dnnc.optim.hyper import Hyper, choose
from dnnc.optim.optimizer import Optimizer, State


class SGD(Optimizer):
    """Gradient descent with momentum.

        g = g + weight_decay p
        v = momentum v + (1 - dampening) g          in the first step v = g
        p = p - lr v                                with nesterov: p - lr (g + momentum v)

    Source: Sutskever et al., 2013, in the form of PyTorch's SGD.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
                maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise InputError("SGD: nesterov needs a momentum, and no dampening")

    def init(self, param: Array, group: Mapping[str, Any]) -> State:
        return {"momentum_buffer": zeros_like(param)} if group["momentum"] else {}

    def numbers(self, h: Hyper, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"damp": choose(h.step == 1, 1.0, 1 - h.dampening)}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Mapping[str, Any]) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        if not group["momentum"]:
            return p - g * h.lr, s
        v = s["momentum_buffer"] * h.momentum + (g * h.damp if group["dampening"] else g)
        return p - (g + v * h.momentum if group["nesterov"] else v) * h.lr, {"momentum_buffer": v}


class ASGD(Optimizer):
    """Gradient descent that keeps the average of the parameters in its state, as `ax`.

        p = p (1 - lambd eta) - eta g               eta = lr / (1 + lambd lr (t - 1))^alpha
        ax = ax + mu (p - ax)                       mu = 1 / max(1, t - 1 - t0)

    Source: Polyak and Juditsky, 1992, in the form of PyTorch's ASGD.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay, maximize=maximize, half=half),
        )

    def init(self, param: Array, group: Mapping[str, Any]) -> State:
        return {"ax": zeros_like(param)}

    def numbers(self, h: Hyper, group: Mapping[str, Any]) -> dict[str, Any]:
        eta = h.lr / (1 + h.lambd * h.lr * (h.step - 1)) ** h.alpha
        averaged = h.step - 1 - h.t0
        mu = 1 / choose(averaged > 1, averaged, 1.0)
        return {"eta": eta, "kept": 1 - h.lambd * eta, "mu": mu}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Mapping[str, Any]) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        p = p * h.kept - g * h.eta
        return p, {"ax": s["ax"] + (p - s["ax"]) * h.mu}


class Rprop(Optimizer):
    """Steps whose sizes follow from the signs of gradients alone. Source: Riedmiller and Braun, 1993.

    A size grows by etas[1] where the gradient keeps its sign, and shrinks by etas[0] where it changes, within
    `step_sizes`. There the parameter stays, and the next gradient counts as the first.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(params, dict(lr=lr, etas=etas, step_sizes=step_sizes, maximize=maximize, half=half))

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        small, large = group["etas"]
        if not 0 < small < 1 < large:
            raise InputError(f"Rprop: etas={group['etas']}, expected a number between 0 and 1, and one above 1")

    def init(self, param: Array, group: Mapping[str, Any]) -> State:
        return {"prev": zeros_like(param), "step_size": full_like(param, group["lr"])}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Mapping[str, Any]) -> tuple[Array, State]:
        kept = sign(g) * sign(s["prev"])
        factor = where(greater(kept, 0.0), h.eta2, where(less(kept, 0.0), h.eta1, 1.0))
        size = maximum(minimum(s["step_size"] * factor, h.step_size2), h.step_size1)
        g = where(less(kept, 0.0), 0.0, g)
        return p - sign(g) * size, {"prev": g, "step_size": size}
