"""How many statements a block runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dnnc.ir.bounds import bounds
from dnnc.ir.expr import Expr, Load, Var, const, free, substitute, walk
from dnnc.ir.loops.stmt import Block, For, If, Let


def statements(body: Block, env: Mapping[Expr, Expr]) -> int:
    """Count the statements in a run of a block, the longer branch's for each branch. `env`: sizes; else the maximum.

    Loops whose bounds are loaded share their steps: rows of a sparse matrix have all of its nonzeros together.
    """
    return _statements(body, env, {})


def _statements(body: Block, env: Mapping[Expr, Expr], around: Mapping[Var, int]) -> int:
    total, lets = 0, dict[Expr, Expr]()
    for s in body:
        if isinstance(s, Let):
            lets[s.var] = substitute(s.value, lets)
            total += 1
        elif isinstance(s, For):
            ends = [substitute(e, lets) for e in (s.lo, s.hi)]
            steps = max(most(ends[1] - ends[0], env), 0)
            loads = [x for e in ends for x in walk(e) if isinstance(x, Load)]
            shared = math.prod(around[v] for v in {v for x in loads for v in free(x)} & around.keys())
            steps = -(-steps // max(shared, 1))
            total += steps * max(_statements(s.body, env, {**around, s.var: max(steps, 1)}), 1)
        elif isinstance(s, If):
            total += max(_statements(s.then, env, around), _statements(s.other, env, around))
        else:
            total += 1
    return total


def most(e: Expr, env: Mapping[Expr, Expr]) -> int:
    """The largest value of an extent, as far as bounds tell."""
    high = bounds(substitute(const(e), env))[1]
    return high if isinstance(high, int) else 1
