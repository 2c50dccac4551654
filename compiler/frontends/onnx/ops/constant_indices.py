"""Checks constant indices against their axes while the model is read; errors carry the node's name."""

from __future__ import annotations

import numpy as np

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.errors import ModelError
from dnnc.ir.shapes import normalize_axis

# which input holds indices into which axes of input 0: the attribute `axis`, or as many axes as its rows are long,
# behind `batch_dims`
AXIS = {"Gather": 1, "GatherElements": 1, "ScatterElements": 1, "Scatter": 1}
ROWS = {"GatherND": 1, "ScatterND": 1}


def check_indices(c: Call) -> None:
    """ModelError where a constant index is out of range."""
    k = AXIS.get(c.op, ROWS.get(c.op))
    if k is None or c.domain or len(c.items) <= k:
        return
    data, indices = c.items[0], c.items[k]
    if data is None or indices is None or indices.array is None or not indices.array.size or data.items is not None:
        return
    shape = data.type.shape
    if c.op in AXIS:
        axis = normalize_axis(c.integer("axis", 0), len(shape))
        _check(indices.array, shape[axis], f"axis {axis} of {data.type}")
        return
    first = c.integer("batch_dims", 0)
    for j in range(min(indices.array.shape[-1] if indices.array.ndim else 0, len(shape) - first)):
        _check(indices.array[..., j], shape[first + j], f"axis {first + j} of {data.type}")


def _check(indices: Array, n: object, what: str) -> None:
    if not isinstance(n, int) or indices.dtype.kind not in "iu":
        return
    low, high = int(np.min(indices)), int(np.max(indices))
    if low < -n or high >= n:
        raise ModelError(f"index {high if high >= n else low} lies outside of {what}; expected {-n} to {n - 1}")
