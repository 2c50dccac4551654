"""What a module learns: an array that requires a gradient, and that modules register."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.array.core import Array, from_buffer, moved
from dnnc.array.creation import asarray
from dnnc.array.lazy import Lazy, buffer


class Parameter(Array):
    """An array that a module registers when it is assigned to an attribute.

    Args:
        data: its first contents: an array of any library, or nested sequences of numbers.
        requires_grad: does `backward` give it a gradient? GradientError for integers.
    """

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        a = asarray(data)
        super().__init__(a._parts, a.dtype)
        if requires_grad:
            self.requires_grad = True

    def __repr__(self) -> str:
        return f"Parameter containing:\n{Array.__repr__(self)}"

    def __reduce__(self) -> Any:
        return _again, (np.array(self.numpy()), self.device, self.requires_grad)


def _again(data: np.ndarray[Any, Any], device: str, requires_grad: bool) -> Parameter:
    return Parameter(from_buffer(data, device), requires_grad)


def snapshot(x: Array) -> Array:
    """A new array of the present contents, without a history."""
    return Array([_settled(p) if p.tracked and not p.traced else p for p in x._parts], x.dtype)


def _settled(p: Lazy) -> Lazy:
    return Lazy(p.type, data=buffer(p), device=p.device)


def overwrite(x: Array, new: Array) -> None:
    """Let an array, a parameter perhaps, hold other contents, dtype and device included."""
    required, grad = x.requires_grad, x.grad
    x._dtype = new.dtype
    x._set(snapshot(new)._parts)
    if required:
        x.requires_grad = True
    if grad is not None and (grad.dtype != new.dtype or grad.shape != new.shape or grad.device != new.device):
        x.grad = moved(grad.astype(new.dtype), new.device) if grad.shape == new.shape else None
