"""Types and contents of torch's tensors: dtypes both ways, and arrays that share a tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dnnc.ir import dtype as dt
from dnnc.ir.dtype import DType
from dnnc.ir.errors import UnsupportedError

Array = np.ndarray[Any, Any]
DTYPES: dict[torch.dtype, DType] = {
    torch.float64: dt.f64,
    torch.float32: dt.f32,
    torch.float16: dt.f16,
    torch.bfloat16: dt.bf16,
    torch.int8: dt.i8,
    torch.int16: dt.i16,
    torch.int32: dt.i32,
    torch.int64: dt.i64,
    torch.uint8: dt.u8,
    torch.uint16: dt.u16,
    torch.uint32: dt.u32,
    torch.uint64: dt.u64,
    torch.bool: dt.boolean,
}
FROM_NAME = {d.name: t for t, d in DTYPES.items()}


def dtype_of(d: torch.dtype) -> DType:
    """The graph's dtype for torch's. UnsupportedError where there is none."""
    found = DTYPES.get(d)
    if found is None:
        raise UnsupportedError(
            f"tensors of {d} have no type in a graph; there are "
            f"{', '.join(str(t).removeprefix('torch.') for t in DTYPES)}"
        )
    return found


def array_of(t: torch.Tensor) -> Array:
    """A tensor on the CPU as an array of the same memory (a copy where it is not contiguous)."""
    t = t.detach()
    if t.device.type != "cpu":
        t = t.cpu()
    if not t.is_contiguous():
        t = t.contiguous()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(dt.bf16.numpy)
    return t.numpy()


def tensor_of(a: Array) -> torch.Tensor:
    """An array as a tensor of the same memory."""
    if a.dtype == dt.bf16.numpy:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


def memory_order(t: Any) -> tuple[int, ...] | None:
    """The order in which a tensor's axes lie in memory, outermost first, where that is dense and not row-major."""
    sizes, strides = ([hint(n) for n in ns] for ns in (t.shape, t.stride()))
    order = dense_order(sizes, strides)
    if order is None or 0 in sizes:
        return None
    moved = [k for k in order if sizes[k] != 1]
    return None if moved == sorted(moved) else order


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes by falling strides, where these leave no gaps and nothing overlaps."""
    order = tuple(sorted(range(len(sizes)), key=lambda k: (-strides[k], k)))
    expected = 1
    for k in reversed(order):
        if sizes[k] != 1 and strides[k] != expected:
            return None
        expected *= sizes[k]
    return order


def hint(n: Any) -> int:
    """A size that torch knows as a symbol: what it is in the example."""
    return int(n) if isinstance(n, int) else int(n.node.hint)
