"""Dynamic loss scaling in define-by-run: small gradients of half precision do not vanish, large ones are noticed."""

from __future__ import annotations

from functools import reduce
from operator import and_

from dnnc.array.core import Array, evaluate
from dnnc.array.elementwise import isfinite
from dnnc.array.statistical import all as every
from dnnc.ir.errors import InputError
from dnnc.optim.optimizer import Optimizer


class GradScaler:
    """Scale a loss before `backward`, and skip the steps whose gradients overflow; PyTorch's torch.amp.GradScaler.

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        init_scale: the first scale.
        growth_factor: factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of steps.
        enabled: False makes everything pass unchanged.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._scale, self._growth, self._backoff, self._interval = (
            float(init_scale),
            growth_factor,
            backoff_factor,
            growth_interval,
        )
        self._enabled, self._good, self._finite = enabled, 0, True
        self._unscaled: set[int] = set()

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def scale(self, loss: Array) -> Array:
        """The loss times the scale."""
        return loss * self._scale if self._enabled else loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, such as ahead of clipping. `step` does it
        automatically."""
        if not self._enabled:
            return
        if id(optimizer) in self._unscaled:
            raise InputError("unscale_: these gradients were divided by the scale already since the last update()")
        self._unscaled.add(id(optimizer))
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        for p in params:
            p.grad = p.grad * (1.0 / self._scale)
        found = [every(isfinite(p.grad)) for p in params]
        if found:
            finite = reduce(and_, found)
            evaluate(finite, *(p.grad for p in params))
            self._finite = self._finite and bool(finite)

    def step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`, unless a gradient is infinite or NaN."""
        if self._enabled and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        if self._finite:
            optimizer.step()

    def update(self) -> None:
        """Choose the scale of the next iteration."""
        self._unscaled.clear()
        if not self._enabled:
            return
        if not self._finite:
            self._scale, self._good, self._finite = self._scale * self._backoff, 0, True
            return
        self._good += 1
        if self._good == self._interval:
            self._scale, self._good = self._scale * self._growth, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self._scale, "_growth_tracker": self._good}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._scale, self._good = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
