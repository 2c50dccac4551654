"""Symbolic dims of a model: their names, and what its operators imply of them.

Where a node only fits if two dims are equal (`[A, 4] + [B, 4]`) or one is bounded (a table of 512 rows sliced to S,
added to S rows), it is noted, and the model is read again with symbols that carry it. Breaking it is an InputError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dnnc.ir.errors import ModelError
from dnnc.ir.expr import Expr, Op, Var, const, dim, factors, free, substitute, terms, unwrap
from dnnc.ir.graph import identifier
from dnnc.ir.op import OpDef
from dnnc.ir.ops.common import broadcast_dims
from dnnc.ir.types import Dim, TensorType


class Refined(Exception):
    """A new fact was noted: read the model again. Never leaves the importer."""


@dataclass
class Facts:
    """What is known of symbols by name: a dim each is equal to, or bounds. Only `equate` adds to it."""

    equal: dict[str, Dim] = field(default_factory=dict)
    bounds: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def symbol(self, name: str) -> Dim:
        """The dim that `name` stands for."""
        same = self.equal.get(name)
        if same is not None:
            return self.current(same)
        low, high = self.bounds.get(name, (1, None))
        return low if low == high else dim(name, low, high)

    def current(self, d: Dim) -> Dim:
        """A dim that was made before some facts were known, by today's facts."""
        if isinstance(d, int):
            return d
        now: Dim = unwrap(substitute(d, {v: const(self.symbol(v.name)) for v in free(d)}))
        return now

    def equate(self, a: Dim, b: Dim) -> bool:
        """Note that a == b if that is a new fact of one symbol."""
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Op) and x.name == "min" and y in x.args:
                other = x.args[0] if x.args[1] is y else x.args[1]
                if self.at_most(y, unwrap(other)):
                    return True
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Var) and not (isinstance(y, Expr) and x in free(y)) and self._allowed(x, y):
                self.equal[x.name] = y
                return True
        return self._solve(a, b)

    def at_most(self, a: Any, b: Dim) -> bool:
        """Note that a <= b for a symbol a and a number b, or for a - b linear in one symbol."""
        ts, c = terms(const(b) - a)  # c + k*x >= 0
        if len(ts) != 1 or not isinstance(ts[0][0], Var):
            return False
        x, k = ts[0]
        assert isinstance(x, Var)
        low, high = self.bounds.get(x.name, (1, None))
        new: tuple[int, int | None]
        if k < 0:
            new = (low, c // -k if high is None else min(high, c // -k))
        else:
            new = (max(low, -(c // k)), high)
        if new == (low, high) or (new[1] is not None and new[0] > new[1]):
            return False
        self.bounds[x.name] = new
        return True

    def _solve(self, a: Dim, b: Dim) -> bool:
        """One symbol from a linear equation: `2*N + 1 == 9`, `A + B == C`."""
        ts, c = terms(const(a) - b)
        for t, k in ts:
            rest = [u for u, _ in ts if u is not t]
            if isinstance(t, Var) and abs(k) == 1 and not any(t in free(u) for u in rest):
                solved = (t * k - (const(a) - b)) * k  # k*t + r == 0 -> t == -r/k
                self.equal[t.name] = unwrap(solved)
                return True
        if len(ts) == 1 and isinstance(ts[0][0], Var) and c % ts[0][1] == 0:
            x, n = ts[0][0], -(c // ts[0][1])
            if self._allowed(x, n):
                self.equal[x.name] = n
                return True
        return False

    def _allowed(self, x: Var, y: Dim) -> bool:
        if isinstance(y, Expr):
            return True
        low, high = self.bounds.get(x.name, (1, None))
        return low <= y and (high is None or y <= high)


def given_facts(dims: Mapping[str, Any]) -> Facts:
    """The facts a user gives: `{"batch": 8}` fixes, `{"batch": (1, 64)}` bounds."""
    facts = Facts()
    for name, d in dims.items():
        if isinstance(d, int) and d >= 0:
            facts.equal[identifier(name)] = d
        elif isinstance(d, tuple) and len(d) == 2 and all(isinstance(n, int) for n in d) and 0 <= d[0] <= d[1]:
            facts.bounds[identifier(name)] = d
        else:
            raise ModelError(f"dims: {name!r} must be a size or a pair (low, high) of sizes; got {d!r}")
    return facts


# --- which dims must be equal -----------------------------------------------------------------------------------------


def must_match(op: OpDef, types: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[tuple[Dim, Dim]]:
    """The pairs of dims that a node needs to be equal but are not: what to equate when its type rule fails."""
    ts = [t for t in types if t is not None]
    pairs: Sequence[tuple[Dim, Dim]]
    if op.equal_dims is not None:
        pairs = op.equal_dims(*ts, **attrs)
    else:
        pairs = [p for k, t in enumerate(ts) for u in ts[:k] for p in broadcast_dims(t.shape, u.shape)]
    return [(a, b) for a, b in pairs if a is not b and a != b]


def of_factors(a: Dim, b: Dim) -> list[tuple[Dim, Dim]]:
    """Products that must be equal and differ in one factor each: `A*4 == B*4` -> A == B."""
    if isinstance(a, int) or isinstance(b, int):
        return []
    (ta, ca), (tb, cb) = terms(a), terms(b)
    if ca or cb or len(ta) != 1 or len(tb) != 1 or ta[0][1] != tb[0][1]:
        return []
    left, right = list(factors(ta[0][0])), list(factors(tb[0][0]))
    for f in list(left):
        if f in right:
            left.remove(f)
            right.remove(f)
    return [(left[0], right[0])] if len(left) == len(right) == 1 else []
