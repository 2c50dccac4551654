"""Blocks of images that become channels, phases that take turns, and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.rules import movement as rules
from dnnc.ir.expr import Expr, const
from dnnc.ir.op import MOVEMENT, OpDef, Trait, require
from dnnc.ir.ops.common import Array, dim, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dense, Dim, Layout, TensorType, parse_layout

Dims = tuple[Dim, ...]


def _depth_type(x: TensorType, *, block: int, mode: str = "DCR") -> TensorType:
    ok = x.rank == 4 and mode in ("DCR", "CRD")
    require(ok, "depth_to_space needs [N, C, H, W] and mode DCR or CRD; got {} and {}", x, mode)
    n, c, h, w = x.shape
    ok = isinstance(c, int) and block > 0 and c % (block * block) == 0
    require(ok, "{} channels do not divide into {}x{} blocks", c, block, block)
    return TensorType(x.dtype, (n, dim(const(c) // (block * block)), dim(const(h) * block), dim(const(w) * block)))


def _depth_to_space(b: Any, x: Any, *, block: int, mode: str) -> Any:
    n, c, h, w = x.type.shape
    inner = c // (block * block)
    if mode == "DCR":
        y = b.transpose(b.reshape(x, shape=(n, block, block, inner, h, w)), perm=(0, 3, 4, 1, 5, 2))
    else:
        y = b.transpose(b.reshape(x, shape=(n, inner, block, block, h, w)), perm=(0, 1, 4, 2, 5, 3))
    return b.reshape(y, shape=_depth_type(x.type, block=block, mode=mode).shape)


def _space_type(x: TensorType, *, block: int) -> TensorType:
    require(x.rank == 4 and block > 0, "space_to_depth needs [N, C, H, W]; got {}", x)
    n, c, h, w = x.shape
    ok = all(dim(const(d) % block) == 0 for d in (h, w))
    require(ok, "the spatial dims of {} do not divide into blocks of {}", x, block)
    return TensorType(x.dtype, (n, dim(const(c) * block * block), dim(const(h) // block), dim(const(w) // block)))


def _space_to_depth(b: Any, x: Any, *, block: int) -> Any:
    out = _space_type(x.type, block=block).shape
    n, c, *_ = x.type.shape
    y = b.reshape(x, shape=(n, c, out[2], block, out[3], block))
    return b.reshape(b.transpose(y, perm=(0, 3, 5, 1, 2, 4)), shape=out)


def _interleave_type(x: TensorType, *, strides: tuple[int, ...], channels: int) -> TensorType:
    phases = math.prod(strides)
    ok = x.rank == len(strides) + 2 and all(s > 0 for s in strides)
    require(ok, "interleave needs a stride > 0 for each of the spatial axes of {}", x)
    n, c, *sizes = x.shape
    ok = isinstance(c, int) and c % phases == 0 and 0 < channels <= c // phases
    require(ok, "{} channels are not {} x {} and more", c, phases, channels)
    return TensorType(x.dtype, (n, channels, *(dim(const(q) * s) for q, s in zip(sizes, strides))))


def _interleave(x: Tensor, *, strides: tuple[int, ...], channels: int) -> Tensor:
    n, c, *sizes = x.dims
    share = const(c) // math.prod(strides)

    def element(image: Expr, channel: Expr, *i: Expr) -> Expr:
        phase: Expr = const(0)
        for k, s in zip(i, strides):
            phase = phase * s + k % s
        return x[(image, phase * share + channel, *(k // s for k, s in zip(i, strides)))]

    return te.compute((n, channels, *(dim(const(q) * s) for q, s in zip(sizes, strides))), x.dtype, element)


def _interleave_numpy(x: Array, *, strides: Sequence[int], channels: int) -> Array:
    n, c, *sizes = x.shape
    rank, phases = len(strides), math.prod(strides)
    y = x.reshape(n, *strides, c // phases, *sizes)
    y = y.transpose(0, 1 + rank, *(axis for k in range(rank) for axis in (2 + rank + k, 1 + k)))
    return np.ascontiguousarray(y.reshape(n, c // phases, *(q * s for q, s in zip(sizes, strides)))[:, :channels])


def _pack_type(x: TensorType, *, layout: Layout | None) -> TensorType:
    ok = layout is None or {p.axis for p in layout.parts} == set(range(x.rank))
    require(ok, "layout {} does not fit to {}", layout, x)
    return TensorType(x.dtype, x.shape, Dense(layout))


def _same(x: Tensor, **attrs: Any) -> Tensor:
    return te.compute(x.dims, x.dtype, lambda *i: x[i])


BLOCK_OPS: tuple[OpDef, ...] = (
    OpDef(
        "depth_to_space",
        _depth_type,
        decompose=_depth_to_space,
        traits=MOVEMENT,
        samples=(sample("f32[1, 8, 2, 3]", block=2), sample("f16[2, 12, 3, 2]", block=2, mode="CRD")),
    ),
    OpDef(
        "space_to_depth",
        _space_type,
        decompose=_space_to_depth,
        traits=MOVEMENT,
        samples=(sample("f32[1, 2, 4, 6]", block=2), sample("f16[2, 1, 3, 6]", block=3)),
    ),
    # the phases of an image, of which each has its own channels, take turns along every spatial axis; a share may end
    # in channels unused
    OpDef(
        "interleave",
        _interleave_type,
        _interleave,
        reference=_interleave_numpy,
        traits=MOVEMENT,
        samples=(
            sample("f32[1, 12, 2, 3]", strides=(2, 2), channels=3),
            sample("f16[2, 8, 3]", strides=(4,), channels=1),
            sample("f32[1, 36, 2, 1]", strides=(3, 2), channels=5),
        ),
    ),
    # the same values in another layout; layout=None is row-major again
    OpDef(
        "pack",
        _pack_type,
        _same,
        reference=lambda x, **_: x,
        traits=MOVEMENT | {Trait.RELAYOUT},
        samples=(sample("f32[1, 20, 3, 3]", layout=parse_layout("0 1/16 2 3 1%16")), sample("f16[5, 4]", layout=None)),
        vjp=rules.pack,
    ),
)
