"""Groups that differ in the pattern of sparse weights alone: what one was scheduled as, the others become, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from dnnc.ir.loops.stmt import with_pattern
from dnnc.ir.sparse import Sparse
from dnnc.passes.planning.ladder import Ladder

if TYPE_CHECKING:
    from dnnc.passes.planning.program import Made


@dataclass(frozen=True)
class Kin:
    """A kernel, which of a group's values its parameters are, and the encoding whose pattern is in its code."""

    made: Made
    places: tuple[int, ...]
    encoding: Sparse

    def of(self, encoding: Sparse, ladder: Ladder) -> tuple[Made, tuple[int, ...]] | None:
        """The kernel for another pattern of the same kind; None where that failed before."""
        made, (old, new) = self.made, (self.encoding.pattern, encoding.pattern)
        nest = made.nest.replace(self.encoding.digest, encoding.digest)
        if ladder.refused(nest):
            return None
        scheduled = replace(made.scheduled, text=made.scheduled.text.replace(str(old), str(new)))
        make = cache(lambda: with_pattern(made.make(), old, new))
        return replace(made, scheduled=scheduled, make=make, nest=nest), self.places
