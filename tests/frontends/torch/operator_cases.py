"""Calls of ATen operators on small operands: (name, function, operands). Operands are made by `f`, `i`, `b` and so on,
seeded by the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Operand:
    """A tensor to be drawn: floats take the dtype that a test asks for."""

    shape: tuple[int, ...]
    kind: str = "float"
    low: float = -2.0
    high: float = 2.0

    def draw(self, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        if self.kind == "bool":
            return torch.rand(self.shape, generator=g) < 0.5
        if self.kind != "float":
            return torch.randint(int(self.low), int(self.high) + 1, self.shape, generator=g).to(
                getattr(torch, self.kind)
            )
        return (torch.rand(self.shape, generator=g, dtype=torch.float64) * (self.high - self.low) + self.low).to(dtype)


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> Operand:
    return Operand(shape, "float", low, high)


def i(*shape: int, low: int = -5, high: int = 5, kind: str = "int64") -> Operand:
    return Operand(shape, kind, low, high)


def b(*shape: int) -> Operand:
    return Operand(shape, "bool")


Case = tuple[str, Callable[..., Any], tuple[Operand, ...]]
A, B, V = f(3, 4), f(3, 4), f(4)
POSITIVE = f(3, 4, low=0.2, high=3)
UNIT = f(3, 4, low=-0.95, high=0.95)

UNARY: list[Case] = [
    *(
        (n, getattr(torch, n), (A,))
        for n in (
            "abs neg sign exp expm1 exp2 erf erfc sin cos tan atan sinh cosh tanh asinh sigmoid floor ceil trunc"
        ).split()
    ),
    *((n, getattr(torch, n), (POSITIVE,)) for n in "sqrt rsqrt log log2 log10 log1p reciprocal".split()),
    *((n, getattr(torch, n), (UNIT,)) for n in "asin acos atanh".split()),
    ("acosh", torch.acosh, (f(3, 4, low=1.1, high=3),)),
    ("round", torch.round, (f(3, 4, low=-5, high=5),)),
    ("round to one digit", lambda x: torch.round(x, decimals=1), (A,)),
    ("frac", torch.frac, (A,)),
    ("square", torch.square, (A,)),
    ("signbit", torch.signbit, (A,)),
    ("isnan", lambda x: torch.isnan(torch.log(x)), (A,)),
    ("isinf", lambda x: torch.isinf(1 / torch.trunc(x)), (A,)),
    ("isfinite", lambda x: torch.isfinite(torch.log(x)), (A,)),
    ("nan_to_num", lambda x: torch.nan_to_num(torch.log(x), nan=7.0), (A,)),
    ("sign with a NaN", lambda x: torch.sign(torch.log(x)), (A,)),
    ("abs of integers", torch.abs, (i(3, 4),)),
    ("neg of int8", torch.neg, (i(3, 4, kind="int8"),)),
    ("exp of integers", torch.exp, (i(3, 4),)),
    ("sqrt of bools", lambda x: torch.sqrt(x), (b(3, 4),)),
    ("floor of integers", torch.floor, (i(3),)),
    ("logical_not", torch.logical_not, (i(3, 4, low=-1, high=1),)),
    ("bitwise_not", torch.bitwise_not, (i(3, 4),)),
    ("bitwise_not of bools", torch.bitwise_not, (b(3, 4),)),
    ("logit", lambda x: torch.logit(x, eps=1e-3), (f(3, 4, low=0, high=1),)),
    ("a scalar", lambda x: torch.exp(x), (f(),)),
]

BINARY: list[Case] = [
    *(
        (n, getattr(torch, n), (A, V))
        for n in "add sub mul maximum minimum eq ne lt le gt ge fmod remainder atan2 copysign hypot logaddexp".split()
    ),
    ("div", torch.div, (A, POSITIVE)),
    ("div of integers", torch.div, (i(3, 4), i(4, low=1))),
    *(
        (f"div, {m}", lambda x, y, m=m: torch.div(x, y, rounding_mode=m), (A, f(4, low=0.3)))
        for m in ("floor", "trunc")
    ),
    *(
        (
            f"div of integers, {m}",
            lambda x, y, m=m: torch.div(x, y, rounding_mode=m),
            (i(3, 4, low=-9, high=9), i(4, low=1)),
        )
        for m in ("floor", "trunc")
    ),
    ("floor_divide by a negative", lambda x: x // -3, (i(7, low=-9, high=9),)),
    ("floor_divide of floats", lambda x: x // 0.1, (f(9, low=0, high=1),)),
    ("remainder by a negative", lambda x: x % -3, (i(7, low=-9, high=9),)),
    ("remainder of floats", lambda x: x % -0.7, (A,)),
    ("pow", torch.pow, (POSITIVE, B)),
    *((f"pow {e}", lambda x, e=e: x**e, (POSITIVE,)) for e in (2, 3, 0.5, -0.5, -1, 1.7, 1)),
    ("pow of integers", lambda x: x**2, (i(3, 4),)),
    ("a number to a power", lambda x: 2.0**x, (A,)),
    ("add a number", lambda x: x + 1.5, (A,)),
    ("add with alpha", lambda x, y: torch.add(x, y, alpha=2), (A, V)),
    ("sub with alpha", lambda x, y: torch.sub(x, y, alpha=0.5), (A, V)),
    ("rsub", lambda x: 3 - x, (A,)),
    ("mixed types", lambda x, y: x + y, (A, i(3, 4))),
    ("integers and a float number", lambda x: x * 0.5, (i(3, 4),)),
    ("bools and an integer", lambda x: x + 1, (b(3, 4),)),
    ("bool + bool", lambda x, y: x + y, (b(3, 4), b(4))),
    ("int8 * uint8", lambda x, y: x * y, (i(3, 4, kind="int8"), i(4, low=0, kind="uint8"))),
    ("compare integers with a float", lambda x: x > 0.5, (i(3, 4),)),
    ("compare bools", lambda x, y: x < y, (b(3, 4), b(4))),
    *((n, getattr(torch, n), (i(3, 4, low=-1, high=1), b(4))) for n in ("logical_and", "logical_or", "logical_xor")),
    *((n, getattr(torch, n), (i(3, 4), i(4))) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    *((f"{n} of bools", getattr(torch, n), (b(3, 4), b(4))) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    ("shifts", lambda x: (x << 2) + (x >> 1), (i(3, 4),)),
    ("maximum of integers", torch.maximum, (i(3, 4), i(4))),
    ("a scalar tensor beside", lambda x, y: x * y, (A, f())),
]

CHOOSING: list[Case] = [
    ("where", torch.where, (b(3, 4), A, V)),
    ("where with a number", lambda c, x: torch.where(c, x, 0.0), (b(3, 4), A)),
    ("masked_fill", lambda x, m: x.masked_fill(m, -1e4), (A, b(4))),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), (A,)),
    ("clamp below", lambda x: x.clamp(min=0.1), (A,)),
    ("clamp by tensors", lambda x, y: x.clamp(min=y), (A, V)),
    ("clamp integers", lambda x: x.clamp(-2, 2), (i(3, 4),)),
    ("clamp integers by floats", lambda x: x.clamp(-1.5, 2.5), (i(3, 4),)),
    ("relu", F.relu, (A,)),
    ("relu6", lambda x: F.relu6(4 * x), (A,)),
    ("hardtanh", lambda x: F.hardtanh(x, -0.5, 1.5), (A,)),
    ("gelu", F.gelu, (A,)),
    ("gelu by tanh", lambda x: F.gelu(x, approximate="tanh"), (A,)),
    ("silu", F.silu, (A,)),
    ("mish", F.mish, (A,)),
    ("elu", lambda x: F.elu(x, 0.7), (A,)),
    ("selu", F.selu, (A,)),
    ("celu", lambda x: F.celu(x, 0.8), (A,)),
    ("softplus", lambda x: F.softplus(x, beta=2, threshold=1.5), (A,)),
    ("softsign", F.softsign, (A,)),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.2), (A,)),
    ("prelu", F.prelu, (f(2, 3, 4), f(3))),
    ("prelu of one", F.prelu, (f(2, 3), f(1))),
    ("hardswish", lambda x: F.hardswish(2 * x), (A,)),
    ("hardsigmoid", lambda x: F.hardsigmoid(2 * x), (A,)),
    ("logsigmoid", F.logsigmoid, (A,)),
    ("glu", lambda x: F.glu(x, 1), (A,)),
    ("hardshrink", F.hardshrink, (A,)),
    ("softshrink", F.softshrink, (A,)),
    ("tanhshrink", F.tanhshrink, (A,)),
    ("threshold", lambda x: F.threshold(x, 0.3, -1.0), (A,)),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3), (A, B)),
    ("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (A, B, V)),
    ("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z), (A, B, POSITIVE)),
]

C = f(2, 3, 4)
REDUCTIONS: list[Case] = [
    *(
        (f"{n} of all", getattr(torch, n), (C,))
        for n in "sum mean prod amax amin max min argmax argmin var std".split()
    ),
    *(
        (f"{n} of an axis", lambda x, n=n: getattr(torch, n)(x, dim=1), (C,))
        for n in "sum mean prod amax amin argmax argmin var std".split()
    ),
    *(
        (f"{n}, axis kept", lambda x, n=n: getattr(torch, n)(x, dim=-1, keepdim=True), (C,))
        for n in "sum mean prod amax argmin var".split()
    ),
    ("sum of two axes", lambda x: x.sum((0, 2)), (C,)),
    ("sum of bools", lambda x: x.sum(), (b(3, 4),)),
    ("sum of int8", lambda x: x.sum(0), (i(3, 4, kind="int8"),)),
    ("sum in a type", lambda x: x.sum(0, dtype=torch.float64), (f(3, 4),)),
    ("mean of a scalar", lambda x: x.mean(), (f(),)),
    ("max with places", lambda x: torch.max(x, 1), (C,)),
    ("min with places, kept", lambda x: torch.min(x, 0, keepdim=True), (C,)),
    ("argmax of bools", lambda x: x.int().argmax(1), (b(3, 4),)),
    ("argmax with a NaN", lambda x: torch.log(x).argmax(1), (A,)),
    ("any", lambda x: (x > 1).any(), (C,)),
    ("any of an axis", lambda x: (x > 1).any(1), (C,)),
    ("all", lambda x: (x > -1).all(-1, keepdim=True), (C,)),
    ("any of floats", lambda x: x.any(0), (C,)),
    ("var uncorrected", lambda x: x.var(1, correction=0), (C,)),
    ("var of two axes", lambda x: x.var((0, 2), correction=2), (C,)),
    ("var_mean", lambda x: torch.var_mean(x, 1), (C,)),
    ("std_mean", lambda x: torch.std_mean(x, 2, keepdim=True), (C,)),
    ("norm", lambda x: torch.linalg.vector_norm(x, dim=1), (C,)),
    ("norm 1", lambda x: torch.linalg.vector_norm(x, ord=1, dim=1), (C,)),
    ("norm inf", lambda x: torch.linalg.vector_norm(x, ord=math.inf), (C,)),
    ("normalize", lambda x: F.normalize(x, dim=1), (C,)),
    ("logsumexp", lambda x: torch.logsumexp(x, 1), (C,)),
    ("softmax", lambda x: torch.softmax(x, 1), (C,)),
    ("log_softmax", lambda x: torch.log_softmax(x, -1), (C,)),
    ("softmin", lambda x: F.softmin(x, dim=0), (C,)),
    ("cumsum", lambda x: x.cumsum(1), (C,)),
    ("cumsum of bools", lambda x: x.cumsum(0), (b(5),)),
    ("cumprod", lambda x: x.cumprod(2), (C,)),
    ("sort", lambda x: torch.sort(x, 1), (C,)),
    ("sort, descending", lambda x: torch.sort(x, -1, descending=True), (C,)),
    ("argsort", lambda x: torch.argsort(x, 0), (C,)),
    ("topk", lambda x: torch.topk(x, 2, 2), (C,)),
    ("topk, smallest", lambda x: torch.topk(x, 2, 1, largest=False), (C,)),
    *((f"cdist {p}", lambda x, y, p=p: torch.cdist(x, y, p=p), (C, f(2, 5, 4))) for p in (1, 2, 3, math.inf)),
    ("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), (C, f(2, 3, 4))),
    ("cross_entropy", lambda x, t: F.cross_entropy(x, t), (f(5, 3), i(5, low=0, high=2))),
    ("mse_loss", F.mse_loss, (A, B)),
    ("count_nonzero", lambda x: (x > 0).sum(1), (C,)),
]

MOVEMENT: list[Case] = [
    ("view", lambda x: x.view(4, 6), (C,)),
    ("view, one size open", lambda x: x.view(-1, 2), (C,)),
    ("flatten", lambda x: x.flatten(1), (C,)),
    ("permute", lambda x: x.permute(2, 0, 1), (C,)),
    ("transpose", lambda x: x.transpose(0, -1), (C,)),
    ("reshape of a transpose", lambda x: x.transpose(0, 1).reshape(3, 8), (C,)),
    ("t", lambda x: x.t(), (A,)),
    ("squeeze", lambda x: x.squeeze(1), (f(2, 1, 3),)),
    ("unsqueeze", lambda x: x.unsqueeze(-1), (C,)),
    ("expand", lambda x: x.expand(2, 3, 4), (V,)),
    ("repeat", lambda x: x.repeat(2, 1, 3), (A,)),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, dim=1), (C,)),
    ("tile", lambda x: x.tile(2), (A,)),
    ("slice", lambda x: x[:, 1:], (C,)),
    ("slice from the end", lambda x: x[..., -3:-1], (C,)),
    ("slice by steps", lambda x: x[:, :, ::2], (C,)),
    ("slice beyond the end", lambda x: x[:, 1:99], (C,)),
    ("select", lambda x: x[:, -1], (C,)),
    ("narrow", lambda x: x.narrow(2, 1, 2), (C,)),
    ("split", lambda x: x.split(3, 2), (C,)),
    ("split with sizes", lambda x: x.split([1, 3], 2), (C,)),
    ("chunk", lambda x: x.chunk(2, 2), (C,)),
    ("unbind", lambda x: x.unbind(1), (C,)),
    ("tensor_split", lambda x: x.tensor_split(3, 2), (C,)),
    ("flip", lambda x: x.flip(0, 2), (C,)),
    ("roll", lambda x: x.roll((1, -1), (0, 2)), (C,)),
    ("roll all", lambda x: x.roll(5), (C,)),
    ("rot90", lambda x: torch.rot90(x), (A,)),
    ("unfold", lambda x: x.unfold(2, 2, 1), (C,)),
    ("diagonal", lambda x: torch.diagonal(x, offset=1, dim1=1, dim2=2), (C,)),
    ("diagonal below", lambda x: torch.diagonal(x, offset=-1), (A,)),
    ("cat", lambda x, y: torch.cat([x, y], 1), (C, f(2, 2, 4))),
    ("cat of types", lambda x, y: torch.cat([x, y]), (A, i(2, 4))),
    ("cat of three", lambda x: torch.cat([x, x, x], -1), (A,)),
    ("cat with nothing", lambda x: torch.cat([x, x.new_zeros(0)]), (A,)),
    ("stack", lambda x, y: torch.stack([x, y], -1), (A, B)),
    ("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), (C, f(2, 2, 4))),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y, 2, -1), (C, f(2, 3))),
    ("as_strided", lambda x: x.as_strided((2, 3), (2, 1), 1), (A,)),
    ("as_strided, transposed", lambda x: x.as_strided((4, 3), (1, 4)), (A,)),
    ("as_strided of a transpose", lambda x: (x.t() + 1).as_strided((2, 6), (6, 1)), (A,)),
    ("diag_embed", lambda x: torch.diag_embed(x), (A,)),
    ("pad", lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), (C,)),
    ("pad by less than nothing", lambda x: F.pad(x, (-1, 1)), (C,)),
    ("pad integers", lambda x: F.pad(x, (1, 0), value=7), (i(3, 4),)),
    ("pad, reflected", lambda x: F.pad(x, (1, 2), mode="reflect"), (C,)),
    ("pad, replicated", lambda x: F.pad(x, (1, 2, 2, 0), mode="replicate"), (f(1, 2, 3, 4),)),
    ("pad, circular", lambda x: F.pad(x, (1, 2), mode="circular"), (C,)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (f(1, 8, 2, 3),)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (f(1, 2, 4, 6),)),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (f(1, 4, 2, 3),)),
    ("to float64", lambda x: x.to(torch.float64), (f(3, 4),)),
    ("to integers", lambda x: (3 * x).to(torch.int32), (A,)),
    ("to bool", lambda x: torch.trunc(x).bool(), (A,)),
    ("bool to float", lambda x: x.float(), (b(3, 4),)),
    ("type_as", lambda x, y: x.type_as(y), (A, i(3))),
    ("clone", lambda x: x.clone(), (A,)),
    ("contiguous", lambda x: x.permute(1, 0).contiguous(), (A,)),
    ("view as integers", lambda x: x.to(torch.float32).view(torch.int32), (A,)),
    ("im2col", lambda x: F.unfold(x, 2), (f(1, 2, 3, 4),)),
]

CREATION: list[Case] = [
    ("zeros_like", lambda x: torch.zeros_like(x) + x, (A,)),
    ("ones", lambda x: x + torch.ones(4, dtype=x.dtype), (A,)),
    ("full", lambda x: x * torch.full((4,), 2.5, dtype=x.dtype), (A,)),
    ("full_like", lambda x: torch.full_like(x, 3), (i(3),)),
    ("new_zeros", lambda x: x.new_zeros(2, 2), (A,)),
    ("arange", lambda x: x + torch.arange(4), (A,)),
    ("arange by steps", lambda x: x + torch.arange(1, 9, 2), (A,)),
    ("arange of floats", lambda x: x + torch.arange(0.5, 2.5, 0.5, dtype=x.dtype), (A,)),
    ("linspace", lambda x: x * torch.linspace(0, 1, 4, dtype=x.dtype), (A,)),
    ("eye", lambda x: x @ torch.eye(4, dtype=x.dtype), (A,)),
    ("tril", torch.tril, (f(4, 4),)),
    ("triu", lambda x: torch.triu(x, 1), (C,)),
    ("tril of a mask", lambda x: x + torch.tril(torch.ones(4, 4, dtype=torch.bool)), (f(4, 4),)),
    ("one_hot", lambda x: F.one_hot(x, 5), (i(3, low=0, high=4),)),
    ("a constant", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), (A,)),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (f(3), f(2))),
]

INDEXING: list[Case] = [
    ("index_select", lambda x, at: x.index_select(1, at), (C, i(5, low=0, high=2))),
    ("embedding", lambda at, w: F.embedding(at, w), (i(2, 3, low=0, high=6), f(7, 4))),
    ("gather", lambda x, at: x.gather(1, at), (C, i(2, 2, 4, low=0, high=2))),
    ("take_along_dim", lambda x, at: torch.take_along_dim(x, at, 2), (C, i(2, 3, 2, low=0, high=3))),
    ("an index", lambda x, at: x[at], (A, i(5, low=-3, high=2))),
    ("an index of a later axis", lambda x, at: x[:, :, at], (C, i(2, 2, low=0, high=3))),
    ("two indices", lambda x, p, q: x[p, q], (C, i(5, low=0, high=1), i(5, low=0, high=2))),
    ("two indices that broadcast", lambda x, p, q: x[:, p, q], (C, i(2, 1, low=0, high=2), i(3, low=-4, high=3))),
    ("two indices apart", lambda x, p, q: x[p, :, q], (C, i(5, low=0, high=1), i(5, low=0, high=3))),
    ("index_put", lambda x, at, y: x.index_put((at,), y), (f(6, 3), i(1, low=0, high=5), f(1, 3))),
    (
        "index_put from the end",
        lambda x, at, y: x.index_put((at,), y, accumulate=True),
        (f(6, 3), i(4, low=-6, high=-1), f(4, 3)),
    ),
    (
        "index_put, added",
        lambda x, at, y: x.index_put((at,), y, accumulate=True),
        (f(6, 3), i(4, low=0, high=5), f(4, 3)),
    ),
    (
        "index_put at two",
        lambda x, p, q, y: x.index_put((p, q), y, accumulate=True),
        (f(4, 5), i(3, low=0, high=3), i(3, low=0, high=4), f(3)),
    ),
    ("index_put by a mask", lambda x, m: x.index_put((m,), torch.zeros((), dtype=x.dtype)), (A, b(3, 4))),
    ("scatter", lambda x, at, y: x.scatter(1, at, y), (f(3, 40), i(3, 2, low=0, high=39), f(3, 2))),
    ("scatter less than there is", lambda x, y: x.scatter(1, torch.arange(2)[None].expand(2, 2), y), (A, f(3, 3))),
    ("scatter a number", lambda x, at: x.scatter(0, at, 9.0), (A, i(1, 4, low=0, high=2))),
    ("scatter_add", lambda x, at, y: x.scatter_add(1, at, y), (A, i(3, 6, low=0, high=3), f(3, 6))),
    *(
        (
            f"scatter_reduce, {n}",
            lambda x, at, y, n=n: x.scatter_reduce(1, at, y, n),
            (A, i(3, 6, low=0, high=3), f(3, 6)),
        )
        for n in "sum prod amax amin".split()
    ),
    (
        "scatter_reduce alone",
        lambda x, at, y: x.scatter_reduce(1, at, y, "amax", include_self=False),
        (A, i(3, 6, low=0, high=3), f(3, 6)),
    ),
    ("index_add", lambda x, at, y: x.index_add(1, at, y, alpha=2), (A, i(3, low=0, high=3), f(3, 3))),
    ("index_fill", lambda x, at: x.index_fill(1, at, 5.0), (A, i(2, low=0, high=3))),
    ("bucketing by where", lambda x: torch.where(x > 0, x, -x).sum(), (A,)),
]

PRODUCTS: list[Case] = [
    ("mm", torch.mm, (A, f(4, 5))),
    ("matmul, batched", torch.matmul, (C, f(2, 4, 5))),
    ("matmul, broadcast", torch.matmul, (C, f(4, 5))),
    ("matmul of vectors", torch.matmul, (V, f(4))),
    ("matrix and vector", torch.matmul, (A, V)),
    ("vector and matrix", torch.matmul, (f(3), A)),
    ("addmm", lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=2), (f(3, 5), A, f(4, 5))),
    ("addmm, beta 0", lambda x, y, z: torch.addmm(torch.log(x), y, z, beta=0), (f(3, 5), A, f(4, 5))),
    ("baddbmm", torch.baddbmm, (f(2, 3, 5), C, f(2, 4, 5))),
    ("linear", F.linear, (C, f(5, 4), f(5))),
    ("linear without bias", F.linear, (A, f(5, 4))),
    ("bilinear", F.bilinear, (A, f(3, 5), f(6, 4, 5), f(6))),
    ("einsum", lambda x, y: torch.einsum("bik,bkj->bij", x, y), (C, f(2, 4, 5))),
    ("einsum of an outer product", lambda x, y: torch.einsum("i,j->ij", x, y), (V, f(3))),
    ("einsum with a trace", lambda x: torch.einsum("bii->b", x), (f(2, 3, 3),)),
    ("outer", torch.outer, (V, f(3))),
    ("kron", torch.kron, (f(2, 2), f(2, 3))),
]

Q = f(2, 4, 5, 8)
ATTENTION: list[Case] = [
    ("attention", F.scaled_dot_product_attention, (Q, Q, Q)),
    (
        "causal attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (Q, f(2, 4, 7, 8), f(2, 4, 7, 8)),
    ),
    ("attention, masked", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (Q, Q, Q, f(5, 5))),
    (
        "attention, bool mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m | (torch.arange(5) < 1)),
        (Q, Q, Q, b(2, 1, 5, 5)),
    ),
    (
        "attention without keys",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, (torch.arange(5) > 1)[:, None].expand(5, 5)),
        (Q, Q, Q),
    ),
    (
        "safe softmax",
        lambda x: torch.ops.aten._safe_softmax(torch.where(x.sum(1, keepdim=True) > 0, x, -math.inf), 1),
        (f(6, 4),),
    ),
    (
        "attention, scaled",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        (f(3, 5, 8), f(3, 6, 8), f(3, 6, 4)),
    ),
    (
        "grouped attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (Q, f(2, 2, 6, 8), f(2, 2, 6, 8)),
    ),
]

P2 = f(2, 3, 8, 9)
LAYERS: list[Case] = [
    ("conv1d", lambda x, w, c: F.conv1d(x, w, c, stride=2, padding=1), (f(2, 3, 9), f(4, 3, 3), f(4))),
    ("conv2d", lambda x, w: F.conv2d(x, w, padding=(1, 0), dilation=2), (P2, f(4, 3, 3, 3))),
    ("conv2d in groups", lambda x, w, c: F.conv2d(x, w, c, groups=3), (P2, f(6, 1, 3, 3), f(6))),
    ("conv2d, same", lambda x, w: F.conv2d(x, w, padding="same"), (P2, f(4, 3, 3, 3))),
    ("conv2d without batch", lambda x, w: F.conv2d(x, w), (f(3, 6, 6), f(4, 3, 3, 3))),
    ("conv3d", lambda x, w: F.conv3d(x, w, stride=2), (f(1, 2, 5, 5, 5), f(3, 2, 3, 3, 3))),
    ("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), (f(2, 3, 5), f(3, 4, 3))),
    (
        "conv_transpose2d",
        lambda x, w, c: F.conv_transpose2d(x, w, c, stride=2, padding=1, output_padding=1),
        (f(1, 3, 4, 5), f(3, 2, 3, 3), f(2)),
    ),
    ("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), (P2,)),
    ("max_pool2d, rounded up", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), (P2,)),
    ("max_pool2d with places", lambda x: F.max_pool2d(x, 2, return_indices=True), (P2,)),
    ("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), (C,)),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2), (f(1, 2, 4, 4, 4),)),
    ("max_pool2d without batch", lambda x: F.max_pool2d(x, 2), (f(3, 6, 6),)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (P2,)),
    ("avg_pool2d, padding not counted", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (P2,)),
    ("avg_pool2d, rounded up", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (P2,)),
    ("avg_pool2d with a divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), (P2,)),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), (f(2, 3, 9),)),
    ("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (f(1, 2, 4, 4, 4),)),
    ("adaptive_avg_pool2d to one", lambda x: F.adaptive_avg_pool2d(x, 1), (P2,)),
    ("adaptive_avg_pool2d, whole windows", lambda x: F.adaptive_avg_pool2d(x, (4, 3)), (P2,)),
    ("adaptive_avg_pool2d, windows that overlap", lambda x: F.adaptive_avg_pool2d(x, (3, 7)), (P2,)),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 5), (f(2, 3, 9),)),
    ("adaptive_max_pool2d to one", lambda x: F.adaptive_max_pool2d(x, 1), (P2,)),
    ("layer_norm", lambda x, w, c: F.layer_norm(x, (3, 4), w, c), (C, A, B)),
    ("layer_norm, plain", lambda x: F.layer_norm(x, (4,), eps=1e-3), (C,)),
    ("layer_norm with statistics", lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5), (C,)),
    ("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, eps=1e-4), (C, V)),
    ("group_norm", lambda x, w, c: F.group_norm(x, 2, w, c), (f(2, 4, 3, 3), V, f(4))),
    (
        "group_norm with statistics",
        lambda x: torch.native_group_norm(x, None, None, 2, 4, 9, 2, 1e-5),
        (f(2, 4, 3, 3),),
    ),
    ("instance_norm", lambda x, w, c: F.instance_norm(x, weight=w, bias=c), (f(2, 3, 4, 4), f(3), f(3))),
    ("batch_norm", lambda x, m, v, w, c: F.batch_norm(x, m, v, w, c), (P2, f(3), f(3, low=0.5), f(3), f(3))),
    ("batch_norm without weights", lambda x, m, v: F.batch_norm(x, m, v), (f(4, 3), f(3), f(3, low=0.5))),
    ("batch_norm by the batch", lambda x, w, c: F.batch_norm(x, None, None, w, c, training=True), (P2, f(3), f(3))),
    ("local_response_norm", lambda x: F.local_response_norm(x, 2), (P2,)),
    ("dropout, off", lambda x: F.dropout(x, training=False), (A,)),
]

RESIZING: list[Case] = [
    ("nearest", lambda x: F.interpolate(x, scale_factor=2), (P2,)),
    ("nearest to a size", lambda x: F.interpolate(x, (5, 13)), (P2,)),
    ("nearest-exact", lambda x: F.interpolate(x, (5, 13), mode="nearest-exact"), (P2,)),
    ("nearest of 1 dim", lambda x: F.interpolate(x, scale_factor=3), (C,)),
    ("linear", lambda x: F.interpolate(x, 9, mode="linear"), (C,)),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (P2,)),
    ("bilinear by a fraction", lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), (P2,)),
    ("bilinear, corners aligned", lambda x: F.interpolate(x, (5, 13), mode="bilinear", align_corners=True), (P2,)),
    ("bilinear to one", lambda x: F.interpolate(x, (1, 1), mode="bilinear"), (P2,)),
    ("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (P2, f(2, 4, 5, 2, low=-1.2, high=1.2))),
    (
        "grid_sample, nearest",
        lambda x, g: F.grid_sample(x, g, "nearest", "border", True),
        (P2, f(2, 4, 5, 2, low=-1.2, high=1.2)),
    ),
    ("fold", lambda x: F.fold(x, (4, 5), 2), (f(1, 8, 12),)),
    ("bicubic", lambda x: F.interpolate(x, (5, 13), mode="bicubic"), (P2,)),
    ("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (f(1, 2, 3, 3, 3),)),
]

CASES: list[Case] = [
    *UNARY,
    *BINARY,
    *CHOOSING,
    *REDUCTIONS,
    *MOVEMENT,
    *CREATION,
    *INDEXING,
    *PRODUCTS,
    *ATTENTION,
    *LAYERS,
    *RESIZING,
]
