"""How much work a kernel is, for the gate: it runs each kernel once and computes some outputs in NumPy, which must end.

A kernel in, a reason out where it is too long to be checked: then it runs unchecked, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dnnc.ir.bounds import bounds
from dnnc.ir.errors import locations
from dnnc.ir.expr import Expr, const, substitute
from dnnc.ir.operator.stmt import Block, For, If
from dnnc.passes.program import Step

MAX_STEPS = 1 << 35  # statements in a run of the kernel, half a minute on one core
MAX_ELEMENTS = 1 << 30  # of an operand, or of a value within a group, which NumPy may have to make as a whole
MAX_TERMS = 1 << 28  # that all sampled outputs together may sum, a second of NumPy
FEWEST = 32  # sampled outputs, however long each is


def unchecked(step: Step, env: Mapping[Expr, Expr], most: int = MAX_STEPS) -> str | None:
    """Why a kernel is not checked at the sizes `env`, or None. `most`: statements that a check may run."""
    values = (v for n in step.group.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    largest = max((_elements(v.type.shape, env) for v in values), default=0)
    if largest > MAX_ELEMENTS:
        return f"a reference of it would take an array of {largest:.2g} elements"
    steps = _steps(step.kernel.entry.body, env)
    return f"it runs {steps:.2g} statements" if steps > most else None


def not_checked(steps: Iterable[Step], env: Mapping[Expr, Expr], most: int = MAX_STEPS) -> tuple[str, ...]:
    """What the report says of the kernels that are not checked, each once."""
    reasons = {s.text: (s, unchecked(s, env, most)) for s in steps}
    return tuple(f"kernel {s.kernel.name}{locations(s.kernel.locs)} was not checked: {why}" for s, why in reasons.values() if why)


def sampled(points: int, terms: int) -> int:
    """How many outputs to look at, where `points` are wished for and each is a reduction over so many terms."""
    return max(min(points, MAX_TERMS // max(terms, 1)), FEWEST)


def _elements(shape: tuple[object, ...], env: Mapping[Expr, Expr]) -> int:
    return math.prod(_most(d, env) if isinstance(d, Expr) else int(str(d)) for d in shape)


def _steps(body: Block, env: Mapping[Expr, Expr]) -> int:
    total = 0
    for s in body:
        if isinstance(s, For):
            total += max(_most(s.extent, env), 0) * max(_steps(s.body, env), 1)
        elif isinstance(s, If):
            total += max(_steps(s.then, env), _steps(s.other, env))
        else:
            total += 1
    return total


def _most(e: Expr, env: Mapping[Expr, Expr]) -> int:
    """The largest value of an extent, as far as bounds tell."""
    high = bounds(substitute(const(e), env))[1]
    return high if isinstance(high, int) else 1
