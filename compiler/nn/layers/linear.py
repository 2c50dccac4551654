"""Layers that are linear in their input, tables of rows, and changes of shape."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.devices import home
from dnnc.array.manipulation import axis_of, reshape
from dnnc.array.promotion import dtype_of
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.module import Module
from dnnc.nn.parameter import Parameter

Same = TypeVar("Same")
DTYPE = "float32"  # of parameters, where no other is asked for


def empty(shape: Any, dtype: Any, device: Any) -> Parameter:
    """A parameter of zeros, which an initializer may fill."""
    return Parameter(from_buffer(np.zeros(shape, dtype_of(DTYPE if dtype is None else dtype)), home(device)))


class Identity(Module):
    """Give the input; arguments of the constructor are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Same) -> Same:
        return input


class Linear(Module):
    """x W^T + b. Weight [out, in] and bias [out] begin uniform within 1 / sqrt(in)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty((out_features, in_features), dtype, device)
        self.register_parameter("bias", empty((out_features,), dtype, device) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound_by(self.bias, self.in_features)

    def forward(self, input: Any) -> Array:
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def bound_by(x: Array | None, fan: int) -> None:
    """Fill a bias with uniform numbers within 1 / sqrt(fan)."""
    if x is not None:
        bound = 1 / math.sqrt(fan) if fan > 0 else 0.0
        init.uniform_(x, -bound, bound)


class Bilinear(Module):
    """x1^T W_k x2 + b_k; weight [out, in1, in2]."""

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self.weight = empty((out_features, in1_features, in2_features), dtype, device)
        self.register_parameter("bias", empty((out_features,), dtype, device) if bias else None)
        bound_by(self.weight, in1_features)
        bound_by(self.bias, in1_features)

    def forward(self, input1: Any, input2: Any) -> Array:
        return F.bilinear(input1, input2, self.weight, self.bias)

    def extra_repr(self) -> str:
        sizes = f"in1_features={self.in1_features}, in2_features={self.in2_features}"
        return f"{sizes}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """The rows of a weight [n, width] that integers name; they begin as normal numbers, that of `padding_idx` as 0."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InputError(f"Embedding: padding_idx={padding_idx} is no row of {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = empty((num_embeddings, embedding_dim), dtype, device)
        init.normal_(self.weight)
        if self.padding_idx is not None:
            self.weight[self.padding_idx, ...] = 0.0

    @classmethod
    def from_pretrained(cls, embeddings: Any, freeze: bool = True, padding_idx: int | None = None) -> Embedding:
        """A table with these rows, which are not learnt unless `freeze` is False."""
        table = cls.__new__(cls)
        Module.__init__(table)
        table.weight = Parameter(embeddings, not freeze)
        table.num_embeddings, table.embedding_dim = table.weight.shape
        table.padding_idx = padding_idx
        return table

    def forward(self, input: Any) -> Array:
        return F.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class EmbeddingBag(Module):
    """The sum, mean or maximum of the rows of a weight [n, width] that each bag of integers names."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.include_last_offset = include_last_offset
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = empty((num_embeddings, embedding_dim), dtype, device)
        init.normal_(self.weight)
        if self.padding_idx is not None:
            self.weight[self.padding_idx, ...] = 0.0

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Array:
        return F.embedding_bag(
            input, self.weight, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


class Flatten(Module):
    """The axes from `start_dim` to `end_dim` as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Array) -> Array:
        first, last = axis_of(self.start_dim, input.ndim), axis_of(self.end_dim, input.ndim)
        if first > last:
            raise InputError(f"Flatten: axis {self.start_dim} stands behind {self.end_dim} in {input.shape}")
        size = math.prod(input.shape[first : last + 1])
        return reshape(input, (*input.shape[:first], size, *input.shape[last + 1 :]))

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """One axis as several of these sizes, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Any) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, input: Array) -> Array:
        k = axis_of(self.dim, input.ndim)
        return reshape(input, (*input.shape[:k], *self.unflattened_size, *input.shape[k + 1 :]))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"
