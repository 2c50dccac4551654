"""Modules that store and train the weights alone that are not 0: `to_sparse`, and `to_dense` back.

Linear layers become `SparseLinear`. Weights of convolutions and of ONNX models are computed of their values,

    weight = zeros with the values at their places        cot values = the elements of cot weight at the places

and products by matrices in ONNX models read the values alone, as SparseLinear does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from dnnc.array.core import Array
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.layers.few import FewValues, sparse_weight
from dnnc.nn.layers.linear import Linear
from dnnc.nn.layers.sparse import SparseLinear
from dnnc.nn.module import Module, replaced
from dnnc.nn.parameter import Parameter
from dnnc.nn.utils.parametrize import computed_names, register_parametrization, remove_parametrizations

M = TypeVar("M", bound=Module)
FEW = 0.3  # of the weights: from there on a step of training is faster than a dense one


def to_sparse(module: M, density: float = FEW) -> M:
    """Let layers that have few weights store and train these alone, in place. Make optimizers behind this call.

    Args:
        module: whose `Linear` layers are replaced by `SparseLinear`, and whose convolutions and weights of ONNX models
            (`nn.from_onnx`) are computed of their values. A single layer is returned as one.
        density: the largest share of a layer's weights that are not 0. Layers with more stay as they are, and those
            that share their weights with another module.

    Returns:
        The module.

    Raises:
        InputError: there is no such layer.
    """
    if not isinstance(module, Module):
        raise InputError(f"to_sparse: expected a Module, got {a_type(module)}")
    owners = [id(p) for m in module.modules() for p in m._parameters.values()]
    weights = [w for w in _weights(module) if w[2].size]
    shares = [np.count_nonzero(p.numpy()) / p.size for _, _, p in weights]
    few = [
        (m, n, p)
        for (_, (m, n), p), s in zip(weights, shares)
        if 0 < s <= density and owners.count(id(p)) == 1 and _fits(p)
    ]
    if not few:
        found = ", ".join(f"{n or 'itself'} {s:.0%}" for (n, _, _), s in list(zip(weights, shares))[:20]) or "none"
        raise InputError(
            f"to_sparse: no layer has at most {density:.0%} of its weights; layers are {found}. Prune first, such as "
            "by dnnc.prune or optim.GradualPruning"
        )
    for m, n, p in few:
        if type(m) is not Linear:
            register_parametrization(m, n, FewValues(p))
    return replaced(module, {id(m): SparseLinear(m.weight, m.bias) for m, _, _ in few if type(m) is Linear})


def _weights(module: Module) -> Iterator[tuple[str, tuple[Module, str], Array]]:
    """Names, owners and arrays of the weights that may be stored as few values."""
    for name, m in module.named_modules():
        if type(m) is Linear:
            yield name, (m, "weight"), m.weight
            continue
        for n, p in m._parameters.items():
            if m.stores_few and p is not None and p.ndim > 1:
                yield ".".join(filter(None, (name, n if n != "weight" else ""))), (m, n), p


def _fits(p: Array) -> bool:
    return p.dtype.kind == "f" or p.dtype.name == "bfloat16"


def to_dense(module: M) -> M:
    """Undo `to_sparse`, in place: `SparseLinear` layers are `Linear` ones again, and all weights have their zeros.

    So the module is saved, exported and compiled as any other. Returns the module; a single layer is returned as
    another one.
    """
    if not isinstance(module, Module):
        raise InputError(f"to_dense: expected a Module, got {a_type(module)}")
    made: dict[int, Module] = {}
    for m in list(module.modules()):
        for n in computed_names(m):
            if sparse_weight(m, n) is not None:
                remove_parametrizations(m, n)
        if isinstance(m, SparseLinear):
            dense = Linear.__new__(Linear)
            Module.__init__(dense)
            dense.in_features, dense.out_features = m.in_features, m.out_features
            required = m._parameters[m._name].requires_grad  # type: ignore[union-attr]
            dense.weight = Parameter(m.weight.toarray(), required)
            dense.register_parameter("bias", m.bias)
            made[id(m)] = dense
    return replaced(module, made)
