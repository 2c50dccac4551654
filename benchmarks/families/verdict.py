"""Are the outputs of a model right? Float32 engines first, then float64 and how far the model itself amplifies a
rounding error.

Two engines that agree decide. Where ours agrees with no other, the imported graph is interpreted in float64; an error
beyond `RIGHT` is then allowed only as far as the model is ill-conditioned: what the same graph loses in float32, or by
inputs that are off by one unit in the last place. The interpreter shares the importer with the compiled model, so it
must be confirmed by another engine within the same bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from judge import largest_error

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]
RIGHT = 2e-4  # largest error over the largest expected number
AMPLIFIED = 8  # times the error that a float32 evaluation or an input off by one unit makes


@dataclass(frozen=True)
class Verdict:
    """`word`: "right", "wrong" or "unconfirmed" (ours agrees with float64, but no other engine does). `error` is
    against `reference`.
    """

    word: str
    error: float
    reference: str
    bound: float = RIGHT
    others: Mapping[str, float] | None = None  # errors of other engines against float64


def decide(ours: Arrays, others: Mapping[str, Arrays], interpret: Callable[[str, bool], Arrays]) -> Verdict:
    """Judge `ours`.

    Args:
        ours: outputs of the compiled model.
        others: outputs of independent engines by name, the most trusted first.
        interpret: runs the imported graph in "float64" or, "as-is", in the model's types; True: with inputs off by one
            unit in the last place.
    """
    errors = {name: largest_error(ours, theirs) for name, theirs in others.items()}
    for name, error in errors.items():
        if error <= RIGHT:
            return Verdict("right", error, name)
    exact = interpret("float64", False)
    error = largest_error(ours, exact)
    lost = [largest_error(interpret("as-is", False), exact), largest_error(interpret("float64", True), exact)]
    bound = max(RIGHT, AMPLIFIED * max(lost))
    theirs = {name: largest_error(o, exact) for name, o in others.items()}
    if error > bound:
        return Verdict("wrong", error, "float64", bound, theirs)
    confirmed = not theirs or min(theirs.values()) <= bound
    return Verdict("right" if confirmed else "unconfirmed", error, "float64", bound, theirs)
