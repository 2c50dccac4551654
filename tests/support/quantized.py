"""What tests of quantized graphs share: the passes in their order, operands in the range of their types."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.fold import fold
from dnnc.passes.rewrites.quantized import quantized, requantized

Array = np.ndarray[Any, Any]
CTX = PassContext(TargetFacts(multiplies_bytes=True, packs_bytes=True))
RNG = np.random.default_rng(0)


def rewritten(g: Graph, ctx: PassContext = CTX) -> list[str]:
    """Run the passes in their order; the ops that are left."""
    quantized(g, ctx)
    fold(g, ctx)
    requantized(g, ctx)
    return [n.op.name for n in g.nodes()]


def inputs(g: Graph) -> list[Array]:
    """Numbers in the range of each input."""
    out = []
    for v in g.inputs:
        shape, t = tuple(map(int, map(str, v.type.shape))), v.type.dtype
        drawn = RNG.integers(*t.range, shape, endpoint=True) if t.is_int else RNG.standard_normal(shape) * 3
        out.append(np.asarray(drawn).astype(t.numpy))
    return out


def weights(dtype: str, *shape: int) -> Array:
    """Bytes, all values as likely."""
    t = BY_NAME[dtype]
    return np.asarray(RNG.integers(*t.range, shape, endpoint=True)).astype(t.numpy)
