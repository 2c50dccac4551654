"""Muon: momentum whose matrices are made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dnnc.array.core import Array
from dnnc.array.creation import zeros_like
from dnnc.array.elementwise import maximum, sqrt
from dnnc.array.statistical import sum as total
from dnnc.ir.errors import InputError
from dnnc.optim.hyper import Hyper
from dnnc.optim.moments import Betas, Moments
from dnnc.optim.optimizer import State

Group = Mapping[str, Any]
ADJUSTMENTS = ("original", "match_rms_adamw")
DTYPES = ("bfloat16", "float16", "float32", "float64")


class Muon(Moments):
    """Momentum, made orthogonal by Newton and Schulz's iteration, for the matrices of hidden layers.

        b = momentum b + (1 - momentum) g             with nesterov: u = momentum b + (1 - momentum) g, else u = b
        x = u / |u|, then ns_steps times: s = x x^T, x = a x + (b s + c s s) x
        p = p - lr weight_decay p - lr f x            f = sqrt(max(1, rows / columns)), or with "match_rms_adamw"
                                                      0.2 sqrt(max(rows, columns)), which fits AdamW's rates

    Groups with `use_muon=False` are updated as by AdamW with `betas`: give it biases, norms, embeddings and the last
    layer. `ns_dtype` is the dtype of the iteration, in which matrix units are fast.

        optim.Muon([{"params": ["*.bias", "embed.*", "head.*"], "use_muon": False, "lr": 3e-4}, {"params": "*"}], 0.02)

    Source: Jordan et al., 2024; Liu et al., "Muon is scalable for LLM training", 2025.

    Raises:
        InputError: a parameter of a group with `use_muon` is no matrix.
    """

    signed = frozenset({"ns_coefficients"})

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        use_muon: bool = True,
        betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        half: str = "master",
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
                ns_dtype=ns_dtype, use_muon=use_muon, betas=betas, maximize=maximize, half=half,
            ),
        )  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        if len(group["ns_coefficients"]) != 3:
            raise InputError(f"Muon: ns_coefficients={group['ns_coefficients']!r}, expected three numbers")
        if not isinstance(group["ns_steps"], int) or not 0 < group["ns_steps"] < 100:
            raise InputError(f"Muon: ns_steps={group['ns_steps']!r}, expected an integer from 1 to 99")
        if group["adjust_lr_fn"] not in (None, *ADJUSTMENTS):
            raise InputError(
                f"Muon: adjust_lr_fn={group['adjust_lr_fn']!r}, expected None or one of {', '.join(ADJUSTMENTS)}"
            )
        if group["ns_dtype"] not in DTYPES:
            raise InputError(f"Muon: ns_dtype={group['ns_dtype']!r}, expected one of {', '.join(DTYPES)}")

    def structure(self, group: Group) -> tuple[Any, ...]:
        return (*super().structure(group), group["ns_steps"])

    def init(self, param: Array, group: Group) -> State:
        if not group["use_muon"]:
            return super().init(param, group)
        if param.ndim != 2:
            raise InputError(
                f"Muon: a parameter has shape {param.shape}, expected a matrix; put it into a group with use_muon=False"
            )
        return {"momentum_buffer": zeros_like(param)}

    def numbers(self, h: Hyper, group: Group) -> dict[str, Any]:
        return {**super().numbers(h, group), "new": 1 - h.momentum}

    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Group) -> tuple[Array, State]:
        if group["weight_decay"]:
            p = p * h.kept
        if not group["use_muon"]:
            m, v = self.means(g, s, h)
            return p - m * h.step_size / (sqrt(v) / h.root_correction2 + h.eps), {"exp_avg": m, "exp_avg_sq": v}
        b = s["momentum_buffer"]
        b = b + (g - b) * h.new
        u = g + (b - g) * h.momentum if group["nesterov"] else b
        return p - orthogonal(u, h, group) * (h.lr * _adjustment(p.shape, group)), {"momentum_buffer": b}


def orthogonal(u: Array, h: SimpleNamespace, group: Group) -> Array:
    """About U V^T of the singular value decomposition U S V^T of `u`: singular values of about 0.7 to 1.2."""
    x = (u / maximum(sqrt(total(u * u)), h.eps)).astype(group["ns_dtype"])
    wide = x.shape[0] <= x.shape[1]  # the product with itself is of the shorter side
    x = x if wide else x.T
    a, b, c = (v.astype(x.dtype) for v in (h.ns_coefficient1, h.ns_coefficient2, h.ns_coefficient3))
    for _ in range(group["ns_steps"]):
        square = x @ x.T
        x = x * a + (square * b + square @ square * c) @ x
    return (x if wide else x.T).astype(u.dtype)


def _adjustment(shape: tuple[Any, ...], group: Group) -> float:
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
