"""Which operators torch takes apart before a graph is read: its own core decompositions, but for what is read whole."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.export import default_decompositions

from dnnc.frontends.torch.operators import WHOLE

CORE_TAKEN_APART = (
    torch.ops.aten.grid_sampler_2d,
)  # operators of the core set that have no form in graphs, but decompositions


def for_compile() -> dict[Any, Any]:
    """What torch.compile takes apart."""
    table: Any = core_aten_decompositions()
    kept = {op: f for op, f in table.items() if not is_whole(op)}
    return {**kept, **get_decompositions(CORE_TAKEN_APART)}


def for_export() -> Any:
    """What `ExportedProgram.run_decompositions` takes apart."""
    table: Any = default_decompositions()
    for op in [op for op in table if is_whole(op)]:
        table.pop(op)
    for op, f in get_decompositions(CORE_TAKEN_APART).items():
        table[op] = f
    return table


def is_whole(op: Any) -> bool:
    return op.name().removeprefix("aten::").split(".")[0] in WHOLE
