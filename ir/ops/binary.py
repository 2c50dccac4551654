"""Binary numbers: signs as bits of words, and products of them by exclusive or and counts of bits.

A bit is 1 for a negative number, so the product of two signs is negative where their bits differ: of k pairs the sum of
products is k less twice the number of bits in which the words differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.dtype import i32, u32
from dnnc.ir.expr import Expr, cast, const, op, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import CONTRACTION, LOOPS, ContractionForm, OpDef, require
from dnnc.ir.ops.common import Array, dim, require_kind, same_dim, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType, product

WORD = 32  # bits of a word


def _signs_type(x: TensorType) -> TensorType:
    require_kind("the operand of sign_words", x, "fi")
    require(x.rank > 0, "sign_words packs rows; got {}", x)
    return TensorType(u32, (*x.shape[:-1], dim((const(x.shape[-1]) + (WORD - 1)) // WORD)))


def _signs(x: Tensor) -> Tensor:
    n = x.dims[-1]
    words = dim((const(n) + (WORD - 1)) // WORD)

    def bit(*v: Expr) -> Expr:
        *at, w, k = v
        negative = x[(*at, w * WORD + k)] < const(0, x.dtype.computed)
        return select(negative, call("shl", const(1, u32), cast(k, u32)), const(0, u32))

    inside = None if same_dim(dim(const(words) * WORD), dim(const(n))) else lambda *v: v[-2] * WORD + v[-1] < n
    return te.reduce((*x.dims[:-1], words), [WORD], u32, "sum", bit, inside)


def _signs_reference(x: Array) -> Array:
    bits = np.pad(np.asarray(x) < 0, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % WORD)])
    packed = np.packbits(bits.reshape(*bits.shape[:-1], -1, WORD), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")[..., 0]


def _differing_type(a: TensorType, b: TensorType) -> TensorType:
    words = a.dtype is b.dtype is u32 and a.rank == b.rank == 2
    require(words, "differing_bits takes matrices of words in u32; got {} and {}", a, b)
    require(same_dim(a.shape[1], b.shape[0]), "differing_bits: {} words of a, {} of b", a.shape[1], b.shape[0])
    return TensorType(i32, (a.shape[0], b.shape[1]))


def _differing(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.dims, b.dims[1]
    bits = lambda i, j, r: cast(call("popcount", op("^", a[i, r], b[r, j])), i32)  # noqa: E731
    return te.reduce((m, n), [k], i32, "sum", bits)


def _differing_reference(a: Array, b: Array) -> Array:
    x, y = (np.unpackbits(np.ascontiguousarray(v).view(np.uint8), axis=-1).astype(np.int32) for v in (a, b.T))
    return (x.sum(1)[:, None] + y.sum(1) - 2 * (x @ y.T)).astype(np.int32)


def _differing_flops(a: TensorType, b: TensorType) -> Dim:
    return dim(const(product((*a.shape, b.shape[1]))) * (2 * WORD))


def binary_product(b_: Any, x: Any, y: Any, *, bits: int) -> Any:
    """The sums of products of `bits` signs: words [M, K], and [K, N]."""
    return b_.sub(b_.constant(np.int32(bits)), b_.mul(b_.differing_bits(x, y), np.int32(2)))


BINARY_OPS: tuple[OpDef, ...] = (
    OpDef(
        "sign_words",
        _signs_type,
        _signs,
        reference=_signs_reference,
        flops=lambda x: product(x.shape),
        traits=LOOPS,
        samples=(sample("f32[3, 64]"), sample("f16[2, 2, 37]"), sample("i32[5]", domain=(-9, 9))),
    ),
    OpDef(
        "differing_bits",
        _differing_type,
        _differing,
        reference=_differing_reference,
        flops=_differing_flops,
        traits=CONTRACTION,
        contraction=ContractionForm.PRODUCT,
        terms=lambda a, b: a.shape[1],
        samples=(
            sample("u32[5, 3]", "u32[3, 20]", domain=(0, 4e9)),
            sample("u32[1, 8]", "u32[8, 7]", domain=(0, 4e9)),
        ),
    ),
)
