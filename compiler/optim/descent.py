"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dnnc.array.core import Array
from dnnc.array.creation import zeros_like
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
