"""Linear layers with few weights: what is stored, multiplied and trained are the weights that are not 0.

    y = x W^T + b        cot x = cot y W        cot values = the elements of (cot y)^T x at the places of W

All three read one array of values and the structure of W, for whole vectors of rows of x. An optimizer has state for
these values only.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import numpy as np

from dnnc.array.core import Array
from dnnc.array.elementwise import add
from dnnc.array.manipulation import matrix_transpose, reshape
from dnnc.array.sizes import differ
from dnnc.array.sparse.arrays import csr_array
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.functional.operands import array
from dnnc.nn.layers.linear import Linear
from dnnc.nn.module import Module, replaced
from dnnc.nn.parameter import Parameter

M = TypeVar("M", bound=Module)
FEW = 0.3  # of the weights: from there on a step of training is faster than a dense one


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
        s = a.structure
        self._name = f"values_{zlib.crc32(s.columns.tobytes(), zlib.crc32(s.starts.tobytes())):08x}"
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


def to_sparse(module: M, density: float = FEW) -> M:
    """Let linear layers that have few weights store and train these alone, in place. Make optimizers behind this call.

    Args:
        module: whose `Linear` layers are replaced by `SparseLinear`; a single layer is returned as one.
        density: the largest share of a layer's weights that are not 0. Layers with more stay as they are, and those
            that share their weights with another module.

    Returns:
        The module.

    Raises:
        InputError: there is no such layer.
    """
    if not isinstance(module, Module):
        raise InputError(f"to_sparse: expected a Module, got {a_type(module)}")
    layers = {n: m for n, m in module.named_modules() if type(m) is Linear}
    owners = [id(p) for m in module.modules() for p in m._parameters.values()]
    shares = {n: np.count_nonzero(m.weight.numpy()) / max(m.weight.size, 1) for n, m in layers.items()}
    few = [m for n, m in layers.items() if 0 < shares[n] <= density and owners.count(id(m.weight)) == 1]
    if not few:
        found = ", ".join(f"{n or 'itself'} {s:.0%}" for n, s in list(shares.items())[:20]) or "none"
        raise InputError(
            f"to_sparse: no linear layer has at most {density:.0%} of its weights; layers are {found}. Prune first, "
            "such as by optim.GradualPruning"
        )
    return replaced(module, {id(m): SparseLinear(m.weight, m.bias) for m in few})


def to_dense(module: M) -> M:
    """Let all `SparseLinear` layers be `Linear` ones again, in place, with zeros where no weights are.

    So the module is saved, exported and compiled as any other. Returns the module; a single layer is returned as
    another one.
    """
    if not isinstance(module, Module):
        raise InputError(f"to_dense: expected a Module, got {a_type(module)}")
    made: dict[int, Module] = {}
    for m in module.modules():
        if isinstance(m, SparseLinear):
            dense = Linear.__new__(Linear)
            Module.__init__(dense)
            dense.in_features, dense.out_features = m.in_features, m.out_features
            required = m._parameters[m._name].requires_grad  # type: ignore[union-attr]
            dense.weight = Parameter(m.weight.toarray(), required)
            dense.register_parameter("bias", m.bias)
            made[id(m)] = dense
    return replaced(module, made)
