"""Linear layers with few weights: what is stored, multiplied and trained are the weights that are not 0.

    y = x W^T + b        cot x = cot y W        cot values = the elements of (cot y)^T x at the places of W

All three read one array of values and the structure of W, for whole vectors of rows of x. An optimizer has state for
these values only.
"""

from __future__ import annotations

import zlib
from typing import Any

from dnnc.array.core import Array
from dnnc.array.elementwise import add
from dnnc.array.manipulation import matrix_transpose, reshape
from dnnc.array.sizes import differ
from dnnc.array.sparse.arrays import csr_array
from dnnc.ir.errors import InputError
from dnnc.nn.functional.operands import array
from dnnc.nn.module import Module
from dnnc.nn.parameter import Parameter


def checksum(a: csr_array) -> str:
    """Of the places of the elements."""
    s = a.structure
    return f"{zlib.crc32(s.columns.tobytes(), zlib.crc32(s.starts.tobytes())):08x}"


class SparseLinear(Module):
    """x W^T + b for weights [out, in] of which few are not 0. The places of these never change.

    Args:
        weight: [out, in], a sparse array, or a dense one of which the elements that are not 0 are taken.
        bias: [out], or None.

    Attributes:
        weight: a `csr_array` of the present values.

    The name of the parameter is `values_` and a checksum of the places, so that states of other places do not load.
    """

    def __init__(self, weight: Any, bias: Any = None) -> None:
        super().__init__()
        a = csr_array(weight)
        if not a.nnz or (a.dtype.kind != "f" and a.dtype.name != "bfloat16"):
            raise InputError(f"SparseLinear: expected floats that are not all 0 as weight, got {a!r}")
        self._name = f"values_{checksum(a)}"
        self._places = a
        self.out_features, self.in_features = a.shape
        self.register_parameter(self._name, Parameter(a.data, getattr(weight, "requires_grad", True)))
        self.register_parameter("bias", bias if bias is None or isinstance(bias, Parameter) else Parameter(bias))
        if self.bias is not None and self.bias.shape != (self.out_features,):
            raise InputError(f"SparseLinear: expected a bias [{self.out_features}] or None, got {self.bias.shape}")

    @property
    def weight(self) -> csr_array:
        return self._places.with_data(self._parameters[self._name])

    def forward(self, input: Any) -> Array:
        x = array("SparseLinear", "input", input)
        if not x.ndim or differ(x.shape[-1], self.in_features):
            raise InputError(f"SparseLinear: the last axis of {x.shape} must have {self.in_features} elements")
        y = matrix_transpose(self.weight @ matrix_transpose(reshape(x, (-1, self.in_features))))
        y = reshape(y, (*x.shape[:-1], self.out_features))
        return y if self.bias is None else add(y, self.bias)

    def extra_repr(self) -> str:
        share = self.weight.nnz / (self.in_features * self.out_features)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {share:.1%} of the weights"
