"""Stacks of lazy values, on which the rules of `dnnc.ir.batching` run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.array.lazy import Lazy, apply_all
from dnnc.ir import batching
from dnnc.ir.errors import Loc
from dnnc.ir.op import OpDef

Operand = batching.Operand[Lazy]


@dataclass(frozen=True)
class Batch(batching.Batch[Lazy]):
    """Builds lazy values. `locs`: where the user's code asked for the op."""

    locs: tuple[Loc, ...] = ()

    def all(self, op: str | OpDef, *inputs: Lazy | None, **attrs: Any) -> tuple[Lazy, ...]:
        made = apply_all(op, *inputs, **attrs)
        for x in made:
            if x.call is not None and self.locs:
                x.call.locs = self.locs
        return made
