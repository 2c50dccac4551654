"""The context of graph passes for the options of a compilation."""

from __future__ import annotations

from dnnc.ir.target import TargetFacts
from dnnc.options import CompileOptions, check_every_pass, steps_down
from dnnc.passes.base import FOLD_LIMIT, PassContext, pass_context


def context_of(options: CompileOptions, facts: TargetFacts, fold_limit: int = FOLD_LIMIT) -> PassContext:
    """What passes may ask. `fold_limit`: bytes up to which values are computed while compiling."""
    fallback, check = steps_down(options), check_every_pass()
    return pass_context(
        facts,
        numerics=options.numerics,
        precision=options.precision,
        fold_limit=fold_limit,
        fallback=fallback,
        check=check,
    )
