"""Work of a kernel for the gate, which runs it once beside NumPy; says why it is too long to be checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dnnc.ir.errors import locations
from dnnc.ir.expr import Expr
from dnnc.ir.loops.count import most, statements
from dnnc.passes.planning.program import Step

MAX_STEPS = 1 << 35  # statements in a run of the kernel, half a minute on one core
MAX_ELEMENTS = 1 << 30  # of an operand, or of a value within a group, which NumPy may have to make as a whole
MAX_TERMS = 1 << 28  # that all sampled outputs together may sum, a second of NumPy
FEWEST = 32  # sampled outputs, however long each is


def unchecked(step: Step, env: Mapping[Expr, Expr], limit: int = MAX_STEPS) -> str | None:
    """Why a kernel is not checked at the sizes `env`, or None. `limit`: statements that a check may run."""
    values = (v for n in step.group.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    largest = max((_elements(v.type.shape, env) for v in values), default=0)
    if largest > MAX_ELEMENTS:
        return f"a reference of it would take an array of {largest:.2g} elements"
    steps = statements(step.kernel.entry.body, env) if env else step.scheduled.statements
    return f"it runs {steps:.2g} statements" if steps > limit else None


def not_checked(steps: Iterable[Step], env: Mapping[Expr, Expr], limit: int = MAX_STEPS) -> tuple[str, ...]:
    """What the report says of the kernels that are not checked, each once."""
    reasons = {s.text: (s, unchecked(s, env, limit)) for s in steps}
    return tuple(
        f"kernel {s.nest.name}{locations(s.nest.locs)} was not checked: {why}" for s, why in reasons.values() if why
    )


def sampled(points: int, terms: int) -> int:
    """How many outputs to look at, where `points` are wished for and each is a reduction over so many terms."""
    return max(min(points, MAX_TERMS // max(terms, 1)), FEWEST)


def _elements(shape: tuple[object, ...], env: Mapping[Expr, Expr]) -> int:
    return math.prod(most(d, env) if isinstance(d, Expr) else int(str(d)) for d in shape)
