"""Optimizers with running means of the gradient and of its square: Adam and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import ones, zeros_like
from dnnc.array.elementwise import abs as absolute
from dnnc.array.elementwise import maximum, sqrt, where
from dnnc.array.statistical import sum as total
from dnnc.optim.hyper import Hyper, choose
from dnnc.optim.hyper import sqrt as root
from dnnc.optim.optimizer import Optimizer, State

Group = Mapping[str, Any]
Betas = tuple[float, float]


class Moments(Optimizer):
    """What the optimizers here share: `exp_avg` and `exp_avg_sq`, and the corrections of their bias to zero."""

    def init(self, param: Array, group: Group) -> State:
        return {"exp_avg": zeros_like(param), "exp_avg_sq": zeros_like(param)}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        correction1, correction2 = 1 - h.beta1**h.step, 1 - h.beta2**h.step
        return {
            "rest1": 1 - h.beta1,
            "rest2": 1 - h.beta2,
            "correction1": correction1,
            "root_correction2": root(correction2),
            "step_size": h.lr / correction1,
            "kept": 1 - h.lr * h.weight_decay,
        }

    @staticmethod
    def decayed(p: Array, g: Array, h: SimpleNamespace, group: Group) -> tuple[Array, Array]:
        """Weight decay: of the parameter itself where it is decoupled, else as a part of the gradient."""
        if not group["weight_decay"]:
            return p, g
        return (p * h.kept, g) if group["decoupled_weight_decay"] else (p, g + p * h.weight_decay)

    @staticmethod
    def means(g: Array, s: State, h: SimpleNamespace) -> tuple[Array, Array]:
        m = s["exp_avg"]
        return m + (g - m) * h.rest1, s["exp_avg_sq"] * h.beta2 + g * g * h.rest2


class Adam(Moments):
    """Adam: steps by the running mean of the gradient over the root of that of its square.

        m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g g
        p = p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    `amsgrad` takes the largest v so far. Weight decay is a part of the gradient, or with `decoupled_weight_decay` of
    the parameter, as in AdamW. Source: Kingma and Ba, 2015; Reddi et al., 2018.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
                decoupled_weight_decay=decoupled_weight_decay, half=half,
            ),
        )  # fmt: skip

    def init(self, param: Array, group: Group) -> State:
        most = {"max_exp_avg_sq": zeros_like(param)} if group["amsgrad"] else {}
        return {**super().init(param, group), **most}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        p, g = self.decayed(p, g, h, group)
        m, v = self.means(g, s, h)
        state, square = {"exp_avg": m, "exp_avg_sq": v}, v
        if group["amsgrad"]:
            square = state["max_exp_avg_sq"] = maximum(s["max_exp_avg_sq"], v)
        return p - m * h.step_size / (sqrt(square) / h.root_correction2 + h.eps), state


class AdamW(Adam):
    """Adam with weight decay of the parameter itself: `p = p - lr weight_decay p` first (Loshchilov, 2019)."""

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, half=half
        )


class Adamax(Moments):
    """Adam with the largest gradient, which decays, in place of the root of squares. Source: Kingma and Ba, 2015, 7.1.

    m = beta1 m + (1 - beta1) g         u = max(beta2 u, |g| + eps)         p = p - lr / (1 - beta1^t) m / u
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, half=half)
        )

    def init(self, param: Array, group: Group) -> State:
        return {"exp_avg": zeros_like(param), "exp_inf": zeros_like(param)}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        if group["weight_decay"]:
            g = g + p * h.weight_decay
        m = s["exp_avg"] + (g - s["exp_avg"]) * h.rest1
        largest = maximum(s["exp_inf"] * h.beta2, absolute(g) + h.eps)
        return p - m * h.step_size / largest, {"exp_avg": m, "exp_inf": largest}


class NAdam(Moments):
    """Adam with Nesterov's momentum, whose weight grows over `momentum_decay`. Source: Dozat, 2016.

    mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)
    p = p - lr ((1 - mu_t) g / (1 - mu_1 ... mu_t) + mu_(t+1) m / (1 - mu_1 ... mu_(t+1))) / (sqrt(v') + eps)
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay,
                decoupled_weight_decay=decoupled_weight_decay, maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def init(self, param: Array, group: Group) -> State:
        return {**super().init(param, group), "mu_product": ones((), dtype=np.float64)}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        def mu(step: Any) -> Any:
            return h.beta1 * (1 - 0.5 * 0.96 ** (step * h.momentum_decay))

        return {**super().numbers(h, group), "mu": mu(h.step), "mu_next": mu(h.step + 1)}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        p, g = self.decayed(p, g, h, group)
        m, v = self.means(g, s, h)
        product = s["mu_product"] * _double(h.mu)
        now, ahead = (1 - product).astype(p.dtype), (1 - product * _double(h.mu_next)).astype(p.dtype)
        size = sqrt(v) / h.root_correction2 + h.eps
        p = p - g / size * (h.lr * (1 - h.mu) / now) - m / size * (h.lr * h.mu_next / ahead)
        return p, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}


class RAdam(Moments):
    """Adam whose first steps, before the variance of v is small enough, go without it. Source: Liu et al., 2020."""

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                decoupled_weight_decay=decoupled_weight_decay, maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        power, limit = h.beta2**h.step, 2 / (1 - h.beta2) - 1
        length = limit - 2 * h.step * power / (1 - power)
        long = length > 5
        safe = choose(long, length, 6.0)  # below, the root is of no number
        rectified = root((safe - 4) * (safe - 2) * limit / ((limit - 4) * (limit - 2) * safe))
        return {
            **super().numbers(h, group),
            "adaptive": choose(long, rectified, 0.0),
            "plain": choose(long, 0.0, 1.0),
        }

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        p, g = self.decayed(p, g, h, group)
        m, v = self.means(g, s, h)
        factor = h.root_correction2 / (sqrt(v) + h.eps) * h.adaptive + h.plain
        return p - m * h.step_size * factor, {"exp_avg": m, "exp_avg_sq": v}


class LAMB(Moments):
    """Layer-wise adaptive moments for large batches. Source: You et al., 2020 (algorithm 2, phi the identity).

    r = m' / (sqrt(v') + eps) + weight_decay p
    p = p - lr |p| / |r| r                       the ratio is 1 where a norm is zero
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, half=half)
        )

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        m, v = self.means(g, s, h)
        r = m / h.correction1 / (sqrt(v) / h.root_correction2 + h.eps)
        if group["weight_decay"]:
            r = r + p * h.weight_decay
        weights, steps = sqrt(total(p * p)), sqrt(total(r * r))
        ratio = where((weights > 0) & (steps > 0), weights / where(steps > 0, steps, 1.0), 1.0)
        return p - r * (ratio * h.lr), {"exp_avg": m, "exp_avg_sq": v}


def _double(x: Any) -> Any:
    return x.astype(np.float64) if isinstance(x, Array) else x
