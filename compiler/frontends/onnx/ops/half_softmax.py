"""Softmax of a half type over short rows, each operation in that type as the standard says; and its scores.

Kernels keep values of half types in float32 and round what they store. For a softmax over a few elements the standard
reads otherwise: difference, exp, sum and quotient round, and a sum of bfloat16 rounds after each addition.
"""

from __future__ import annotations

from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.ir.dtype import bf16, f16
from dnnc.ir.graph import Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait

# The roundings of a running sum of n terms add up to at most (n - 1) * eps / 2 of it: 6 % for 16 terms of bfloat16. 256
# ones sum to 256, and then more of them add nothing. Longer rows than these, and those whose length is not known, keep
# float32 up to the result, which is closer to the exact one. One limit serves all half types.
LONGEST = 16


def is_rounded(x: Value, axis: int) -> bool:
    """Is a softmax of x computed operation by operation in its own type?"""
    n = x.type.shape[axis]
    return x.type.dtype in (f16, bf16) and isinstance(n, int) and 0 < n <= LONGEST


def rounded_softmax(c: Call, x: Value, axis: int) -> Any:
    """Softmax of x where `is_rounded` holds: element-wise ops since the last product or norm round operands too."""
    _round_operands(c, x)
    last = x.type.rank - 1
    if axis == last:
        return c.b.rounded_softmax(x, dtype=x.type.dtype)
    perm = (*(k for k in range(last + 1) if k != axis), axis)
    y = c.b.rounded_softmax(c.b.transpose(x, perm=perm), dtype=x.type.dtype)
    return c.b.transpose(y, perm=tuple(perm.index(k) for k in range(last + 1)))


def _round_operands(c: Call, x: Value) -> None:
    todo = [x.node]
    while todo:
        n = todo.pop()
        if (
            n is None
            or n.graph is not c.b.graph
            or Trait.ELEMENTWISE not in n.op.traits
            or n.op.name in ("rounded", "cast")
        ):
            continue
        for k, v in enumerate(n.inputs):
            if v is not None and v.type.dtype is x.type.dtype and v.node is not None and _computes(v.node):
                n.set_input(k, Builder(c.b.graph, n, n.locs).rounded(v, dtype=v.type.dtype))
                todo.append(v.node)


def _computes(n: Node) -> bool:
    return bool(n.op.traits & {Trait.ELEMENTWISE, Trait.CONTRACTION}) and n.op.name != "rounded"
