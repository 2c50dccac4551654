"""How many statements a block runs."""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.ir.bounds import bounds
from dnnc.ir.expr import Expr, const, substitute
from dnnc.ir.loops.stmt import Block, For, If


def statements(body: Block, env: Mapping[Expr, Expr]) -> int:
    """Count the statements in a run of a block, the longer branch's for each branch. `env`: sizes; else the maximum."""
    total = 0
    for s in body:
        if isinstance(s, For):
            total += max(most(s.extent, env), 0) * max(statements(s.body, env), 1)
        elif isinstance(s, If):
            total += max(statements(s.then, env), statements(s.other, env))
        else:
            total += 1
    return total


def most(e: Expr, env: Mapping[Expr, Expr]) -> int:
    """The largest value of an extent, as far as bounds tell."""
    high = bounds(substitute(const(e), env))[1]
    return high if isinstance(high, int) else 1
